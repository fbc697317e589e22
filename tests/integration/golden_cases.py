"""The cases of the golden losses: which data, plan and settings each trains with, and the folders that hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts import InputError
from recmill.data.cluster import cluster_sessions
from recmill.data.schema import Schema
from recmill.data.sources import PRESETS, make_raw_log
from recmill.data.sources.criteo import convert_criteo
from recmill.data.sources.presets import training_settings
from recmill.data.sources.raw_log import locate_data
from recmill.data.sources.synthetic.generator import generate_log
from recmill.planning.planner import Topology, plan_shards
from recmill.profiling.access import profile_access
from recmill.training.config import TrainConfig

PROCESSES = (1, 2)
FROM_DATA_DIR = ("globo", "frappe")  # presets whose data is taken from RECMILL_DATA_DIR; the others are made here

# Each switch on and off, as TrainConfig spells it. The golden files know the switches by the keys only.
SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dedup": ({"dedup": "true"}, {"dedup": "false"}),
    "tiers": ({"tiers": "auto"}, {"tiers": "false"}),
    "hot": ({"hot_batches": "true"}, {"hot_batches": "false"}),
    "shared": ({"sharing": "true"}, {"sharing": "false"}),
    "tuned": ({"tuning": "true"}, {"tuning": "false"}),
}
ALL = tuple(SWITCHES)

SMALL_MODEL = {"bottom_layers": (16,), "top_layers": (16,)}
# Without latency and with slow links copies of rows pay even in small tables, so that plans have tiers.
SLOW_LINKS = dict.fromkeys(("intra_node_latency_s", "inter_node_latency_s"), 0.0) | dict.fromkeys(
    ("intra_node_bytes_per_s", "inter_node_bytes_per_s"), 1e4
)
ORDER = {"session_limit": 0, "trial": False}  # the cases name their switches, and keep sessions whole
BASE = TrainConfig(
    batch_size=128, eval_batch_size=512, epochs=2, max_steps=14, threads=1, seed=1, **SMALL_MODEL, **ORDER
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration; `switches` None leaves all of them at their defaults."""

    name: str
    data: str = "tiny"
    layout: str = "session"
    switches: tuple[str, ...] | None = ()
    plan: Mapping[str, Any] | None = None  # options of plan_shards beyond those of the switches; None: without a plan
    settings: Mapping[str, Any] = field(default_factory=dict)
    processes: tuple[int, ...] = PROCESSES

    def config(self) -> TrainConfig:
        changes: dict[str, Any] = {}
        if self.switches is not None:
            for name, (on, off) in SWITCHES.items():
                changes |= on if name in self.switches else off
        return replace(BASE, **changes, **self.settings)

    def plan_options(self) -> dict[str, Any] | None:
        offers: dict[str, Any] = {}
        switches = self.switches or ()
        if "tiers" in switches:
            offers["strategy"] = "tiers"
        if "hot" in switches:
            offers["hot_budget_bytes"] = 40_000
        if "shared" in switches:
            offers["compress"] = "4"
        if self.plan is None and not offers:
            return None
        return {"memory_budget_bytes": 2**24, "strategy": "torchrec", **offers, **(self.plan or {})}


def preset_case(name: str, *, plan: Mapping[str, Any], **settings: Any) -> Case:
    """A preset with its own settings and every switch at its default, as `recmill run` trains it."""
    suited = TrainConfig.from_overrides(training_settings(name), base=BASE)
    suited = replace(suited, batch_size=BASE.batch_size, epochs=BASE.epochs, **SMALL_MODEL, **settings)
    changed = {key: value for key, value in vars(suited).items() if value != getattr(BASE, key)}
    layout = "session" if name in ("frappe", "criteo") else "deduplicated"
    return Case(name=f"preset-{name}", data=name, layout=layout, switches=None, plan=plan, settings=changed)


