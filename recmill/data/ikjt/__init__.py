"""Batches that store each repeated list once (RecD's IKJT), and the forms a list takes on the way there.

    form                       of           made by                   for
    Arrow column               row group    the decoder               reading Parquet
    DistinctGroup (distinct)   row group    find_distinct, storage    transforms, cutting batches (packing, cutting)
    InverseKeyedJaggedTensor   batch        cut_ids                   lookups and encoders over distinct rows
    KeyedJaggedTensor          batch        group_kjt, to_kjt         TorchRec's collections

Without deduplication, batches are plain KeyedJaggedTensors; from layouts with one record per sample they are cut
directly from the Arrow columns (RowBlock).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recmill.data.ikjt.batch import Batch
    from recmill.data.ikjt.tensor import InverseKeyedJaggedTensor

__all__ = ["Batch", "InverseKeyedJaggedTensor"]


def __getattr__(name: str) -> Any:
    """Imported when first used: batches need torch and TorchRec, which take seconds to load; `distinct` does not."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from recmill.data.ikjt import batch, tensor

    return getattr(tensor if name == "InverseKeyedJaggedTensor" else batch, name)
