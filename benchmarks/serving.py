"""What request-shaped scoring gains: candidates per second, latency and memory of one core that serves a ranker.

    python benchmarks/serving.py [--quick] [--only STAGE] [--json PATH|-] [--seed K]

A request is one user and 1, 20, 100 or 500 candidates: users and candidates of `recd` and globo, models with random
weights (speed does not depend on them). Baseline: the exported program, model.pt2, with the user repeated for every
candidate; preparing its padded inputs is not counted. Ours: `RequestModel.score`, from arrays to probabilities with all
checks. Also, on `recd` with 1 and 100 candidates, against the model with plain embeddings as TorchScript, AOTInductor
(compiled within a time limit) and onnxruntime. Everything runs on one thread in one process, in alternating pairs; the
ratio is the mean of their logarithms; rates are per second of CPU time, latencies by the clock. Open loop: Poisson
arrivals at 70% of the baseline's rate. Over loopback: `recmill serve`, if its environment is there.

The file of --json is written after every stage, with `is_partial` until the last. The same command continues it, and
--only measures one stage: recd_transformer, recd_transformer_rivals, recd_pooled, recd_pooled_rivals,
recd_pooled_forms, globo_transformer, globo_pooled, score_difference, large_table, globo_auc_difference, loopback
or loopback_globo. RECMILL_SERVING_WORK names a folder that keeps logs, models and compiled rivals for later calls.
"""

from __future__ import annotations

import os

from recmill.training.processes import rank_environment

os.environ.update(rank_environment() | {"OMP_NUM_THREADS": "1"})  # before any library reads it

import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from harness import compare, parse_options, plain_count, plain_value, say, warn_if_busy
from serving_bench import GB, Bench, Runs
from serving_loops import closed_loop, infer_body, measure_apart, open_loop, percentile_ms, served_over_http
from serving_memory import forget_cache, memory_group, write_large_model
from serving_models import RIVALS, Case, Inputs, Scorer, Unavailable, exported_program, largest_difference, make_case
from session_logs import why_no_globo

from recmill.serving import RequestBatch, RequestModel
from recmill.training.config import TrainConfig
from recmill.training.serving import export_checkpoint
from recmill.training.trainer import train

ENCODERS = {"transformer": "transformer", "pooled": "mean"}
CANDIDATES = (1, 20, 100, 500)
MEMORY_BYTES = 2 * GB  # of a process with tables that are larger, and of the system's cache of their files


def make_case_of(bench: Bench, data: str, name: str) -> Case:
    return make_case(bench.dataset(data), ENCODERS[name], num_samples=bench.sizes.num_samples, seed=bench.seed)


def served_folder(bench: Bench, data: str, name: str, case: Case) -> Path:
    return written(case, bench.folder / f"{data}-{name}")


def written(case: Case, folder: Path, form: str = "float32") -> Path:
    return folder if folder.exists() else case.write(folder, form)


def measure_case(bench: Bench, data: str, name: str) -> None:
    rng = np.random.default_rng(bench.seed)
    case = make_case_of(bench, data, name)
    folder = served_folder(bench, data, name, case)
    model = RequestModel.load(folder, memory="resident")
    program = exported_program(case, folder)
    for count in CANDIDATES:
        key = f"{data}_{name}_{count}"
        say(key)
        requests, inputs = make_requests(bench, case, count, rng)
        difference = np.abs(program(*inputs[0]).numpy() - model.score(requests[0])).max()
        assert difference < 1e-5, f"{key}: scores differ by {difference}"
        runs: Runs = {
            "program": lambda n, inputs=inputs: program(*inputs[n]),
            "request": lambda n, requests=requests: model.score(requests[n]),
        }
        rates = bench.loops(key, runs, count)
        bench.metrics[key] = compare(*rates, unit="candidates/s", note=f"one core; {bench.note(key)}")
        if count == 100:
            measure_open_loop(bench, f"{key}_p99_open", runs, float(np.mean(rates[0])) / count)


def make_requests(
    bench: Bench, case: Case, count: int, rng: np.random.Generator
) -> tuple[list[RequestBatch], list[Inputs]]:
    requests = [case.request(count, rng) for _ in range(bench.sizes.num_requests)]
    return requests, [case.repeat_user(request) for request in requests]


def measure_rivals(bench: Bench, name: str) -> None:
    """The same model in other runtimes, with the user repeated, for 1 and 100 candidates."""
    rng = np.random.default_rng(bench.seed)
    case = make_case_of(bench, "recd", name)
    folder = served_folder(bench, "recd", name, case)
    model = RequestModel.load(folder, memory="resident")
    exported_program(case, folder)  # AOTInductor compiles it
    given = {count: make_requests(bench, case, count, rng) for count in (1, 100)}
    rivals = make_rivals(bench, f"recd_{name}", case, folder, given[1][1][0])
    for count, (requests, inputs) in given.items():
        for rival, scorer in rivals.items():
            key = f"recd_{name}_{count}_vs_{rival}"
            say(key)
            difference = np.abs(np.asarray(scorer(*inputs[0])) - model.score(requests[0])).max()
            assert difference < 1e-4, f"{key}: scores differ by {difference}"
            against: Runs = {
                rival: lambda n, inputs=inputs, scorer=scorer: scorer(*inputs[n]),
                "request": lambda n, requests=requests: model.score(requests[n]),
            }
            rates = bench.loops(key, against, count)
            bench.metrics[key] = compare(*rates, unit="candidates/s", note=bench.note(key))