def cases() -> list[Case]:
    """Every case; a golden file for each, and no other files."""
    auto = {"links": {}, "strategy": "tiers", "hot_budget_bytes": 40_000, "memory_budget_bytes": 2**26}
    found = [
        *(preset_case(name, plan=auto) for name in PRESETS),
        # switches
        Case(name="none"),
        Case(name="none-planned", plan={}),
        *(Case(name=switch, switches=(switch,)) for switch in SWITCHES),
        Case(name="all-but-shared", switches=tuple(name for name in ALL if name != "shared"), layout="deduplicated"),
        Case(name="all", switches=ALL, layout="deduplicated"),
        Case(name="all-session", switches=ALL, settings={"lr_schedule": "linear", "model": "dcn"}),
        # layouts
        Case(name="layout-time", layout="time", switches=("dedup",)),
        Case(name="layout-deduplicated", layout="deduplicated", switches=("dedup",)),
        Case(name="layout-deduplicated-expanded", layout="deduplicated"),
        Case(name="transforms", data="transforms", layout="deduplicated", switches=("dedup",)),
        Case(name="transforms-session", data="transforms", switches=("tiers",)),
        # tiers of rows
        Case(name="tiers-two-nodes", switches=("tiers",), plan={"nodes": 2}, processes=(2,)),
        Case(name="tiers-adagrad", switches=("tiers",), settings={"table_optimiser": "adagrad"}, processes=(2,)),
        Case(name="tiers-sgd", switches=("tiers",), settings={"table_optimiser": "sgd"}, processes=(2,)),
        Case(name="tiers-raw", switches=("tiers", "dedup"), settings={"hot_sync": "raw"}, processes=(2,)),
        Case(name="tiers-every-3", switches=("tiers",), settings={"hot_sync_every": 3}, processes=(2,)),
        # hot batches
        Case(name="hot-raw", switches=("hot",), settings={"hot_sync": "raw"}),
        Case(
            name="hot-adagrad",
            switches=("hot", "dedup"),
            settings={"table_optimiser": "adagrad"},
            layout="deduplicated",
        ),
        Case(name="hot-sgd", switches=("hot", "tiers"), settings={"table_optimiser": "sgd"}),
        # tables on disk
        Case(name="disk", settings={"table_memory_bytes": 400_000}, processes=(1,)),
        Case(
            name="disk-dedup",
            switches=("dedup",),
            layout="deduplicated",
            settings={"table_memory_bytes": 400_000},
            processes=(1,),
        ),
        Case(
            name="disk-adagrad",
            settings={"table_memory_bytes": 400_000, "table_optimiser": "adagrad"},
            plan={},
            processes=(1,),
        ),
        Case(
            name="disk-hot",
            switches=("hot",),
            settings={"table_memory_bytes": 400_000, "table_optimiser": "sgd"},
            processes=(1,),
        ),
        # shared parameters
        Case(name="shared-int8", switches=("shared", "dedup"), plan={"precision": "int8"}),
        Case(name="shared-adagrad", switches=("shared",), settings={"table_optimiser": "adagrad"}),
        Case(name="shared-sgd", switches=("shared", "tiers"), settings={"table_optimiser": "sgd"}),
        # models, encoders, optimisers
        Case(name="dcn", settings={"model": "dcn", "dropout": 0.1}),
        Case(name="dcn-full-rank", settings={"model": "dcn", "cross_rank": 0, "dense_weight_decay": 0.01}),
        *(
            Case(
                name=f"{encoder}{suffix}",
                switches=on,
                settings={"sequence_encoder": encoder, "max_sequence_length": 10},
            )
            for encoder in ("mean", "attention", "transformer", "standard_transformer", "din", "hstu")
            for suffix, on in (("", ()), ("-dedup", ("dedup",)))
        ),
        Case(
            name="din-all",
            switches=ALL,
            layout="deduplicated",
            settings={"sequence_encoder": "din", "din_layers": (12, 5), "din_softmax": True},
        ),
        Case(name="hstu-all", switches=ALL, layout="deduplicated", settings={"sequence_encoder": "hstu"}),
        Case(name="adagrad", settings={"table_optimiser": "adagrad", "interaction_dim": 8}),
        Case(name="sgd", settings={"table_optimiser": "sgd", "table_init_scale": 0.1, "shuffle": False}),
        # evaluations and checkpoints between steps, the best weights kept
        Case(name="patience", settings={"patience": 1, "eval_every": 2, "checkpoint_every": 3, "dense_lr": 0.3}),
    ]
    assert len({case.name for case in found}) == len(found)
    return found


def shrunk(preset: str) -> Any:
    """A synthetic preset with a few thousand samples and tables of at most 2,000 rows."""
    config = PRESETS[preset].config()

    def small(lists: Any) -> tuple[Any, ...]:
        # A table of 20 rows is too small to share parameters: hot batches beside shared tables have something to do.
        return tuple(
            replace(each, num_rows=20 if each.name == "category" else min(each.num_rows, 2_000)) for each in lists
        )

    groups = tuple(replace(group, lists=small(group.lists)) for group in config.user_groups)
    return replace(config, num_sessions=150, zipf=1.3, user_groups=groups, items=small(config.items))


