"""A transformer over windows of rows and the attention pooling behind it, in one call without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels import _cpu
from kernels.backends import pick_backend
from kernels.windows import check_windows

if TYPE_CHECKING:
    from torch import Tensor

PANEL = 16  # kPanel of kernels/dense_layers/products.h: heads are padded to whole panels

# D = width of a row, H = heads of a block, Q = queries of the pooling, F = width of the feed-forward layer, E = 3 * D
# N = rows of the buffer, W = windows, P = positions


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderBlock:
    """x + project(attention(norm(x))) + last(gelu(first(norm(x)))) + bias; the norm has neither scale nor shift."""

    packed_ED: Tensor  # queries, keys and values, each of them head by head
    packed_bias_E: Tensor
    project_DD: Tensor
    first_FD: Tensor
    first_bias_F: Tensor
    last_DF: Tensor
    bias_D: Tensor  # of both last layers


class WindowEncoder:
    """The weights of an encoder, packed once and used for every batch.

        rows -> block -> + position, counted from the newest row -> block ... -> softmax(query . row) -> mix -> vector

    Without blocks, rows are pooled as they are.
    """

    def __init__(
        self,
        blocks: Sequence[EncoderBlock],
        *,
        num_heads: int,
        epsilon: float,
        position_PD: Tensor | None,
        query_QD: Tensor,
        mix_weight: Tensor,
        mix_bias_D: Tensor,
    ) -> None:
        """`mix_weight` is [D, Q * D]; `epsilon` is that of the norms."""
        self.blocks, self.num_heads, self.epsilon = tuple(blocks), num_heads, epsilon
        self.position_PD, self.query_QD = position_PD, query_QD
        self.mix_weight, self.mix_bias_D = mix_weight, mix_bias_D
        arrays = [array for block in blocks for array in _pad_heads(block, num_heads)]
        positions = None if position_PD is None else position_PD.contiguous()
        self.compiled = _cpu.WindowEncoder(
            arrays,
            positions,
            query_QD.contiguous(),
            mix_weight.contiguous(),
            mix_bias_D.contiguous(),
            num_heads,
            epsilon,
        )


def encode_windows(
    encoder: WindowEncoder, rows_ND: Tensor, starts_W: Tensor, lengths_W: Tensor, *, kernel: str | None = None
) -> Tensor:
    """The vector of each window: [W, D]; zeros for an empty one.

    ValueError for windows that lie outside of the rows, or have more rows than there are positions. The bits of a
    vector depend neither on other windows nor on the number of threads.
    """
    check_windows(starts_W, lengths_W)
    if pick_backend(kernel, rows_ND) == "reference":
        from kernels.encode_windows import reference

        return reference.encode_windows(encoder, rows_ND, starts_W, lengths_W)
    out_WD = rows_ND.new_empty(len(starts_W), len(encoder.mix_bias_D))
    _cpu.encode_windows(encoder.compiled, rows_ND.contiguous(), starts_W.contiguous(), lengths_W.contiguous(), out_WD)
    return out_WD


def _pad_heads(block: EncoderBlock, num_heads: int) -> list[Tensor]:
    """The arrays of a block as the compiled encoder takes them: heads padded with zeros, scores already scaled."""
    from torch.nn.functional import pad

    width = block.project_DD.shape[1]
    own = width // num_heads
    room = -own % PANEL
    packed = block.packed_ED.view(3, num_heads, own, -1).clone()
    bias = block.packed_bias_E.view(3, num_heads, own).clone()
    packed[0] *= own**-0.5
    bias[0] *= own**-0.5
    project = pad(block.project_DD.reshape(-1, num_heads, own), (0, room)).flatten(1)
    packed, bias = pad(packed, (0, 0, 0, room)).flatten(0, 2), pad(bias, (0, room)).flatten()
    arrays = [packed, bias, project, block.bias_D, block.first_FD, block.first_bias_F, block.last_DF]
    return [array.contiguous() for array in arrays]
