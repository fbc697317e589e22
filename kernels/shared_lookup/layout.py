"""How logical tables map to a shared array, in plain numbers that every backend uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

WORD = (1 << 64) - 1
ID_FACTOR = 0x9E3779B97F4A7C15
BLOCK_FACTOR = 0xD1B54A32D192ED03
MIX_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MAX_SIZE = 1 << 46  # the limit of the reference's arithmetic: 281 TB of float32
LINE = 16  # slots that share a touched flag, a momentum in row-wise Adagrad and, if packed, an exponent


def count_lines(num_slots: int) -> int:
    return -(-num_slots // LINE)


def mix_bits(value: int) -> int:
    """64 well mixed bits of an integer (splitmix64), the same in C++, Triton and torch."""
    value &= WORD
    value = ((value ^ (value >> 30)) * MIX_FACTORS[0]) & WORD
    value = ((value ^ (value >> 27)) * MIX_FACTORS[1]) & WORD
    return value ^ (value >> 31)


def signed(word: int) -> int:
    """The same 64 bits as the int64 that torch and the compiled kernels take."""
    word &= WORD
    return word - (1 << 64) if word >> 63 else word


@dataclass(frozen=True, kw_only=True)
class SharedLayout:
    """Where each weight is in `size` shared slots: each block of a row starts at hash(table, id, block)."""

    size: int
    block_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}, expected at least 1")
        if not self.block_size <= self.size < MAX_SIZE:
            raise ValueError(
                f"the shared array has {self.size} slots, expected at least one block of {self.block_size} "
                f"and fewer than {MAX_SIZE}"
            )

    def table_key(self, table: int) -> int:
        """The number that a table adds to the hash of its rows."""
        return signed(mix_bits(mix_bits(self.seed) + ID_FACTOR * (table + 1)))

    def numbers(self) -> list[int]:
        """Shared slots, slots per block: as the kernels take it."""
        return [self.size, self.block_size]


@dataclass(frozen=True, kw_only=True)
class SharedFeature:
    """One feature's table, and how its lists are pooled: by sum or mean."""

    key: int
    dim: int
    is_mean: bool = False
    exact_start: int = 0  # its exact rows have the ids exact_ids[exact_start : exact_start + num_exact]
    num_exact: int = 0
    exact_base: int = 0  # the slot of the first exact row
    exact_width: int = 0  # weights that each exact row owns, repeated over the row; 0: the width of the row

    def __post_init__(self) -> None:
        if not 0 <= self.exact_width <= self.dim:
            raise ValueError(f"exact_width is {self.exact_width}, expected at most the row's width {self.dim}")


@dataclass(frozen=True, eq=False)
class SharedFeatures:
    """The features of a lookup, side by side in its output."""

    rows: Tensor  # int64 [F, 8]: key, dim, is_mean, column, exact_start, num_exact, exact_base, exact_width
    exact_ids: Tensor  # int64, ascending inside each table
    width: int

    @classmethod
    def of(cls, features: Sequence[SharedFeature], exact_ids: Tensor | None = None) -> SharedFeatures:
        import torch

        rows, column = [], 0
        for f in features:
            where = [f.exact_start, f.num_exact, f.exact_base, f.exact_width or f.dim]
            rows.append([f.key, f.dim, int(f.is_mean), column, *where])
            column += f.dim
        kept = torch.empty(0, dtype=torch.int64) if exact_ids is None else exact_ids
        return cls(rows=torch.tensor(rows, dtype=torch.int64).reshape(-1, 8), exact_ids=kept, width=column)

    def described(self, layout: SharedLayout, *, is_pooled: bool) -> tuple[Any, ...]:
        """What the kernels take after the lists: rows, exact ids, layout, width of the output, is it pooled."""
        width = self.width
        if not is_pooled:
            dims = {int(dim) for dim in self.rows[:, 1]}
            if len(dims) != 1:
                raise ValueError(f"rows of widths {sorted(dims)} do not fit into one tensor, expected one width")
            width = dims.pop()
        return self.rows, self.exact_ids, layout.numbers(), width, is_pooled

    def to(self, device: object) -> SharedFeatures:
        return SharedFeatures(self.rows.to(device), self.exact_ids.to(device), self.width)  # type: ignore[call-overload]
