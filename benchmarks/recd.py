"""What storing, reading and training each repeated list once gains (RecD), from bytes on disk to samples per second.

    python benchmarks/recd.py [--quick] [--json PATH|-] [--seed K]

Baselines: the same rows in time order with the best of several settings of the same writer (storage), and plain
KeyedJaggedTensors read from our time-ordered layout, through the same FBGEMM fused tables (preprocessing, training).
Ours: the deduplicated layout, features chosen by `dedup=auto`. Notes give the effect of clustering alone, without IKJT.
Both sides are measured in turns in one process, a separate one for each `train_*`. These go from the files to the last
optimiser step: whole epochs, except in the quick form for the transformer on `recd` (one batch per turn) and the pooled
model on globo (20 batches).
Globo is a sample of its users, each with all clicks, so sessions and histories are as long as in the whole data set.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from recmill.training.processes import rank_environment

os.environ.update(rank_environment())  # before any library reads it: thread and memory settings as in training

import torch
from dedup_kernel import RIVALS, measure_dedup
from harness import Metric, Options, finish, fresh_processes, parse_options, say, warn_if_busy
from recd_curve import run_curve
from recd_measures import measure_preprocessing, measure_reader_bytes, measure_storage, quieten, train_apart
from recd_rank import NUM_RANKS
from recd_sizes import SIZES, Sizes
from session_logs import SAMPLES_PER_SESSION, Logs, why_no_globo
from training_rate import one_rank
from wire_bytes import count_wire_bytes

GLOBO_METRICS = (
    "storage_globo_vs_best",
    "preprocess_globo",
    "train_sequence_globo",
    "train_pooled_globo",
    "reader_bytes_globo",
    "wire_bytes_globo",
)
NUM_TRAINED = 5  # comparisons that train, each in a separate process


def make_logs(logs: Logs, sizes: Sizes, seed: int, *, ranks: ProcessPoolExecutor, has_globo: bool) -> dict[str, Metric]:
    """Write all logs but the curve's; two ranks count their bytes as soon as their logs are ready."""
    recd = [(rows, SAMPLES_PER_SESSION) for rows in (sizes.rows, sizes.sequence_rows, sizes.storage_rows)]
    globo = [sizes.sequence_globo_users, sizes.storage_globo_users, sizes.globo_users] if has_globo else []
    with logs.made_ahead(recd=[*recd, (sizes.control_rows, 1.0)], globo=globo):
        wired = {"wire_bytes": logs.recd(sizes.rows)}
        if has_globo:
            wired["wire_bytes_globo"] = logs.globo(sizes.sequence_globo_users)
        shape = {"batch_size": sizes.batch_size, "num_batches": sizes.wire_batches, "seed": seed}
        return count_wire_bytes(wired, ranks=ranks, **shape)


def moved_bytes(metrics: dict[str, Metric]) -> dict[str, Any]:
    """Bytes per sample of the metrics, by log and path."""
    ways = {"reader_to_trainer": "reader_bytes", "over_the_wire": "wire_bytes"}
    return {
        log: {way: {side: metrics[name + suffix][side] for side in ("baseline", "ours")} for way, name in ways.items()}
        for log, suffix in (("recd", ""), ("globo", "_globo"))
        if f"reader_bytes{suffix}" in metrics
    }


