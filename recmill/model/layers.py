"""Dense building blocks of the rankers: MLP, feature crosses, sequence encoders."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import dot_interaction, expand_rows, pool_windows, window_attention
from kernels.windows import window_places
from recmill.model.sequence_windows import SequenceWindows, ages_of

# B = batch, F = features, D = embedding width, L = padded length, H = attention heads
# N = rows of a buffer, U = windows into it, T = rows of all windows, E = 3 * D


class MLP(nn.Sequential):
    """Linear layers with ReLU and dropout between them; `is_logit` leaves the last one bare."""

    def __init__(self, in_width: int, widths: tuple[int, ...], *, dropout: float = 0.0, is_logit: bool = False) -> None:
        layers: list[nn.Module] = []
        for position, width in enumerate(widths):
            layers.append(nn.Linear(in_width, width))
            if not (is_logit and position == len(widths) - 1):
                layers.append(nn.ReLU())
                if dropout:
                    layers.append(nn.Dropout(dropout))
            in_width = width
        super().__init__(*layers)


class DotInteraction(nn.Module):
    """Inner products of every pair of features: F vectors in, F*(F-1)/2 numbers out."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_pairs = num_features * (num_features - 1) // 2

    def forward(self, features_BFD: Tensor) -> Tensor:
        return self.join(features_BFD.unbind(1))

    def join(self, vectors: Sequence[Tensor], *, num_kept: int = 0) -> Tensor:
        """The first `num_kept` vectors [B, D] themselves, then the products."""
        return dot_interaction(vectors, num_kept=num_kept)


class CrossNetwork(nn.Module):
    """DCNv2's crosses: x_{k+1} = x_0 * (W_k x_k + b_k) + x_k, with W_k of low rank if `rank` is given."""

    def __init__(self, width: int, num_layers: int, rank: int) -> None:
        super().__init__()

        def weight() -> nn.Module:
            if not rank or rank >= width:
                return nn.Linear(width, width)
            return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))

        self.layers = nn.ModuleList(weight() for _ in range(num_layers))

    def forward(self, start_BD: Tensor) -> Tensor:
        crossed_BD = start_BD
        for layer in self.layers:
            crossed_BD = start_BD * layer(crossed_BD) + crossed_BD
        return crossed_BD


def valid_positions(lengths_B: Tensor, padded_length: int) -> Tensor:
    """True where a padded sequence holds a real element: [B, L]."""
    return torch.arange(padded_length, device=lengths_B.device)[None, :] < lengths_B[:, None]


class MeanEncoder(nn.Module):
    """The mean of a sequence; zero for an empty one."""

    def forward(self, padded_BLD: Tensor, lengths_B: Tensor) -> Tensor:
        valid_BL = valid_positions(lengths_B, padded_BLD.shape[1])
        total_BD = (padded_BLD * valid_BL[:, :, None].to(padded_BLD.dtype)).sum(1)
        return total_BD / lengths_B.clamp(min=1)[:, None].to(padded_BLD.dtype)

    def encode(self, windows: SequenceWindows) -> Tensor:
        """The same of windows: [U, D]."""
        return pool_windows(windows.rows_ND, None, windows.starts_U, windows.lengths_U).squeeze(1)


