"""Encoders that pool a sequence into one vector: a mean, or learned weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels import pool_windows
from recmill.model.encoders.windows import SequenceWindows

# B = batch, F = features, D = embedding width, L = padded length, H = attention heads
# N = rows of a buffer, U = windows into it, T = rows of all windows, E = 3 * D


def valid_positions(lengths_B: Tensor, padded_length: int) -> Tensor:
    """True where a padded sequence has a real element: [B, L]."""
    return torch.arange(padded_length, device=lengths_B.device)[None, :] < lengths_B[:, None]


class MeanEncoder(nn.Module):
    """The mean of a sequence; zero for an empty sequence."""

    def forward(self, padded_BLD: Tensor, lengths_B: Tensor) -> Tensor:
        valid_BL = valid_positions(lengths_B, padded_BLD.shape[1])
        total_BD = (padded_BLD * valid_BL[:, :, None].to(padded_BLD.dtype)).sum(1)
        return total_BD / lengths_B.clamp(min=1)[:, None].to(padded_BLD.dtype)

    def encode(self, windows: SequenceWindows) -> Tensor:
        """The same for windows: [U, D]."""
        return pool_windows(windows.rows_ND, None, windows.starts_U, windows.lengths_U).squeeze(1)


class AttentionEncoder(nn.Module):
    """Multi-head attention of one learned query over a sequence; zero for an empty sequence.

    The weights of a head sum to 1, so values are projected after pooling: once per sequence, not once per row.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_HD = nn.Parameter(torch.zeros(num_heads, dim))
        self.value = nn.Linear(dim, dim)
        self.mix = nn.Linear(num_heads * dim, dim)
        nn.init.normal_(self.query_HD, std=dim**-0.5)

    def forward(self, padded_BLD: Tensor, lengths_B: Tensor) -> Tensor:
        valid_BL = valid_positions(lengths_B, padded_BLD.shape[1])
        scores_BLH = padded_BLD @ self.query_HD.T
        # A finite minimum instead of -inf avoids NaN in the softmax of an empty sequence.
        scores_BLH = scores_BLH.masked_fill(~valid_BL[:, :, None], torch.finfo(padded_BLD.dtype).min)
        weights_BLH = scores_BLH.softmax(1) * valid_BL[:, :, None].to(padded_BLD.dtype)
        return self._mix(weights_BLH.transpose(1, 2) @ padded_BLD, lengths_B)

    def encode(self, windows: SequenceWindows) -> Tensor:
        """The same for windows: [U, D]. A row that several windows share is scored once."""
        return self.pool(windows.rows_ND, windows.starts_U, windows.lengths_U)

    def pool(self, rows_ND: Tensor, starts_U: Tensor, lengths_U: Tensor) -> Tensor:
        return self._mix(pool_windows(rows_ND, rows_ND @ self.query_HD.T, starts_U, lengths_U), lengths_U)

    def _mix(self, pooled_BHD: Tensor, lengths_B: Tensor) -> Tensor:
        is_filled_B1 = (lengths_B > 0)[:, None].to(pooled_BHD.dtype)
        return self.mix(self.value(pooled_BHD).flatten(1)) * is_filled_B1
