"""Tables of any size in one small array of parameters that their rows share (PSS)."""

from recmill.model.stores.shared.array import SharedArray, SharedTable
from recmill.model.stores.shared.bag import SharedEmbeddingBag
from recmill.model.stores.shared.collection import SharedEmbeddingBagCollection

__all__ = ["SharedArray", "SharedEmbeddingBag", "SharedEmbeddingBagCollection", "SharedTable"]
