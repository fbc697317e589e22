"""Profiles a dataset: how often every row of every table is read, and how much the features of a session repeat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from recmill.artifacts import AccessProfile, Dataset, InputError, refuse_foreign_folder, write_folder
from recmill.artifacts.profile import TableProfile
from recmill.data.dataset import open_dataset, read_rows
from recmill.data.schema import Schema, Table
from recmill.data.transforms import Transforms
from recmill.profiling.counting import RowCounter, count_out_of_core, write_counts
from recmill.profiling.drift import drift_figures, middle_time
from recmill.profiling.duplication import BATCH_SIZES, count_duplication
from recmill.profiling.samples import rows_read, write_samples
from recmill.profiling.sampling import Group, by_file, ratio_half_width, row_groups, sample_groups
from recmill.profiling.skew import SkewSummary, top_ranks
from recmill.profiling.steps import distinct_per_step
from recmill.progress import Progress, no_progress

# Total rows of the tables that are counted in arrays: 16 bytes per row for two slices of time, 8 more while ranking, so
# 1.6 GB. DuckDB counts the larger tables and spills to disk; their drift is not measured.
MAX_ARRAY_ROWS = 100_000_000

# Shares of the reads that the most read rows take, and the half-widths of their intervals.
Estimate = tuple[Mapping[str, float], Mapping[str, float | None]]


def profile_access(
    data: Dataset | str | Path,
    *,
    out: str | Path,
    split: str | None = None,
    sample: float = 1.0,
    confidence: float = 0.999,
    progress: Progress = no_progress,
) -> AccessProfile:
    """Write the profile of a split ("train" where there are several, else all rows).

    With `sample` < 1 a seeded choice of row groups is read: counts and curve are those of the sample, and `top_share`,
    the share of accesses of the most read rows, is an estimate with the half-width of its interval at `confidence`.
    Otherwise counts are exact, and `drift` says how far the most read rows change over time. Tables also have what
    batches of several sizes read (`accesses_per_step`, `distinct_per_step`). All of this is about ids after the
    transforms; `duplication` is about lists as stored, because those are compared.
    """
    if not 0 < sample <= 1 or not 0 < confidence < 1:
        raise InputError(
            f"sample is {sample} and confidence {confidence}, expected 0 < sample <= 1 and 0 < confidence < 1"
        )
    refuse_foreign_folder(out, AccessProfile.manifest_name)
    dataset = open_dataset(data)
    schema = Schema.load(dataset.path)
    split = split or ("train" if len(dataset.splits) > 1 else None)
    every_group = row_groups(dataset, split)
    groups = every_group if sample == 1 else sample_groups(every_group, sample)
    num_samples = sum(rows for _, _, rows in groups)
    with write_folder(out, manifest_name=AccessProfile.manifest_name) as folder:
        counter = AccessCounter(
            dataset=dataset,
            schema=schema,
            groups=groups,
            is_sample=len(groups) < len(every_group),
            confidence=confidence,
        )
        tables = counter.run(folder, progress=progress)
        duplication = count_duplication(dataset, split=split, groups=groups, sample=sample, progress=progress)
        num_sampled = write_samples(folder, dataset, schema, every_group)
        schema.save(folder)  # planning needs the features of a table, not only how its rows are read
        AccessProfile(
            num_samples=num_samples,
            num_sampled=num_sampled,
            num_samples_total=sum(rows for _, _, rows in every_group),
            split=split,
            sample=sample,
            confidence=confidence if counter.is_sample else None,
            layout=dataset.layout,
            tables=tables,
            num_sessions=duplication.num_sessions,
            samples_per_session=duplication.samples_per_session,
            duplication=duplication.features,
            inputs={"dataset": dataset.content_hash},
        ).seal(folder)
    return AccessProfile.load(out)


@dataclass(frozen=True, kw_only=True)
class AccessCounter:
    """Counts the reads of every table over the given row groups and writes `counts/<table>.parquet`."""

    dataset: Dataset
    schema: Schema
    groups: Sequence[Group]
    is_sample: bool
    confidence: float

    @cached_property
    def transforms(self) -> Transforms:
        return Transforms(self.schema)

    def run(self, folder: Path, *, progress: Progress) -> dict[str, TableProfile]:
        """The figures of every table."""
        (folder / "counts").mkdir()
        small, large = choose_counting(self.schema.tables, MAX_ARRAY_ROWS)
        counters = {table.name: RowCounter(table.num_rows) for table in small}
        later: dict[str, RowCounter] = {}
        if not self.is_sample:  # a sample drifts by chance alone
            later = {table.name: RowCounter(table.num_rows) for table in small}
        estimates = self._count(small, counters, later, progress)
        steps = distinct_per_step(self.dataset, self.schema, self.groups, BATCH_SIZES, self._lists_read)
        figures: dict[str, TableProfile] = {}
        for table in self.schema.tables:
            summary = SkewSummary(table.num_rows)
            path = folder / "counts" / f"{table.name}.parquet"
            drift = None
            if table in large:
                pieces: Iterator[tuple[np.ndarray, np.ndarray]] = count_out_of_core(
                    self._ids(table), spill_parent=folder
                )
            else:
                counter = counters.pop(table.name)
                if table.name in later:
                    drift = drift_figures(counter.counts, later[table.name].counts)
                    counter.counts += later.pop(table.name).counts
                pieces = counter.ranked()
            write_counts(path, summarised(pieces, summary))
            top_share, half_width = estimates.get(table.name, (summary.top_share, None))
            accesses, distinct = steps[table.name]
            figures[table.name] = TableProfile(
                num_rows=table.num_rows,
                dim=table.dim,
                features=table.features,
                num_accesses=summary.num_accesses,
                num_distinct=summary.num_distinct,
                top_share=top_share,
                top_share_half_width=half_width,
                zipf_exponent=summary.zipf_exponent,
                curve=summary.curve,
                accesses_per_step=accesses,
                distinct_per_step=distinct,
                drift=drift,
            )
        return figures

    def _count(
        self,
        tables: Sequence[Table],
        counters: dict[str, RowCounter],
        later: dict[str, RowCounter],
        progress: Progress,
    ) -> dict[str, Estimate]:
        """Count all groups; for a sample, also estimate by table the shares of the most read rows."""
        if not self.is_sample:
            self._add_groups(tables, counters, self.groups, progress, later=later)
            return {}
        # One half of the sample chooses the most read rows, the other half measures their share: measured on the half
        # that chose them, it would be too high.
        half = len(self.groups) // 2
        self._add_groups(tables, counters, self.groups[:half], progress)
        ranks = {table.name: _rank_of_rows(counters[table.name]) for table in tables}
        hits: dict[str, list[list[int]]] = {table.name: [] for table in tables}
        for group in self.groups[half:]:
            for table in tables:
                ids = np.concatenate(list(self._ids(table, [group])) or [np.zeros(0, np.int64)])
                counters[table.name].add(ids)
                ids_ranks = ranks[table.name][ids]
                inside = [int((ids_ranks < top).sum()) for top in top_ranks(table.num_rows).values()]
                hits[table.name].append([*inside, len(ids)])
        return {table.name: self._estimate(np.array(hits[table.name]), table) for table in tables}

    def _estimate(self, hits: np.ndarray, table: Table) -> Estimate:
        """Shares of the most read rows as they hold beyond the sample, and the half-width of their intervals."""
        shares, totals = list(top_ranks(table.num_rows)), hits[:, -1].astype(np.float64)
        inside = dict(zip(shares, hits[:, :-1].T.astype(np.float64), strict=True))
        return (
            {share: float(inside[share].sum() / max(1.0, totals.sum())) for share in shares},
            {share: ratio_half_width(inside[share], totals, self.confidence) for share in shares},
        )

    def _add_groups(
        self,
        tables: Sequence[Table],
        counters: dict[str, RowCounter],
        groups: Sequence[Group],
        progress: Progress,
        *,
        later: dict[str, RowCounter] | None = None,
    ) -> None:
        """Count the reads of the row groups, or with `later` those of the later half of the time in there."""
        features = [name for table in tables for name in table.features]
        if not features or not groups:
            return
        middle = middle_time(self.dataset, groups) if later else np.iinfo(np.int64).max
        done, total = 0, sum(rows for _, _, rows in groups)
        for batch in read_rows(self.dataset, columns=[*features, "timestamp"], row_groups=by_file(groups)):
            is_later = batch.column("timestamp").to_numpy() >= middle
            for half, mask in ((counters, ~is_later), (later or {}, is_later)):
                if not mask.any():
                    continue
                chosen = batch if mask.all() else batch.filter(pa.array(mask))
                for table in tables:
                    for name in table.features:
                        half[table.name].add(self._lists_read(name, chosen.column(name))[0])
            done += batch.num_rows
            progress("count accesses", done, total)

    def _ids(self, table: Table, groups: Sequence[Group] | None = None) -> Iterator[np.ndarray]:
        for batch in read_rows(self.dataset, columns=table.features, row_groups=by_file(groups or self.groups)):
            for name in table.features:
                yield self._lists_read(name, batch.column(name))[0]

    def _lists_read(self, name: str, lists: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        return rows_read(self.transforms, self.schema, name, lists)


def choose_counting(tables: Sequence[Table], max_array_rows: int) -> tuple[list[Table], list[Table]]:
    """The tables that are counted in arrays, the smallest first until the rows are used up, and the others."""
    small: list[Table] = []
    for table in sorted(tables, key=lambda table: table.num_rows):
        if sum(chosen.num_rows for chosen in small) + table.num_rows <= max_array_rows:
            small.append(table)
    return small, [table for table in tables if table not in small]


def summarised(
    pieces: Iterator[tuple[np.ndarray, np.ndarray]], summary: SkewSummary
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The same pieces, after adding their counts to `summary`."""
    for rows, counts in pieces:
        summary.add(counts)
        yield rows, counts


def _rank_of_rows(counter: RowCounter) -> np.ndarray:
    """The rank of every row of the table, 0 for the most read; rows never read come last."""
    ranks, done = np.full(len(counter.counts), len(counter.counts), np.int64), 0
    for rows, _ in counter.ranked():
        ranks[rows] = np.arange(done, done + len(rows))
        done += len(rows)
    return ranks
