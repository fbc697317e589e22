"""Sequence encoders: they turn the elements of a list into one vector per sample."""

from recmill.model.encoders.choice import make_encoder
from recmill.model.encoders.folded import fold_encoder
from recmill.model.encoders.hstu import HSTUEncoder
from recmill.model.encoders.pooling import AttentionEncoder, MeanEncoder
from recmill.model.encoders.standard import StandardTransformerEncoder
from recmill.model.encoders.target import TargetAttentionEncoder
from recmill.model.encoders.transformer import TransformerEncoder
from recmill.model.encoders.windows import SequenceWindows

__all__ = [
    "AttentionEncoder",
    "HSTUEncoder",
    "MeanEncoder",
    "SequenceWindows",
    "StandardTransformerEncoder",
    "TargetAttentionEncoder",
    "TransformerEncoder",
    "fold_encoder",
    "make_encoder",
]
