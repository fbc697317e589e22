"""What benchmarks/serving.py has measured so far: written after every stage, so that a run that is cut loses little."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import Metric, Options, finish, in_turns, say, write_result
from measured_code import hash_code
from serving_loops import closed_loop, percentile_ms

from recmill.artifacts import Dataset
from recmill.data.cluster import cluster_sessions
from recmill.data.sources import make_raw_log

GB = 10**9
Runs = dict[str, Callable[[int], object]]  # ways to score request n


@dataclass(frozen=True, kw_only=True)
class Sizes:
    recd_sessions: int
    globo_users: int  # one in this many users
    auc_users: int  # the same, of the model that is trained
    num_samples: int
    num_requests: int  # different ones in a loop
    seconds: float  # of a loop
    pairs: int
    equal_requests: int
    table_bytes: int  # of the table that is larger than memory
    limit_bytes: int
    memory_requests: int
    compile_seconds: int  # for AOTInductor, per model; 0: not compiled


SIZES = {
    "tiny": Sizes(
        recd_sessions=8,
        globo_users=20_000,
        auc_users=20_000,
        num_samples=32,
        num_requests=2,
        seconds=0.005,
        pairs=2,
        equal_requests=50,
        table_bytes=GB // 100,
        limit_bytes=GB // 1000,
        memory_requests=5,
        compile_seconds=0,
    ),
    "quick": Sizes(
        recd_sessions=100,
        globo_users=2_000,
        auc_users=2_000,
        num_samples=1024,
        num_requests=50,
        seconds=0.15,
        pairs=3,
        equal_requests=1_000,
        table_bytes=GB,
        limit_bytes=GB // 20,
        memory_requests=200,
        compile_seconds=30,
    ),
    "full": Sizes(
        recd_sessions=500,
        globo_users=50,
        auc_users=1,
        num_samples=8192,
        num_requests=200,
        seconds=0.6,
        pairs=9,
        equal_requests=10_000,
        table_bytes=20 * GB,
        limit_bytes=GB,
        memory_requests=1_000,
        compile_seconds=240,
    ),
}


@dataclass(eq=False)
class Bench:
    folder: Path
    options: Options
    metrics: dict[str, Metric] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    latency: dict[str, Any] = field(default_factory=dict)  # ms: p50 and p99 of every loop
    stages: list[str] = field(default_factory=list)  # that are complete
    left_out: list[str] = field(default_factory=list)  # by --only

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.options.size]

    @property
    def seed(self) -> int:
        return self.options.seed

    def resume(self) -> None:
        """Continue the file of a run that was cut, if it measured the same code in the same form."""
        path = Path(self.options.json_path or "-")
        if path.name == "-" or not path.exists():
            return
        found = json.loads(path.read_text(encoding="utf-8"))
        is_ours = (found.get("size"), found.get("seed")) == (self.options.size, self.seed)
        if not found.get("is_partial") or not is_ours or found["code"] != hash_code(self.options.benchmark):
            return
        self.metrics, self.skipped, self.latency = found["metrics"], found["skipped"], found["latency"]
        self.stages = found["stages"]
        say(f"continues {path}: {', '.join(self.stages) or 'nothing'} was measured before")

    def run(self, stage: str, measure: Callable[[], None]) -> None:
        """Measure a stage unless an earlier run has, and write what there is."""
        if stage in self.stages:
            return
        if self.options.only and stage not in self.options.only:
            self.left_out.append(stage)
            return
        say(stage)
        measure()
        self.stages.append(stage)
        self.save(is_partial=True)

    def save(self, *, is_partial: bool) -> None:
        write_result(self.options, self.metrics, skipped=self.skipped, extra=self._extra(is_partial))

    def finish(self, *, is_partial: bool = False) -> None:
        finish(self.options, self.metrics, skipped=self.skipped, extra=self._extra(is_partial))

    def _extra(self, is_partial: bool) -> dict[str, Any]:
        seed = {"seed": self.seed, "stages": self.stages, "latency": self.latency}
        return {"is_partial": True, **seed} if is_partial else seed

    def stop_on_signals(self) -> None:
        """A run that is ended prints what it has."""

        def stop(number: int, frame: object) -> None:
            raise SystemExit(128 + number)

        signal.signal(signal.SIGTERM, stop)

    def dataset(self, preset: str, *, one_in: int | None = None) -> Dataset:
        """The log of a preset, written on first use; `one_in` users of globo."""
        sizes = self.sizes
        one_in = one_in or sizes.globo_users
        folder = self.folder / (f"{preset}-{one_in}" if preset == "globo" else preset)
        raw, path = folder / "raw", folder / "data"
        if path.exists():
            return Dataset.load(path)
        wide = {"one_in": one_in} if preset == "globo" else {"sessions": sizes.recd_sessions}
        say(f"write {folder.name}")
        make_raw_log(preset, out=raw, overrides={"seed": self.seed, **wide})
        return cluster_sessions(raw, out=path, layout="session", eval_fraction=0.1)

    def loops(self, name: str, runs: Runs, num_candidates: int) -> list[list[float]]:
        """Candidates per second of CPU time of each way to score requests, in turns; latencies go to the notes.

        One thread scores, so on a quiet machine this is the rate of a core. Other programs disturb it less.
        """
        taken: dict[str, list[float]] = {way: [] for way in runs}

        def measure(way: str) -> Callable[[], float]:
            def rate() -> float:
                began = time.process_time()
                own = closed_loop(runs[way], self.sizes.num_requests, seconds=self.sizes.seconds)
                taken[way].extend(own)
                return num_candidates * len(own) / (time.process_time() - began)

            return rate

        found = in_turns(*map(measure, runs), repeats=self.sizes.pairs, warm_ups=1)
        self.latency[name] = {
            way: {"p50_ms": percentile_ms(own, 0.5), "p99_ms": percentile_ms(own, 0.99), "num_requests": len(own)}
            for way, own in taken.items()
        }
        return found

    def note(self, name: str) -> str:
        own = self.latency[name]
        return ", ".join(f"{way} p50 {t['p50_ms']:.2f} p99 {t['p99_ms']:.2f} ms" for way, t in own.items())
