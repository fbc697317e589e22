"""What benchmarks/recd.py and recd_curve.py measure of a log: bytes on disk, preprocessing, training, memory."""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from harness import Metric, compare, compare_counts, in_turns
from recd_sizes import Sizes
from session_logs import LAYOUTS, Layouts, with_transforms
from training_rate import Trainer, check_same_losses, one_rank, open_batches
from wire_bytes import wire_bytes

from recmill.artifacts import Dataset
from recmill.data.dataset import read_table
from recmill.data.storage.options import LONG_LIST_LEVEL, writer_options
from recmill.training.config import TrainConfig
from recmill.training.rank.dedup import DedupChoice, choose_dedup


def measure_storage(layouts: Layouts, *names: str) -> list[Metric]:
    """Bytes per row of the best time-ordered Parquet with our writer and its zstd levels, against some of our layouts.

    The candidates are our own time layout, whose encodings and levels are chosen per column by trials, and pyarrow's
    default and tuned encodings at the highest of those levels. The note has pyarrow's defaults as most people use them.
    """
    table = read_table(layouts.time)
    tuned = writer_options(table.schema, "time")
    settings: dict[str, dict[str, Any]] = {
        "pyarrow's defaults with zstd": {"compression": "zstd"},
        f"pyarrow's encodings, zstd {LONG_LIST_LEVEL}": {"compression": "zstd", "compression_level": LONG_LIST_LEVEL},
        f"split bytes, zstd {LONG_LIST_LEVEL}": {**tuned, "compression_level": LONG_LIST_LEVEL},
    }
    sizes = {"our time layout": stored_bytes(layouts.time)}
    with tempfile.TemporaryDirectory() as scratch:
        for name, options in settings.items():
            pq.write_table(table, Path(scratch) / "table.parquet", **options)
            sizes[name] = (Path(scratch) / "table.parquet").stat().st_size
    default, best = sizes["pyarrow's defaults with zstd"], min(sizes, key=lambda name: sizes[name])
    note = f"{table.num_rows:,} rows; best of {len(sizes)} time-ordered settings: {best}; pyarrow's defaults with zstd"
    metrics = []
    for layout in names:
        own = stored_bytes(getattr(layouts, layout))
        per_row = [size / table.num_rows for size in (sizes[best], own)]
        metrics.append(compare_counts(*per_row, unit="bytes/row", note=f"{note} {default / own:.2f}x"))
    return metrics


def stored_bytes(dataset: Dataset) -> int:
    return dataset.data_bytes


def measure_preprocessing(layouts: Layouts, sizes: Sizes, seed: int, *, repeats: int) -> Metric:
    """Rows per second from the files to the trainer's batches: read, decode, dedup, transform, batch."""
    config = TrainConfig(dedup="auto", batch_size=sizes.batch_size, seed=seed, session_limit=0)
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
        rate(changed.time, plain), rate(changed.deduplicated, chosen), repeats=repeats, warm_ups=1
    )
    clustered, baseline_raw, ours_raw = in_turns(
        rate(changed.session, plain),
        rate(layouts.time, plain),
        rate(layouts.deduplicated, chosen),
        repeats=max(1, sizes.repeats // 3),
    )
    alone = f"session layout without IKJT {_against(clustered, baseline)}"
    note = (
        f"hash every id, last 50 of histories, log and clip; {alone}; no transforms {_against(ours_raw, baseline_raw)}"
    )
    return compare(baseline, ours, unit="rows/s", note=note)


def train_apart(
    layouts: Layouts,
    encoder: str,
    sizes: Sizes,
    seed: int,
    *,
    repeats: int,
    num_steps: int,
    memory_repeats: int = 0,
    same_lookups: bool = False,
    **shape: int | None,
) -> list[Metric]:
    """Measured in a separate process: samples per second, and with `memory_repeats` also its growth.

    With `same_lookups` ours looks up ids and dense rows as the baseline does: only lists are deduplicated.
    """
    quieten()
    with one_rank():
        trainers = make_trainers(layouts, encoder, sizes, seed, same_lookups=same_lookups, **shape)
        metrics = [measure_training(layouts, trainers, repeats=repeats, num_steps=num_steps)]
        if memory_repeats:
            metrics.append(measure_memory(trainers, repeats=memory_repeats))
    return metrics


def quieten() -> None:
    """Hide warnings about deprecated torch functions that TorchRec uses."""
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)


