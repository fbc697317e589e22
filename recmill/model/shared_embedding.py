"""`SharedEmbeddingBag`: see `recmill.model.stores.shared`."""

from recmill.model.stores.shared import SharedEmbeddingBag

__all__ = ["SharedEmbeddingBag"]
