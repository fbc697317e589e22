"""Batches that store each repeated list once (RecD's IKJT), and the forms a list takes on the way there.

    form                       of           made by                   for
    Arrow column               row group    the decoder               reading Parquet
    DistinctGroup (distinct)   row group    find_distinct, storage    transforms, cutting batches (packing, cutting)
    InverseKeyedJaggedTensor   batch        cut_ids                   lookups and encoders over distinct rows
    KeyedJaggedTensor          batch        group_kjt, to_kjt         TorchRec's collections

Without deduplication, batches are plain KeyedJaggedTensors; from layouts with one record per sample they are cut
directly from the Arrow columns (RowBlock).
"""

from recmill.data.ikjt.batch import Batch, batch_from_arrow
from recmill.data.ikjt.tensor import InverseKeyedJaggedTensor

__all__ = ["Batch", "InverseKeyedJaggedTensor", "batch_from_arrow"]
