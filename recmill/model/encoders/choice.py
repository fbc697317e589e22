"""Which encoder a sequence feature gets."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from recmill.artifacts import InputError
from recmill.data.schema import Feature
from recmill.model.encoders.hstu import HSTUEncoder
from recmill.model.encoders.pooling import AttentionEncoder, MeanEncoder
from recmill.model.encoders.standard import StandardTransformerEncoder
from recmill.model.encoders.target import TargetAttentionEncoder
from recmill.model.encoders.transformer import TransformerEncoder
from recmill.model.settings import RankerConfig

OF_POOLING = {"none": "transformer", "sum": "mean", "mean": "mean", "attention": "attention"}
STACKED: dict[str, Callable[[int, int, int, int], nn.Module]] = {
    "transformer": TransformerEncoder,
    "standard_transformer": StandardTransformerEncoder,
    "hstu": HSTUEncoder,
}


def make_encoder(feature: Feature, config: RankerConfig) -> nn.Module:
    """The encoder of a sequence feature that the config chooses; "schema" follows the feature's pooling."""
    choice = OF_POOLING[feature.pooling] if config.sequence_encoder == "schema" else config.sequence_encoder
    num_heads = config.attention_heads
    if choice == "mean":
        return MeanEncoder()
    if choice == "attention":
        return AttentionEncoder(feature.dim, num_heads)
    if choice == "din":
        return TargetAttentionEncoder(feature.dim, config.din_layers, is_softmax=config.din_softmax)
    if feature.dim % num_heads:
        raise InputError(
            f"feature {feature.name!r}: dim {feature.dim} is not a multiple of attention_heads={num_heads}"
        )
    return STACKED[choice](feature.dim, num_heads, config.transformer_layers, config.max_sequence_length)
