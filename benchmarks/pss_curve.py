"""AUC against bytes: every method from 1x to 10,000x, each choosing from the same learning rates.

    python benchmarks/pss_curve.py RESULT.json [--data frappe] [--rows N] [--epochs K] [--seeds K] [--rates R ...]

Entries are written as they finish, in the form of pss.py's `curves`; an interrupted run resumes with the same
RESULT.json. pss_chart.py draws it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from harness import say
from pss_data import Samples, load_frappe, load_globo, make_synthetic
from pss_quality import (
    Exact,
    Make,
    full,
    full_adagrad,
    hash_packed,
    hash_rows,
    narrow,
    narrow_packed,
    packed,
    quotient_remainder,
    shared,
    train_once,
)

from recmill.artifacts import write_text_atomically

RATES = (0.01, 0.03, 0.1)  # learning rates of rows that every method chooses from on the validation split
ADAGRAD_RATES = (0.1, 0.2, 0.3)
ADAGRAD = ("full adagrad", "hot int8", "narrow int8", "hash int8")
PACKED_PEERS: dict[str, Make] = {"narrow int8": narrow_packed, "hash int8": hash_packed}
SHARED: dict[str, Make] = {f"shared {block}": shared(block) for block in (1, 16, 64)}
PEERS: dict[str, Make] = {"hash": hash_rows, "quotient": quotient_remainder, **SHARED}
NAMES = ("hot int8", "hot", *PACKED_PEERS, *PEERS)
FACTORS = (10.0, 100.0, 1_000.0, 10_000.0)


@dataclass(frozen=True, kw_only=True)
class Way:
    """A method of shrinking tables, its factor, and the learning rates to try."""

    name: str
    compression: float
    rates: tuple[float, ...] = RATES
    epochs: int | None = None  # None: as the others

    @property
    def make(self) -> Make:
        if self.name == "hot":
            return shared(1, exact=Exact.planned(self.compression))
        others = {"full": full, "full adagrad": full_adagrad, "hot int8": packed, "narrow": narrow}
        return {**PEERS, **PACKED_PEERS, **others}[self.name]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Data and length of the training."""

    data: str
    epochs: int
    batch_size: int
    rows: int | None = (
        None  # training rows of frappe, clicks of globo, synthetic samples; None: all of frappe, 200,000, 120,000
    )

    def samples(self) -> Samples:
        if self.data == "frappe":
            return load_frappe(self.rows)
        return make_synthetic(self.rows or 120_000) if self.data == "synthetic" else load_globo(self.rows or 200_000)


def fits(name: str, factor: float) -> bool:
    """A narrow row has at least one weight, which is a hundredth of its bytes, or more."""
    return name != "narrow int8" or factor <= 100


def all_ways(
    names: Sequence[str] = NAMES, rates: Sequence[float] = RATES, adagrad_rates: Sequence[float] = ADAGRAD_RATES
) -> list[Way]:
    """Full tables, then every method at every factor; learning rates by optimiser."""
    pairs = [("full", 1.0), ("full adagrad", 1.0)]
    pairs += [*((name, factor) for factor in FACTORS for name in names if fits(name, factor)), ("narrow", 10.0)]
    chosen = {name: tuple(adagrad_rates if name in ADAGRAD else rates) for name, _ in pairs}
    return [Way(name=name, compression=compression, rates=chosen[name]) for name, compression in pairs]


def measure_curve(training: Training, ways: Sequence[Way], *, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Bytes and AUC of every method over all seeds, trained on all cores, one thread each."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:

        def start(way: Way) -> dict[float, list[Future[dict[str, Any]]]]:
            first = seeds if len(way.rates) == 1 else seeds[:1]
            return {lr: [pool.submit(_train, training, way, seed, lr) for seed in first] for lr in way.rates}

        # One rate each: queue all trials at once. Otherwise one method after another, so that entries appear singly.
        has_choice = any(len(way.rates) > 1 for way in ways)
        started = {} if has_choice else {way: start(way) for way in ways}
        for way in ways:
            tried = {lr: [run.result() for run in runs] for lr, runs in (started.get(way) or start(way)).items()}
            lr = max(tried, key=lambda rate: tried[rate][0]["best_valid"])
            rest = [pool.submit(_train, training, way, seed, lr) for seed in seeds[len(tried[lr]) :]]
            runs = tried[lr] + [run.result() for run in rest]
            yield _describe(training, way, lr, runs, {rate: found[0]["best_valid"] for rate, found in tried.items()})


def _train(training: Training, way: Way, seed: int, lr: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    epochs = way.epochs or training.epochs
    how = {"compression": way.compression, "epochs": epochs, "batch_size": training.batch_size}
    return train_once(_samples(training), way.make, seed=seed, lr=lr, **how)


@cache
def _samples(training: Training) -> Samples:
    return training.samples()


def _describe(
    training: Training, way: Way, lr: float, runs: list[dict[str, Any]], tried: dict[float, float]
) -> dict[str, Any]:
    middle = statistics.median(run["best"] for run in runs)
    say(f"{training.data} {way.name} {way.compression:g}x: AUC {middle:.4f}, {runs[0]['bytes']:,} B, rate {lr:g}")
    return {
        "data": training.data,
        "rows": training.rows,
        "way": way.name,
        "compression": way.compression,
        "bytes": runs[0]["bytes"],
        "weight_bytes": runs[0]["weight_bytes"],
        "epochs": way.epochs or training.epochs,
        "lr": lr,
        "tried": {f"{rate:g}": valid for rate, valid in tried.items()},
        **{key: [run[key] for run in runs] for key in ("best", "best_valid", "best_epoch", "one_epoch")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--data", choices=("frappe", "globo", "synthetic"), default="frappe")
    parser.add_argument("--rows", type=int, help="rows of frappe (default: all), clicks of globo, or synthetic samples")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--ways", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates tried with Adam")
    parser.add_argument(
        "--adagrad-rates",
        type=float,
        nargs="+",
        default=ADAGRAD_RATES,
        help="learning rates tried with row-wise Adagrad",
    )
    given = parser.parse_args()
    curves = json.loads(given.result.read_text())["curves"] if given.result.exists() else []
    known = {(entry["data"], entry["way"], entry["compression"]) for entry in curves}
    ways = all_ways(given.ways, given.rates, given.adagrad_rates)
    ways = [way for way in ways if (given.data, way.name, way.compression) not in known]
    training = Training(data=given.data, rows=given.rows, epochs=given.epochs, batch_size=given.batch_size)
    for entry in measure_curve(training, ways, seeds=range(given.seeds)):
        curves.append(entry)
        write_text_atomically(given.result, json.dumps({"curves": curves}, indent=1) + "\n")


if __name__ == "__main__":
    main()
