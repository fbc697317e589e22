"""What sharing parameters costs and gains (PSS): time per step, AUC against bytes, and 100 GB of tables in 1 GB.

    python benchmarks/pss.py [--quick] [--json PATH|-] [--seed K]

Steps are forward, backward and SGD of one table of 4M rows, in turns with FBGEMM's full table and with PSS in plain
torch. AUC is that of the test split at the best validation epoch, for all methods of shrinking tables in one harness
(pss_quality.py), three seeds, nine in the full form; bytes include weights, optimiser state and the ids of exact rows.
The full table is trained by Adam and by row-wise Adagrad; the better one on the validation split counts. 10x is ten
times smaller than the latter, which has a third of the former's bytes. `curves` of the JSON has the whole curve.
--quick trains on a sixth of frappe, full tables and 10x for seven epochs, 100x for three: compare methods, not values.
"""

from __future__ import annotations

import os
import statistics
from functools import partial
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from harness import MIN_PAIRS, Metric, Options, parse_options, plain_value, say, warn_if_busy
from parts import Found, Parts
from pss_curve import ADAGRAD, PACKED_PEERS, PEERS, SHARED, Training, Way, all_ways, measure_curve
from pss_data import why_no
from pss_memory import measure_resident
from pss_quality import Exact
from pss_speed import measure_steps

FRAPPE_METRICS = (
    "frappe_auc_full",
    "frappe_auc_10x",
    "frappe_auc_10x_difference",
    "frappe_auc_10x_vs_int8",
    "frappe_auc_100x_vs_int8",
    "frappe_auc_100x",
    "frappe_auc_100x_hot",
    "frappe_auc_100x_vs_peers",
    "best_peer_auc_100x",
)
LR = 0.03  # of the rows, in --quick: better on validation than 0.01 and 0.1 for full tables and hot (one seed each)
ADAGRAD_LR = 0.2  # better on validation than 0.1, 0.15, 0.25, 0.3 and 0.5 for full tables (three seeds or six)
FULL = ("full", "full adagrad")
EPOCHS = {"tiny": 1, "quick": 3, "full": 8}
# The tenth is compared to 0.002, so both sides train until neither gains: after three epochs full tables are .002 below
# their best and a tenth .004 (docs/log.md).
CLOSE_EPOCHS = {"tiny": 1, "quick": 7}
TRAIN_ROWS = {"tiny": 2_000, "quick": 35_000, "full": None}
BATCH_SIZE = {"tiny": 256, "quick": 512, "full": 1024}  # few rows still need some hundred steps


def quick_ways(size: str) -> list[Way]:
    """The trials that the metrics need, with one learning rate each."""
    close = [("full", 1.0, LR), *((name, 1.0 if name in FULL else 10.0, ADAGRAD_LR) for name in ADAGRAD)]
    ways = [Way(name=name, compression=factor, rates=(lr,), epochs=CLOSE_EPOCHS[size]) for name, factor, lr in close]
    small = [(name, LR) for name in ("shared 1", "hot", "hash", "quotient")]
    small += [(name, ADAGRAD_LR) for name in ("hot int8", *PACKED_PEERS)]
    return ways + [Way(name=name, compression=100.0, rates=(lr,)) for name, lr in small]


