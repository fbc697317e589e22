"""Turns a raw log into a dataset: rows sorted by session, split, and written in parts.

DuckDB sorts in this process within a memory limit; Spark sorts on executors. Both write the same files.
"""

from recmill.data.cluster.sessions import cluster_sessions

__all__ = ["cluster_sessions"]