def measure_open_loop(bench: Bench, key: str, runs: Runs, capacity: float) -> None:
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
            if bench.options.tiny and rival != "torchscript":
                raise Unavailable("too slow to build for a test")
            found[rival] = make(case, folder, example, bench.sizes.compile_seconds)
        except Unavailable as reason:
            bench.skipped |= {f"{key}_{count}_vs_{rival}": str(reason) for count in (1, 100)}
    return found


def measure_forms(bench: Bench) -> None:
    """Other forms of the tables against float32: speed and memory of a process that holds all of it."""
    key, case = "recd_pooled_100", make_case_of(bench, "recd", "pooled")
    requests, _ = make_requests(bench, case, 100, np.random.default_rng(bench.seed))
    settings = {"memory": "resident", "num_requests": 20, "num_candidates": 100}
    whole = served_folder(bench, "recd", "pooled", case)
    plain = RequestModel.load(whole, memory="resident")
    base = measure_apart(whole, **settings)["model_bytes"]
    small = {form: written(case, bench.folder / f"{key}-{form}", form) for form in ("bf16", "int8", "int4")}
    encoder = case.config.sequence_encoder
    shared = make_case(bench.dataset("recd"), encoder, num_samples=32, seed=bench.seed, compression=10)
    small["shared10x"] = written(shared, bench.folder / f"{key}-shared")
    for form, folder in small.items():
        name = f"{key}_{form}"
        say(name)
        model = RequestModel.load(folder, memory="resident")
        runs: Runs = {
            "float32": lambda n: plain.score(requests[n]),
            form: lambda n, model=model: model.score(requests[n]),
        }
        rates = bench.loops(name, runs, 100)
        bench.metrics[name] = compare(*rates, unit="candidates/s", note="against float32 tables")
        bytes_ = measure_apart(folder, **settings)["model_bytes"]
        pairs = [[base / 2**20] * 2, [bytes_ / 2**20] * 2]
        note = "growth of a process that loads and serves the model, against float32 tables"
        bench.metrics[f"{name}_memory"] = compare(*pairs, unit="MiB", note=note, less_is_better=True)


def measure_auc(bench: Bench) -> None:
    """A model trained on globo: how far the AUC of each form is from float32."""
    run, dataset = Path(tempfile.mkdtemp(dir=bench.folder)), bench.dataset("globo", one_in=bench.sizes.auc_users)
    train(dataset.path, out=run / "train", nproc=1, config=TrainConfig(epochs=1, batch_size=2048, seed=bench.seed))
    checkpoint = run / "train" / "checkpoint"
    result = export_checkpoint(checkpoint, out=run / "export", data=dataset.path, for_mlflow=False)
    forms = result["request"]["forms"]
    for form in ("bf16", "int8", "int4"):
        difference = abs(forms[form]["auc"] - forms["float32"]["auc"])
        note = f"AUC {forms[form]['auc']:.5f}, float32 {forms['float32']['auc']:.5f}; bytes {forms[form]['bytes']:,}"
        note += f"; one in {bench.sizes.auc_users} users"
        bench.metrics[f"globo_auc_difference_{form}"] = plain_count(difference, unit="AUC", note=note)


def measure_equality(bench: Bench) -> None:
    case = make_case_of(bench, "recd", "transformer")
    for weight in case.model.ranker.top.parameters():
        weight.mul_(4.0)  # new weights give about the same score to everything
    with tempfile.TemporaryDirectory(dir=bench.folder) as scratch:
        served = RequestModel.load(case.write(Path(scratch) / "model"))
        count = bench.sizes.equal_requests
        largest, lowest, highest = largest_difference(case, served, num_requests=count, rng=np.random.default_rng(1))
    note = f"largest difference to repeating the user, {count:,} random requests, float32, "
    note += f"scores from {lowest:.3f} to {highest:.3f}"
    bench.metrics["score_difference"] = plain_count(largest, unit="probability", note=note)


