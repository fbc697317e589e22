"""The measured logs, each in the three layouts with the same rows."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from harness import say

from recmill.artifacts import Dataset, join_path, write_folder
from recmill.data.cluster import cluster_sessions
from recmill.data.schema import Feature, Schema
from recmill.data.sources import make_raw_log
from recmill.data.sources.log_writer import write_log

LAYOUTS = ("time", "session", "deduplicated")
HELD_OUT = 0.05  # share of sessions held out, so that "train" has the same rows in every layout
SAMPLES_PER_SESSION = 16.5


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """One log in the three layouts, with the same rows and the same training split in each."""

    time: Dataset
    session: Dataset
    deduplicated: Dataset

    @property
    def schema(self) -> Schema:
        return Schema.load(self.time.path)


class Logs:
    """The measured logs, each created once, on first use."""

    def __init__(
        self, folder: Path, seed: int, *, widest_globo: int = 1, writers: ProcessPoolExecutor | None = None
    ) -> None:
        """`widest_globo`: the largest log of globo has one in this many users; all others are cut from it.

        `writers` lay out the logs that are made ahead; without them, threads do.
        """
        self.folder, self.seed, self._widest_globo, self._writers = folder, seed, widest_globo, writers
        self._made: dict[str, Layouts] = {}
        self._coming: dict[str, Future[Layouts]] = {}
        self._lock = threading.Lock()

    def recd(self, num_rows: int, samples_per_session: float = SAMPLES_PER_SESSION) -> Layouts:
        return self._make(_recd_name(num_rows, samples_per_session))

    def globo(self, one_in: int) -> Layouts:
        return self._make(f"globo-{one_in}")

    @contextmanager
    def made_ahead(self, *, recd: Sequence[tuple[int, float]] = (), globo: Sequence[int] = ()) -> Iterator[None]:
        """Create several logs on all cores while the block runs, and finish all of them before it ends.

        Using one of them inside the block waits for that one only. Nothing is timed meanwhile.
        """
        names = dict.fromkeys([*(_recd_name(*shape) for shape in recd), *(f"globo-{one_in}" for one_in in globo)])
        say(f"write {', '.join(names)}")
        with ThreadPoolExecutor(max_workers=len(names)) as pool:
            self._coming = {name: pool.submit(self._make_apart, name) for name in names}
            yield
            self._made |= {name: layouts.result() for name, layouts in self._coming.items()}
            self._coming = {}

    def _make_apart(self, name: str) -> Layouts:
        """One log, its layouts in parallel; the slowest first."""
        raw = self._make_raw(name)
        with ThreadPoolExecutor(max_workers=len(LAYOUTS)) as pool:
            writers = self._writers or pool
            wanted = ("session", "deduplicated", "time")
            started = {layout: writers.submit(_lay_out, raw, self.folder / name / layout, layout) for layout in wanted}
            return Layouts(**{layout: dataset.result() for layout, dataset in started.items()})

    def _make(self, name: str) -> Layouts:
        if name in self._coming:
            return self._coming[name].result()
        if name not in self._made:
            say(f"write {name}")
            raw = self._make_raw(name)
            self._made[name] = Layouts(
                **{layout: _lay_out(raw, self.folder / name / layout, layout) for layout in LAYOUTS}
            )
        return self._made[name]

    def _make_raw(self, name: str) -> Path:
        out = self.folder / name / "raw"
        preset, first, *rest = name.split("-")
        if preset == "globo":
            with self._lock:
                return self._make_globo(int(first), out)
        samples = float(rest[0])
        sessions = max(8, round(int(first) / samples))
        shape = {"seed": self.seed, "sessions": sessions, "samples_per_session": samples}
        make_raw_log(preset, out=out, overrides=shape)
        return out

    def _make_globo(self, one_in: int, out: Path) -> Path:
        """Filter users after drawing negatives, which come from the clicks of all users.

        Reading those takes 4 s, so only the largest log is made from them, and others are cut from it.
        """
        widest = self.folder / f"globo-{self._widest_globo}" / "raw"
        if not widest.exists():
            make_raw_log("globo", out=widest, overrides={"seed": self.seed, "one_in": self._widest_globo})
        if widest == out:
            return out
        assert one_in % self._widest_globo == 0, "its users are not all in the widest log"
        rows = pq.read_table(sorted(widest.glob("log-*.parquet")))
        users = rows.column("user").combine_chunks().flatten().to_numpy()
        rows = rows.take(np.flatnonzero(users % one_in == 0))
        num_sessions = len(rows.column("session_id").unique())
        write_log(out, Schema.load(widest), rows.to_batches(), info=lambda: {"num_sessions": num_sessions})
        return out


def _lay_out(raw: Path, out: Path, layout: str) -> Dataset:
    return cluster_sessions(raw, out=out, layout=layout, eval_fraction=HELD_OUT)


def _recd_name(num_rows: int, samples_per_session: float) -> str:
    return f"recd-{num_rows}-{samples_per_session}"


def globo_clicks() -> Path:
    return Path(os.environ.get("RECMILL_DATA_DIR", "")) / "globo" / "clicks.parquet"


def why_no_globo() -> str | None:
    if not os.environ.get("RECMILL_DATA_DIR"):
        return "RECMILL_DATA_DIR is not set"
    return None if globo_clicks().exists() else f"{globo_clicks()} does not exist"


def with_transforms(dataset: Dataset) -> Dataset:
    """The same files with a schema that declares the usual production transforms of every feature."""
    schema = Schema.load(dataset.path)
    features = tuple(replace(feature, transforms=_usual_steps(feature)) for feature in schema.features)
    out = f"{dataset.path}-transformed"
    with write_folder(out, manifest_name=Dataset.manifest_name) as folder:
        for entry in dataset.files:
            if entry.name != "schema.json":
                os.link(join_path(dataset.path, entry.name), folder / entry.name)
        replace(schema, features=features).save(folder)
        dataset.seal(folder)
    return Dataset.load(out)


def _usual_steps(feature: Feature) -> tuple[dict[str, Any], ...]:
    if feature.kind == "dense":
        return {"op": "log"}, {"op": "clip", "min": -8, "max": 8}
    hashed = {"op": "hash_to_range", "num_rows": feature.num_rows}
    return ({"op": "truncate", "n": 50}, hashed) if feature.kind == "sequence" else (hashed,)
