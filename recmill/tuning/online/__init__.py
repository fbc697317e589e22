"""Tuning while training runs: measure the pipeline, decide, resize, and learn from the outcome."""

__all__ = ["learning", "live", "tuner"]