def measure_large_table(bench: Bench) -> None:
    """A table of 20 GB behind a mapped file, of which at most 1 GB of cold pages is in memory. Nothing is cached.

    The process and the operating system's cache of the file get 2 GB together, so most rows come from the disk.
    """
    sizes, found = bench.sizes, []
    if shutil.disk_usage(bench.folder).free < sizes.table_bytes + GB:
        bench.skipped["large_table_resident"] = f"needs {sizes.table_bytes / GB + 1:g} GB of disk"
        return
    settings = {"memory": "mapped", "cold_bytes": sizes.limit_bytes, "num_candidates": 100}
    scratch = tempfile.TemporaryDirectory(dir=bench.folder)
    with scratch as folder, memory_group(MEMORY_BYTES) as group:
        model = write_large_model(Path(folder) / "large", table_bytes=sizes.table_bytes)
        for _ in range(sizes.pairs):
            forget_cache(model)
            found.append(measure_apart(model, group=group, num_requests=sizes.memory_requests, **settings))
    what = f"{sizes.table_bytes / GB:g} GB of tables, uniform ids, at most {sizes.limit_bytes / GB:g} GB of cold pages"
    within = "memory with the file's cache not limited"
    if group is not None:
        within = f"memory with the file's cache limited to {MEMORY_BYTES / GB:g} GB"
    resident = [own["resident_bytes"] / GB for own in found]
    bench.metrics["large_table_resident"] = plain_value(resident, unit="GB", note=f"{what}; {within}")
    released = max(own["num_released"] for own in found)
    p50_ms = float(np.mean([own["p50_ms"] for own in found]))
    note = f"100 candidates, 20 ids of history, {within}, nothing cached before; p50 {p50_ms:.2f} ms; "
    note += f"pages were given back up to {released:.0f} times"
    bench.metrics["large_table_p99"] = plain_value([own["p99_ms"] for own in found], unit="ms", note=note)


def measure_loopback(bench: Bench, data: str, prefix: str) -> None:
    """The same requests over HTTP; the client's JSON is prepared, the server's is part of the time."""
    rng = np.random.default_rng(bench.seed)
    case = make_case_of(bench, data, "transformer")
    folder = served_folder(bench, data, "transformer", case)
    seconds = 5 * bench.sizes.seconds
    try:
        if bench.options.tiny:
            raise Unavailable("too slow to start for a test")
        with served_over_http(folder) as (send, process):
            for count in CANDIDATES:
                say(f"{prefix}, {count} candidates")
                requests = [case.request(count, rng) for _ in range(bench.sizes.num_requests)]
                bodies = [infer_body(request, case.signature) for request in requests]
                loops = [
                    closed_loop(lambda n, b=bodies: send(b[n]), len(bodies), seconds=bench.sizes.seconds)
                    for _ in range(bench.sizes.pairs)
                ]
                rates = [count * len(own) / sum(own) for own in loops]
                taken = [own for loop in loops for own in loop]
                p50_ms, p99_ms = (percentile_ms(taken, share) for share in (0.5, 0.99))
                note = f"one core; closed loop, p50 {p50_ms:.2f}, p99 {p99_ms:.2f} ms"
                bench.metrics[f"{prefix}_{count}"] = plain_value(rates, unit="candidates/s", note=note)
                rate = 0.7 * len(taken) / sum(taken)
                taken = open_loop(lambda n, b=bodies: send(b[n]), len(bodies), rate=rate, seconds=seconds, rng=rng)
                note = f"Poisson arrivals, {rate:.0f} requests/s (70% of capacity), p50 {percentile_ms(taken, 0.5):.2f}"
                value = plain_value([percentile_ms(taken, 0.99)], unit="ms", note=note)
                bench.metrics[f"{prefix}_{count}_p99_open"] = value
            server = psutil.Process(process)
            bytes_ = sum(own.memory_info().rss for own in [server, *server.children(recursive=True)])
            bench.metrics[f"{prefix}_memory"] = plain_value([bytes_ / 2**20], unit="MiB", note="server and its workers")
    except Unavailable as reason:
        bench.skipped |= dict.fromkeys((prefix, f"{prefix}_100"), str(reason))


def main() -> None:
    options = parse_options(__doc__ or "", quick="fewer pairs, shorter loops, smaller tables")
    warn_if_busy()
    torch.set_num_threads(1)
    kept = os.environ.get("RECMILL_SERVING_WORK")
    scratch = Path(kept) if kept else Path(tempfile.mkdtemp(prefix="recmill-serving-"))
    scratch.mkdir(exist_ok=True)
    bench, is_complete = Bench(folder=scratch, options=options), False
    bench.stop_on_signals()
    bench.resume()
    no_globo = why_no_globo()
    try:
        # What the issue asks for comes first: a run that is cut has it.
        for data in ("recd", "globo"):
            if data == "globo" and no_globo:
                bench.skipped["globo"] = no_globo
                continue
            for name in ENCODERS:
                bench.run(f"{data}_{name}", partial(measure_case, bench, data, name))
        for name in ENCODERS:
            bench.run(f"recd_{name}_rivals", partial(measure_rivals, bench, name))
        bench.run("recd_pooled_forms", partial(measure_forms, bench))
        bench.run("score_difference", partial(measure_equality, bench))
        bench.run("large_table", partial(measure_large_table, bench))
        if not no_globo:
            bench.run("globo_auc_difference", partial(measure_auc, bench))
        bench.run("loopback", partial(measure_loopback, bench, "recd", "loopback"))
        if not no_globo:
            bench.run("loopback_globo", partial(measure_loopback, bench, "globo", "loopback_globo"))
        is_complete = not bench.left_out
    finally:
        if bench.metrics:
            bench.finish(is_partial=not is_complete)
        if not kept:
            shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    with torch.inference_mode(False), torch.no_grad():
        main()
