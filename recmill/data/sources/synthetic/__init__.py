"""Synthetic session logs with known statistics, and the best AUC that any model can reach on them."""

from recmill.data.sources.synthetic.config import SyntheticConfig
from recmill.data.sources.synthetic.generator import generate_log

__all__ = ["SyntheticConfig", "generate_log"]
