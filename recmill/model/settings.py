"""The shape of a ranker, as settings. Light: a training configuration has them too, and launchers load no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recmill.artifacts.records import read_record


@dataclass(frozen=True, kw_only=True)
class RankerConfig:
    """The model's part of a training configuration."""

    model: str = "dlrm"
    bottom_layers: tuple[int, ...] = (128, 64)  # hidden layers of the dense branch, before one of interaction width
    top_layers: tuple[int, ...] = (256, 128)
    cross_layers: int = 3  # dcn only
    cross_rank: int = 64  # dcn only; 0: full rank
    interaction_dim: int = 0  # width that all embeddings are projected to; 0: that of the widest table
    dropout: float = 0.0
    sequence_encoder: str = "schema"  # "schema": attention where the feature's pooling says so, transformer for "none"
    transformer_layers: int = 2  # blocks of transformer, standard_transformer and hstu
    attention_heads: int = 2
    din_layers: tuple[int, ...] = (36,)  # hidden layers of din's activation unit, which weighs history for a candidate
    din_softmax: bool = False  # din's weights of a history sum to 1
    multi_task: str = "shared"  # with several labels: "shared" bottom, "mmoe" or "ple"; experts have top_layers
    num_experts: int = 4  # mmoe: of all labels together; ple: shared ones, and as many per label
    extraction_levels: int = 2  # ple only
    tower_layers: tuple[int, ...] = (64,)  # of each label, before its logit
    max_sequence_length: int = 512  # longer sequences keep this many of their last elements

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, where: str = "settings") -> RankerConfig:
        """The ranker's part of the settings that a checkpoint or an exported model holds, with their types checked."""
        chosen = {name: settings[name] for name in cls.__dataclass_fields__ if name in settings}
        chosen |= {name: list(value) for name, value in chosen.items() if isinstance(value, tuple)}
        return read_record(cls, chosen, where=where)
