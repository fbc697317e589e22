"""The whole model: embeddings, then a ranker."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recmill.data.schema import Schema
from recmill.model.embeddings import Ids, TableEmbeddings
from recmill.model.ranker import Ranker
from recmill.model.settings import RankerConfig


class RankingModel(nn.Module):
    """Logits [B], or [B, labels] if there are several, from dense values [B, F] and the ids of every feature.

    `deduplicated` names the features that are processed once per distinct row: id features arrive as distinct rows;
    if all dense features are named, rows of dense values are compared here.
    """

    def __init__(
        self,
        schema: Schema,
        config: RankerConfig,
        *,
        deduplicated: frozenset[str] = frozenset(),
        table_device: torch.device | None = None,
        **tables: frozenset[str],
    ) -> None:
        """`tables` as in TableEmbeddings: elsewhere, repeated_ids."""
        super().__init__()
        limit = config.max_sequence_length
        self.embeddings = TableEmbeddings(
            schema, max_sequence_length=limit, deduplicated=deduplicated, device=table_device, **tables
        )
        repeats_dense = bool(schema.dense) and deduplicated.issuperset(feature.name for feature in schema.dense)
        self.ranker = Ranker(schema, config, repeats_dense=repeats_dense)

    def forward(self, dense_BF: Tensor, ids: Ids, is_hot: bool = False) -> Tensor:
        found = self.embeddings(ids, is_hot)
        logits: Tensor = self.ranker(dense_BF, found.pooled, found.sequences, found.inverse)
        if is_hot:
            self.embeddings.end_forward()
        return logits
