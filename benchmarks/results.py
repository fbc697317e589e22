"""The results table of the README, made from the JSON of the benchmarks.

    python benchmarks/results.py              write the table into README.md and docs/results.md
    python benchmarks/results.py --run        run every benchmark first (nothing else may run meanwhile)
    python benchmarks/results.py --check      fail if the files do not hold the table

Results lie in benchmarks/results/NAME.json as the benchmarks write them (--json).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGES = (HERE.parent / "README.md", HERE.parent / "docs" / "results.md")
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
BENCHMARKS = ("recd", "flexshard", "fae", "fae_order", "pss", "intune", "together")
FULL_FORM = ("fae_order",)  # noise in the quick one is larger than what is claimed


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A line of the table: what is claimed, which metric holds it and what it has to be."""

    text: str
    metric: str
    target: float
    is_below: bool = False  # the value (or its size) must not be above the target
    is_value: bool = False  # a value, not a ratio
    reference: str = ""  # a metric of the same benchmark: the value may fall short of it by the target at most


CLAIMS: dict[str, tuple[Claim, ...]] = {
    "recd": (
        Claim(text="storage, session layout", metric="storage_session", target=3.7),
        Claim(text="storage, deduplicated", metric="storage_deduplicated", target=5.0),
        Claim(text="storage, deduplicated, globo", metric="storage_globo", target=3.7),
        Claim(text="preprocessing", metric="preprocess", target=1.8),
        Claim(text="preprocessing, globo", metric="preprocess_globo", target=1.3),
        Claim(text="training, sequence encoder", metric="train_sequence", target=2.5),
        Claim(text="training, sequence encoder, globo", metric="train_sequence_globo", target=1.5),
        Claim(text="training, pooled DLRM", metric="train_pooled", target=1.25),
        Claim(text="training, pooled DLRM, globo", metric="train_pooled_globo", target=1.0),
        Claim(text="control: one sample a session", metric="train_control", target=0.97),
        Claim(text="dedup kernel over torch.unique", metric="dedup_kernel", target=30.0),
    ),
    "flexshard": (
        Claim(text="all-to-all bytes, Zipf 1.2", metric="alltoall_bytes_zipf12", target=1 / 0.15),
        Claim(text="all-to-all bytes, globo", metric="alltoall_bytes_globo", target=1 / 0.15),
        Claim(text="all bytes over row-wise with id dedup, Zipf 1.2", metric="total_vs_dedup_zipf12", target=1.0),
        Claim(text="all bytes over row-wise with id dedup, globo", metric="total_vs_dedup_globo", target=1.0),
        Claim(text="communication time, Zipf 1.2", metric="comm_time_zipf12", target=3.0),
        Claim(text="communication time, globo", metric="comm_time_globo", target=3.0),
        Claim(text="communication time, Zipf 1.0", metric="comm_time_zipf10", target=1.0),
        Claim(text="communication time, Zipf 0.8", metric="comm_time_zipf08", target=1.0),
        Claim(
            text="error of predicted bytes", metric="predicted_bytes_error", target=0.1, is_below=True, is_value=True
        ),
        Claim(text="planner's gap to the bound", metric="planner_gap", target=0.01, is_below=True, is_value=True),
    ),
    "fae": (
        Claim(text="hot batches, embedding part", metric="hot_batch_embedding", target=2.0),
        Claim(text="training on a slow network, Zipf 1.2", metric="train_shaped", target=2.3),
        Claim(text="training on loopback", metric="train_loopback", target=1.2),
        Claim(text="moving 100,000 rows over a loop", metric="swap_rows", target=100.0),
        Claim(
            text="AUC, hot order against random, Zipf 1.2",
            metric="auc_difference",
            target=0.001,
            is_below=True,
            is_value=True,
        ),
        Claim(text="ids laid out, a second and core", metric="layout_ids_per_s", target=5e6, is_value=True),
        Claim(text="low skew: left off", metric="low_skew", target=0.97),
        Claim(text="samples/s, 50 GB table in 12 GB", metric="beyond_memory_samples_per_s", target=0.0, is_value=True),
    ),
    "fae_order": (
        Claim(
            text="AUC, hot order against random, globo",
            metric="auc_difference_globo",
            target=0.001,
            is_below=True,
            is_value=True,
        ),
    ),
    "pss": (
        Claim(text="step over plain-torch sharing", metric="step_vs_torch", target=10.0),
        Claim(text="step over FBGEMM full table, pooling 1", metric="step_vs_fbgemm_pool1", target=1.3),
        Claim(text="step over FBGEMM full table, pooling 20", metric="step_vs_fbgemm_pool20", target=1.0),
        Claim(text="frappe AUC, full table", metric="frappe_auc_full", target=0.0, is_value=True),
        Claim(
            text="frappe AUC, 10x smaller",
            metric="frappe_auc_10x",
            target=0.002,
            is_value=True,
            reference="frappe_auc_full",
        ),
        Claim(
            text="frappe AUC, 100x, hot rows exact",
            metric="frappe_auc_100x_hot",
            target=0.0,
            is_value=True,
            reference="best_peer_auc_100x",
        ),
        Claim(text="frappe AUC, 100x, best peer", metric="best_peer_auc_100x", target=0.0, is_value=True),
        Claim(
            text="resident, 100 GB of logical tables",
            metric="resident_100gb",
            target=2**30,
            is_below=True,
            is_value=True,
        ),
    ),
    "intune": (
        Claim(text="share of the oracle, simulated", metric="sim_oracle_share", target=0.97, is_value=True),
        Claim(text="share of the oracle after an event", metric="sim_after_event", target=0.97, is_value=True),
        Claim(text="over the re-profiled linear programme", metric="sim_vs_lp", target=0.99),
        Claim(text="over an even split", metric="sim_vs_even", target=1.8),
        Claim(text="out of memory", metric="sim_oom", target=0.0, is_below=True, is_value=True),
        Claim(text="rows/s over the best other loader", metric="local_vs_best_peer", target=1.0),
        Claim(text="reads with 50 ms latency", metric="latency_speedup", target=10.0),
        Claim(text="two slow stages over hand-set sizes", metric="two_stage_vs_preset", target=1 / 1.15),
    ),
    "together": (
        Claim(text="all switches, globo, slow network", metric="globo_all", target=3.0),
        Claim(text="best single switch, globo", metric="globo_best_single", target=0.0),
        Claim(text="all switches, recd preset", metric="recd_all", target=5.0),
        Claim(text="time to the baseline's AUC, globo", metric="time_to_auc", target=2.5),
        Claim(text="AUC of all less the baseline's", metric="auc_difference", target=-0.002, is_value=True),
        Claim(text="error of predicted bytes", metric="prediction_error", target=0.15, is_below=True, is_value=True),
    ),
}


