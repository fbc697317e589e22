"""Datasets laid out for hot batches: samples that read only hot rows are stored apart (FAE)."""

__all__ = ["layout", "remap", "rows"]