def run_recd(logs: Logs, sizes: Sizes, options: Options, processes: Iterator[ProcessPoolExecutor]) -> dict[str, Metric]:
    """The metrics of the synthetic preset."""
    seed = options.seed
    main, stored = logs.recd(sizes.rows), logs.recd(sizes.storage_rows)
    names = ("session", "deduplicated")
    found = measure_storage(stored, *names)
    metrics = {f"storage_{name}_vs_best": metric for name, metric in zip(names, found, strict=True)}
    say("preprocess")
    metrics["preprocess"] = measure_preprocessing(stored, sizes, seed, repeats=sizes.preprocess_repeats)
    metrics["reader_bytes"] = measure_reader_bytes(main, sizes, seed)
    say("train with a transformer")
    layouts, shape = logs.recd(sizes.sequence_rows), {"batch_size": sizes.sequence_batch_size}
    shape |= {"num_batches": sizes.sequence_batches, "memory_repeats": max(1, sizes.sequence_repeats // 3)}
    how = {"repeats": sizes.sequence_repeats, "num_steps": 1, **shape}
    trained = next(processes).submit(train_apart, layouts, "transformer", sizes, seed, **how)
    metrics["train_sequence"], metrics["peak_memory"] = trained.result()
    say("train pooled")
    how = {"repeats": sizes.repeats, "num_steps": 2}
    metrics["train_pooled"] = next(processes).submit(train_apart, main, "mean", sizes, seed, **how).result()[0]
    say("train pooled, one sample a session")
    layouts, how = logs.recd(sizes.control_rows, samples_per_session=1.0), {"repeats": sizes.control_repeats}
    trained = next(processes).submit(train_apart, layouts, "mean", sizes, seed, **how, num_steps=1, same_lookups=True)
    metrics["train_control_same_lookups"] = trained.result()[0]
    return metrics


def run_globo(
    logs: Logs, sizes: Sizes, options: Options, processes: Iterator[ProcessPoolExecutor]
) -> dict[str, Metric]:
    """The metrics of globo."""
    seed, main = options.seed, logs.globo(sizes.globo_users)
    stored = logs.globo(sizes.storage_globo_users)
    metrics = {"storage_globo_vs_best": measure_storage(stored, "deduplicated")[0]}
    say("preprocess globo")
    metrics["preprocess_globo"] = measure_preprocessing(stored, sizes, seed, repeats=sizes.preprocess_globo_repeats)
    trained = {
        "train_sequence_globo": (
            sizes.sequence_globo_users,
            "transformer",
            {"repeats": sizes.sequence_globo_repeats, "batch_size": sizes.sequence_globo_batch_size},
        ),
        "train_pooled_globo": (
            sizes.globo_users,
            "mean",
            {"repeats": sizes.globo_repeats, "num_batches": sizes.globo_batches},
        ),
    }
    for name, (users, encoder, shape) in trained.items():
        say(f"{name}: {encoder}")
        how = {"num_steps": 2, **shape}
        found = next(processes).submit(train_apart, logs.globo(users), encoder, sizes, seed, **how)
        metrics[name] = found.result()[0]
    metrics["reader_bytes_globo"] = measure_reader_bytes(main, sizes, seed)
    return metrics


def main() -> None:
    options = parse_options(
        __doc__, quick="smaller logs, fewer repeats, no curve over samples per session (under 90 s)"
    )
    warn_if_busy()
    quieten()
    sizes = SIZES[options.size]
    skipped: dict[str, str] = {}
    with (
        fresh_processes(os.cpu_count() or 1, NUM_RANKS, *[1] * NUM_TRAINED) as processes,
        tempfile.TemporaryDirectory(prefix="recd-") as folder,
        one_rank(),
    ):
        logs = Logs(Path(folder), options.seed, widest_globo=sizes.storage_globo_users, writers=next(processes))
        wired = make_logs(logs, sizes, options.seed, ranks=next(processes), has_globo=not why_no_globo())
        metrics = run_recd(logs, sizes, options, processes)
        if reason := why_no_globo():
            skipped = dict.fromkeys(GLOBO_METRICS, reason)
        else:
            metrics |= run_globo(logs, sizes, options, processes)
        metrics |= wired
        series: dict[str, Any] = {"bytes_per_sample": moved_bytes(metrics)}
        num_rows, repeats = sizes.kernel
        generator = torch.Generator().manual_seed(options.seed)
        kernel = {"num_rows": num_rows, "repeats": repeats, "generator": generator}
        metrics |= {
            "dedup_kernel" + suffix: measure_dedup("clustered", rival, **kernel) for rival, suffix in RIVALS.items()
        }
        if options.size == "full":
            series["samples_per_session"] = run_curve(logs, sizes, options.seed)
    finish(options, metrics, skipped=skipped, extra={"series": series})


if __name__ == "__main__":
    main()
