"""Stores of embedding tables: TorchRec's shards, tiers of rows, hot rows, a shared array, files on disk.

All implement `TableStore`, so checkpoints and hot batches do not depend on where a row lives.
"""

from recmill.model.stores.interface import Replica, TableOptimiser, TableStore

__all__ = ["Replica", "TableOptimiser", "TableStore"]
