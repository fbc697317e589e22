"""Workloads of the FlexShard benchmark: ids by a Zipf law, or the reading histories of globo's users.

A workload has two time spans. The first is profiled and planned for, the second is run and measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts import AccessProfile, write_folder
from recmill.artifacts.profile import FeatureDuplication, TableProfile
from recmill.data.schema import Feature, Schema

Ids = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table and the list of ids every sample reads from it (one feature of the table's name)."""

    name: str
    num_rows: int
    mean_length: float


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Counts per row of the profiled span, and batches of the measured one."""

    name: str
    tables: tuple[Table, ...]
    dim: int
    samples_per_rank: int
    num_profiled: int  # samples of the profiled span
    counts: dict[str, Ids]  # table -> reads of each row in the profiled span
    batches: list[list[dict[str, tuple[Ids, Ids]]]]  # step -> rank -> table -> (ids, lengths)

    @property
    def schema(self) -> Schema:
        return Schema(
            features=tuple(
                Feature(
                    name=table.name,
                    kind="sequence",
                    table=table.name,
                    num_rows=table.num_rows,
                    dim=self.dim,
                    pooling="none",
                )
                for table in self.tables
            )
        )


def zipf_law(num_rows: int, exponent: float) -> np.ndarray:
    """The probability of each row, most read first."""
    weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent
    return weights / weights.sum()


def zipf_workload(
    exponent: float, *, num_rows: int, dim: int, samples_per_rank: int, world_size: int, num_steps: int, seed: int
) -> Workload:
    """Two tables, one four times the other, whose rows are read with probability rank ** -exponent."""
    tables = (
        Table(name="items", num_rows=num_rows * 4 // 5, mean_length=48),
        Table(name="shops", num_rows=num_rows // 5, mean_length=16),
    )
    rng = np.random.default_rng(seed)
    laws = {}
    for table in tables:
        # Ids are not sorted by popularity: otherwise one block of rows would hold all hot ones.
        laws[table.name] = rng.permutation(zipf_law(table.num_rows, exponent))

    def draw(table: Table, count: int) -> Ids:
        shares = np.cumsum(laws[table.name])
        return np.minimum(np.searchsorted(shares, rng.random(count)), table.num_rows - 1)

    num_profiled = 20 * samples_per_rank * world_size
    counts = {table.name: rng.multinomial(num_profiled * int(table.mean_length), laws[table.name]) for table in tables}
    batches = [
        [
            {
                table.name: (
                    draw(table, samples_per_rank * int(table.mean_length)),
                    np.full(samples_per_rank, int(table.mean_length), dtype=np.int32),
                )
                for table in tables
            }
            for _ in range(world_size)
        ]
        for _ in range(num_steps)
    ]
    return Workload(
        name=f"zipf{exponent * 10:02.0f}",
        tables=tables,
        dim=dim,
        samples_per_rank=samples_per_rank,
        num_profiled=num_profiled,
        counts=counts,
        batches=batches,
    )


def globo_workload(
    path: Path, *, dim: int, samples_per_rank: int, world_size: int, num_steps: int, seed: int, history: int = 50
) -> Workload:
    """A sample is a click with the articles its user clicked before; one time span is profiled, the next measured.

    News age within hours: the profiled span is the 5% of clicks right before the measured ones.
    """
    clicks = pq.read_table(path, columns=["user_id", "click_article_id", "click_timestamp"])
    user, article, moment = (clicks.column(place).to_numpy() for place in range(3))
    _, article = np.unique(article, return_inverse=True)
    order = np.lexsort((moment, user))
    user, article, moment = user[order], article[order], moment[order]
    first = np.flatnonzero(np.r_[True, user[1:] != user[:-1]])
    position = np.arange(len(user)) - np.repeat(first, np.diff(np.r_[first, len(user)]))
    lengths = np.minimum(position, history)
    by_time = np.argsort(moment, kind="stable")

    def ids_of(chosen: Ids) -> Ids:
        own = lengths[chosen]
        begins = np.repeat(chosen - own - np.concatenate([[0], np.cumsum(own)[:-1]]), own)
        return article[begins + np.arange(len(begins))]

    split, span = int(0.8 * len(user)), int(0.05 * len(user))
    before, after = by_time[split - span : split], by_time[split : split + span]
    rng = np.random.default_rng(seed)
    # Ten full steps together are more samples than the span has: each step draws its own.
    taken = [rng.choice(after, world_size * samples_per_rank, replace=False) for _ in range(num_steps)]
    parts = np.stack(taken).reshape(num_steps, world_size, samples_per_rank)
    num_rows = int(article.max()) + 1
    return Workload(
        name="globo",
        tables=(Table(name="articles", num_rows=num_rows, mean_length=float(lengths[before].mean())),),
        dim=dim,
        samples_per_rank=samples_per_rank,
        num_profiled=len(before),
        counts={"articles": np.bincount(ids_of(before), minlength=num_rows)},
        batches=[
            [{"articles": (ids_of(chosen), lengths[chosen].astype(np.int32))} for chosen in step] for step in parts
        ],
    )


def write_profile(workload: Workload, out: Path) -> AccessProfile:
    """The profiled span as the planner reads it."""
    with write_folder(out, manifest_name=AccessProfile.manifest_name) as folder:
        (folder / "counts").mkdir()
        tables = {}
        for table in workload.tables:
            counts = workload.counts[table.name]
            rows = np.argsort(-counts, kind="stable")
            rows = rows[counts[rows] > 0]
            pq.write_table(pa.table({"row": rows, "count": counts[rows]}), folder / "counts" / f"{table.name}.parquet")
            tables[table.name] = TableProfile(
                num_rows=table.num_rows,
                dim=workload.dim,
                features=(table.name,),
                num_accesses=int(counts.sum()),
                num_distinct=len(rows),
                zipf_exponent=None,
                drift=None,
            )
        duplication = {
            table.name: FeatureDuplication(mean_length=table.mean_length, same_as_previous=None, shifted_by_one=None)
            for table in workload.tables
        }
        workload.schema.save(folder)
        AccessProfile(
            num_samples=workload.num_profiled,
            tables=tables,
            duplication=duplication,
            layout=None,
            split=None,
            confidence=None,
        ).seal(folder)
    return AccessProfile.load(out)


def save_batches(workload: Workload, folder: Path) -> None:
    """One file per rank: steps/<table>/<step> arrays."""
    for rank in range(len(workload.batches[0])):
        arrays = {}
        for step, ranks in enumerate(workload.batches):
            for table, (ids, lengths) in ranks[rank].items():
                arrays[f"{step}/{table}/ids"], arrays[f"{step}/{table}/lengths"] = ids, lengths
        np.savez(folder / f"rank-{rank}.npz", **arrays)
