"""What request-shaped scoring gains: candidates per second, latency and memory of one core that serves a ranker.

    python benchmarks/serving.py [--quick] [--json PATH|-] [--seed K]

A request is one user and 1, 20, 100 or 500 candidates: users and candidates of `recd` and globo, models with random
weights (speed does not depend on them). Baseline: the exported program, model.pt2, with the user repeated for every
candidate; preparing its padded inputs is not counted. Ours: `RequestModel.score`, from arrays to probabilities with all
checks. Also against the model with plain embeddings as TorchScript, AOTInductor and onnxruntime. Everything runs on one
thread in one process, in alternating pairs; the ratio is the mean of their logarithms. Open loop: Poisson arrivals at
70% of the baseline's rate. Over loopback: `recmill serve`, if its environment is there.
"""

from __future__ import annotations

import os

from recmill.training.processes import rank_environment

os.environ.update(rank_environment() | {"OMP_NUM_THREADS": "1"})  # before any library reads it

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from harness import Metric, compare, finish, in_turns, parse_options, plain_value, say, warn_if_busy
from serving_loops import closed_loop, infer_body, measure_apart, open_loop, percentile_ms, served_over_http
from serving_memory import write_sparse_model
from serving_models import RIVALS, Case, Scorer, Unavailable, exported_program, largest_difference, make_case
from session_logs import why_no_globo

from recmill.artifacts import Dataset
from recmill.data.cluster import cluster_sessions
from recmill.data.sources import make_raw_log
from recmill.serving import RequestModel
from recmill.training.config import TrainConfig
from recmill.training.serving import export_checkpoint
from recmill.training.trainer import train

ENCODERS = {"transformer": "transformer", "pooled": "mean"}
CANDIDATES = (1, 20, 100, 500)
GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Sizes:
    recd_sessions: int
    globo_users: int  # one in this many users
    num_samples: int
    num_requests: int  # different ones in a loop
    seconds: float  # of a loop
    pairs: int
    equal_requests: int
    table_bytes: int  # of the table that is larger than memory
    limit_bytes: int
    memory_requests: int


SIZES = {
    "tiny": Sizes(
        recd_sessions=8,
        globo_users=20_000,
        num_samples=32,
        num_requests=2,
        seconds=0.005,
        pairs=2,
        equal_requests=50,
        table_bytes=GB // 100,
        limit_bytes=GB // 1000,
        memory_requests=5,
    ),
    "quick": Sizes(
        recd_sessions=100,
        globo_users=2_000,
        num_samples=1024,
        num_requests=50,
        seconds=0.3,
        pairs=3,
        equal_requests=1_000,
        table_bytes=GB,
        limit_bytes=GB // 20,
        memory_requests=200,
    ),
    "full": Sizes(
        recd_sessions=500,
        globo_users=20,
        num_samples=8192,
        num_requests=200,
        seconds=1.0,
        pairs=9,
        equal_requests=10_000,
        table_bytes=20 * GB,
        limit_bytes=GB,
        memory_requests=2_000,
    ),
}


@dataclass(eq=False)
class Bench:
    """What was measured so far."""

    folder: Path
    sizes: Sizes
    seed: int
    size: str
    metrics: dict[str, Metric] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    latency: dict[str, Any] = field(default_factory=dict)  # ms: p50 and p99 of every loop

    def dataset(self, preset: str) -> Dataset:
        raw, sizes = self.folder / preset / "raw", self.sizes
        wide = {"one_in": sizes.globo_users} if preset == "globo" else {"sessions": sizes.recd_sessions}
        say(f"write {preset}")
        make_raw_log(preset, out=raw, overrides={"seed": self.seed, **wide})
        return cluster_sessions(raw, out=self.folder / preset / "data", layout="session", eval_fraction=0.1)

    def loops(self, name: str, case: Case, runs: dict[str, Callable[[int], object]], count: int) -> list[list[float]]:
        """Candidates per second of each way to score the same requests, in turns; latencies go to the notes."""
        taken: dict[str, list[float]] = {way: [] for way in runs}

        def measure(way: str) -> Callable[[], float]:
            def rate() -> float:
                own = closed_loop(runs[way], self.sizes.num_requests, seconds=self.sizes.seconds)
                taken[way].extend(own)
                return count * len(own) / sum(own)

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