class AttentionEncoder(nn.Module):
    """Multi-head attention of one learned query over a sequence; zero for an empty one.

    The weights of a head add up to 1, so values are projected after they are pooled: once a sequence, not once a row.
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
        # A finite floor instead of -inf keeps the softmax of an empty sequence free of NaN.
        scores_BLH = scores_BLH.masked_fill(~valid_BL[:, :, None], torch.finfo(padded_BLD.dtype).min)
        weights_BLH = scores_BLH.softmax(1) * valid_BL[:, :, None].to(padded_BLD.dtype)
        return self._mix(weights_BLH.transpose(1, 2) @ padded_BLD, lengths_B)

    def encode(self, windows: SequenceWindows) -> Tensor:
        """The same of windows: [U, D]. A row that windows share is scored once."""
        return self.pool(windows.rows_ND, windows.starts_U, windows.lengths_U)

    def pool(self, rows_ND: Tensor, starts_U: Tensor, lengths_U: Tensor) -> Tensor:
        return self._mix(pool_windows(rows_ND, rows_ND @ self.query_HD.T, starts_U, lengths_U), lengths_U)

    def _mix(self, pooled_BHD: Tensor, lengths_B: Tensor) -> Tensor:
        is_filled_B1 = (lengths_B > 0)[:, None].to(pooled_BHD.dtype)
        return self.mix(self.value(pooled_BHD).flatten(1)) * is_filled_B1


class TransformerBlock(nn.Module):
    """Pre-norm self-attention and feed-forward side by side: x + attention(norm(x)) + feed_forward(norm(x)).

    Side by side (as in GPT-J and PaLM) the feed-forward sees the row alone, so in a first block it can be run once for
    all windows that share the row.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, hidden_BLD: Tensor, mask_B11L: Tensor) -> Tensor:
        batch, length, dim = hidden_BLD.shape
        packed = self.query_key_value(self.attention_norm(hidden_BLD))
        query, key, value = packed.view(batch, length, 3, self.num_heads, dim // self.num_heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask_B11L)
        attended_BLD = self.project(attended.transpose(1, 2).reshape(batch, length, dim))
        return hidden_BLD + self.feed_forward(hidden_BLD) + attended_BLD

    def encode(self, hidden_ND: Tensor, starts_U: Tensor, lengths_U: Tensor, *, num_rows: int) -> tuple[Tensor, Tensor]:
        """The two parts of the block over windows of rows: (of each row alone [N, D], of its window [T, D])."""
        packed_NE = self.query_key_value(self.attention_norm(hidden_ND))
        attended_TD = window_attention(packed_NE, starts_U, lengths_U, num_heads=self.num_heads, num_values=num_rows)
        return hidden_ND + self.feed_forward(hidden_ND), self.project(attended_TD)


class TransformerEncoder(nn.Module):
    """A transformer over a sequence, then attention pooling.

    Positions are counted from the newest element and added after the first block: that one sees a set, so what it
    computes of a row alone is the same in every window that holds the row, wherever it stands there.
    """

    def __init__(self, dim: int, num_heads: int, num_layers: int, max_length: int) -> None:
        super().__init__()
        self.position = nn.Embedding(max_length, dim)
        nn.init.normal_(self.position.weight, std=0.02)
        self.blocks = nn.ModuleList(TransformerBlock(dim, num_heads) for _ in range(num_layers))
        self.pool = AttentionEncoder(dim, num_heads)

    def forward(self, padded_BLD: Tensor, lengths_B: Tensor) -> Tensor:
        length = padded_BLD.shape[1]
        steps_L = torch.arange(length, device=padded_BLD.device)
        age_BL = (lengths_B[:, None] - 1 - steps_L[None, :]).clamp(min=0)
        valid_BL = valid_positions(lengths_B, length)
        # An empty sequence attends to its first padding slot; the pooling zeroes what comes of it.
        attends_BL = valid_BL | ((lengths_B == 0)[:, None] & (steps_L == 0)[None, :])
        hidden_BLD = padded_BLD
        for number, block in enumerate(self.blocks):
            hidden_BLD = block(hidden_BLD, attends_BL[:, None, None, :])
            if number == 0:
                hidden_BLD = hidden_BLD + self.position(age_BL)
        return self.pool(hidden_BLD, lengths_B)

    def encode(self, windows: SequenceWindows) -> Tensor:
        """The same of windows: [U, D]. What the first block computes of a row alone is computed once a row."""
        first, *others = [block for block in self.blocks if isinstance(block, TransformerBlock)]
        lengths_U, num_rows = windows.lengths_U, int(windows.lengths_U.sum())
        own_ND, attended_TD = first.encode(windows.rows_ND, windows.starts_U, lengths_U, num_rows=num_rows)
        position_TD = expand_rows(self.position.weight, ages_of(lengths_U, num_rows=num_rows))
        hidden_TD = windows.take(own_ND, num_rows=num_rows) + attended_TD + position_TD
        starts_U = window_places(lengths_U)
        for block in others:
            own_TD, attended_TD = block.encode(hidden_TD, starts_U, lengths_U, num_rows=num_rows)
            hidden_TD = own_TD + attended_TD
        return self.pool.pool(hidden_TD, starts_U, lengths_U)
