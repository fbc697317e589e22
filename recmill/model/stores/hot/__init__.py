"""The most-read rows of all tables on every rank, for batches that read nothing else (FAE)."""

from recmill.model.stores.hot.collection import HotEmbeddingCollection

__all__ = ["HotEmbeddingCollection"]
