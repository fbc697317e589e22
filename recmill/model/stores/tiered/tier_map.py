"""Where each row of a table lives: in a tier, at a slot.

global      one copy, striped: slot s on rank s % W at s // W; slots in row order, so that neighbours are on all ranks
node        one copy per node: slot s on local rank s % R at s // R; slots by descending number of reads
replicated  one copy per rank, at s; slots by descending number of reads
table_wise  the whole table on one rank, at s

Most rows are global: one bit per row marks the others ("moved"), so a map costs 1.5 bits per row and 8 bytes per moved
row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from kernels import split_tiers
from recmill.artifacts import InputError, ShardPlan, join_path, local_folder
from recmill.artifacts.places.columns import check_numbers

# N = ids, M = moved rows, R = requested rows
GLOBAL, NODE, REPLICATED, TABLE_WISE = range(4)
KINDS = ("global", "node", "replicated", "table_wise")
TIER_BITS = 3
WORD_ROWS = 64
READ_ROWS = 1 << 20

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TierMap:
    """The tier and slot of every row of one table."""

    num_rows: int
    counts: tuple[int, int, int, int]  # rows per kind, in the order of KINDS
    common: int  # the kind of rows that are not moved: GLOBAL, or TABLE_WISE for a whole table
    bits: Tensor  # int64, one bit per row: is it moved?
    ranks: Tensor  # int32, moved rows before each word of bits
    moved_M: Tensor  # int64, slot << 3 | kind
    owner: int = 0  # the rank that holds a table_wise table

    @classmethod
    def of(cls, num_rows: int, *, replicated: Tensor | None = None, node: Tensor | None = None) -> Self:
        """A map from lists: `replicated` and `node` are the rows of these tiers in slot order."""
        rows: list[Rows] = []
        entries: list[Rows] = []
        for kind, listed in ((NODE, node), (REPLICATED, replicated)):
            own = np.asarray(listed if listed is not None else [], dtype=np.int64)
            rows.append(own)
            entries.append(np.arange(len(own), dtype=np.int64) << TIER_BITS | kind)
        return cls._of_moved(num_rows, np.concatenate(rows), np.concatenate(entries), where="TierMap.of")

    @classmethod
    def whole(cls, num_rows: int, *, owner: int) -> Self:
        """A table that one rank holds."""
        empty = np.empty(0, dtype=np.int64)
        found = cls._of_moved(num_rows, empty, empty, where="TierMap.whole")
        fields = {**vars(found), "counts": (0, 0, 0, num_rows), "common": TABLE_WISE, "owner": owner}
        return cls(**fields)

    @classmethod
    def from_plan(cls, plan: ShardPlan, table: str) -> Self:
        """The map of a plan's table, from plan.json and rows/<table>.parquet."""
        where = join_path(plan.path, plan.manifest_name)
        if table not in plan.tables:
            raise InputError(f"{where}: has no table {table!r}; it plans {', '.join(sorted(plan.tables))}")
        tiers = plan.tables[table].tiers
        if not tiers:
            raise InputError(f"{where}: table {table!r} has no tiers; create the plan again with `recmill plan`")
        num_rows = sum(tier.num_rows for tier in tiers)
        kinds = np.array([KINDS.index(tier.kind) for tier in tiers])
        if (kinds == TABLE_WISE).any():
            if len(kinds) > 1:
                raise InputError(f"{where}: table {table!r} is table_wise but has other tiers too")
            return cls.whole(num_rows, owner=plan.tables[table].shards[0].rank)
        if (kinds == GLOBAL).all():
            return cls.of(num_rows)
        with local_folder(plan.path) as folder:
            path = f"{folder}/rows/{table}.parquet"
            try:
                rows, entries = _read_moved(path, kinds, num_rows)
            except (OSError, pa.ArrowException) as error:
                raise InputError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]})") from None
        found = cls._of_moved(num_rows, rows, entries, where=path)
        planned = tuple(sum(tier.num_rows for tier in tiers if tier.kind == kind) for kind in KINDS)
        if found.counts != planned:
            raise InputError(f"{path}: holds {found.counts} rows of {', '.join(KINDS)}, plan.json says {planned}")
        return found

    @classmethod
    def _of_moved(cls, num_rows: int, rows_M: Rows, entries_M: Rows, *, where: str) -> Self:
        if len(rows_M) and not (rows_M.min() >= 0 and rows_M.max() < num_rows):
            raise InputError(f"{where}: names rows from {rows_M.min()} to {rows_M.max()} in a table of {num_rows}")
        order = np.argsort(rows_M, kind="stable")
        rows_M, entries_M = rows_M[order], entries_M[order]
        twice = np.flatnonzero(rows_M[1:] == rows_M[:-1])
        if len(twice):
            raise InputError(f"{where}: row {rows_M[twice[0]]} is in two tiers")
        kinds_M, slots_M = entries_M & ((1 << TIER_BITS) - 1), entries_M >> TIER_BITS
        for kind in (NODE, REPLICATED):
            slots = np.sort(slots_M[kinds_M == kind])
            if len(slots) and not np.array_equal(slots, np.arange(len(slots))):
                raise InputError(
                    f"{where}: the slots of its {KINDS[kind]} rows are not 0 to {len(slots) - 1}, each once"
                )
        num_words = -(-num_rows // WORD_ROWS)
        bits = np.zeros(num_words, dtype=np.uint64)
        np.bitwise_or.at(bits, rows_M >> 6, np.left_shift(np.uint64(1), (rows_M & 63).astype(np.uint64)))
        ranks = np.searchsorted(rows_M, np.arange(num_words, dtype=np.int64) * WORD_ROWS).astype(np.int32)
        num_node, num_replicated = int((kinds_M == NODE).sum()), int((kinds_M == REPLICATED).sum())
        return cls(
            num_rows=num_rows,
            counts=(num_rows - len(rows_M), num_node, num_replicated, 0),
            common=GLOBAL,
            bits=torch.from_numpy(bits.view(np.int64)),
            ranks=torch.from_numpy(ranks),
            moved_M=torch.from_numpy(entries_M),
        )

    def split(self, ids_N: Tensor) -> tuple[Tensor, Tensor]:
        """(kinds_N uint8, slots_N int64) of rows."""
        return split_tiers(ids_N, self.bits, self.ranks, self.moved_M, num_rows=self.num_rows, common_tier=self.common)

    def to(self, device: torch.device) -> Self:
        if self.bits.device == device:
            return self
        on_device = {name: getattr(self, name).to(device) for name in ("bits", "ranks", "moved_M")}
        return type(self)(**{**vars(self), **on_device})

    @property
    def size_in_bytes(self) -> int:
        return self.bits.nbytes + self.ranks.nbytes + self.moved_M.nbytes


def _read_moved(path: str, kinds: npt.NDArray[np.int64], num_rows: int) -> tuple[Rows, Rows]:
    """(rows, slot << 3 | kind) of the rows that are not global."""
    rows: list[Rows] = []
    entries: list[Rows] = []
    seen = 0
    for batch in pq.ParquetFile(path).iter_batches(batch_size=READ_ROWS, columns=["row", "tier", "slot"]):
        row, tier, slot = (check_numbers(batch, name, path) for name in ("row", "tier", "slot"))
        if len(tier) and not tier.max() < len(kinds):
            raise InputError(f"{path}: column 'tier' has values up to {tier.max()}, plan.json has {len(kinds)} tiers")
        kind = kinds[tier]
        is_moved = kind != GLOBAL
        rows.append(row[is_moved])
        entries.append(slot[is_moved] << TIER_BITS | kind[is_moved])
        seen += len(row)
    if seen != num_rows:
        raise InputError(f"{path}: lists {seen} rows, plan.json says {num_rows}")
    return np.concatenate(rows), np.concatenate(entries)
