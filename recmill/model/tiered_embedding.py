"""`TieredEmbeddingCollection`: see `recmill.model.stores.tiered`."""

from recmill.model.stores.tiered import TieredEmbeddingCollection

__all__ = ["TieredEmbeddingCollection"]
