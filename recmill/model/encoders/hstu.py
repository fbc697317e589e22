"""Hierarchical sequential transduction units over a sequence (HSTU, arXiv 2402.17152)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import expand_rows, pointwise_attention
from kernels.windows import window_places
from recmill.model.encoders.pooling import valid_positions
from recmill.model.encoders.windows import SequenceWindows

# B = batch, D = embedding width, L = padded length, R = longest sequence, E = 3 * D
# N = rows of a buffer, U = windows into it, V = windows with different starts, T = rows of these

# Norms of vectors near zero magnify rounding: with 1e-6 in both norms and n = 10, losses of two exact implementations
# differed by 2e-3 after 14 steps, with these by 1e-7. The second is of sums before they are divided by n, so that the
# model does not depend on n; the published 1e-6 with n = 200 are 0.04.
INPUT_EPSILON = 1e-3
SUM_EPSILON = 0.1


class TransductionUnit(nn.Module):
    """One block: x + output(norm(silu(Q K + bias by distance) / n V) * U), with U, V, Q, K = silu(linear(norm(x))).

    Weights are not normalised by a softmax, so how often a history repeats something is not lost. A row sees the rows
    before it and itself. n is the longest sequence that the encoder takes, as in the published code.
    """

    def __init__(self, dim: int, num_heads: int, max_length: int) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, 1.0 / max_length
        self.input_norm = nn.LayerNorm(dim, eps=INPUT_EPSILON, elementwise_affine=False)
        self.gate = nn.Linear(dim, dim, bias=False)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.distance_R = nn.Parameter(torch.empty(max_length).normal_(std=0.02))
        self.attention_norm = nn.LayerNorm(dim, eps=SUM_EPSILON * self.scale**2, elementwise_affine=False)
        self.output = nn.Linear(dim, dim)

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        batch, length, dim = hidden_BLD.shape
        normed_BLD = self.input_norm(hidden_BLD)
        packed = functional.silu(self.query_key_value(normed_BLD))
        query, key, value = packed.view(batch, length, 3, self.num_heads, dim // self.num_heads).permute(2, 0, 3, 1, 4)
        steps_L = torch.arange(length, device=hidden_BLD.device)
        distances_LL = steps_L[:, None] - steps_L[None, :]
        scores = query @ key.transpose(2, 3) + self.distance_R[distances_LL.clamp(min=0)]
        weights = functional.silu(scores) * self.scale * (distances_LL >= 0).to(scores.dtype)
        attended_BLD = (weights @ value).transpose(1, 2).reshape(batch, length, dim)
        return self.join(hidden_BLD, functional.silu(self.gate(normed_BLD)), attended_BLD)

    def join(self, hidden: Tensor, gate: Tensor, attended: Tensor) -> Tensor:
        """The block's last steps, for rows of any arrangement."""
        found: Tensor = hidden + self.output(self.attention_norm(attended) * gate)
        return found

    def attend(self, normed_ND: Tensor, windows: SequenceWindows, *, num_rows: int | None) -> Tensor:
        """Attention of every row of the windows [`num_rows`, D]; with None, of the last row of each: [U, D]."""
        return pointwise_attention(
            functional.silu(self.query_key_value(normed_ND)),
            self.distance_R,
            windows.starts_U,
            windows.lengths_U,
            num_heads=self.num_heads,
            scale=self.scale,
            is_last_only=num_rows is None,
            num_values=num_rows,
        )

    def encode(self, windows: SequenceWindows, *, num_rows: int) -> SequenceWindows:
        """The block over windows: the same windows, now one after another. Projections run once per buffer row."""
        normed_ND = self.input_norm(windows.rows_ND)
        gate_TD = windows.take(functional.silu(self.gate(normed_ND)), num_rows=num_rows)
        hidden_TD = windows.take(windows.rows_ND, num_rows=num_rows)
        attended_TD = self.attend(normed_ND, windows, num_rows=num_rows)
        return SequenceWindows(
            rows_ND=self.join(hidden_TD, gate_TD, attended_TD),
            starts_U=window_places(windows.lengths_U),
            lengths_U=windows.lengths_U,
            is_packed=True,
        )

    def encode_last(self, windows: SequenceWindows) -> Tensor:
        """The block for the last row of every window only: [U, D]."""
        last_U = (windows.starts_U + windows.lengths_U - 1).clamp(min=0, max=len(windows.rows_ND) - 1)
        hidden_UD = expand_rows(windows.rows_ND, last_U)
        gate_UD = functional.silu(self.gate(self.input_norm(hidden_UD)))
        return self.join(hidden_UD, gate_UD, self.attend(self.input_norm(windows.rows_ND), windows, num_rows=None))


class HSTUEncoder(nn.Module):
    """Transduction units over a sequence; the normed last row is the result, zero for an empty sequence.

    Distances between rows stand in for positions, and rows see older rows only. So overlapping windows share the first
    block's projections and weights, windows with one start share everything, and the last block runs for last rows.
    """

    def __init__(self, dim: int, num_heads: int, num_layers: int, max_length: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(TransductionUnit(dim, num_heads, max_length) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, padded_BLD: Tensor, lengths_B: Tensor) -> Tensor:
        # Padding comes last, where no row sees it; zeros keep it finite.
        hidden_BLD = padded_BLD * valid_positions(lengths_B, padded_BLD.shape[1])[:, :, None].to(padded_BLD.dtype)
        for unit in self.units:
            hidden_BLD = unit(hidden_BLD)
        last_B1D = (lengths_B - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden_BLD.shape[2])
        return self._finish(hidden_BLD.gather(1, last_B1D).squeeze(1), lengths_B)

    def encode(self, windows: SequenceWindows) -> Tensor:
        """The same for windows: [U, D]."""
        shared, longest_U = windows.longest_per_start()
        num_rows = int(shared.lengths_U.sum())
        if not num_rows:  # connected to the rows: the backward pass must reach the tables on every rank
            blank_U1D = windows.rows_ND[:0].sum() + windows.rows_ND.new_zeros(
                len(windows.lengths_U), 1, windows.rows_ND.shape[1]
            )
            return self(blank_U1D, windows.lengths_U)
        *units, last = [unit for unit in self.units if isinstance(unit, TransductionUnit)]
        for unit in units:
            shared = unit.encode(shared, num_rows=num_rows)
        found = SequenceWindows(
            rows_ND=shared.rows_ND, starts_U=shared.starts_U[longest_U], lengths_U=windows.lengths_U
        )
        return self._finish(last.encode_last(found), windows.lengths_U)

    def _finish(self, last_BD: Tensor, lengths_B: Tensor) -> Tensor:
        found_BD: Tensor = self.norm(last_BD) * (lengths_B > 0)[:, None].to(last_BD.dtype)
        return found_BD
