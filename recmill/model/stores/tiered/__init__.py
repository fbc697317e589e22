"""Tables whose rows live where they are read: replicated, once per node, or striped over all ranks (FlexShard)."""

from recmill.model.stores.tiered.collection import TieredEmbeddingCollection

__all__ = ["TieredEmbeddingCollection"]
