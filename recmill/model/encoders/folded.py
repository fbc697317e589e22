"""Encoders for scoring alone: the same function of the same weights in fewer calls.

A request with one candidate spends most of its time between the calls of an encoder, not in them. Without gradients,
neighbouring linear maps are one: a norm's scale and shift belong to the layer behind it, both norms of a block are one,
and the layers behind the pooling are a single matrix. Results equal those of `encode` but for the order in which floats
are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import pool_windows, window_attention
from kernels.encode_windows import EncoderBlock, WindowEncoder, encode_windows
from kernels.windows import window_places
from recmill.model.encoders.pooling import AttentionEncoder
from recmill.model.encoders.transformer import TransformerBlock, TransformerEncoder
from recmill.model.encoders.windows import SequenceWindows, ages_of

# D = embedding width, H = heads, E = 3 * D, F = width of the feed-forward layer
# U = windows, T = rows of all windows one after another, P = longest window


def fold_encoder(encoder: nn.Module, *, is_compiled: bool = False) -> Any:
    """An encoder with the same `encode`, without gradients; encoders that have no such form are returned as they are.

    With `is_compiled` it is one call of kernels/encode_windows. Weights are copied: later changes of `encoder` do not
    show.
    """
    with torch.no_grad():
        if type(encoder) is AttentionEncoder:
            pool = FoldedAttention(encoder)
            return CompiledEncoder([], pool) if is_compiled else pool
        if type(encoder) is TransformerEncoder and len(encoder.blocks):
            blocks = [FoldedBlock(block) for block in encoder.blocks if isinstance(block, TransformerBlock)]
            if not is_compiled:
                return FoldedTransformer(encoder, blocks)
            return CompiledEncoder(blocks, FoldedAttention(encoder.pool), encoder.position.weight.detach().clone())
    return encoder


class FoldedAttention:
    """Attention pooling: the weights of a head sum to 1, so all layers behind the sums are one matrix."""

    def __init__(self, pool: AttentionEncoder, shift_D: Tensor | None = None) -> None:
        """`shift_D` is added to every row; scores differ by the same for all rows of a window, so weights do not."""
        num_heads, dim = pool.query_HD.shape
        self.query_DH = pool.query_HD.detach().t().contiguous()
        mix_DHD = pool.mix.weight.double().view(dim, num_heads, dim)
        value_DD, bias_D = pool.value.weight.double(), pool.value.bias.double()
        if shift_D is not None:
            bias_D = bias_D + value_DD @ shift_D.double()
        self.weight = (mix_DHD @ value_DD).flatten(1).float()
        self.bias = (pool.mix.bias.double() + (mix_DHD @ bias_D).sum(1)).float()

    def encode(self, windows: SequenceWindows) -> Tensor:
        return self.pool(windows.rows_ND, windows.starts_U, windows.lengths_U)

    def pool(self, rows_ND: Tensor, starts_U: Tensor, lengths_U: Tensor) -> Tensor:
        pooled_UHD = pool_windows(rows_ND, rows_ND @ self.query_DH, starts_U, lengths_U)
        found_UD = functional.linear(pooled_UHD.flatten(1), self.weight, self.bias)
        if not lengths_U.all():  # an empty sequence gives zeros
            found_UD *= (lengths_U > 0)[:, None]
        return found_UD


class FoldedBlock:
    """x + attention(norm(x)) + feed_forward(norm(x)), without the bias of its last layers."""

    def __init__(self, block: TransformerBlock) -> None:
        norm, first, gelu, last = block.feed_forward
        assert isinstance(norm, nn.LayerNorm)
        assert isinstance(first, nn.Linear)
        assert isinstance(last, nn.Linear)
        assert norm.eps == block.attention_norm.eps
        assert isinstance(gelu, nn.GELU)
        self.num_heads, self.eps, self.shape = block.num_heads, norm.eps, norm.normalized_shape
        self.packed_ED, self.packed_bias_E = _fold_norm(block.attention_norm, block.query_key_value)
        self.first_FD, self.first_bias_F = _fold_norm(norm, first)
        self.project_DD = block.project.weight.detach().t().contiguous()
        self.last_FD = last.weight.detach().t().contiguous()
        self.bias_D = block.project.bias.detach() + last.bias.detach()

    def __call__(self, hidden_TD: Tensor, starts_U: Tensor, lengths_U: Tensor) -> Tensor:
        normed_TD = functional.layer_norm(hidden_TD, self.shape, None, None, self.eps)
        packed_TE = functional.linear(normed_TD, self.packed_ED, self.packed_bias_E)
        attended_TD = window_attention(
            packed_TE, starts_U, lengths_U, num_heads=self.num_heads, num_values=len(hidden_TD)
        )
        inner_TF = functional.gelu(functional.linear(normed_TD, self.first_FD, self.first_bias_F))
        return torch.addmm(hidden_TD, attended_TD, self.project_DD).addmm_(inner_TF, self.last_FD)


class FoldedTransformer:
    """Blocks over sequences that share no rows, then attention pooling."""

    def __init__(self, encoder: TransformerEncoder, blocks: Sequence[FoldedBlock]) -> None:
        self.blocks = blocks
        first, last = blocks[0], blocks[-1]
        # The oldest position first, so that those of one window are neighbours.
        self.position_PD = encoder.position.weight.detach().flip(0).contiguous()
        if first is not last:
            self.position_PD += first.bias_D
        self.pool = FoldedAttention(encoder.pool, last.bias_D)

    def encode(self, windows: SequenceWindows) -> Tensor:
        """[U, D]."""
        hidden_TD, starts_U, lengths_U = windows.rows_ND, windows.starts_U, windows.lengths_U
        if not windows.is_packed:
            hidden_TD = windows.take(hidden_TD, num_rows=int(lengths_U.sum()))
            starts_U = window_places(lengths_U)
        for number, block in enumerate(self.blocks):
            hidden_TD = block(hidden_TD, starts_U, lengths_U)
            if number == 0:
                hidden_TD += self._positions(lengths_U, len(hidden_TD))
            elif number < len(self.blocks) - 1:
                hidden_TD += block.bias_D
        return self.pool.pool(hidden_TD, starts_U, lengths_U)

    def _positions(self, lengths_U: Tensor, num_rows: int) -> Tensor:
        newest = len(self.position_PD) - 1
        if len(lengths_U) == 1:
            return self.position_PD[newest + 1 - num_rows :]
        return self.position_PD.index_select(0, newest - ages_of(lengths_U, num_rows=num_rows))


class CompiledEncoder:
    """Transformer blocks, if any, and attention pooling."""

    def __init__(self, blocks: Sequence[FoldedBlock], pool: FoldedAttention, position_PD: Tensor | None = None) -> None:
        self.encoder = WindowEncoder(
            [
                EncoderBlock(
                    packed_ED=block.packed_ED,
                    packed_bias_E=block.packed_bias_E,
                    project_DD=block.project_DD.t(),
                    first_FD=block.first_FD,
                    first_bias_F=block.first_bias_F,
                    last_DF=block.last_FD.t(),
                    bias_D=block.bias_D,
                )
                for block in blocks
            ],
            num_heads=blocks[0].num_heads if blocks else 1,
            epsilon=blocks[0].eps if blocks else 0.0,
            position_PD=position_PD,
            query_QD=pool.query_DH.t(),
            mix_weight=pool.weight,
            mix_bias_D=pool.bias,
        )

    def encode(self, windows: SequenceWindows) -> Tensor:
        """[U, D]."""
        return encode_windows(self.encoder, windows.rows_ND, windows.starts_U, windows.lengths_U)


def _fold_norm(norm: nn.LayerNorm, layer: nn.Linear) -> tuple[Tensor, Tensor]:
    """W (n * scale + shift) + b as a layer over n."""
    weight, bias = layer.weight.double(), layer.bias.double()
    return (weight * norm.weight.double()).float(), (bias + weight @ norm.bias.double()).float()
