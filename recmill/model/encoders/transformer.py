"""A small transformer over the elements of a sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import expand_rows, window_attention
from kernels.windows import window_places
from recmill.model.encoders.pooling import AttentionEncoder, valid_positions
from recmill.model.encoders.windows import SequenceWindows, ages_of

# B = batch, F = features, D = embedding width, L = padded length, H = attention heads
# N = rows of a buffer, U = windows into it, T = rows of all windows, E = 3 * D


def padded_ages(lengths_B: Tensor, padded_length: int) -> Tensor:
    """The number of newer elements of a padded sequence, 0 in its padding: [B, L]."""
    steps_L = torch.arange(padded_length, device=lengths_B.device)
    return (lengths_B[:, None] - 1 - steps_L[None, :]).clamp(min=0)


def attended_positions(lengths_B: Tensor, padded_length: int) -> Tensor:
    """True where attention may look: [B, L]. An empty sequence attends to its first padding slot; pooling zeroes it."""
    is_first_L = torch.arange(padded_length, device=lengths_B.device) == 0
    return valid_positions(lengths_B, padded_length) | ((lengths_B == 0)[:, None] & is_first_L[None, :])


class TransformerBlock(nn.Module):
    """Pre-norm self-attention and feed-forward in parallel: x + attention(norm(x)) + feed_forward(norm(x)).

    In parallel (as in GPT-J and PaLM) the feed-forward depends on the row alone, so the first block computes it once
    for all windows that share the row.
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
        attended_BLD = self.attend(hidden_BLD, mask_B11L)
        found_BLD: Tensor = hidden_BLD + self.feed_forward(hidden_BLD) + attended_BLD
        return found_BLD

    def attend(self, hidden_BLD: Tensor, mask_B11L: Tensor) -> Tensor:
        """attention(norm(x)) of padded sequences."""
        batch, length, dim = hidden_BLD.shape
        packed = self.query_key_value(self.attention_norm(hidden_BLD))
        query, key, value = packed.view(batch, length, 3, self.num_heads, dim // self.num_heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask_B11L)
        attended_BLD: Tensor = self.project(attended.transpose(1, 2).reshape(batch, length, dim))
        return attended_BLD

    def encode(self, hidden_ND: Tensor, starts_U: Tensor, lengths_U: Tensor, *, num_rows: int) -> tuple[Tensor, Tensor]:
        """The two parts of the block over windows: (per row of the buffer [N, D], per row of every window [T, D])."""
        packed_NE = self.query_key_value(self.attention_norm(hidden_ND))
        attended_TD = window_attention(packed_NE, starts_U, lengths_U, num_heads=self.num_heads, num_values=num_rows)
        return hidden_ND + self.feed_forward(hidden_ND), self.project(attended_TD)


class TransformerEncoder(nn.Module):
    """A transformer over a sequence, then attention pooling.

    Positions are counted from the newest element and added after the first block. The first block sees a set, so its
    per-row result is the same in every window that contains the row, at any position.
    """

    def __init__(self, dim: int, num_heads: int, num_layers: int, max_length: int) -> None:
        super().__init__()
        self.position = nn.Embedding(max_length, dim)
        nn.init.normal_(self.position.weight, std=0.02)
        self.blocks = nn.ModuleList(TransformerBlock(dim, num_heads) for _ in range(num_layers))
        self.pool = AttentionEncoder(dim, num_heads)

    def forward(self, padded_BLD: Tensor, lengths_B: Tensor) -> Tensor:
        length = padded_BLD.shape[1]
        age_BL, attends_BL = padded_ages(lengths_B, length), attended_positions(lengths_B, length)
        hidden_BLD = padded_BLD
        for number, block in enumerate(self.blocks):
            hidden_BLD = block(hidden_BLD, attends_BL[:, None, None, :])
            if number == 0:
                hidden_BLD = hidden_BLD + self.position(age_BL)
        return self.pool(hidden_BLD, lengths_B)

    def encode(self, windows: SequenceWindows) -> Tensor:
        """The same for windows: [U, D]. The first block computes its per-row part once per row of the buffer."""
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