def frappe_metrics(curve: list[dict[str, Any]], *, note: str) -> dict[str, Metric]:
    found = {(entry["way"], entry["compression"]): entry for entry in curve}

    def value(way: str, compression: float, more: str = "") -> Metric:
        entry = found[way, compression]
        one = statistics.median(entry["one_epoch"])
        size = f"{entry['bytes']:,} B with optimiser state, {entry['weight_bytes']:,} B without"
        trained = f"{note}, {entry['epochs']} epochs, {len(entry['best'])} seeds"
        text = f"{way}, {size}; after one epoch {one:.4f}; {trained}{more}"
        return plain_value(entry["best"], unit="AUC", note=text)

    def best_of(compression: float, *names: str, by: str = "best_valid") -> str:
        """The best by the median over seeds."""
        known = [name for name in names if (name, compression) in found]
        return max(known, key=lambda way: statistics.median(found[way, compression][by]))

    def of_exact(compression: float) -> str:
        planned = Exact.planned(compression)
        return f"; exact rows of {planned.width} take {planned.share:.0%} of the bytes"

    def difference(ours: tuple[str, float], theirs: tuple[str, float]) -> Metric:
        """Of the test AUC with the same seeds."""
        pairs = zip(found[ours]["best"], found[theirs]["best"], strict=True)
        names = f"{ours[0]} {ours[1]:g}x less {theirs[0]} {theirs[1]:g}x"
        return plain_value([own - other for own, other in pairs], unit="AUC", note=f"{names}; {note}")

    best_peer = best_of(100, *PEERS, by="best")
    return {
        "frappe_auc_10x_difference": difference(("hot int8", 10), (best_of(1, *FULL), 1)),
        **{
            f"frappe_auc_{factor:g}x_vs_int8": difference(
                ("hot int8", factor), (best_of(factor, *PACKED_PEERS, by="best"), factor)
            )
            for factor in (10.0, 100.0)
        },
        "frappe_auc_100x_vs_peers": difference(("hot", 100), (best_peer, 100)),
        "frappe_auc_full": value(best_of(1, *FULL), 1, "; the better optimiser on the validation split"),
        "frappe_auc_10x": value("hot int8", 10, "; hot rows exact, all weights in bytes, row-wise Adagrad"),
        "frappe_auc_100x": value(best_of(100, *SHARED), 100, "; chosen on the validation split"),
        "frappe_auc_100x_hot": value("hot", 100, of_exact(100)),
        "best_peer_auc_100x": value(best_peer, 100, "; the best of all other ways, by its test AUC"),
    }


def trained_curve(parts: Parts, training: Training, ways: list[Way], seeds: list[int]) -> list[dict[str, Any]]:
    """The entry of every way; each is kept as it finishes."""
    names = {f"{training.data}, {way.name}, {way.compression:g}x": way for way in ways}
    missing = {name: way for name, way in names.items() if name not in parts}
    for name, entry in zip(missing, measure_curve(training, list(missing.values()), seeds=seeds), strict=True):
        parts.keep(name, entry)
    return [parts[name] for name in names]


def measure_frappe(parts: Parts, options: Options, seeds: list[int]) -> Found:
    size = options.size
    if reason := why_no("frappe", "train.parquet"):
        return Found(skipped=dict.fromkeys(FRAPPE_METRICS, reason))
    training = Training(data="frappe", rows=TRAIN_ROWS[size], epochs=EPOCHS[size], batch_size=BATCH_SIZE[size])
    curve = trained_curve(parts, training, all_ways() if size == "full" else quick_ways(size), seeds)
    part = "all rows" if TRAIN_ROWS[size] is None else f"{TRAIN_ROWS[size]:,} rows"
    return Found(metrics=frappe_metrics(curve, note=part), extra={"curves": curve})


def measure_other(parts: Parts, data: str, seeds: list[int]) -> Found:
    """The curve of the synthetic log or of globo; no row of the results comes from it."""
    if data == "globo" and (reason := why_no("globo", "clicks.parquet")):
        say(f"globo is left out: {reason}")
        return Found()
    training = Training(data=data, epochs=3, batch_size=1024)
    return Found(extra={"curves": trained_curve(parts, training, all_ways(), seeds)})


def measure_memory(size: str) -> Metric:
    steps = {"tiny": 2, "quick": 10, "full": 100}[size]
    runs = [measure_resident(steps) for _ in range(MIN_PAIRS if size == "full" else 1)]
    found = runs[0]
    note = (
        f"peak of a process that trains 26 tables of {found['logical_bytes']:,} B for {steps} steps; the tables take "
        f"{found['table_bytes']:,} B; loss {found['first_loss']:.4f} to {found['last_loss']:.4f}"
    )
    return plain_value([float(run["peak_bytes"]) for run in runs], unit="bytes", note=note)


def main() -> None:
    options = parse_options(__doc__ or "", quick="three seeds of a part of frappe, three step times, under 90 s")
    warn_if_busy()
    torch.set_num_threads(1)
    parts = Parts(options)
    seeds = [options.seed + turn for turn in range({"tiny": 1, "quick": 3, "full": 9}[options.size])]
    parts.measure("steps", lambda: time_steps(options))
    parts.measure("memory", lambda: Found(metrics={"resident_100gb": measure_memory(options.size)}))
    parts.measure("frappe", lambda: measure_frappe(parts, options, seeds))
    for data in ("synthetic", "globo") if options.size == "full" else ():
        parts.measure(data, partial(measure_other, parts, data, seeds))
    parts.finish()


def time_steps(options: Options) -> Found:
    metrics, steps = measure_steps(options.size, seed=options.seed)
    return Found(metrics=metrics, extra={"steps": steps})


if __name__ == "__main__":
    main()
