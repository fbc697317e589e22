"""Raw logs from synthetic presets, real data sets and a user's own Parquet; `presets` lists what has a name."""

from recmill.data.sources.presets import PRESETS
from recmill.data.sources.raw_log import is_log_yaml, make_raw_log, synthetic_config

__all__ = ["PRESETS", "is_log_yaml", "make_raw_log", "synthetic_config"]
