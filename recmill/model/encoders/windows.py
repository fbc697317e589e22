"""The sequences of a batch as input of encoders: windows into a buffer of rows, without padding.

Shape suffixes: N = rows of the buffer, U = windows, T = rows of all windows one after another, L = longest window,
D = embedding width.
"""

from __future__ import annotations

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

    Sequences of plain batches follow one another and share nothing (`is_packed`).
    """

    rows_ND: Tensor
    starts_U: Tensor  # int64
    lengths_U: Tensor  # int64
    is_packed: bool = False

    @classmethod
    def of_lists(cls, rows_ND: Tensor, lengths_U: Tensor, *, max_length: int) -> SequenceWindows:
        """Consecutive lists, each truncated to its last `max_length` rows."""
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

    def longest_per_start(self) -> tuple[SequenceWindows, Tensor]:
        """Windows with different starts, and for each sequence the one that begins with it: [U].

            starts = [0, 0, 1]   lengths = [2, 3, 3]     ->     starts = [0, 1]   lengths = [3, 3]   [0, 0, 1]

        Histories that grow are such sequences. Causal encoders give a row the same result in all of them.
        """
        if self.is_packed:
            return self, torch.arange(len(self.starts_U), device=self.starts_U.device)
        starts_V, longest_U = torch.unique(self.starts_U, return_inverse=True)
        lengths_V = torch.zeros_like(starts_V).scatter_reduce_(0, longest_U, self.lengths_U, "amax")
        return SequenceWindows(rows_ND=self.rows_ND, starts_U=starts_V, lengths_U=lengths_V), longest_U

    def take(self, rows_ND: Tensor, *, num_rows: int) -> Tensor:
        """Values per row of the buffer, expanded to every row of every window: [T, ...] with T = `num_rows`."""
        if self.is_packed:
            return rows_ND
        return expand_rows(rows_ND, window_rows_of(self.starts_U, self.lengths_U, num_values=num_rows))


def ages_of(lengths_U: Tensor, *, num_rows: int) -> Tensor:
    """The number of newer rows in its window, for every row of every window: [T] with T = `num_rows`."""
    ends_U = lengths_U.cumsum(0) - 1
    last_T = torch.repeat_interleave(ends_U, lengths_U, output_size=num_rows)
    return last_T - torch.arange(num_rows, device=lengths_U.device)
