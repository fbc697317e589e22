"""`HotEmbeddingCollection`: see `recmill.model.stores.hot`."""

from recmill.model.stores.hot import HotEmbeddingCollection

__all__ = ["HotEmbeddingCollection"]
