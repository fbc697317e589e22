"""Chooses the tables that share parameters and the rows that stay exact, from sizes, counts and a budget.

    keep    the table fits as it is, or sharing it would save too little
    share   all of its rows live in the shared array
    both    the most read rows are kept exactly, all others are shared

Rows compete for exact slots by reads per byte, because a collision costs most on a row that is read often: the exact
rows are the most read rows of all tables together, as long as they are read much more often than the average row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts import AccessProfile, InputError, join_path
from recmill.artifacts.plan import SharedParameters, SharedTablePlan

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
    """What `choose_sharing` decided: the `shared` entry of a plan, the exact rows, and why."""

    shared: SharedParameters | None
    exact_rows: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)  # by falling count
    reasons: dict[str, str] = field(default_factory=dict)  # every table, kept ones too
    full_bytes: int = 0
    chosen_bytes: int = 0  # of all tables after the choice

    def write_rows(self, folder: Path) -> None:
        """`exact/<table>.parquet` with `row, slot`, slots by falling count."""
        (folder / "exact").mkdir(exist_ok=True)
        for table, rows in self.exact_rows.items():
            columns = {"row": pa.array(rows, pa.int64()), "slot": pa.array(np.arange(len(rows)), pa.int64())}
            pq.write_table(pa.table(columns), folder / "exact" / f"{table}.parquet", compression="zstd")


@dataclass(frozen=True, kw_only=True)
class _Table:
    name: str
    num_rows: int
    dim: int
    num_accesses: int

    @property
    def full_bytes(self) -> int:
        """Rows with one momentum each."""
        return self.num_rows * (self.dim + 1) * WEIGHT_BYTES

    def exact_row_bytes(self, width: int, line: _Line) -> int:
        """Bytes of a row with `width` own weights: weights, its share of exponents and momenta, and its id."""
        return -(-min(width, self.dim) * line.all_bytes // LINE_SLOTS) + ID_BYTES


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

    def array_within(self, num_bytes: int) -> int:
        """Bytes of the largest array that fits with its momenta: whole floats, or whole lines of bytes."""
        if self.array_bytes == LINE_SLOTS * WEIGHT_BYTES:
            return num_bytes * LINE_SLOTS // (LINE_SLOTS + 1) // WEIGHT_BYTES * WEIGHT_BYTES
        return num_bytes // self.all_bytes * self.array_bytes


def choose_sharing(
    profile: AccessProfile | str | Path,
    *,
    compress: str | float | int = "auto",
    memory_budget_bytes: int | None = None,
    exact_share: float | None = None,
    exact_width: int | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    seed: int = 0,
    precision: str = "float32",
) -> SharedChoice:
    """Keep, share or both, for every table.

    `compress` is "auto" (share only if the tables exceed `memory_budget_bytes`, and only as far as needed), a
    factor above 1, or the bytes all tables may take together ("10MB", or a whole number above 10,000). Exact rows get
    `exact_share` of the bytes and `exact_width` weights each; both fall with the compression unless given. With
    `precision` "int8" a weight takes one byte, so three times as many slots fit into the same bytes.
    """
    line = _Line.of(precision)
    if not isinstance(profile, AccessProfile):
        profile = AccessProfile.load(profile)
    tables = [
        _Table(name=name, num_rows=entry.num_rows, dim=entry.dim, num_accesses=entry.num_accesses)
        for name, entry in profile.tables.items()
    ]
    full_bytes = sum(table.full_bytes for table in tables)
    target = target_bytes(compress, full_bytes=full_bytes, memory_budget_bytes=memory_budget_bytes)
    if target >= full_bytes:
        reasons = {t.name: f"keep: all tables take {full_bytes:,} B, {target:,} B are allowed" for t in tables}
        return SharedChoice(shared=None, reasons=reasons, full_bytes=full_bytes, chosen_bytes=full_bytes)
    kept = _choose_kept(tables, target)
    shared = [table for table in tables if table.name not in kept]
    left = target - sum(table.full_bytes for table in tables if table.name in kept)
    squeeze = math.sqrt(sum(t.full_bytes for t in shared) / max(left, 1) / line.slots_per_float)
    share = choose_exact_share(squeeze) if exact_share is None else exact_share
    width = exact_width or choose_exact_width(max(t.dim for t in shared), squeeze, precision)
    exact = _choose_exact(profile, shared, round(left * share), width=width, line=line)
    spent = sum(len(exact[t.name][0]) * t.exact_row_bytes(width, line) for t in shared)
    array_bytes = line.array_within(left - spent)
    needed = -(-block_size * line.array_bytes // LINE_SLOTS)
    if array_bytes < needed:
        raise InputError(
            f"compress allows {target:,} B in total, which leaves {array_bytes:,} B to share, expected {needed} or more"
        )
    parameters = SharedParameters(
        array_bytes=int(array_bytes),
        block_size=block_size,
        mapping="robe",
        seed=seed,
        exact_width=width,
        precision=precision,
        tables={
            t.name: SharedTablePlan(kind="both" if len(exact[t.name][0]) else "share", exact_rows=len(exact[t.name][0]))
            for t in shared
        },
    )
    weights = sum((t.num_rows - len(exact[t.name][0])) * t.dim for t in shared)
    factor = weights * line.array_bytes / LINE_SLOTS / array_bytes
    reasons = {}
    for table in tables:
        if table.name in kept:
            reasons[table.name] = f"keep: {kept[table.name]}"
        else:
            reasons[table.name] = _explain(table, exact[table.name], factor, width)
    return SharedChoice(
        shared=parameters,
        exact_rows={name: rows for name, (rows, _) in exact.items() if len(rows)},
        reasons=reasons,
        full_bytes=full_bytes,
        chosen_bytes=full_bytes
        - sum(t.full_bytes for t in shared)
        + spent
        + array_bytes * line.all_bytes // line.array_bytes,
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
    units = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "b": 1}
    try:
        for unit in sorted(units, key=len, reverse=True):
            if text.endswith(unit):
                return round(float(text.removesuffix(unit)) * units[unit])
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
    rows = pq.read_table(join_path(plan_path, f"exact/{table}.parquet")).sort_by("slot")["row"]
    return np.array(rows.to_numpy(), dtype=np.int64)  # a copy: Arrow's own memory cannot be written to


def _choose_kept(tables: list[_Table], target: int) -> dict[str, str]:
    """Tables too small to be worth sharing, smallest first, while they take little of the target."""
    kept, spent = {}, 0
    for table in sorted(tables, key=lambda table: table.full_bytes):
        if table.full_bytes > SMALL_TABLE_SHARE * target or spent + table.full_bytes > target // 4:
            break
        spent += table.full_bytes
        share = table.full_bytes / target
        kept[table.name] = f"{table.full_bytes:,} B are {share:.2%} of the {target:,} B allowed"
    return kept


def _choose_exact(
    profile: AccessProfile, tables: list[_Table], budget: int, *, width: int, line: _Line
) -> dict[str, tuple[npt.NDArray[np.int64], float]]:
    """{table: (rows by falling count, their share of its reads)}: the rows with the most reads per byte."""
    rows, heat, cost, owner, reads = [], [], [], [], []
    total_rows, total_reads = sum(t.num_rows for t in tables), sum(t.num_accesses for t in tables)
    for place, table in enumerate(tables):
        row_bytes = table.exact_row_bytes(width, line)
        counts = _read_counts(profile, table, limit=budget // row_bytes)
        rows.append(counts[0])
        reads.append(counts[1])
        heat.append(counts[1] / row_bytes)
        cost.append(np.full(len(counts[0]), row_bytes))
        owner.append(np.full(len(counts[0]), place))
    all_rows, all_owner = np.concatenate(rows), np.concatenate(owner)
    all_reads, all_cost = np.concatenate(reads), np.concatenate(cost)
    order = np.argsort(-np.concatenate(heat), kind="stable")
    is_hot = all_reads[order] * max(total_rows, 1) >= MIN_HEAT * total_reads
    taken = order[is_hot & (np.cumsum(all_cost[order]) <= budget)]
    chosen = {}
    for place, table in enumerate(tables):
        own = taken[all_owner[taken] == place]
        share = float(all_reads[own].sum() / max(table.num_accesses, 1))
        chosen[table.name] = (all_rows[own].astype(np.int64), share)
    return chosen


def _read_counts(
    profile: AccessProfile, table: _Table, *, limit: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The most read rows of a table and how often each was read."""
    found = pq.read_table(join_path(profile.path, f"counts/{table.name}.parquet")).slice(0, limit)
    return found["row"].to_numpy(), found["count"].to_numpy().astype(np.float64)


def _explain(table: _Table, exact: tuple[npt.NDArray[np.int64], float], factor: float, width: int) -> str:
    rows, share = exact
    size = f"{table.num_rows:,} rows of {table.dim} ({table.full_bytes:,} B)"
    if not len(rows):
        return (
            f"share: {size}, no row is read {MIN_HEAT:g} times as often as the mean one; {factor:,.0f} weights per slot"
        )
    return (
        f"both: {size}, {len(rows):,} rows that take {share:.0%} of its reads are exact with "
        f"{min(width, table.dim)} weights each, the others share {factor:,.0f} weights per slot"
    )
