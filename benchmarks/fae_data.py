"""The logs of the FAE benchmark: clustered, profiled, with a hot set and laid out for hot batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from harness import say
from session_logs import globo_clicks

from recmill.artifacts import AccessProfile, Dataset, ShardPlan, write_folder
from recmill.artifacts.plan import HotSet
from recmill.data.cluster import cluster_sessions
from recmill.data.hot.layout import layout_hot
from recmill.data.schema import Schema
from recmill.data.sources import make_raw_log
from recmill.data.sources.synthetic.config import IdList, SyntheticConfig, UserGroup
from recmill.data.sources.synthetic.generator import generate_log
from recmill.planning.hot.selection import HotChoice, choose_hot_set
from recmill.planning.planner import Topology, default_plan
from recmill.planning.tiers.row_files import write_slots
from recmill.profiling.access import profile_access

DIM = 64
HELD_OUT = 0.1
# As in click logs: a few large tables, more small ones. All rows with their optimiser state: 221 MB.
LARGE_ROWS, MEDIUM_ROWS, SMALL_ROWS = 200_000, 20_000, 1_000


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A dataset, its plan with the hot set, and the same rows laid out for hot batches."""

    name: str
    data: Dataset
    profile: AccessProfile
    plan: ShardPlan
    hot_set: HotSet
    laid_out: Dataset


def click_log(zipf: float, num_samples: int, *, seed: int, dim: int = DIM) -> SyntheticConfig:
    """Twelve features of one id each and four dense values; sessions of one sample, as in Criteo's logs."""
    sizes = [LARGE_ROWS] * 4 + [MEDIUM_ROWS] * 2 + [SMALL_ROWS] * 6
    lists = [IdList(name=f"id_{number}", num_rows=rows, dim=dim) for number, rows in enumerate(sizes)]
    return SyntheticConfig(
        name=f"clicks-{zipf}",
        num_sessions=num_samples,
        samples_per_session=1.0,
        zipf=zipf,
        stay_prob=0.0,
        shift_prob=0.0,
        user_groups=(UserGroup(name="user", lists=tuple(lists[:6]), dense=("age", "activity")),),
        histories=(),
        items=tuple(lists[6:]),
        item_dense=("price", "quality"),
        seed=seed,
    )


def make_clicks(
    folder: Path, zipf: float, num_samples: int, *, budget_bytes: int, topology: Topology, batch_size: int, seed: int
) -> Workload:
    say(f"write clicks, Zipf {zipf}")
    place = folder / f"clicks-{zipf}"
    raw = generate_log(click_log(zipf, num_samples, seed=seed), out=place / "raw")
    data = cluster_sessions(raw, out=place / "data", eval_fraction=HELD_OUT)
    return prepare(place, data, f"Zipf {zipf}", budget_bytes=budget_bytes, topology=topology, batch_size=batch_size)


def make_globo(
    folder: Path,
    one_in: int,
    *,
    budget_bytes: int,
    topology: Topology,
    batch_size: int,
    seed: int,
    rows_per_group: int | None = None,
) -> Workload:
    """A sample of globo's users, each with all clicks; negatives are drawn from the clicks of all users.

    Random sessions are held out: the last ones are about articles that nobody clicked before.
    """
    say(f"write globo, one user in {one_in}")
    place = folder / "globo"
    overrides = {"one_in": one_in, "seed": seed}
    raw = make_raw_log("globo", out=place / "raw", data=globo_clicks(), overrides=overrides)
    data = cluster_sessions(
        raw, out=place / "data", eval_fraction=HELD_OUT, eval_sessions="random", rows_per_group=rows_per_group
    )
    return prepare(place, data, "globo", budget_bytes=budget_bytes, topology=topology, batch_size=batch_size)


def prepare(
    place: Path, data: Dataset, name: str, *, budget_bytes: int, topology: Topology, batch_size: int
) -> Workload:
    profile = profile_access(data, out=place / "profile")
    choice = choose_hot_set(profile, budget_bytes=budget_bytes, topology=topology, batch_size=batch_size)
    plan = write_plan(place / "plan", Schema.load(data.path), choice, topology)
    laid_out = layout_hot(data, plan, out=place / "hot")
    return Workload(name=name, data=data, profile=profile, plan=plan, hot_set=choice.hot_set, laid_out=laid_out)


def write_plan(out: Path, schema: Schema, choice: HotChoice, topology: Topology) -> ShardPlan:
    """TorchRec's table-wise plan with the hot set added."""
    with write_folder(out, manifest_name=ShardPlan.manifest_name) as folder:
        write_slots(folder / "hot", choice.rows)
        replace(default_plan(schema, topology), hot_set=choice.hot_set).seal(folder)
    return ShardPlan.load(out)
