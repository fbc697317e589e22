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
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# As the training launcher sets it: threads that spin while they wait take the cores from those that read.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pyarrow.parquet as pq
import torch
from dedup_kernel import measure_dedup
from harness import Metric, Options, compare, finish, in_turns, parse_options, say, warn_if_busy
from session_logs import LAYOUTS, SAMPLES_PER_SESSION, Layouts, Logs, why_no_globo, with_transforms
from training_rate import Trainer, check_same_losses, one_rank, open_batches
from wire_bytes import count_wire_bytes, wire_bytes

from recmill.artifacts import Dataset
from recmill.data.dataset import read_table
from recmill.data.parquet_writer import writer_options
from recmill.training.config import TrainConfig
from recmill.training.dedup import DedupChoice, choose_dedup

CURVE = (1.0, 2.0, 4.0, 8.0, SAMPLES_PER_SESSION)
GLOBO_METRICS = (
    "storage_globo",
    "preprocess_globo",
    "train_sequence_globo",
    "train_pooled_globo",
    "reader_bytes_globo",
    "wire_bytes_globo",
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured, and how often."""

    rows: int  # of the synthetic log that is stored, preprocessed and trained pooled
    sequence_rows: int  # of the one that is trained with a transformer
    sequence_batches: int | None  # of it that are trained; a log that short would have other sessions
    control_rows: int
    storage_rows: int  # of the one whose bytes are counted: dictionaries and footers weigh less in more rows
    storage_globo_users: int  # one in so many users of globo; this log is preprocessed, too
    globo_users: int  # of the one that is trained pooled
    sequence_globo_users: int
    batch_size: int
    sequence_batch_size: int  # on `recd`, whose histories are always 64 long
    repeats: int
    preprocess_repeats: int
    globo_repeats: int
    sequence_repeats: int
    control_repeats: int
    wire_batches: int  # that two ranks train on while their bytes are counted
    kernel: tuple[int, int]  # rows, repeats


SIZES = {
    "tiny": Sizes(
        rows=1_000,
        sequence_rows=300,
        sequence_batches=None,
        control_rows=300,
        storage_rows=1_000,
        storage_globo_users=20_000,
        globo_users=20_000,
        sequence_globo_users=20_000,
        batch_size=128,
        sequence_batch_size=128,
        repeats=1,
        preprocess_repeats=1,
        globo_repeats=1,
        sequence_repeats=1,
        control_repeats=1,
        wire_batches=1,
        kernel=(512, 1),
    ),
    "quick": Sizes(
        rows=8_400,
        sequence_rows=8_400,
        sequence_batches=1,
        control_rows=4_300,
        storage_rows=50_000,
        storage_globo_users=40,
        globo_users=200,
        sequence_globo_users=200,
        batch_size=2048,
        sequence_batch_size=1024,
        repeats=3,
        preprocess_repeats=5,
        globo_repeats=3,
        sequence_repeats=2,
        control_repeats=2,
        wire_batches=1,
        kernel=(8192, 5),
    ),
    "full": Sizes(
        rows=198_000,
        sequence_rows=18_000,
        sequence_batches=None,
        control_rows=40_000,
        storage_rows=198_000,
        storage_globo_users=20,
        globo_users=20,
        sequence_globo_users=40,
        batch_size=2048,
        sequence_batch_size=2048,
        repeats=7,
        preprocess_repeats=15,
        globo_repeats=7,
        sequence_repeats=7,
        control_repeats=11,
        wire_batches=8,
        kernel=(16384, 21),
    ),
}


def measure_storage(layouts: Layouts, *names: str, thorough: bool = False) -> list[Metric]:
    """Bytes a row of time-ordered Parquet with default settings, against those of some of our layouts."""
    table = read_table(layouts.time)
    settings: dict[str, dict[str, Any]] = {"default": {"compression": "zstd"}}
    if thorough:
        tuned = writer_options(table.schema, "time")
        settings |= {f"tuned, zstd {level}": {**tuned, "compression_level": level} for level in (3, 9, 19)}
    sizes = {"our time layout": stored_bytes(layouts.time)}
    with tempfile.TemporaryDirectory() as scratch:
        for name, options in settings.items():
            pq.write_table(table, Path(scratch) / "table.parquet", **options)
            sizes[name] = (Path(scratch) / "table.parquet").stat().st_size
    default, best = sizes["default"], min(sizes, key=lambda name: sizes[name])
    note = f"{table.num_rows:,} rows; time order, best of {len(sizes)} settings ({best}) {default / sizes[best]:.2f}x"
    metrics = []
    for layout in names:
        session = "" if layout == "session" else f", session layout {default / stored_bytes(layouts.session):.2f}x"
        per_row = [size / table.num_rows for size in (default, stored_bytes(getattr(layouts, layout)))]
        metrics.append(
            compare(*([size] for size in per_row), unit="bytes/row", note=note + session, less_is_better=True)
        )
    return metrics


def stored_bytes(dataset: Dataset) -> int:
    return sum(int(part["bytes"]) for part in dataset.parts)


def measure_preprocessing(layouts: Layouts, sizes: Sizes, seed: int) -> Metric:
    """Rows a second from the files to batches a trainer takes: read, decode, dedup, transform, batch."""
    config = TrainConfig(dedup="auto", batch_size=sizes.batch_size, seed=seed)
    chosen, plain = choose_dedup(layouts.deduplicated, layouts.schema, config), DedupChoice()

    def rate(dataset: Dataset, dedup: DedupChoice) -> Callable[[], float]:
        def read_epoch() -> float:
            started, num_rows = time.perf_counter(), 0
            with open_batches(dataset, dedup, batch_size=sizes.batch_size, seed=seed) as batches:
                for batch in batches:
                    num_rows += len(batch)
            return num_rows / (time.perf_counter() - started)

        return read_epoch

    changed = Layouts(**{name: with_transforms(getattr(layouts, name)) for name in LAYOUTS})
    baseline, ours = in_turns(
        rate(changed.time, plain), rate(changed.deduplicated, chosen), repeats=sizes.preprocess_repeats, warm_ups=1
    )
    clustered, baseline_raw, ours_raw = in_turns(
        rate(changed.session, plain),
        rate(layouts.time, plain),
        rate(layouts.deduplicated, chosen),
        repeats=sizes.repeats,
    )
    alone = f"session layout without IKJT {_against(clustered, baseline)}"
    note = (
        f"hash every id, last 50 of histories, log and clip; {alone}; no transforms {_against(ours_raw, baseline_raw)}"
    )
    return compare(baseline, ours, unit="rows/s", note=note)


def make_trainers(
    layouts: Layouts,
    encoder: str,
    sizes: Sizes,
    seed: int,
    *,
    batch_size: int | None = None,
    num_batches: int | None = None,
) -> tuple[Trainer, Trainer]:
    """The baseline and ours: the same model, the same weights to begin with."""
    batch_size = batch_size or sizes.batch_size
    config = TrainConfig(sequence_encoder=encoder, batch_size=batch_size, seed=seed, dedup="false")
    ours = replace(config, dedup="auto")
    return (
        Trainer(layouts.time, config, num_batches=num_batches),
        Trainer(layouts.deduplicated, ours, num_batches=num_batches),
    )


def measure_training(layouts: Layouts, trainers: tuple[Trainer, Trainer], *, repeats: int, num_steps: int) -> Metric:
    """Samples a second of whole epochs, after steps on the same rows that must give the same losses."""
    plain, ours = trainers
    difference = check_same_losses(plain, ours, num_steps=num_steps)
    rates = in_turns(plain.train_epoch, ours.train_epoch, repeats=repeats)
    if not ours.dedup.groups:
        # The models are the same then. Two copies of their tables differ in speed by up to 8%, by where in memory they
        # lie, so each copy is also trained with what the other one reads.
        swapped = in_turns(
            lambda: ours.train_epoch(layouts.time), lambda: plain.train_epoch(layouts.deduplicated), repeats=repeats
        )
        rates = [[*own, *other] for own, other in zip(rates, swapped, strict=True)]
    clustered = [plain.train_epoch(layouts.session) for _ in range(max(1, repeats // 3))]
    chosen = f"{len(ours.dedup.features)} features in {len(ours.dedup.groups)} groups deduplicated"
    losses = f"losses on the same rows differ by {difference:.0e}"
    note = f"{chosen}; {losses}; session layout without IKJT {_against(clustered, rates[0])}"
    return compare(*rates, unit="samples/s", note=note)


def measure_memory(trainers: tuple[Trainer, Trainer], *, repeats: int) -> Metric:
    """How far the process grows while it reads and trains an epoch with the transformer."""
    peaks = in_turns(*(trainer.peak_bytes for trainer in trainers), repeats=repeats)
    note = "rise of resident memory over an epoch with the transformer"
    return compare(*peaks, unit="bytes", note=note, less_is_better=True)


def measure_reader_bytes(layouts: Layouts, sizes: Sizes, seed: int) -> Metric:
    """Bytes a sample of the batches as the trainer receives them."""
    moved = bytes_per_sample(layouts, sizes, seed)
    computed = moved["over_the_wire"]["baseline"] / moved["over_the_wire"]["ours"]
    note = f"batches as the trainer receives them; between ranks they would be {computed:.2f}x (computed)"
    sides = ([value] for value in moved["reader_to_trainer"].values())
    return compare(*sides, unit="bytes/sample", note=note, less_is_better=True)


def _against(values: list[float], baseline: list[float]) -> str:
    return f"{statistics.median(values) / statistics.median(baseline):.2f}x"


def bytes_per_sample(layouts: Layouts, sizes: Sizes, seed: int) -> dict[str, dict[str, float]]:
    """What a batch weighs on its way from the reader to the trainer, and between ranks when no table is local."""
    config = TrainConfig(dedup="auto", batch_size=sizes.batch_size, seed=seed)
    chosen = choose_dedup(layouts.deduplicated, layouts.schema, config)
    found: dict[str, dict[str, float]] = {"reader_to_trainer": {}, "over_the_wire": {}}
    sides = {"baseline": (layouts.time, DedupChoice()), "ours": (layouts.deduplicated, chosen)}
    for side, (dataset, dedup) in sides.items():
        num_samples = sent = moved = 0
        with open_batches(dataset, dedup, batch_size=sizes.batch_size, seed=seed) as batches:
            for batch in batches:
                num_samples += len(batch)
                sent += batch.size_in_bytes()
                moved += wire_bytes(batch, layouts.schema)
        found["reader_to_trainer"][side] = sent / num_samples
        found["over_the_wire"][side] = moved / num_samples
    return found


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
    metrics["preprocess"] = measure_preprocessing(main, sizes, seed)
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
    metrics["train_pooled"] = measure_training(main, trainers, repeats=sizes.repeats, num_steps=3)
    say("train pooled, one sample a session")
    layouts = logs.recd(sizes.control_rows, samples_per_session=1.0)
    trainers = make_trainers(layouts, "mean", sizes, seed)
    metrics["train_control"] = measure_training(layouts, trainers, repeats=sizes.control_repeats, num_steps=3)
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
    metrics["train_sequence_globo"] = measure_training(layouts, trainers, repeats=sizes.sequence_repeats, num_steps=3)
    say("train globo pooled")
    trainers = make_trainers(main, "mean", sizes, seed)
    metrics["train_pooled_globo"] = measure_training(main, trainers, repeats=sizes.globo_repeats, num_steps=3)
    metrics["reader_bytes_globo"] = measure_reader_bytes(main, sizes, seed)
    return metrics


def run_curve(logs: Logs, sizes: Sizes, seed: int) -> list[dict[str, Any]]:
    """The ratios at other numbers of samples a session, each from fewer repeats."""
    sizes = replace(sizes, repeats=1, preprocess_repeats=5)
    curve = []
    for samples in CURVE:
        say(f"{samples} samples a session")
        main, short = (logs.recd(rows, samples) for rows in (sizes.rows // 4, sizes.sequence_rows // 2))
        pooled = make_trainers(main, "mean", sizes, seed)
        sequence = make_trainers(short, "transformer", sizes, seed, batch_size=sizes.sequence_batch_size)
        session, deduplicated = measure_storage(main, "session", "deduplicated")
        metrics = {
            "storage_session": session,
            "storage_deduplicated": deduplicated,
            "preprocess": measure_preprocessing(main, sizes, seed),
            "train_pooled": measure_training(main, pooled, repeats=3, num_steps=1),
            "train_sequence": measure_training(short, sequence, repeats=3, num_steps=1),
        }
        ratios = {name: metric["ratio"] for name, metric in metrics.items()}
        say("  ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items()))
        curve.append(
            {"samples_per_session": samples, **ratios, "bytes_per_sample": bytes_per_sample(main, sizes, seed)}
        )
    return curve


def main() -> None:
    options = parse_options(__doc__, quick="smaller logs, fewer repeats, no curve over samples a session (under 90 s)")
    warn_if_busy()
    warnings.filterwarnings("ignore")  # TorchRec uses what torch is about to drop, and logs that it does
    logging.getLogger("torch").setLevel(logging.ERROR)
    sizes = SIZES[options.size]
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="recd-") as folder, one_rank():
        logs = Logs(Path(folder), options.seed)
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