def measure_case(bench: Bench, data: str, name: str, case: Case) -> None:
    rng = np.random.default_rng(bench.seed)
    folder = bench.folder / f"{data}-{name}"
    model = RequestModel.load(case.write(folder), memory="resident")
    program = exported_program(case, folder)
    rivals: dict[str, Scorer] = {}
    for count in CANDIDATES:
        key = f"{data}_{name}_{count}"
        say(key)
        requests = [case.request(count, rng) for _ in range(bench.sizes.num_requests)]
        inputs = [case.repeat_user(request) for request in requests]
        difference = np.abs(program(*inputs[0]).numpy() - model.score(requests[0])).max()
        assert difference < 1e-5, f"{key}: scores differ by {difference}"
        runs: dict[str, Callable[[int], object]] = {
            "program": lambda n, inputs=inputs: program(*inputs[n]),
            "request": lambda n, requests=requests: model.score(requests[n]),
        }
        rates = bench.loops(key, case, runs, count)
        bench.metrics[key] = compare(*rates, unit="candidates/s", note=bench.note(key))
        if data == "recd" and count in (1, 100):
            rivals = rivals or make_rivals(bench, f"{data}_{name}", case, folder, inputs[0])
            for rival, scorer in rivals.items():
                difference = np.abs(np.asarray(scorer(*inputs[0])) - model.score(requests[0])).max()
                assert difference < 1e-4, f"{key}: scores of {rival} differ by {difference}"
                against = {
                    rival: lambda n, inputs=inputs, scorer=scorer: scorer(*inputs[n]),
                    "request": runs["request"],
                }
                rates_of_both = bench.loops(f"{key}_vs_{rival}", case, against, count)
                note = bench.note(f"{key}_vs_{rival}")
                bench.metrics[f"{key}_vs_{rival}"] = compare(*rates_of_both, unit="candidates/s", note=note)
        if count == 100:
            measure_open_loop(bench, f"{key}_p99_open", runs, float(np.mean(rates[0])) / count)
            if data == "recd" and name == "pooled":
                measure_forms(bench, key, case, requests)


def measure_open_loop(bench: Bench, key: str, runs: dict[str, Callable[[int], object]], capacity: float) -> None:
    """p99 of both at the same rate of arrivals: 70% of what the baseline can answer."""
    rate = 0.7 * capacity
    found: list[list[float]] = [[], []]
    for pair in range(bench.sizes.pairs):
        for side, run in zip(found, runs.values(), strict=True):
            rng = np.random.default_rng((bench.seed, pair))  # the same arrivals
            seconds = 3 * bench.sizes.seconds
            taken = open_loop(run, bench.sizes.num_requests, rate=rate, seconds=seconds, rng=rng)
            side.append(percentile_ms(taken, 0.99))
    note = f"{rate:.0f} requests/s, Poisson arrivals, one server"
    bench.metrics[key] = compare(*found, unit="ms", note=note, less_is_better=True)


def make_rivals(bench: Bench, key: str, case: Case, folder: Path, example: Any) -> dict[str, Scorer]:
    """The other runtimes that are here; those that are not are skipped with their reason."""
    found: dict[str, Scorer] = {}
    for rival, make in RIVALS.items():
        say(f"{key}: {rival}")
        try:
            if bench.size == "tiny" and rival != "torchscript":
                raise Unavailable("too slow to build for a test")
            found[rival] = make(case, folder, example)
        except Unavailable as reason:
            bench.skipped[f"{key}_vs_{rival}"] = str(reason)
    return found


def measure_forms(bench: Bench, key: str, case: Case, requests: list[Any]) -> None:
    """Other forms of the tables against float32: speed and memory of a process that holds all of it."""
    settings = {"memory": "resident", "num_requests": 20, "num_candidates": 100}
    whole = bench.folder / f"{key}-float32"
    plain = RequestModel.load(case.write(whole), memory="resident")
    base = measure_apart(whole, **settings)["model_bytes"]
    small = {form: case.write(bench.folder / f"{key}-{form}", form) for form in ("bf16", "int8", "int4")}  # type: ignore[arg-type]
    encoder = case.config.sequence_encoder
    dataset = Dataset.load(bench.folder / "recd" / "data")
    shared = make_case(dataset, encoder, num_samples=32, seed=bench.seed, compression=10)
    small["shared10x"] = shared.write(bench.folder / f"{key}-shared")
    for form, folder in small.items():
        name = f"{key}_{form}"
        say(name)
        model = RequestModel.load(folder, memory="resident")
        runs: dict[str, Callable[[int], object]] = {
            "float32": lambda n: plain.score(requests[n]),
            form: lambda n, model=model: model.score(requests[n]),
        }
        rates = bench.loops(name, case, runs, 100)
        bench.metrics[name] = compare(*rates, unit="candidates/s", note="against float32 tables")
        bytes_ = measure_apart(folder, **settings)["model_bytes"]
        pairs = [[base / 2**20] * 2, [bytes_ / 2**20] * 2]
        note = "growth of a process that loads and serves the model, against float32 tables"
        bench.metrics[f"{name}_memory"] = compare(*pairs, unit="MiB", note=note, less_is_better=True)


