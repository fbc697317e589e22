"""The definition of the encoder in torch: window after window, in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from kernels.encode_windows import EncoderBlock, WindowEncoder

# L = rows of a window


def encode_windows(encoder: WindowEncoder, rows_ND: Tensor, starts_W: Tensor, lengths_W: Tensor) -> Tensor:
    out_WD = rows_ND.new_zeros(len(starts_W), len(encoder.mix_bias_D))
    for window, (start, length) in enumerate(zip(starts_W.tolist(), lengths_W.tolist(), strict=True)):
        if start < 0 or length < 0 or start + length > len(rows_ND):
            raise ValueError(f"window {window}: start {start} and length {length} lie outside of the rows")
        if length:
            out_WD[window] = _encode(encoder, rows_ND[start : start + length].double()).to(out_WD.dtype)
    return out_WD


def _encode(encoder: WindowEncoder, hidden_LD: Tensor) -> Tensor:
    for number, block in enumerate(encoder.blocks):
        hidden_LD = _apply(block, hidden_LD, encoder.num_heads, encoder.epsilon)
        if number == 0 and encoder.position_PD is not None:
            if len(hidden_LD) > len(encoder.position_PD):
                raise ValueError(f"a window has {len(hidden_LD)} rows, more than there are positions")
            hidden_LD = hidden_LD + encoder.position_PD[: len(hidden_LD)].flip(0).double()
    weights_LQ = (hidden_LD @ encoder.query_QD.double().t()).softmax(0)
    pooled_QD = weights_LQ.t() @ hidden_LD
    return encoder.mix_weight.double() @ pooled_QD.flatten() + encoder.mix_bias_D.double()


def _apply(block: EncoderBlock, hidden_LD: Tensor, num_heads: int, epsilon: float) -> Tensor:
    normed_LD = functional.layer_norm(hidden_LD, hidden_LD.shape[1:], eps=epsilon)
    packed_LE = functional.linear(normed_LD, block.packed_ED.double(), block.packed_bias_E.double())
    query, key, value = packed_LE.view(len(hidden_LD), 3, num_heads, -1).permute(1, 2, 0, 3)
    scores = query @ key.transpose(1, 2) * query.shape[2] ** -0.5
    attended_LD = (scores.softmax(2) @ value).transpose(0, 1).flatten(1)
    inner_LF = functional.gelu(functional.linear(normed_LD, block.first_FD.double(), block.first_bias_F.double()))
    both_LD = attended_LD @ block.project_DD.double().t() + inner_LF @ block.last_DF.double().t()
    found_LD: Tensor = hidden_LD + both_LD + block.bias_D.double()
    return found_LD
