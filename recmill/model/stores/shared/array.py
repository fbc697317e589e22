"""One small array of parameters for many logical tables: each weight of each table is a slot found by hashing.

    table a, row 7:   [w w w w | w w w w]            two blocks of 4
                          |         '--------.
    array:      . . [ . . w w w w . . .  w w w w ] [ exact rows of a ][ of b ]
                     '---- shared slots --------'   '-- rows that are not shared --'

Memory does not grow with the number of rows: a table of 2^40 rows takes no more than the array. With dtype int8 a
weight is one byte, plus one exponent per line of 16 slots (kernels/shared_lookup/packing.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernels import _cpu, shared_lookup, shared_scatter
from kernels.shared_lookup import SharedFeature, SharedFeatures, SharedLayout
from kernels.shared_lookup.layout import LINE, count_lines
from kernels.shared_lookup.packing import pack, unpack
from recmill.artifacts import InputError

# R = requested rows, D = embedding width
DEFAULT_COMPRESSION = 10.0
MAX_BLOCK_SIZE = 64  # four cache lines; longer blocks were not tested


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedTable:
    """A logical table. `exact_rows` are the ids whose rows are not shared.

    `exact_width` is how many weights each of those owns; they repeat over the row's width. None: full width.
    """

    name: str
    num_rows: int
    dim: int
    exact_rows: Tensor | None = None
    exact_width: int | None = None

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.dim < 1:
            raise InputError(
                f"table {self.name!r} has {self.num_rows} rows of width {self.dim}, expected at least 1 of each"
            )
        if self.exact_width is not None and self.exact_width < 1:
            raise InputError(f"table {self.name!r}: exact_width is {self.exact_width}, expected at least 1")

    @property
    def number(self) -> int:
        """The table's number in the hash: independent of the order in which tables are listed."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:7], "little")

    @property
    def own_width(self) -> int:
        """Number of weights of an exact row."""
        return self.dim if self.exact_width is None else min(self.exact_width, self.dim)

    @property
    def exact_ids(self) -> Tensor:
        if self.exact_rows is None:
            return torch.empty(0, dtype=torch.int64)
        ids = self.exact_rows.detach().to("cpu", torch.int64).flatten().unique()  # type: ignore[no-untyped-call]
        if len(ids) != self.exact_rows.numel():
            raise InputError(
                f"table {self.name!r}: exact_rows has {self.exact_rows.numel()} rows, {len(ids)} of them distinct; "
                "expected each row once"
            )
        return ids