def measure_auc(bench: Bench, dataset: Dataset) -> None:
    """A model trained on globo: how far the AUC of each form is from float32."""
    say("train on globo")
    run = bench.folder / "run"
    train(dataset.path, out=run, nproc=1, config=TrainConfig(epochs=1, batch_size=2048, seed=bench.seed))
    result = export_checkpoint(run / "checkpoint", out=bench.folder / "export", data=dataset.path, for_mlflow=False)
    forms = result["request"]["forms"]
    for form in ("bf16", "int8", "int4"):
        difference = abs(forms[form]["auc"] - forms["float32"]["auc"])
        note = f"AUC {forms[form]['auc']:.5f}, float32 {forms['float32']['auc']:.5f}; bytes {forms[form]['bytes']:,}"
        bench.metrics[f"globo_auc_difference_{form}"] = plain_value([difference], unit="AUC", note=note)


def measure_large_table(bench: Bench) -> None:
    """A table of 20 GB behind a mapped file, with at most 1 GB of its cold pages in memory."""
    say("table larger than memory")
    sizes = bench.sizes
    model = write_sparse_model(bench.folder / "large", table_bytes=sizes.table_bytes)
    found = measure_apart(
        model, memory="mapped", cold_bytes=sizes.limit_bytes, num_requests=sizes.memory_requests, num_candidates=100
    )
    what = f"{sizes.table_bytes / GB:g} GB of tables, uniform ids, at most {sizes.limit_bytes / GB:g} GB of cold pages"
    bench.metrics["large_table_resident"] = plain_value([found["resident_bytes"] / GB], unit="GB", note=what)
    note = f"100 candidates, 20 ids of history; pages were given back {found['num_released']:.0f} times"
    bench.metrics["large_table_p99"] = plain_value([found["p99_ms"]], unit="ms", note=note)


def measure_loopback(bench: Bench, case: Case) -> None:
    """The same requests over HTTP; the client's JSON is prepared, the server's is part of the time."""
    folder, rng = bench.folder / "recd-transformer", np.random.default_rng(bench.seed)
    try:
        if bench.size == "tiny":
            raise Unavailable("too slow to start for a test")
        with served_over_http(folder) as (send, process):
            for count in CANDIDATES:
                say(f"loopback, {count} candidates")
                requests = [case.request(count, rng) for _ in range(bench.sizes.num_requests)]
                bodies = [infer_body(request, case.signature) for request in requests]
                taken = closed_loop(lambda n, bodies=bodies: send(bodies[n]), len(bodies), seconds=3.0)  # type: ignore[misc]
                note = f"p50 {percentile_ms(taken, 0.5):.2f} ms, p99 {percentile_ms(taken, 0.99):.2f} ms, closed loop"
                rate = count * len(taken) / sum(taken)
                bench.metrics[f"loopback_{count}"] = plain_value([rate], unit="candidates/s", note=note)
                rate = 0.7 * len(taken) / sum(taken)
                taken = open_loop(lambda n, b=bodies: send(b[n]), len(bodies), rate=rate, seconds=5.0, rng=rng)  # type: ignore[misc]
                note = f"Poisson arrivals, {rate:.0f} requests/s (70% of capacity), p50 {percentile_ms(taken, 0.5):.2f}"
                value = plain_value([percentile_ms(taken, 0.99)], unit="ms", note=note)
                bench.metrics[f"loopback_{count}_p99_open"] = value
            server = psutil.Process(process)
            bytes_ = sum(own.memory_info().rss for own in [server, *server.children(recursive=True)])
            bench.metrics["loopback_memory"] = plain_value([bytes_ / 2**20], unit="MiB", note="server and its workers")
    except Unavailable as reason:
        bench.skipped["loopback"] = str(reason)


def main() -> None:
    options = parse_options(__doc__ or "", quick="fewer pairs, shorter loops, smaller tables")
    warn_if_busy()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="recmill-serving-") as scratch:
        bench = Bench(folder=Path(scratch), sizes=SIZES[options.size], seed=options.seed, size=options.size)
        no_globo = why_no_globo()
        for data in ("recd", "globo"):
            if data == "globo" and no_globo:
                bench.skipped["globo"] = no_globo
                continue
            dataset = bench.dataset(data)
            for name, encoder in ENCODERS.items():
                case = make_case(dataset, encoder, num_samples=bench.sizes.num_samples, seed=options.seed)
                measure_case(bench, data, name, case)
                if data == "recd" and name == "transformer":
                    say("compare scores")
                    served = RequestModel.load(bench.folder / "recd-transformer")
                    largest = largest_difference(
                        case, served, num_requests=bench.sizes.equal_requests, rng=np.random.default_rng(1)
                    )
                    note = f"largest difference to repeating the user, {bench.sizes.equal_requests:,} random requests"
                    bench.metrics["score_difference"] = plain_value([largest], unit="probability", note=note)
                    measure_loopback(bench, case)
            if data == "globo":
                measure_auc(bench, dataset)
        measure_large_table(bench)
    finish(options, bench.metrics, skipped=bench.skipped, extra={"latency": bench.latency})


if __name__ == "__main__":
    with torch.inference_mode(False), torch.no_grad():
        main()
