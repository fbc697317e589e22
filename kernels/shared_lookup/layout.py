"""How logical tables map to a shared array, in plain numbers that every backend uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WORD = (1 << 64) - 1
ID_FACTOR = 0x9E3779B97F4A7C15
BLOCK_FACTOR = 0xD1B54A32D192ED03
MIX_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
FLAT_IDS = 1 << 40  # randomfold lines up this many rows per table; ids beyond (and below 0) are hashed one by one
MAX_SIZE = 1 << 46  # the limit of the reference's arithmetic: 281 TB of float32
MAPPINGS = ("robe", "randomfold")
MODES = ("sum", "mean", "max")


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
    """Where each weight is in `size` shared slots.

    robe        a row is cut into blocks of `block_size`; each starts at hash(table, id, block)
    randomfold  all tables form one line, cut into pieces of `size`; each piece is rotated by a multiple of
                `block_size` slots, so that every slot holds equally many weights, and without compression exactly one
    """

    size: int
    mapping: str = "robe"
    block_size: int = 16
    sign: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mapping not in MAPPINGS:
            raise ValueError(f"mapping is {self.mapping!r}, expected one of {', '.join(MAPPINGS)}")
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
        """size, key, block, is randomfold, is signed: as the kernels take it."""
        is_fold = self.mapping == "randomfold"
        return [self.size, signed(mix_bits(self.seed)), self.block_size, int(is_fold), int(self.sign)]


@dataclass(frozen=True, kw_only=True)
class SharedFeature:
    """One feature's table. `base` is the position of its first weight in the line of all tables (randomfold)."""

    key: int
    dim: int
    mode: str = "sum"
    base: int = 0
    exact_start: int = 0  # its exact rows have the ids exact_ids[exact_start : exact_start + num_exact]
    num_exact: int = 0
    exact_base: int = 0  # the slot of the first exact row
    exact_width: int = 0  # weights that each exact row owns, repeated over the row; 0: the width of the row

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}, expected one of {', '.join(MODES)}")
        if not 0 <= self.exact_width <= self.dim:
            raise ValueError(f"exact_width is {self.exact_width}, expected at most the row's width {self.dim}")


@dataclass(frozen=True, eq=False)
class SharedFeatures:
    """The features of a lookup, side by side in its output."""

    rows: Tensor  # int64 [F, 9]: key, base, dim, mode, column, exact_start, num_exact, exact_base, exact_width
    exact_ids: Tensor  # int64, ascending inside each table
    width: int
    has_max: bool

    @classmethod
    def of(cls, features: Sequence[SharedFeature], exact_ids: Tensor | None = None) -> SharedFeatures:
        import torch

        rows, column = [], 0
        for f in features:
            where = [f.exact_start, f.num_exact, f.exact_base, f.exact_width or f.dim]
            rows.append([f.key, signed(f.base), f.dim, MODES.index(f.mode), column, *where])
            column += f.dim
        return cls(
            rows=torch.tensor(rows, dtype=torch.int64).reshape(-1, 9),
            exact_ids=torch.empty(0, dtype=torch.int64) if exact_ids is None else exact_ids,
            width=column,
            has_max=any(f.mode == "max" for f in features),
        )

    @property
    def num_features(self) -> int:
        return self.rows.shape[0]

    def unpooled_width(self) -> int:
        """The width that all features share."""
        dims = {int(dim) for dim in self.rows[:, 2]}
        if len(dims) != 1:
            raise ValueError(f"rows of widths {sorted(dims)} do not fit into one tensor, expected one width")
        return dims.pop()

    def to(self, device: object) -> SharedFeatures:
        return SharedFeatures(self.rows.to(device), self.exact_ids.to(device), self.width, self.has_max)  # type: ignore[call-overload]