def write_movielens(folder: Path) -> Path:
    """Ratings in the form of ml-1m, drawn at random: the data itself may not be passed on."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    ratings = zip(rng.integers(1, 61, 2_000), rng.integers(1, 201, 2_000), rng.integers(1, 6, 2_000), strict=True)
    times = np.sort(rng.integers(0, 400_000, 2_000))
    genres = ("Action", "Comedy", "Drama", "Sci-Fi")
    files = {
        "ratings": [
            f"{user}::{movie}::{stars}::{time}" for (user, movie, stars), time in zip(ratings, times, strict=True)
        ],
        "users": [f"{user}::{'FM'[user % 2]}::{(18, 25, 35)[user % 3]}::{user % 7}::0" for user in range(1, 61)],
        "movies": [f"{movie}::Film {movie}::{'|'.join(genres[: 1 + movie % 4])}" for movie in range(1, 201)],
    }
    for name, lines in files.items():
        (folder / f"{name}.dat").write_text("\n".join(lines) + "\n", encoding="latin-1")
    return folder


def write_criteo(folder: Path) -> Path:
    """Rows in the form of the Criteo data, drawn at random, some values missing."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    lines = []
    for _ in range(1_500):
        counts = ["" if count > 60 else str(count) for count in rng.integers(-2, 70, 13)]
        categories = ["" if each == 0 else f"{each * 2654435761 % 2**32:08x}" for each in rng.zipf(1.3, 26) % 500]
        lines.append("\t".join([str(rng.integers(0, 2)), *counts, *categories]))
    (folder / "train.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_raw(data: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The raw log of a case's `data`, and options to cluster it with."""
    raw = folder / "raw"
    if data in PRESETS and PRESETS[data].config:
        return Path(generate_log(shrunk(data), out=raw)), {}
    if data == "movielens":
        return Path(make_raw_log(data, data=write_movielens(folder / "ml-1m"), out=raw)), {}
    if data == "criteo":
        return Path(convert_criteo(write_criteo(folder / "criteo"), out=raw, num_rows=400)), {}
    if data == "transforms":
        generate_log(shrunk("tiny"), out=raw)
        return raw, {"schema": transformed(Schema.load(raw))}
    if data == "globo":  # the converter reads all clicks before it limits them
        clicks = pq.ParquetFile(locate_real(data)).iter_batches(batch_size=4_000)
        pq.write_table(pa.Table.from_batches([next(clicks)]), folder / "clicks.parquet")
        return Path(make_raw_log(data, data=folder / "clicks.parquet", out=raw)), {}
    return Path(make_raw_log(data, out=raw, overrides={"limit": 1_000})), {}


def locate_real(data: str) -> Path:
    return locate_data(data, None)


def transformed(schema: Schema) -> Schema:
    """The schema with every kind of transform and pooling."""
    changes: dict[str, dict[str, Any]] = {
        "liked_topics": {"pooling": "mean", "transforms": ({"op": "first_x", "n": 3},)},
        "followed_pages": {"transforms": ({"op": "hash_to_range", "num_rows": 500, "seed": 7},)},
        "recent_queries": {"transforms": ({"op": "ngram", "n": 2, "num_rows": 300},)},
        "recent_categories": {"transforms": ({"op": "map_ids", "mapping": {"1": 3, "2": 4}, "default": 0},)},
        "history": {"pooling": "none", "transforms": ({"op": "truncate", "n": 9},)},
        "price": {"transforms": ({"op": "clip", "min": -1, "max": 1}, {"op": "normalise", "mean": 0.1, "std": 2})},
        "age": {"transforms": ({"op": "log"},)},
        "quality": {"transforms": ({"op": "bucketise", "boundaries": [-0.5, 0.5]},)},
    }
    return replace(schema, features=tuple(replace(each, **changes.get(each.name, {})) for each in schema.features))


class Inputs:
    """Datasets, profiles and plans in one folder, each made when the first case needs it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.raw: dict[str, tuple[Path, dict[str, Any]]] = {}
        self.missing: dict[str, str] = {}  # data -> why its cases cannot run here

    def of(self, case: Case, nproc: int) -> tuple[Path, Path | None] | None:
        """The dataset and the plan of a case; None where its data is missing."""
        if case.data in self.missing:
            return None
        base = self.folder / case.data
        if case.data not in self.raw:
            try:
                if case.data in FROM_DATA_DIR:
                    locate_real(case.data)
            except InputError as error:
                self.missing[case.data] = str(error)
                return None
            base.mkdir()
            self.raw[case.data] = write_raw(case.data, base)
        data = self._once(base / case.layout, lambda out: self._cluster(case, out))
        options = case.plan_options()
        if options is None:
            return data, None
        # Counts of rows do not depend on the layout.
        profile = self._once(base / "profile", lambda out: profile_access(data, out=out))
        return data, self._once(base / plan_name(options, nproc), lambda out: self._plan(profile, out, options, nproc))

    def _cluster(self, case: Case, out: Path) -> None:
        raw, options = self.raw[case.data]
        cluster_sessions(raw, out=out, layout=case.layout, eval_fraction=0.2, rows_per_group=512, **options)

    def _plan(self, profile: Path, out: Path, options: Mapping[str, Any], nproc: int) -> None:
        given = dict(options)
        nodes = given.pop("nodes", 1)
        topology = Topology(nodes=nodes, ranks_per_node=nproc // nodes, **given.pop("links", SLOW_LINKS))
        plan_shards(profile, out=out, topology=topology, batch_size=BASE.batch_size, cores=2, **given)

    def _once(self, path: Path, make: Callable[[Path], Any]) -> Path:
        if not path.exists():
            make(path)
        return path


def plan_name(options: Mapping[str, Any], nproc: int) -> str:
    return f"plan-{nproc}-" + "-".join(f"{key}={options[key]}" for key in sorted(options))
