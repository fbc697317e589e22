"""Tables larger than memory: hot rows in memory, the others in a sparse file on disk."""

from recmill.model.stores.disk.store import DiskStore

__all__ = ["DiskStore"]
