"""Chooses the tables that share parameters and the rows that stay exact, from sizes, counts and a budget.

    keep    the table fits as it is, or sharing it would save too little
    share   all of its rows live in the shared array
    both    the most read rows are kept exactly, all others are shared

Rows compete for exact slots by reads per byte, because a collision costs most on a row that is read often: the exact
rows are the most read rows of all tables together, as long as they are read much more often than the average row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from recmill.artifacts import AccessProfile, InputError, ShardPlan, join_path
from recmill.artifacts.places.columns import read_numbers
from recmill.artifacts.plan import SharedParameters, SharedTablePlan
from recmill.artifacts.profile import TableProfile
from recmill.data.schema import Schema
from recmill.planning.tiers.entries import whole_table
from recmill.planning.tiers.problem import table_bytes
from recmill.sizes import parse_bytes

WEIGHT_BYTES = 4
ID_BYTES = 8  # of an exact row in the index
LINE_SLOTS = 16  # per line of the array: one momentum of row-wise Adagrad and, with int8 weights, one exponent
PRECISIONS = ("float32", "int8")
DEFAULT_BLOCK_SIZE = 32
SMALL_TABLE_SHARE = 0.01  # of the budget: smaller tables are not worth a collision
# Exact rows own few weights, which repeat over the row: hot rows are days and countries as often as items, and need no
# 64 numbers each. Frappe at 100x, rows of 32, validation AUC: no exact rows .937, 30 of 2 weights (9% of the bytes)
# .952, 30 of 4 .951, 100 of 1 .948; rows of 64, a short run: none .898, 10% .905, 20% .906 (one seed each). As wide as
# the rows they took more from the array than they gave. At 10x there is room for wider ones, not for more of them: a
# run of 4 epochs, none .931, 80% in rows of 8 .930, 70% in rows of 12 .933, 30% in rows of 16 .933, 90% of 12 .931.
EXACT_SHARE = 2.0  # of the bytes, divided by the root of the compression
MAX_EXACT_SHARE = 0.5
EXACT_WIDTH_SHARE = 2.5  # of a row's width, divided by the compression
MIN_EXACT_WIDTH = 2
MIN_HEAT = 4.0  # a row is kept exactly if it is read this many times as often as the mean row of all shared tables


@dataclass(frozen=True, kw_only=True)
class SharedChoice:
    """What `choose_sharing` decided: the `shared` entry of a plan, the exact rows, and why.

    Every rank holds the shared array and the exact rows.
    """

    shared: SharedParameters | None
    exact_rows: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)  # by falling count
    reasons: dict[str, str] = field(default_factory=dict)  # every table, kept ones too
    chosen_bytes: int = 0  # of all tables after the choice

    @property
    def tables(self) -> frozenset[str]:
        return frozenset(self.shared.tables) if self.shared else frozenset()

    def bytes_per_rank(self, schema: Schema) -> int:
        kept = sum(table_bytes(table) for table in schema.tables if table.name not in self.tables)
        return self.chosen_bytes - kept if self.tables else 0

    def added_to(self, plan: ShardPlan, schema: Schema) -> ShardPlan:
        """The plan with the shared tables, in a placement that TorchRec takes should a run switch sharing off."""
        if not self.tables:
            return plan
        tables = dict(plan.tables)
        for position, table in enumerate(table for table in schema.tables if table.name in self.tables):
            rank, why = position % plan.world_size, self.reasons[table.name]
            tables[table.name] = whole_table(table, schema, plan.topology, rank=rank, placement="shared", why=why)
        rank_bytes = tuple(rank + self.bytes_per_rank(schema) for rank in plan.rank_bytes)
        return replace(plan, tables=tables, rank_bytes=rank_bytes, shared=self.shared)


def full_bytes(table: TableProfile) -> int:
    """Rows with one momentum each."""
    return table.num_rows * (table.dim + 1) * WEIGHT_BYTES


@dataclass(frozen=True, kw_only=True)
class _Line:
    """Bytes of 16 slots."""

    array_bytes: int  # weights, and with weights of one byte their exponent
    momentum_bytes: int = WEIGHT_BYTES

    @classmethod
    def of(cls, precision: str) -> _Line:
        if precision not in PRECISIONS:
            raise InputError(f"precision is {precision!r}, expected {' or '.join(PRECISIONS)}")
        return cls(array_bytes=LINE_SLOTS * WEIGHT_BYTES if precision == "float32" else LINE_SLOTS + 1)

    @property
    def all_bytes(self) -> int:
        return self.array_bytes + self.momentum_bytes

    @property
    def slots_per_float(self) -> float:
        """Slots that fit in the bytes of one float32 slot, momenta included."""
        return _Line.of("float32").all_bytes / self.all_bytes

    def exact_row_bytes(self, table: TableProfile, width: int) -> int:
        """Bytes of a row with `width` own weights: weights, its share of exponents and momenta, and its id."""
        return -(-min(width, table.dim) * self.all_bytes // LINE_SLOTS) + ID_BYTES

    def array_within(self, num_bytes: int) -> int:
        """Bytes of the largest array that fits with its momenta: whole floats, or whole lines of bytes."""
        if self.array_bytes == LINE_SLOTS * WEIGHT_BYTES:
            return num_bytes * LINE_SLOTS // (LINE_SLOTS + 1) // WEIGHT_BYTES * WEIGHT_BYTES
        return num_bytes // self.all_bytes * self.array_bytes


def choose_sharing(
    profile: AccessProfile,
    *,
    compress: str | float | int,
    memory_budget_bytes: int | None = None,
    precision: str = "float32",
) -> SharedChoice:
    """Keep, share or both, for every table.

    `compress` is "auto" (share only if the tables exceed `memory_budget_bytes`, and only as far as needed), a
    factor above 1, or the bytes all tables may take together ("10MB", or a whole number above 10,000). The share of the
    bytes that exact rows get, and the weights of each, fall with the compression. With `precision` "int8" a weight
    takes one byte, so three times as many slots fit into the same bytes.
    """
    line, tables = _Line.of(precision), profile.tables
    whole_bytes = sum(map(full_bytes, tables.values()))
    target = target_bytes(compress, full_bytes=whole_bytes, memory_budget_bytes=memory_budget_bytes)
    if target >= whole_bytes:
        reason = f"keep: all tables take {whole_bytes:,} B, {target:,} B are allowed"
        return SharedChoice(shared=None, reasons=dict.fromkeys(tables, reason), chosen_bytes=whole_bytes)
    kept = _choose_kept(tables, target)
    shared = {name: table for name, table in tables.items() if name not in kept}
    kept_bytes, shared_bytes = (sum(full_bytes(tables[name]) for name in own) for own in (kept, shared))
    left = target - kept_bytes
    squeeze = math.sqrt(shared_bytes / max(left, 1) / line.slots_per_float)
    width = choose_exact_width(max(table.dim for table in shared.values()), squeeze, precision)
    budget = round(left * choose_exact_share(squeeze))
    exact = _choose_exact(profile, shared, budget, width=width, line=line)
    spent = sum(len(exact[name][0]) * line.exact_row_bytes(table, width) for name, table in shared.items())
    array_bytes = line.array_within(left - spent)
    needed = -(-DEFAULT_BLOCK_SIZE * line.array_bytes // LINE_SLOTS)
    if array_bytes < needed:
        raise InputError(
            f"compress allows {target:,} B in total, which leaves {array_bytes:,} B to share, expected {needed} or more"
        )
    parameters = SharedParameters(
        array_bytes=int(array_bytes),
        block_size=DEFAULT_BLOCK_SIZE,
        mapping="robe",
        seed=0,
        exact_width=width,
        precision=precision,
        tables={
            name: SharedTablePlan(kind="both" if len(exact[name][0]) else "share", exact_rows=len(exact[name][0]))
            for name in shared
        },
    )
    weights = sum((table.num_rows - len(exact[name][0])) * table.dim for name, table in shared.items())
    factor = weights * line.array_bytes / LINE_SLOTS / array_bytes
    return SharedChoice(
        shared=parameters,
        exact_rows={name: rows for name, (rows, _) in exact.items() if len(rows)},
        reasons={name: kept.get(name) or _explain(table, exact[name], factor, width) for name, table in tables.items()},
        chosen_bytes=kept_bytes + spent + array_bytes * line.all_bytes // line.array_bytes,
    )


def choose_exact_share(squeeze: float) -> float:
    """The share of the bytes that exact rows get where tables are compressed by the square of `squeeze`."""
    return min(MAX_EXACT_SHARE, EXACT_SHARE / squeeze)


def choose_exact_width(dim: int, squeeze: float, precision: str = "float32") -> int:
    """Weights of an exact row where rows of `dim` are compressed by the square of `squeeze` (weights per slot).

    int8 weights share exponent and momentum with their line, so rows of a line or more get whole lines.
    """
    width = min(dim, max(MIN_EXACT_WIDTH, round(dim * EXACT_WIDTH_SHARE / squeeze**2)))
    return width // LINE_SLOTS * LINE_SLOTS if precision == "int8" and width > LINE_SLOTS else width


def target_bytes(compress: str | float | int, *, full_bytes: int, memory_budget_bytes: int | None) -> int:
    """The bytes all tables may take together."""
    if compress == "auto":
        return full_bytes if memory_budget_bytes is None else memory_budget_bytes
    text = str(compress).strip().lower()
    try:
        if text.endswith("b"):
            return parse_bytes(text)
        number = float(text.removesuffix("x"))
    except ValueError:
        raise InputError(
            f"compress is {compress!r}, expected auto, a factor such as 100, or bytes such as 10MB"
        ) from None
    if not number > 1:
        raise InputError(f"compress is {compress!r}, expected a factor above 1, bytes, or auto")
    if number > MAX_FACTOR:
        return round(number)
    return int(full_bytes / number)


MAX_FACTOR = 10_000  # the largest published factor; a larger number means bytes


def read_exact_rows(plan_path: str | Path, table: str) -> npt.NDArray[np.int64]:
    """The ids of a table's exact rows from a plan's folder, by falling count."""
    rows, slots = read_numbers(join_path(plan_path, f"exact/{table}.parquet"), ("row", "slot"))
    return rows[np.argsort(slots, kind="stable")]  # a copy: Arrow's own memory cannot be written to


def _choose_kept(tables: Mapping[str, TableProfile], target: int) -> dict[str, str]:
    """Tables too small to be worth sharing, smallest first, while they take little of the target; and why."""
    kept, spent = {}, 0
    for name, table in sorted(tables.items(), key=lambda entry: full_bytes(entry[1])):
        size = full_bytes(table)
        if size > SMALL_TABLE_SHARE * target or spent + size > target // 4:
            break
        spent += size
        kept[name] = f"keep: {size:,} B are {size / target:.2%} of the {target:,} B allowed"
    return kept


def _choose_exact(
    profile: AccessProfile, tables: Mapping[str, TableProfile], budget: int, *, width: int, line: _Line
) -> dict[str, tuple[npt.NDArray[np.int64], float]]:
    """{table: (rows by falling count, their share of its reads)}: the rows with the most reads per byte."""
    rows, cost, owner, reads = [], [], [], []
    total_rows = sum(table.num_rows for table in tables.values())
    total_reads = sum(table.num_accesses for table in tables.values())
    for place, (name, table) in enumerate(tables.items()):
        row_bytes = line.exact_row_bytes(table, width)
        path = join_path(profile.path, f"counts/{name}.parquet")
        own, counts = read_numbers(path, ("row", "count"), below=table.num_rows)
        most = own[: budget // row_bytes]
        rows.append(most)
        reads.append(counts[: len(most)].astype(np.float64))
        cost.append(np.full(len(most), row_bytes))
        owner.append(np.full(len(most), place))
    all_rows, all_owner, all_reads, all_cost = map(np.concatenate, (rows, owner, reads, cost))
    order = np.argsort(-all_reads / all_cost, kind="stable")
    is_hot = all_reads[order] * max(total_rows, 1) >= MIN_HEAT * total_reads
    taken = order[is_hot & (np.cumsum(all_cost[order]) <= budget)]
    chosen = {}
    for place, (name, table) in enumerate(tables.items()):
        own = taken[all_owner[taken] == place]
        share = float(all_reads[own].sum() / max(table.num_accesses, 1))
        chosen[name] = (all_rows[own].astype(np.int64), share)
    return chosen


def _explain(table: TableProfile, exact: tuple[npt.NDArray[np.int64], float], factor: float, width: int) -> str:
    rows, share = exact
    size = f"{table.num_rows:,} rows of {table.dim} ({full_bytes(table):,} B)"
    if not len(rows):
        return (
            f"share: {size}, no row is read {MIN_HEAT:g} times as often as the mean one; {factor:,.0f} weights per slot"
        )
    return (
        f"both: {size}, {len(rows):,} rows that take {share:.0%} of its reads are exact with "
        f"{min(width, table.dim)} weights each, the others share {factor:,.0f} weights per slot"
    )
