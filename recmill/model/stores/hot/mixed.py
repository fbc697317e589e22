"""Batches that read hot and cold rows, split by id instead of by sample: nothing is reordered, every batch is taken.

    ids of a sample   [7, 912, 3]
    hot slots         [0,      1]      looked up locally, gradients gathered
    cold ids          [   912   ]      looked up where the tables are
    pooled            hot sum + cold sum       row by row: each row where its id stood

Hot rows live in the hot collection all the time, so nothing moves between batches; cold ids alone are exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from recmill.data.hot.remap import HotRemap
from recmill.model.stores.hot.collection import HotEmbeddingCollection, PooledRows

# F = features, B = samples, N = ids


class MixedEmbeddingCollection(nn.Module):
    """Looks up ids of rows: hot ones in `hot`, the others in `cold`, a collection over the whole tables.

    `num_rows` is the number of rows of every table. The hot rows must have entered, and leave when the mode ends.
    Rows and bags of one id come out bit by bit as from `cold` alone; longer bags are summed in another order.
    """

    def __init__(self, hot: HotEmbeddingCollection, cold: nn.Module, *, num_rows: Mapping[str, int]) -> None:
        super().__init__()
        self.hot = hot
        self._cold = (cold,)  # a tuple: whoever owns the cold tables registers them
        remap = HotRemap({name: rows.cpu().numpy() for name, rows in hot.hot_rows.items()}, num_rows)
        self._remap = (remap,)

    def split(self, ids: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor, Tensor]:
        """(slots of the hot ids, the cold ids, is_hot [N]), both with as many samples as the batch."""
        edges, keys = ids.offset_per_key(), ids.keys()
        values = ids.values().cpu().numpy()
        slots = [
            self._remap[0].slots(self.hot.table_of(key), values[edges[place] : edges[place + 1]])
            for place, key in enumerate(keys)
        ]
        slots_N = torch.cat([torch.from_numpy(own) for own in slots]).to(ids.values().device).long()
        is_hot = slots_N >= 0
        counts = torch.nn.functional.pad(is_hot.long().cumsum(0), (1, 0))
        offsets = torch.nn.functional.pad(ids.lengths().long().cumsum(0), (1, 0))
        hot_lengths = counts[offsets].diff()
        hot = KeyedJaggedTensor(keys=keys, values=slots_N[is_hot], lengths=hot_lengths)
        cold = KeyedJaggedTensor(keys=keys, values=ids.values()[~is_hot], lengths=ids.lengths().long() - hot_lengths)
        return hot, cold, is_hot

    def forward(self, ids: KeyedJaggedTensor) -> Any:
        hot_ids, cold_ids, is_hot = self.split(ids)
        # The exchange of the cold ids starts first and is waited for last.
        cold = self._cold[0](cold_ids)
        hot = self.hot(hot_ids)
        if self.hot.is_pooled:
            return PooledRows(self._merge_bags(hot.to_dict(), cold.to_dict(), hot_ids, cold_ids))
        return self._merge_rows(hot, cold, ids, is_hot)

    def _merge_bags(
        self, hot: dict[str, Tensor], cold: dict[str, Tensor], hot_ids: KeyedJaggedTensor, cold_ids: KeyedJaggedTensor
    ) -> dict[str, Tensor]:
        merged = {}
        num_samples = hot_ids.stride()
        for place, name in enumerate(hot_ids.keys()):
            if not self.hot.is_mean(name):
                merged[name] = hot[name] + cold[name]
                continue
            part = slice(place * num_samples, (place + 1) * num_samples)
            num_hot, num_cold = hot_ids.lengths()[part, None], cold_ids.lengths()[part, None]
            merged[name] = (hot[name] * num_hot + cold[name] * num_cold) / (num_hot + num_cold).clamp(min=1)
        return merged

    def _merge_rows(
        self, hot: Mapping[str, JaggedTensor], cold: Mapping[str, JaggedTensor], ids: KeyedJaggedTensor, is_hot: Tensor
    ) -> dict[str, JaggedTensor]:
        edges, num_samples, merged = ids.offset_per_key(), ids.stride(), {}
        for place, name in enumerate(ids.keys()):
            own = is_hot[edges[place] : edges[place + 1]]
            rows = torch.cat([hot[name].values(), cold[name].values()])
            num_hot = int(own.sum())
            source = torch.where(own, own.long().cumsum(0) - 1, num_hot + (~own).long().cumsum(0) - 1)
            lengths = ids.lengths()[place * num_samples : (place + 1) * num_samples]
            merged[name] = JaggedTensor(values=rows.index_select(0, source), lengths=lengths)
        return merged
