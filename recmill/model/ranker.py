"""The dense half of the model: embeddings in, one logit per sample and label out.

It receives pooled vectors and sequences of vectors and does not know where the tables live, so training (TorchRec,
sharded) and serving (plain tensors) use the same module with the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kernels import distinct_rows, dot_interaction, expand_rows
from recmill.artifacts import InputError, module_name
from recmill.data.schema import Schema
from recmill.model.encoders import SequenceWindows, TargetAttentionEncoder, make_encoder
from recmill.model.layers import MLP, CrossNetwork
from recmill.model.settings import RankerConfig
from recmill.model.tasks import MixtureOfExperts, ProgressiveExtraction, SharedBottom

Sequences = SequenceWindows | tuple[Tensor, Tensor]


class Ranker(nn.Module):
    """DLRM or DCNv2 over dense values, pooled embeddings and sequences of embeddings.

    `forward(dense_BF, pooled, sequences, inverse)`: `pooled` maps a sparse feature to [U, D], `sequences` a sequence
    feature to windows, or to the padded pair ([U, L, D], lengths [U]). A feature in `inverse` arrives as U distinct
    rows and is expanded to B samples after its encoder, which therefore runs once per distinct row. All other features
    have U = B. With `repeats_dense` the bottom layers also run once per distinct row of `dense_BF`.
    """

    def __init__(self, schema: Schema, config: RankerConfig, *, repeats_dense: bool = False) -> None:
        super().__init__()
        if not schema.id_features:
            raise InputError("the schema has no sparse or sequence feature, expected at least one")
        self.schema, self.repeats_dense = schema, repeats_dense
        self.width = config.interaction_dim or max(feature.dim for feature in schema.id_features)
        self.projections = nn.ModuleDict(
            {
                module_name(feature.name): nn.Linear(feature.dim, self.width, bias=False)
                for feature in schema.id_features
                if feature.dim != self.width
            }
        )
        self.encoders = nn.ModuleDict({module_name(f.name): make_encoder(f, config) for f in schema.sequence})
        is_weighed = config.sequence_encoder == "din"
        self.targets = {f.name: schema.target_of(f).name for f in schema.sequence} if is_weighed else {}
        num_dense = len(schema.dense)
        self.bottom = MLP(num_dense, (*config.bottom_layers, self.width)) if num_dense else None
        num_vectors = len(schema.id_features) + (1 if num_dense else 0)
        num_tasks = len(schema.labels)
        self.is_dlrm = config.model == "dlrm"
        if self.is_dlrm:
            # Without dense features the products alone would lose first-order effects, so the vectors are kept.
            self.num_kept = 1 if num_dense else num_vectors
            joined = self.num_kept * self.width + num_vectors * (num_vectors - 1) // 2
            self.top = _top(joined, config, num_tasks, layers=config.top_layers)
        else:
            joined = num_vectors * self.width
            self.interaction = CrossNetwork(joined, config.cross_layers, config.cross_rank)
            self.deep = MLP(joined, config.top_layers, dropout=config.dropout)
            crossed = joined + (config.top_layers[-1] if config.top_layers else joined)
            self.top = _top(crossed, config, num_tasks, layers=())

    def forward(
        self,
        dense_BF: Tensor,
        pooled: dict[str, Tensor],
        sequences: Mapping[str, Sequences],
        inverse: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Logits [B]; with several labels [B, T]."""
        vectors = [self._encode_dense(self.bottom, dense_BF)] if self.bottom is not None else []
        inverse = inverse or {}
        for feature in self.schema.id_features:
            if feature.kind == "sequence":
                vector_BD = self._encode_sequence(feature.name, pooled, sequences[feature.name], inverse)
            else:
                vector_BD = pooled[feature.name]
            if module_name(feature.name) in self.projections:
                vector_BD = self.projections[module_name(feature.name)](vector_BD)
            if feature.name in inverse and feature.name not in self.targets:
                vector_BD = expand_rows(vector_BD, inverse[feature.name])
            vectors.append(vector_BD)
        if self.is_dlrm:
            logit_BT: Tensor = self.top(dot_interaction(vectors, num_kept=self.num_kept))
        else:
            flat_BD = torch.cat(vectors, dim=1)
            logit_BT = self.top(torch.cat([self.interaction(flat_BD), self.deep(flat_BD)], dim=1))
        return logit_BT.squeeze(1) if logit_BT.shape[1] == 1 else logit_BT

    def _encode_sequence(
        self, name: str, pooled: dict[str, Tensor], found: Sequences, inverse: dict[str, Tensor]
    ) -> Tensor:
        """[U, D]; of an encoder that looks at the target, [B, D]."""
        encoder: Any = self.encoders[module_name(name)]
        if not isinstance(encoder, TargetAttentionEncoder):
            vector_UD: Tensor = encoder.encode(found) if isinstance(found, SequenceWindows) else encoder(*found)
            return vector_UD
        target = self.targets[name]
        target_BD = expand_rows(pooled[target], inverse[target]) if target in inverse else pooled[target]
        if isinstance(found, SequenceWindows):
            return encoder.encode(found, target_BD, inverse.get(name))
        padded, lengths = (part[inverse[name]] for part in found) if name in inverse else found
        return encoder(padded, lengths, target_BD)

    def _encode_dense(self, bottom: nn.Module, dense_BF: Tensor) -> Tensor:
        # The number of distinct rows determines later shapes: on CUDA the host would have to wait for it.
        if not self.repeats_dense or dense_BF.is_cuda:
            found_BD: Tensor = bottom(dense_BF)
            return found_BD
        rows_U, inverse_B = distinct_rows(dense_BF)
        return expand_rows(bottom(dense_BF[rows_U]), inverse_B)


def _top(in_width: int, config: RankerConfig, num_tasks: int, *, layers: tuple[int, ...]) -> nn.Module:
    """What turns interactions into logits: `layers` and one logit, or the heads of several labels."""
    if num_tasks == 1:
        return MLP(in_width, (*layers, 1), dropout=config.dropout, is_logit=True)
    if config.multi_task == "shared":
        bottom = MLP(in_width, layers, dropout=config.dropout)
        return SharedBottom(layers[-1] if layers else in_width, bottom, num_tasks, config.tower_layers)
    head = MixtureOfExperts if config.multi_task == "mmoe" else ProgressiveExtraction
    return head(in_width, num_tasks, config)
