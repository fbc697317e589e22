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
from harness import Metric, fresh_processes, parse_options, say, warn_if_busy
from parts import Found, Parts
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
    "train_standard_globo",
    "train_pooled_globo",
    "reader_bytes_globo",
    "wire_bytes_globo",
)
NUM_TRAINED = 7  # comparisons that train, each in a separate process


def make_logs(logs: Logs, sizes: Sizes, seed: int, *, ranks: ProcessPoolExecutor) -> dict[str, Metric]:
    """Write all logs but the curve's; two ranks count their bytes as soon as their logs are ready."""
    has_globo = not why_no_globo()
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
        if f"reader_bytes{suffix}" in metrics and f"wire_bytes{suffix}" in metrics
    }


def run_recd(parts: Parts, logs: Logs, sizes: Sizes, processes: Iterator[ProcessPoolExecutor]) -> None:
    """The metrics of the synthetic preset."""
    seed = parts.options.seed

    def store() -> Found:
        names = ("session", "deduplicated")
        found = zip(names, measure_storage(logs.recd(sizes.storage_rows), *names), strict=True)
        return Found(metrics={f"storage_{name}_vs_best": metric for name, metric in found})

    def read() -> Found:
        say("preprocess")
        main, stored = logs.recd(sizes.rows), logs.recd(sizes.storage_rows)
        rate = measure_preprocessing(stored, sizes, seed, repeats=sizes.preprocess_repeats)
        return Found(metrics={"preprocess": rate, "reader_bytes": measure_reader_bytes(main, sizes, seed)})

    def train_sequence() -> Found:
        say("train with a transformer")
        layouts, shape = logs.recd(sizes.sequence_rows), {"batch_size": sizes.sequence_batch_size}
        shape |= {"num_batches": sizes.sequence_batches, "memory_repeats": max(1, sizes.sequence_repeats // 3)}
        how = {"repeats": sizes.sequence_repeats, "num_steps": 1, **shape}
        trained = next(processes).submit(train_apart, layouts, "transformer", sizes, seed, **how)
        return Found(metrics=dict(zip(("train_sequence", "peak_memory"), trained.result(), strict=True)))

    def train_standard() -> Found:
        say("train with the standard transformer")
        layouts, shape = logs.recd(sizes.sequence_rows), {"batch_size": sizes.sequence_batch_size}
        how = {"repeats": sizes.sequence_repeats, "num_steps": 1, "num_batches": sizes.sequence_batches, **shape}
        trained = next(processes).submit(train_apart, layouts, "standard_transformer", sizes, seed, **how)
        return Found(metrics={"train_standard": trained.result()[0]})

    def train_pooled() -> Found:
        say("train pooled")
        how = {"repeats": sizes.repeats, "num_steps": 2}
        trained = next(processes).submit(train_apart, logs.recd(sizes.rows), "mean", sizes, seed, **how)
        return Found(metrics={"train_pooled": trained.result()[0]})

    def train_control() -> Found:
        say("train pooled, one sample per session")
        layouts, how = logs.recd(sizes.control_rows, samples_per_session=1.0), {"repeats": sizes.control_repeats}
        how |= {"num_steps": 1, "same_lookups": True}
        trained = next(processes).submit(train_apart, layouts, "mean", sizes, seed, **how)
        return Found(metrics={"train_control_same_lookups": trained.result()[0]})

    for run in (store, read, train_sequence, train_standard, train_pooled, train_control):
        parts.measure(f"recd, {run.__name__}", run)


def run_globo(parts: Parts, logs: Logs, sizes: Sizes, processes: Iterator[ProcessPoolExecutor]) -> None:
    """The metrics of globo."""
    seed = parts.options.seed

    def store() -> Found:
        stored = logs.globo(sizes.storage_globo_users)
        return Found(metrics={"storage_globo_vs_best": measure_storage(stored, "deduplicated")[0]})

    def read() -> Found:
        say("preprocess globo")
        main, stored = logs.globo(sizes.globo_users), logs.globo(sizes.storage_globo_users)
        rate = measure_preprocessing(stored, sizes, seed, repeats=sizes.preprocess_globo_repeats)
        return Found(metrics={"preprocess_globo": rate, "reader_bytes_globo": measure_reader_bytes(main, sizes, seed)})

    def train(name: str, users: int, encoder: str, **shape: int | None) -> Found:
        say(f"{name}: {encoder}")
        found = next(processes).submit(train_apart, logs.globo(users), encoder, sizes, seed, num_steps=2, **shape)
        return Found(metrics={name: found.result()[0]})

    sequence = {"repeats": sizes.sequence_globo_repeats, "batch_size": sizes.sequence_globo_batch_size}

    def train_sequence() -> Found:
        return train("train_sequence_globo", sizes.sequence_globo_users, "transformer", **sequence)

    def train_standard() -> Found:
        return train("train_standard_globo", sizes.sequence_globo_users, "standard_transformer", **sequence)

    def train_pooled() -> Found:
        shape = {"repeats": sizes.globo_repeats, "num_batches": sizes.globo_batches}
        return train("train_pooled_globo", sizes.globo_users, "mean", **shape)

    for run in (store, read, train_sequence, train_standard, train_pooled):
        parts.measure(f"globo, {run.__name__}", run)


def time_kernel(sizes: Sizes, seed: int) -> Found:
    num_rows, repeats = sizes.kernel
    how = {"num_rows": num_rows, "repeats": repeats, "generator": torch.Generator().manual_seed(seed)}
    found = {"dedup_kernel" + suffix: measure_dedup("clustered", rival, **how) for rival, suffix in RIVALS.items()}
    return Found(metrics=found)


def main() -> None:
    options = parse_options(
        __doc__, quick="smaller logs, fewer repeats, no curve over samples per session (under 90 s)"
    )
    warn_if_busy()
    quieten()
    sizes = SIZES[options.size]
    parts = Parts(options)
    with (
        fresh_processes(os.cpu_count() or 1, NUM_RANKS, *[1] * NUM_TRAINED) as processes,
        tempfile.TemporaryDirectory(prefix="recd-") as folder,
        one_rank(),
    ):
        logs = Logs(Path(folder), options.seed, widest_globo=sizes.storage_globo_users, writers=next(processes))
        ranks = next(processes)
        parts.measure("wire bytes", lambda: Found(metrics=make_logs(logs, sizes, options.seed, ranks=ranks)))
        run_recd(parts, logs, sizes, processes)
        if reason := why_no_globo():
            parts.skipped |= dict.fromkeys(GLOBO_METRICS, reason)
        else:
            run_globo(parts, logs, sizes, processes)
        parts.measure("kernel", lambda: time_kernel(sizes, options.seed))
        parts.extra["series"] = {"bytes_per_sample": moved_bytes(parts.metrics)}
        if options.size == "full":
            parts.measure("curve", lambda: curve_of(logs, sizes, options.seed))
    parts.finish()


def curve_of(logs: Logs, sizes: Sizes, seed: int) -> Found:
    return Found(extra={"series": {"samples_per_session": run_curve(logs, sizes, seed)}})


if __name__ == "__main__":
    main()
