"""Which tables share parameters, and which of their rows stay exact (PSS)."""

__all__ = ["choice"]