class SharedArray(nn.Module):
    """The parameters of many logical tables in `weight`: first the shared slots, then the exact rows.

    `compression` is the number of logical weights per shared slot; `memory_bytes` gives the size in bytes instead.
    Weights start with the standard deviation `std`, and so does every logical table. int8 arrays also have `exponents`
    and no gradient: SharedStep trains them.
    """

    exponents: Tensor | None

    def __init__(
        self,
        tables: Sequence[SharedTable],
        *,
        compression: float | None = None,
        memory_bytes: int | None = None,
        block_size: int | None = None,
        seed: int = 0,
        std: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        names = [table.name for table in tables]
        if not tables or len(set(names)) != len(names):
            raise InputError(f"tables are {names}, expected at least one and distinct names")
        self.tables = {table.name: table for table in tables}
        self.num_logical = sum(table.num_rows * table.dim for table in tables)
        dtype = dtype or torch.get_default_dtype()
        self.is_packed = dtype == torch.int8
        item_bytes = slot_bytes(dtype)
        size = choose_size(self.num_logical, compression=compression, memory_bytes=memory_bytes, item_bytes=item_bytes)
        if block_size is None:
            block_size = min(MAX_BLOCK_SIZE, max(table.dim for table in tables))
        self.layout = SharedLayout(size=size, block_size=min(block_size, size), seed=seed)
        self._place_tables(tables)
        slots = _empty_slots(self.num_slots, device=device, dtype=dtype)
        self.weight = nn.Parameter(slots, requires_grad=not self.is_packed)
        num_lines = count_lines(self.num_slots)
        exponents = torch.zeros(num_lines, dtype=torch.int8, device=device) if self.is_packed else None
        self.register_buffer("exponents", exponents)
        self.std = std
        self.reset_parameters()

    def _place_tables(self, tables: Sequence[SharedTable]) -> None:
        """Where the exact rows of each table are: first and number among all exact ids, first slot."""
        exact_start = 0
        slot = -(-self.layout.size // LINE) * LINE  # exact rows begin on a new line
        kept, self._places = [], {}
        for table in tables:
            ids = table.exact_ids
            self._places[table.name] = (exact_start, len(ids), slot)
            exact_start += len(ids)
            slot += len(ids) * table.own_width
            kept.append(ids)
        self.num_slots = slot if exact_start else self.layout.size
        self.exact_ids = torch.cat(kept)

    @property
    def num_exact(self) -> int:
        """Number of slots that belong to one row only."""
        return sum(count * self.tables[name].own_width for name, (_, count, _) in self._places.items())

    @property
    def num_bytes(self) -> int:
        """Bytes needed for lookups: slots, exponents and the ids of exact rows."""
        exponents = 0 if self.exponents is None else self.exponents.nbytes
        return self.num_slots * self.weight.element_size() + exponents + self.exact_ids.nbytes

    @property
    def value_dtype(self) -> torch.dtype:
        """The dtype of looked-up rows."""
        return torch.float32 if self.is_packed else self.weight.dtype

    def values(self) -> Tensor:
        """All slots as floats: the weights themselves, or an unpacked copy of int8 weights."""
        return self.weight.data if self.exponents is None else unpack(self.weight.data, self.exponents)

    @torch.no_grad()
    def take(self, values: Tensor) -> None:
        """Set all slots to these values; int8 weights are rounded to the nearest."""
        if self.exponents is None:
            self.weight.copy_(values)
        else:
            codes, exponents = pack(values)
            self.weight.copy_(codes)
            self.exponents.copy_(exponents)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights from the seed: the same on every machine and rank."""
        generator = torch.Generator().manual_seed(self.layout.seed)
        self.take(torch.empty(self.num_slots, dtype=torch.float32).normal_(0.0, self.std, generator=generator))

    def feature(self, table: str, *, is_mean: bool = False) -> SharedFeature:
        """What the kernels need to find the rows of a table."""
        exact_start, num_exact, exact_base = self._places[table]
        return SharedFeature(
            key=self.layout.table_key(self.tables[table].number),
            dim=self.tables[table].dim,
            is_mean=is_mean,
            exact_start=exact_start,
            num_exact=num_exact,
            exact_base=exact_base,
            exact_width=self.tables[table].own_width,
        )

    def features(self, tables: Sequence[str]) -> SharedFeatures:
        """One feature per name, side by side."""
        return SharedFeatures.of([self.feature(name) for name in tables], self.exact_ids)

    def exact_slots(self, table: str) -> slice:
        """The slots of a table's exact rows, in ascending order of ids."""
        _, count, slot = self._places[table]
        return slice(slot, slot + count * self.tables[table].own_width)

    def exact_rows(self, table: str) -> Tensor:
        """The ids of a table's exact rows, ascending."""
        start, count, _ = self._places[table]
        return self.exact_ids[start : start + count]

    def materialise(self, table: str, rows_R: Tensor | range | Sequence[int]) -> Tensor:
        """[R, D]: rows of the logical table as lookups see them, with a gradient."""
        ids = torch.as_tensor(list(rows_R) if isinstance(rows_R, range) else rows_R, dtype=torch.int64).flatten()
        return self.gather(self.weight, table, ids.to(self.weight.device), exponents=self.exponents)

    def gather(self, slots: Tensor, table: str, rows_R: Tensor, *, exponents: Tensor | None = None) -> Tensor:
        """[R, D]: the values of a table's rows in any array of slots, such as an optimiser's state."""
        how: dict[str, Any] = {"layout": self.layout, "features": self.features([table]).to(slots.device)}
        offsets = torch.tensor([0, len(rows_R)], device=slots.device)
        return shared_lookup(slots, rows_R, offsets, is_pooled=False, exponents=exponents, **how)

    @torch.no_grad()
    def fold(self, slots: Tensor, table: str, rows_R: Tensor, values_RD: Tensor) -> None:
        """Write values of rows into any array of slots; a slot that several rows share becomes their mean.

        Exact rows of full width read back as written.
        """
        sums, counts = torch.zeros_like(slots), torch.zeros_like(slots)
        self.add_rows(sums, counts, table, rows_R, values_RD)
        slots.copy_(torch.where(counts > 0, sums / counts.clamp(min=1), slots))

    @torch.no_grad()
    def add_rows(self, sums: Tensor, counts: Tensor, table: str, rows_R: Tensor, values_RD: Tensor) -> None:
        """Add values of rows to the sums of their slots, and the number of rows to the slots' counts."""
        how: dict[str, Any] = {"layout": self.layout, "features": self.features([table]), "is_pooled": False}
        offsets, values_RD = torch.tensor([0, len(rows_R)]), values_RD.to(sums.dtype)
        shared_scatter(sums, values_RD, rows_R, offsets, **how)
        shared_scatter(counts, torch.ones_like(values_RD), rows_R, offsets, **how)

    def get_extra_state(self) -> dict[str, Any]:
        """The layout of `weight`, saved with it."""
        layout = self.layout
        return {
            "size": layout.size,
            "block_size": layout.block_size,
            "seed": layout.seed,
            "tables": {name: [table.num_rows, table.dim] for name, table in self.tables.items()},
            "exact_rows": {name: self.exact_rows(name).tolist() for name in self.tables},
            "exact_width": {name: table.own_width for name, table in self.tables.items()},
            "is_packed": self.is_packed,
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        own = self.get_extra_state()
        wrong = [f"{name} {state.get(name)!r} instead of {own[name]!r}" for name in own if state.get(name) != own[name]]
        if wrong:
            raise InputError(f"the saved array has a different layout: {'; '.join(wrong)[:400]}")

    def extra_repr(self) -> str:
        layout = self.layout
        return (
            f"{len(self.tables)} tables, {self.num_logical:,} weights in {layout.size:,} slots, "
            f"blocks of {layout.block_size}, {self.num_exact:,} exact"
        )


def slot_bytes(dtype: torch.dtype) -> float:
    """Bytes per slot, including its part of a line's exponent."""
    return dtype.itemsize + (1 / LINE if dtype == torch.int8 else 0)


def choose_size(num_logical: int, *, compression: float | None, memory_bytes: int | None, item_bytes: float) -> int:
    """The number of shared slots for a compression factor or a number of bytes."""
    if compression is not None and memory_bytes is not None:
        raise InputError(f"compression is {compression} and memory_bytes is {memory_bytes}, expected only one of them")
    if memory_bytes is not None:
        if memory_bytes < item_bytes:
            raise InputError(f"memory_bytes is {memory_bytes}, expected at least one weight of {item_bytes:g} bytes")
        return int(memory_bytes // item_bytes)
    factor = DEFAULT_COMPRESSION if compression is None else float(compression)
    if not math.isfinite(factor) or factor < 1:
        raise InputError(f"compression is {compression}, expected a factor of at least 1")
    return max(1, math.ceil(num_logical / factor))


def _empty_slots(num_slots: int, *, device: torch.device | str | None, dtype: torch.dtype) -> Tensor:
    slots = torch.empty(num_slots, device=device, dtype=dtype)
    if slots.device.type == "cpu":
        _cpu.advise_huge_pages(slots)  # must happen before the first touch
    return slots
