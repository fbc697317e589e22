"""The usual transformer over a sequence: positions in its input, attention and feed-forward one after the other."""

from __future__ import annotations

from torch import Tensor, nn

from kernels import expand_rows, window_attention
from kernels.windows import window_places
from recmill.model.encoders.pooling import AttentionEncoder
from recmill.model.encoders.transformer import TransformerBlock, attended_positions, padded_ages
from recmill.model.encoders.windows import SequenceWindows, ages_of

# B = batch, D = embedding width, L = padded length, U = windows into a buffer, T = rows of all windows


class SequentialBlock(TransformerBlock):
    """Pre-norm self-attention, then feed-forward: y = x + attention(norm(x)); y + feed_forward(norm(y))."""

    def forward(self, hidden_BLD: Tensor, mask_B11L: Tensor) -> Tensor:
        hidden_BLD = hidden_BLD + self.attend(hidden_BLD, mask_B11L)
        found_BLD: Tensor = hidden_BLD + self.feed_forward(hidden_BLD)
        return found_BLD

    def encode_rows(self, hidden_TD: Tensor, starts_U: Tensor, lengths_U: Tensor) -> Tensor:
        """The same for windows that share no rows: [T, D]."""
        packed_TE = self.query_key_value(self.attention_norm(hidden_TD))
        attended_TD = window_attention(
            packed_TE, starts_U, lengths_U, num_heads=self.num_heads, num_values=len(hidden_TD)
        )
        hidden_TD = hidden_TD + self.project(attended_TD)
        found_TD: Tensor = hidden_TD + self.feed_forward(hidden_TD)
        return found_TD


class StandardTransformerEncoder(nn.Module):
    """torch.nn.TransformerEncoder (norm_first, GELU) over rows and learned positions, then attention pooling.

    Positions are counted from the newest element. They are part of the input, so a row differs from window to window:
    distinct windows are encoded once, but overlapping ones share lookups only.
    """

    def __init__(self, dim: int, num_heads: int, num_layers: int, max_length: int) -> None:
        super().__init__()
        self.position = nn.Embedding(max_length, dim)
        nn.init.normal_(self.position.weight, std=0.02)
        self.blocks = nn.ModuleList(SequentialBlock(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.pool = AttentionEncoder(dim, num_heads)

    def forward(self, padded_BLD: Tensor, lengths_B: Tensor) -> Tensor:
        hidden_BLD = padded_BLD + self.position(padded_ages(lengths_B, padded_BLD.shape[1]))
        attends_BL = attended_positions(lengths_B, padded_BLD.shape[1])
        for block in self.blocks:
            hidden_BLD = block(hidden_BLD, attends_BL[:, None, None, :])
        found_BD: Tensor = self.pool(self.norm(hidden_BLD), lengths_B)
        return found_BD

    def encode(self, windows: SequenceWindows) -> Tensor:
        """The same for windows: [U, D]."""
        lengths_U, num_rows = windows.lengths_U, int(windows.lengths_U.sum())
        position_TD = expand_rows(self.position.weight, ages_of(lengths_U, num_rows=num_rows))
        hidden_TD = windows.take(windows.rows_ND, num_rows=num_rows) + position_TD
        starts_U = window_places(lengths_U)
        for block in self.blocks:
            assert isinstance(block, SequentialBlock)
            hidden_TD = block.encode_rows(hidden_TD, starts_U, lengths_U)
        return self.pool.pool(self.norm(hidden_TD), starts_U, lengths_U)
