"""What holds embedding tables: TorchRec's shards, tiers of rows, hot rows, a shared array, or files on disk.

All of them implement `TableStore`, so that checkpoints and hot batches do not depend on who holds a row.
"""

from recmill.model.stores.interface import Replica, TableOptimiser, TableStore

__all__ = ["Replica", "TableOptimiser", "TableStore"]
