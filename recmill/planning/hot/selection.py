"""Chooses the rows that every rank keeps so that most samples read nothing else, and whether hot batches pay.

The gain depends on the share of *samples* that are all hot: a sample that reads nine hot rows and a cold one still
needs the exchange. So the set is chosen on a sample of sessions (profiling/samples.py), not on counts alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from recmill.artifacts import AccessProfile, InputError, join_path
from recmill.artifacts.places.columns import read_numbers
from recmill.artifacts.plan import HotSet, HotTable, SizeEstimate
from recmill.artifacts.topology import Topology
from recmill.data.schema import Schema, Table
from recmill.planning.hot.cost import judge_hot_batches
from recmill.planning.hot.depths import choose_depths, served
from recmill.planning.hot.size import NUM_CHUNKS, estimate_hot_rows
from recmill.planning.tiers.costs import held_bytes
from recmill.profiling.samples import SampledRows, load_samples
from recmill.profiling.sampling import ratio_half_width

IdArray = npt.NDArray[np.int64]

CONFIDENCE, SEED = 0.95, 0
SMALL_SHARE = 1 / 16  # of the budget: a table up to this size is hot as a whole ...
SMALL_TOTAL = 1 / 2  # ... as long as these tables together stay below this share
MIN_SAMPLES = 200  # with fewer, the same samples choose the rows and measure their share
NEVER = np.iinfo(np.int64).max // 2  # the rank of a row that was never read


@dataclass(frozen=True, kw_only=True, eq=False)
class HotChoice:
    """What `choose_hot_set` decided: the `hot_set` entry of a plan, and the hot rows of every table by slot."""

    hot_set: HotSet
    rows: Mapping[str, IdArray]  # for `hot/<table>.parquet`


@dataclass(frozen=True, kw_only=True, eq=False)
class _Candidates:
    """The tables of a profile with their counts and row sizes."""

    tables: tuple[Table, ...]
    rows: list[IdArray]  # most read first
    counts: list[IdArray]
    row_bytes_T: IdArray
    whole_T: npt.NDArray[np.bool_] = field(repr=False)

    @property
    def num_rows_T(self) -> IdArray:
        return np.array([table.num_rows for table in self.tables], np.int64)


def choose_hot_set(
    profile: AccessProfile | str | Path,
    *,
    budget_bytes: int,
    schema: Schema | None = None,
    topology: Topology | None = None,
    batch_size: int = 2048,
    cold_bytes_s: float | None = None,
) -> HotChoice:
    """The rows to keep on every rank within `budget_bytes` per rank for weights and optimiser state.

    `schema` leaves out tables that every rank holds anyway: they make no sample cold (None: all tables). Without a
    `topology` two ranks on one machine are assumed. `cold_bytes_s` is the transfer time of a cold batch under the plan
    (None: estimate TorchRec's exchange).
    """
    profile = profile if isinstance(profile, AccessProfile) else AccessProfile.load(profile)
    if budget_bytes <= 0:
        raise InputError(f"budget_bytes is {budget_bytes}, expected more than 0")
    schema = schema or Schema.load(profile.path)
    found = _load_candidates(profile, schema, budget_bytes)
    sessions_N, sampled = load_samples(profile, found.tables)
    deepest_NT = np.stack([_deepest(found, place, sampled) for place in range(len(found.tables))], axis=1)
    chooses_N, measures_N = _halves(sessions_N)
    depths_T = choose_depths(
        deepest_NT[chooses_N],
        found.counts,
        row_bytes_T=found.row_bytes_T,
        whole_T=found.whole_T,
        num_rows_T=found.num_rows_T,
        budget_bytes=budget_bytes,
    )
    is_hot_N = served(deepest_NT[measures_N], depths_T)
    sessions_N = sessions_N[measures_N]
    whole_sessions_N = _in_whole_sessions(sessions_N, is_hot_N)
    rows = {table.name: _hot_rows(found, place, int(depths_T[place])) for place, table in enumerate(found.tables)}
    hot_bytes = int((depths_T * found.row_bytes_T).sum())
    cost = judge_hot_batches(
        schema,
        profile,
        topology=topology or Topology.local(2),
        batch_size=batch_size,
        hot_bytes=hot_bytes,
        is_hot_N=is_hot_N,
        in_hot_session_N=whole_sessions_N,
        sampled=sampled,
        measures_N=measures_N,
        cold_bytes_s=cold_bytes_s,
    )
    hot_set = HotSet(
        budget_bytes=budget_bytes,
        bytes=hot_bytes,
        **vars(cost),
        sample_share=float(is_hot_N.mean()) if len(is_hot_N) else 0.0,
        session_share=float(whole_sessions_N.mean()) if len(is_hot_N) else 0.0,
        access_share=_access_share(found, depths_T),
        interval=share_interval(sessions_N, is_hot_N, confidence=CONFIDENCE, seed=SEED),
        confidence=CONFIDENCE,
        size=_total_size(found, depths_T),
        tables={table.name: _hot_table(found, place, depths_T) for place, table in enumerate(found.tables)},
    )
    return HotChoice(hot_set=hot_set, rows=rows)


def _load_candidates(profile: AccessProfile, schema: Schema, budget_bytes: int) -> _Candidates:
    tables = schema.tables
    row_bytes_T = np.array([held_bytes(table.dim) for table in tables], np.int64)
    sizes_T = row_bytes_T * np.array([table.num_rows for table in tables], np.int64)
    whole_T, used = np.zeros(len(tables), bool), 0
    for place in np.argsort(sizes_T, kind="stable").tolist():
        is_small = sizes_T[place] <= SMALL_SHARE * budget_bytes
        if is_small and used + sizes_T[place] <= SMALL_TOTAL * budget_bytes:
            whole_T[place] = True
            used += int(sizes_T[place])
    rows, counts = [], []
    for table in tables:
        path = join_path(profile.path, f"counts/{table.name}.parquet")
        own, reads = read_numbers(path, ("row", "count"), below=table.num_rows)
        rows.append(own)
        counts.append(reads)
    return _Candidates(tables=tables, rows=rows, counts=counts, row_bytes_T=row_bytes_T, whole_T=whole_T)


def _deepest(found: _Candidates, place: int, sampled: Mapping[str, SampledRows]) -> IdArray:
    """The rank of the least popular row that each sample reads in a table; -1 where it reads none, or all are hot."""
    own = sampled[found.tables[place].name]
    num_samples = len(own.offsets) - 1
    if found.whole_T[place] or not len(own.values):
        return np.full(num_samples, -1, np.int64)
    ranks = pc.index_in(pa.array(own.values), value_set=pa.array(found.rows[place])).cast(pa.int64()).fill_null(NEVER)
    deepest_N = np.full(num_samples, -1, np.int64)
    np.maximum.at(deepest_N, np.repeat(np.arange(num_samples), np.diff(own.offsets)), ranks.to_numpy())
    return deepest_N


def _halves(sessions_N: IdArray) -> tuple[IdArray, IdArray]:
    """Samples that choose the rows and samples that measure them: a random split of the sessions."""
    names, session_of_N = np.unique(sessions_N, return_inverse=True)
    if len(sessions_N) < MIN_SAMPLES or len(names) < 2:
        return np.arange(len(sessions_N)), np.arange(len(sessions_N))
    chooses = np.random.default_rng(SEED).permutation(len(names)) % 2 == 0
    return np.flatnonzero(chooses[session_of_N]), np.flatnonzero(~chooses[session_of_N])


def _in_whole_sessions(sessions_N: IdArray, is_hot_N: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which samples belong to a session whose samples are all hot."""
    if not len(sessions_N):
        return is_hot_N
    _, session_of_N = np.unique(sessions_N, return_inverse=True)
    num_cold = np.bincount(session_of_N, weights=~is_hot_N)
    return np.asarray(num_cold[session_of_N] == 0)


def share_interval(
    sessions_N: IdArray, is_hot_N: npt.NDArray[np.bool_], *, confidence: float, seed: int
) -> tuple[float, float]:
    """The t-interval of the share of hot samples, over random chunks of whole sessions."""
    names, session_of_N = np.unique(sessions_N, return_inverse=True)
    num_chunks = min(NUM_CHUNKS, len(names))
    if num_chunks < 2:
        return 0.0, 1.0
    chunk_of_N = (np.random.default_rng(seed).permutation(len(names)) % num_chunks)[session_of_N]
    totals = np.bincount(chunk_of_N, minlength=num_chunks).astype(np.float64)
    hits = np.bincount(chunk_of_N, weights=is_hot_N, minlength=num_chunks)
    share, width = float(hits.sum() / totals.sum()), ratio_half_width(hits, totals, confidence) or 0.0
    return max(0.0, share - width), min(1.0, share + width)


def _hot_rows(found: _Candidates, place: int, depth: int) -> IdArray:
    rows = found.rows[place][:depth]
    if not found.whole_T[place]:
        return rows
    never_read = np.setdiff1d(np.arange(found.tables[place].num_rows), found.rows[place])
    return np.concatenate([found.rows[place], never_read])


def _hot_table(found: _Candidates, place: int, depths_T: IdArray) -> HotTable:
    depth, counts = int(depths_T[place]), found.counts[place]
    threshold = 0 if found.whole_T[place] else int(counts[depth - 1]) if 0 < depth <= len(counts) else None
    return HotTable(
        num_rows=depth,
        bytes=depth * int(found.row_bytes_T[place]),
        is_whole=bool(found.whole_T[place]),
        lowest_count=threshold,
    )


def _access_share(found: _Candidates, depths_T: IdArray) -> float:
    """The share of all reads that go to hot rows."""
    total = sum(int(counts.sum()) for counts in found.counts)
    hot = sum(int(counts[: int(depth)].sum()) for counts, depth in zip(found.counts, depths_T, strict=True))
    return hot / max(total, 1)


def _total_size(found: _Candidates, depths_T: IdArray) -> SizeEstimate:
    """The number of hot rows of all tables, estimated from random rows."""
    estimates = []
    for place, table in enumerate(found.tables):
        depth = int(depths_T[place])
        if found.whole_T[place] or depth == 0:
            estimates.append(SizeEstimate(num_rows=depth, low=depth, high=depth, confidence=CONFIDENCE))
            continue
        ranks = np.zeros(table.num_rows, np.int64)  # 1 for hot rows: ties at the lowest count are cut by the depth
        ranks[found.rows[place][:depth]] = 1
        estimates.append(estimate_hot_rows(ranks, 1, confidence=CONFIDENCE, seed=place))
    middle = sum(own.num_rows for own in estimates)
    below = float(np.sqrt(sum((own.num_rows - own.low) ** 2 for own in estimates)))
    above = float(np.sqrt(sum((own.high - own.num_rows) ** 2 for own in estimates)))
    return SizeEstimate(num_rows=middle, low=max(0.0, middle - below), high=middle + above, confidence=CONFIDENCE)
