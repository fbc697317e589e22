"""How often a split holds given ids, such as those of held-out samples in the training split."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from kernels import count_rows
from recmill.artifacts import Dataset
from recmill.data.ikjt.tensor import InverseKeyedJaggedTensor
from recmill.data.ingest.reader import RowGroupReader
from recmill.data.ingest.splits import split_groups
from recmill.data.schema import Schema

IdArray = npt.NDArray[np.int64]
NO_ID = -1


def first_ids(ids: KeyedJaggedTensor | InverseKeyedJaggedTensor, key: str) -> IdArray:
    """The first id of the feature for every sample of a batch; NO_ID where its list is empty."""
    inverse_B: torch.Tensor | slice = slice(None)
    if isinstance(ids, InverseKeyedJaggedTensor):
        values, lengths_U = ids.lists(key)
        inverse_B = ids.inverse(ids.group_of(key))
    else:
        position, edges, stride = ids.keys().index(key), ids.offset_per_key(), ids.stride()
        values = ids.values()[edges[position] : edges[position + 1]]
        lengths_U = ids.lengths()[position * stride : (position + 1) * stride]
    starts_U = torch.cumsum(lengths_U, 0) - lengths_U
    padded = torch.cat([values.cpu(), torch.tensor([NO_ID])])
    first_U = torch.where(lengths_U.cpu() > 0, padded[starts_U.cpu().long()], NO_ID)
    found: IdArray = first_U[inverse_B.cpu() if isinstance(inverse_B, torch.Tensor) else inverse_B].numpy()
    return found


def count_ids(
    dataset: Dataset,
    schema: Schema,
    wanted: Mapping[str, IdArray],
    *,
    split: str = "train",
    rank: int = 0,
    world_size: int = 1,
) -> dict[str, IdArray]:
    """In how many samples of this rank's share of a split each wanted id is the first of its feature's list.

    `wanted` maps a feature to sorted distinct ids, as tables see them (after transforms). Only the columns of these
    features are decoded, and memory grows with the wanted ids, not with the tables.
    """
    counts = {name: np.zeros(len(ids) + 1, np.int64) for name, ids in wanted.items()}  # the last: ids not wanted
    reader = RowGroupReader(dataset, schema, only=list(wanted))
    try:
        for group in split_groups(dataset, split)[rank::world_size]:
            block = reader.transform(group, reader.decode(group, reader.read(group)))
            batch = reader.assemble([(block, 0, len(block))], num_global=len(block))
            for name, ids in wanted.items():
                found_B = first_ids(batch.ids, name)
                place_B = np.minimum(np.searchsorted(ids, found_B), max(len(ids) - 1, 0))
                is_wanted_B = ids[place_B] == found_B if len(ids) else np.zeros(len(found_B), bool)
                count_rows(counts[name], np.where(is_wanted_B, place_B, len(ids)))
    finally:
        reader.close()
    return {name: own[:-1] for name, own in counts.items()}