def make_trainers(
    layouts: Layouts,
    encoder: str,
    sizes: Sizes,
    seed: int,
    *,
    batch_size: int | None = None,
    num_batches: int | None = None,
    same_lookups: bool = False,
) -> tuple[Trainer, Trainer]:
    """The baseline and ours: the same model with the same initial weights."""
    batch_size = batch_size or sizes.batch_size
    config = TrainConfig(sequence_encoder=encoder, batch_size=batch_size, seed=seed, dedup="false")
    ours = replace(config, dedup="auto")
    return (
        Trainer(layouts.time, config, num_batches=num_batches),
        Trainer(layouts.deduplicated, ours, num_batches=num_batches, only_lists=same_lookups),
    )


def measure_training(layouts: Layouts, trainers: tuple[Trainer, Trainer], *, repeats: int, num_steps: int) -> Metric:
    """Samples per second of whole epochs, after steps on the same rows that must give the same losses."""
    plain, ours = trainers
    difference = check_same_losses(plain, ours, num_steps=num_steps)
    # These steps have warmed up everything that an epoch of one batch needs.
    rates = in_turns(plain.train_epoch, ours.train_epoch, repeats=repeats, warm_ups=0 if plain.num_batches == 1 else 1)
    chosen = f"{sum(map(len, ours.dedup.groups))} features in {len(ours.dedup.groups)} groups deduplicated"
    chosen += f", and rows of {len(ours.dedup.dense)} numbers" if ours.dedup.dense else ""
    chosen += f", and single ids of {len(ours.dedup.ids)} features" if ours.dedup.ids else ""
    losses = f"losses on the same rows differ by {difference:.0e}"
    note = f"{chosen}; {losses}"
    if ours.dedup.features:
        clustered = [plain.train_epoch(layouts.session) for _ in range(max(1, repeats // 3))]
        note += f"; session layout without IKJT {_against(clustered, rates[0])}"
    return compare(*rates, unit="samples/s", note=note)


def measure_memory(trainers: tuple[Trainer, Trainer], *, repeats: int) -> Metric:
    """Growth of the process while it reads and trains an epoch with the transformer."""
    peaks = in_turns(*(trainer.peak_bytes for trainer in trainers), repeats=repeats)
    note = "rise of resident memory over an epoch with the transformer"
    return compare(*peaks, unit="bytes", note=note, less_is_better=True)


def measure_reader_bytes(layouts: Layouts, sizes: Sizes, seed: int) -> Metric:
    """Bytes per sample of the batches that the trainer receives."""
    moved = bytes_per_sample(layouts, sizes, seed)
    computed = moved["over_the_wire"]["baseline"] / moved["over_the_wire"]["ours"]
    note = f"batches as the trainer receives them; between ranks they would be {computed:.2f}x (computed)"
    return compare_counts(*moved["reader_to_trainer"].values(), unit="bytes/sample", note=note)


def _against(values: list[float], baseline: list[float]) -> str:
    return f"{statistics.median(values) / statistics.median(baseline):.2f}x"


def bytes_per_sample(layouts: Layouts, sizes: Sizes, seed: int) -> dict[str, dict[str, float]]:
    """Bytes of a batch from the reader to the trainer, and between ranks when no table is local."""
    config = TrainConfig(dedup="auto", batch_size=sizes.batch_size, seed=seed, session_limit=0)
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
