"""Tuning during training: measure the pipeline, decide, resize it, and learn from the outcome."""

__all__ = ["learning", "live", "tuner"]
