"""Synthetic session logs with known statistics, and the best AUC that any model can reach on them."""

__all__ = ["block_maker", "blocks", "config", "generator", "hidden_model", "session_shapes", "zipf"]
