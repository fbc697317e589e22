"""What storing, reading and training every repeated list once buys (RecD), from bytes on disk to samples a second.

    python benchmarks/recd.py [--quick] [--json PATH|-] [--seed K]

Baselines: the same rows in time order as zstd Parquet with pyarrow's default settings (storage), and plain
KeyedJaggedTensors read from our time-ordered layout, through the same FBGEMM fused tables (preprocessing, training).
Ours: the deduplicated layout, features chosen by `dedup=auto`. Notes give what clustering alone does, without IKJT.
Everything is measured in turns in this process. `train_*` go from the files to the last optimiser step: whole epochs,
but for the transformer on `recd` in the quick form, which sees one batch a turn.
Globo is a sample of its users, each with all of their clicks, so sessions and histories are as long as in all of it.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from recmill.training.processes import rank_environment

os.environ.update(rank_environment())  # before anything reads it: how threads wait and memory is kept, as in training

import torch
from dedup_kernel import measure_dedup
from harness import Metric, Options, finish, parse_options, say, warn_if_busy
from recd_curve import run_curve
from recd_measures import (
    make_trainers,
    measure_memory,
    measure_preprocessing,
    measure_reader_bytes,
    measure_storage,
    measure_training,
)
from recd_sizes import SIZES, Sizes
from session_logs import SAMPLES_PER_SESSION, Logs, why_no_globo
from training_rate import one_rank
from wire_bytes import count_wire_bytes

GLOBO_METRICS = (
    "storage_globo",
    "preprocess_globo",
    "train_sequence_globo",
    "train_pooled_globo",
    "reader_bytes_globo",
    "wire_bytes_globo",
)


def make_logs(logs: Logs, sizes: Sizes, seed: int, *, has_globo: bool) -> dict[str, Metric]:
    """Everything that is measured, but the curve; while the large logs are written, two ranks count their bytes."""
    recd = [(rows, SAMPLES_PER_SESSION) for rows in (sizes.rows, sizes.sequence_rows)]
    globo = [sizes.globo_users, sizes.sequence_globo_users] if has_globo else []
    logs.make_ahead(recd=[*recd, (sizes.control_rows, 1.0)], globo=globo)
    wired = {"wire_bytes": logs.recd(sizes.rows)}
    if has_globo:
        wired["wire_bytes_globo"] = logs.globo(sizes.globo_users)
    with ThreadPoolExecutor(max_workers=1) as pool:
        shape = {"batch_size": sizes.batch_size, "num_batches": sizes.wire_batches, "seed": seed}
        counted = pool.submit(count_wire_bytes, wired, **shape)
        stored = [sizes.storage_globo_users] if has_globo else []
        logs.make_ahead(recd=[(sizes.storage_rows, SAMPLES_PER_SESSION)], globo=stored)
        return counted.result()


def moved_bytes(metrics: dict[str, Metric]) -> dict[str, Any]:
    """What the metrics say of bytes a sample, by log and way."""
    ways = {"reader_to_trainer": "reader_bytes", "over_the_wire": "wire_bytes"}
    return {
        log: {way: {side: metrics[name + suffix][side] for side in ("baseline", "ours")} for way, name in ways.items()}
        for log, suffix in (("recd", ""), ("globo", "_globo"))
        if f"reader_bytes{suffix}" in metrics
    }


def run_recd(logs: Logs, sizes: Sizes, options: Options) -> dict[str, Metric]:
    """The metrics of the synthetic preset."""
    seed, thorough = options.seed, options.size == "full"
    main, stored = logs.recd(sizes.rows), logs.recd(sizes.storage_rows)
    names = ("session", "deduplicated")
    found = measure_storage(stored, *names, thorough=thorough)
    metrics = {f"storage_{name}": metric for name, metric in zip(names, found, strict=True)}
    say("preprocess")
    metrics["preprocess"] = measure_preprocessing(stored, sizes, seed)
    metrics["reader_bytes"] = measure_reader_bytes(main, sizes, seed)
    say("train with a transformer")
    layouts = logs.recd(sizes.sequence_rows)
    shape = {"batch_size": sizes.sequence_batch_size, "num_batches": sizes.sequence_batches}
    trainers = make_trainers(layouts, "transformer", sizes, seed, **shape)
    metrics["train_sequence"] = measure_training(layouts, trainers, repeats=sizes.sequence_repeats, num_steps=1)
    memory_repeats = max(1, sizes.sequence_repeats // 3)
    metrics["peak_memory"] = measure_memory(trainers, repeats=memory_repeats)
    say("train pooled")
    trainers = make_trainers(main, "mean", sizes, seed)
    metrics["train_pooled"] = measure_training(main, trainers, repeats=sizes.repeats, num_steps=2)
    say("train pooled, one sample a session")
    layouts = logs.recd(sizes.control_rows, samples_per_session=1.0)
    trainers = make_trainers(layouts, "mean", sizes, seed)
    metrics["train_control"] = measure_training(layouts, trainers, repeats=sizes.control_repeats, num_steps=1)
    return metrics


def run_globo(logs: Logs, sizes: Sizes, options: Options) -> dict[str, Metric]:
    """The metrics of globo."""
    seed, main = options.seed, logs.globo(sizes.globo_users)
    stored = logs.globo(sizes.storage_globo_users)
    metrics = {"storage_globo": measure_storage(stored, "deduplicated", thorough=options.size == "full")[0]}
    say("preprocess globo")
    metrics["preprocess_globo"] = measure_preprocessing(stored, sizes, seed)
    say("train globo with a transformer")
    layouts = logs.globo(sizes.sequence_globo_users)
    trainers = make_trainers(layouts, "transformer", sizes, seed)
    repeats = sizes.sequence_globo_repeats
    metrics["train_sequence_globo"] = measure_training(layouts, trainers, repeats=repeats, num_steps=3)
    say("train globo pooled")
    trainers = make_trainers(main, "mean", sizes, seed)
    metrics["train_pooled_globo"] = measure_training(main, trainers, repeats=sizes.globo_repeats, num_steps=3)
    metrics["reader_bytes_globo"] = measure_reader_bytes(main, sizes, seed)
    return metrics


def main() -> None:
    options = parse_options(__doc__, quick="smaller logs, fewer repeats, no curve over samples a session (under 90 s)")
    warn_if_busy()
    warnings.filterwarnings("ignore")  # TorchRec uses what torch is about to drop, and logs that it does
    logging.getLogger("torch").setLevel(logging.ERROR)
    sizes = SIZES[options.size]
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="recd-") as folder, one_rank():
        logs = Logs(Path(folder), options.seed, widest_globo=sizes.storage_globo_users)
        wired = make_logs(logs, sizes, options.seed, has_globo=not why_no_globo())
        metrics = run_recd(logs, sizes, options)
        if reason := why_no_globo():
            skipped = dict.fromkeys(GLOBO_METRICS, reason)
        else:
            metrics |= run_globo(logs, sizes, options)
        metrics |= wired
        series: dict[str, Any] = {"bytes_per_sample": moved_bytes(metrics)}
        num_rows, repeats = sizes.kernel
        generator = torch.Generator().manual_seed(options.seed)
        metrics["dedup_kernel"] = measure_dedup("clustered", num_rows=num_rows, repeats=repeats, generator=generator)
        if options.size == "full":
            series["samples_per_session"] = run_curve(logs, sizes, options.seed)
    finish(options, metrics, skipped=skipped, extra={"series": series})


if __name__ == "__main__":
    main()