def make_table() -> str:
    """The Markdown table of everything that has been measured."""
    lines = ["| what | measured | asked for | by |", "|---|---|---|---|"]
    for benchmark in BENCHMARKS:
        path = RESULTS / f"{benchmark}.json"
        if not path.is_file():
            lines.append(f"| {benchmark} | not measured yet | | `benchmarks/{benchmark}.py` |")
            continue
        loaded = json.loads(path.read_text(encoding="utf-8"))
        lines += [
            f"| {claim.text} | {_measured(claim, loaded)} | {_target(claim)} | `benchmarks/{benchmark}.py` |"
            for claim in CLAIMS[benchmark]
        ]
    return "\n".join(lines)


def _measured(claim: Claim, loaded: dict[str, Any]) -> str:
    metric = loaded["metrics"].get(claim.metric)
    if metric is None:
        return f"skipped: {loaded['skipped'].get(claim.metric, 'not in this form')}"
    if claim.reference:
        value, wanted = metric["ours"], loaded["metrics"][claim.reference]["ours"] - claim.target
        return f"{_number(value, metric['unit'])}{'' if value >= wanted else ' **missed**'}"
    if claim.is_value:
        value = metric["ours"]
        return f"{_number(value, metric['unit'])}{_verdict(claim, value)}"
    if metric["ratio"] is None:
        return f"{_number(metric['ours'], metric['unit'])}{_verdict(claim, metric['ours'])}"
    low, high = metric["spread"]["ratio"] if "ratio" in metric["spread"] else (metric["ratio"],) * 2
    spread = f" ({low:.2f} to {high:.2f})" if high > low else ""
    return f"{metric['ratio']:.2f}x{spread}{_verdict(claim, metric['ratio'])}"


def _verdict(claim: Claim, value: float) -> str:
    if not claim.target and not claim.is_below:
        return ""
    is_met = abs(value) <= claim.target if claim.is_below else value >= claim.target
    return "" if is_met else " **missed**"


def _target(claim: Claim) -> str:
    if claim.reference:
        return f"{claim.reference} less {claim.target:g}" if claim.target else claim.reference
    if claim.is_below:
        return f"at most {_number(claim.target, 'bytes' if claim.target > 1e6 else '')}"
    if not claim.target:
        return ""
    return _number(claim.target, "") if claim.is_value else f"{claim.target:.3g}x"


def _number(value: float, unit: str) -> str:
    if unit in ("bytes", "B"):
        return f"{value / 2**20:,.0f} MiB"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def update(page: Path, table: str) -> str:
    """The page's text with the table between its marks."""
    text = page.read_text(encoding="utf-8")
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise SystemExit(f"{page}: lacks {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the benchmarks first")
    parser.add_argument("--only", action="append", choices=BENCHMARKS, help="run these only; may be repeated")
    parser.add_argument("--check", action="store_true", help="change nothing, fail where a page is out of date")
    given = parser.parse_args()
    if given.run:
        RESULTS.mkdir(exist_ok=True)
        for name in given.only or BENCHMARKS:
            print(f"== {name}", flush=True)
            target = RESULTS / f"{name}.json"
            form = [] if name in FULL_FORM else ["--quick"]
            subprocess.run([sys.executable, HERE / f"{name}.py", *form, "--json", target], check=True)
    table = make_table()
    for page in PAGES:
        text = update(page, table)
        if text == page.read_text(encoding="utf-8"):
            continue
        if given.check:
            raise SystemExit(f"{page.name}: its results table is not that of benchmarks/results; run make results")
        page.write_text(text, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
