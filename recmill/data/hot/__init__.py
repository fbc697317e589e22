"""Datasets laid out for hot batches: samples that read hot rows only, apart from the others (FAE)."""

__all__ = ["layout", "remap", "rows"]
