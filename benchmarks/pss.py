"""What sharing parameters costs and buys (PSS): time of a step, AUC against bytes, and 100 GB of tables in 1 GB.

    python benchmarks/pss.py [--quick] [--json PATH|-] [--seed K]

Steps are forward, backward and SGD of one table of 4M rows, in turns with FBGEMM's full table and with PSS in plain
torch. AUC is that of the test split where the validation split is best, of all ways to shrink tables in one harness
(pss_quality.py), three seeds or more; bytes count weights, optimiser state and the ids of exact rows. The whole curve
stands in `curves` of the JSON. --quick trains on a sixth of frappe for two epochs: compare ways, not values.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from harness import Metric, Options, finish, parse_options, plain_value, say, warn_if_busy
from pss_data import load_frappe, load_globo, make_synthetic, why_no
from pss_memory import measure_resident
from pss_quality import Exact, Make, Way, full, hash_rows, measure_ways, narrow, quotient_remainder, shared
from pss_speed import measure_steps

FRAPPE_METRICS = ("frappe_auc_full", "frappe_auc_10x", "frappe_auc_100x", "frappe_auc_100x_hot", "best_peer_auc_100x")
LR = 0.03  # of the rows; better than 0.01 on the validation split for full tables, hot and narrow (quick, one seed)
EPOCHS = {"tiny": 1, "quick": 2, "full": 8}
TRAIN_ROWS = {"tiny": 2_000, "quick": 35_000, "full": None}
BATCH_SIZE = {"tiny": 256, "quick": 512, "full": 1024}  # few rows still need some hundred steps
SHARED: dict[str, Make] = {f"shared {block}": shared(block) for block in (1, 16, 64)}
PEERS: dict[str, Make] = {"hash": hash_rows, "quotient": quotient_remainder, **SHARED}
PEERS["randomfold"] = shared(1, mapping="randomfold")


def way(name: str, compression: float) -> Way:
    makes = {**PEERS, "full": full, "narrow": narrow}
    make = shared(1, exact=Exact.planned(compression)) if name == "hot" else makes[name]
    return Way(name=name, compression=compression, make=make, lr=LR)


def ways_for(size: str, *, factors: tuple[float, ...] = (10.0, 100.0, 1_000.0, 10_000.0)) -> list[Way]:
    """Everything that is trained."""
    names = [("full", 1.0), ("shared 1", 10.0)]
    names += [(name, 100.0) for name in ("shared 1", "hot", "hash", "quotient")]
    if size == "full":
        names += [("narrow", 10.0), *((name, factor) for factor in factors for name in ("hot", *PEERS))]
    return [way(name, compression) for name, compression in dict.fromkeys(names)]


def frappe_metrics(curve: list[dict[str, Any]], *, note: str) -> dict[str, Metric]:
    found = {(entry["way"], entry["compression"]): entry for entry in curve}

    def value(way: str, compression: float, more: str = "") -> Metric:
        entry = found[way, compression]
        one = statistics.median(entry["one_epoch"])
        text = f"{way}, {entry['bytes']:,} B with optimiser state; after one epoch {one:.4f}; {note}{more}"
        return plain_value(entry["best"], unit="AUC", note=text)

    def best_of(compression: float, *names: str, by: str = "best_valid") -> str:
        """The best by the median over seeds."""
        known = [name for name in names if (name, compression) in found]
        return max(known, key=lambda way: statistics.median(found[way, compression][by]))

    chosen = "; chosen on the validation split"
    hot = Exact.planned(100)
    return {
        "frappe_auc_full": value("full", 1),
        "frappe_auc_10x": value(best_of(10, "hot", *SHARED), 10, chosen),
        "frappe_auc_100x": value(best_of(100, *SHARED), 100, chosen),
        "frappe_auc_100x_hot": value("hot", 100, f"; exact rows of {hot.width} take {hot.share:.0%} of the bytes"),
        "best_peer_auc_100x": value(
            best_of(100, *PEERS, by="best"), 100, "; the best of all other ways, by its test AUC"
        ),
    }


def measure_quality(options: Options) -> tuple[dict[str, Metric], list[dict[str, Any]], dict[str, str]]:
    size = options.size
    seeds = [options.seed + turn for turn in range(1 if size == "tiny" else 3)]
    curve: list[dict[str, Any]] = []
    metrics: dict[str, Metric] = {}
    skipped: dict[str, str] = {}
    if reason := why_no("frappe", "train.parquet"):
        skipped |= dict.fromkeys(FRAPPE_METRICS, reason)
    else:
        frappe = load_frappe(TRAIN_ROWS[size])
        curve += measure_ways(frappe, ways_for(size), seeds=seeds, epochs=EPOCHS[size], batch_size=BATCH_SIZE[size])
        part = "all rows" if TRAIN_ROWS[size] is None else f"{TRAIN_ROWS[size]:,} rows"
        metrics = frappe_metrics(curve, note=f"{part}, {EPOCHS[size]} epochs, {len(seeds)} seeds")
    if size == "full":
        others = [make_synthetic()]
        if reason := why_no("globo", "clicks.parquet"):
            say(f"globo is left out: {reason}")
        else:
            others.append(load_globo())
        for samples in others:
            curve += measure_ways(samples, ways_for("full"), seeds=seeds, epochs=3, batch_size=1024)
    return metrics, curve, skipped


def measure_memory(size: str) -> Metric:
    steps = {"tiny": 2, "quick": 10, "full": 100}[size]
    found = measure_resident(steps)
    note = (
        f"peak of a process that trains 26 tables of {found['logical_bytes']:,} B for {steps} steps; the tables take "
        f"{found['table_bytes']:,} B; loss {found['first_loss']:.4f} to {found['last_loss']:.4f}"
    )
    return plain_value([float(found["peak_bytes"])], unit="bytes", note=note)


def main() -> None:
    options = parse_options(__doc__ or "", quick="three seeds of a part of frappe, three step times, under 90 s")
    warn_if_busy()
    torch.set_num_threads(1)
    metrics, steps = measure_steps(options.size, seed=options.seed)
    say("steps measured")
    metrics["resident_100gb"] = measure_memory(options.size)
    say("memory measured")
    quality, curve, skipped = measure_quality(options)
    finish(options, {**metrics, **quality}, skipped=skipped, extra={"curves": curve, "steps": steps})


if __name__ == "__main__":
    main()
