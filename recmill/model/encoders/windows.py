"""The sequences of a batch as encoders take them: windows into a buffer of rows, nothing padded.

Shape suffixes: N = rows of the buffer, U = windows, T = rows of all windows one after another, L = longest window,
D = embedding width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import expand_rows
from kernels.windows import window_places, window_rows_of


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceWindows:
    """Sequence u is rows_ND[starts_U[u] : starts_U[u] + lengths_U[u]].

        sequences:   [a, b, c, d]   [b, c, d, e]   [x]
        rows       = [a, b, c, d, e, x]     starts = [0, 1, 5]     lengths = [4, 4, 1]

    Sequences of plain batches lie one after another and share nothing (`is_packed`): windows all the same. Unpacks as
    the pair (padded [U, L, D], lengths [U]) for whoever wants a rectangle.
    """

    rows_ND: Tensor
    starts_U: Tensor  # int64
    lengths_U: Tensor  # int64
    is_packed: bool = False

    @classmethod
    def of_lists(cls, rows_ND: Tensor, lengths_U: Tensor, *, max_length: int) -> SequenceWindows:
        """Lists that follow one another, each cut to its last `max_length` rows."""
        lengths_U = lengths_U.long()
        return cls(rows_ND=rows_ND, starts_U=window_places(lengths_U), lengths_U=lengths_U, is_packed=True).last(
            max_length
        )

    def last(self, max_length: int) -> SequenceWindows:
        """The last `max_length` rows of every sequence."""
        if not self.lengths_U.numel() or int(self.lengths_U.max()) <= max_length:
            return self
        starts_U = self.starts_U + (self.lengths_U - max_length).clamp(min=0)
        return SequenceWindows(rows_ND=self.rows_ND, starts_U=starts_U, lengths_U=self.lengths_U.clamp(max=max_length))

    def take(self, rows_ND: Tensor, *, num_rows: int) -> Tensor:
        """Something that each row of the buffer has, for every row of every window: [T, ...], T being `num_rows`."""
        if self.is_packed:
            return rows_ND
        return expand_rows(rows_ND, window_rows_of(self.starts_U, self.lengths_U, num_values=num_rows))

    def pad(self) -> tuple[Tensor, Tensor]:
        """(padded [U, L, D] with zeros behind each sequence, lengths [U]); L is at least 1."""
        longest = max(int(self.lengths_U.max()), 1) if self.lengths_U.numel() else 1
        steps_L = torch.arange(longest, device=self.starts_U.device)
        is_real_UL = steps_L[None, :] < self.lengths_U[:, None]
        width = self.rows_ND.shape[1]
        if not self.rows_ND.shape[0]:
            blank = self.rows_ND.new_zeros(len(self.lengths_U), longest, width)
            return blank + self.rows_ND.sum(), self.lengths_U  # the sum keeps an empty lookup in the graph
        position_UL = torch.where(is_real_UL, self.starts_U[:, None] + steps_L[None, :], 0)
        rows_ULD = expand_rows(self.rows_ND, position_UL.flatten()).view(len(self.lengths_U), longest, width)
        return rows_ULD * is_real_UL[:, :, None].to(rows_ULD.dtype), self.lengths_U

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.pad())

    def __getitem__(self, position: int) -> Tensor:
        return self.pad()[position]


def ages_of(lengths_U: Tensor, *, num_rows: int) -> Tensor:
    """How many newer rows its window has, for every row of every window: [T], T being `num_rows`."""
    ends_U = lengths_U.cumsum(0) - 1
    last_T = torch.repeat_interleave(ends_U, lengths_U, output_size=num_rows)
    return last_T - torch.arange(num_rows, device=lengths_U.device)
