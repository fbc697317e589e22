"""Batches in which every repeated list is held once, from decoded rows to tensors (RecD's IKJT).

Arrow columns -> DistinctBlock -> CutBlock -> Batch with an InverseKeyedJaggedTensor
"""

from recmill.data.ikjt.batch import Batch, batch_from_arrow
from recmill.data.ikjt.tensor import InverseKeyedJaggedTensor

__all__ = ["Batch", "InverseKeyedJaggedTensor", "batch_from_arrow"]
