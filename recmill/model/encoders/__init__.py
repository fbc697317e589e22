"""Sequence encoders: they turn the elements of a list into one vector per sample."""

from recmill.model.encoders.pooling import AttentionEncoder, MeanEncoder
from recmill.model.encoders.transformer import TransformerEncoder
from recmill.model.encoders.windows import SequenceWindows

__all__ = ["AttentionEncoder", "MeanEncoder", "SequenceWindows", "TransformerEncoder"]
