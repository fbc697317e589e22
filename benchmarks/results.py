"""The results tables, made from the JSON files of the benchmarks.

    python benchmarks/results.py              write the tables into README.md (headlines) and docs/results.md (all rows)
    python benchmarks/results.py --run        run every benchmark first (nothing else may run meanwhile)
    python benchmarks/results.py --check      fail if the pages do not hold these tables

Each benchmark writes benchmarks/results/NAME.json (--json).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
README, PAGE = HERE.parent / "README.md", HERE.parent / "docs" / "results.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
BENCHMARKS = ("recd", "flexshard", "fae", "fae_order", "pss", "intune", "together")
FULL_FORM = ("fae_order",)  # the quick form's noise is larger than the claim


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One row of the table: what is measured, against which rival, in which metric, and its target."""

    text: str
    rival: str  # "" for a plain value without a baseline
    metric: str
    target: float = 0.0  # 0: no target
    is_below: bool = False  # the absolute value must not exceed the target
    is_value: bool = False  # a value, not a ratio
    reference: str = ""  # a metric of the same benchmark: the value may be below it by at most the target
    is_headline: bool = False  # also in the README


PLAIN_TRAINING = "same model, time-ordered data, no deduplication"
ROW_WISE = "TorchRec row-wise sharding"
ROW_WISE_DEDUP = "row-wise sharding with id dedup"
TABLE_WISE = "TorchRec table-wise sharding"
PARQUET = "time-ordered Parquet, pyarrow defaults with zstd"
SWITCHES_OFF = "the same training with all switches off"

CLAIMS: dict[str, tuple[Claim, ...]] = {
    "recd": (
        Claim(text="bytes per row, session layout, `recd`", rival=PARQUET, metric="storage_session", target=3.7),
        Claim(
            text="bytes per row, deduplicated layout, `recd`",
            rival=PARQUET,
            metric="storage_deduplicated",
            target=5.0,
            is_headline=True,
        ),
        Claim(text="bytes per row, deduplicated layout, globo", rival=PARQUET, metric="storage_globo", target=3.7),
        Claim(
            text="preprocessing rows/s, `recd`",
            rival="same transforms on time-ordered data",
            metric="preprocess",
            target=1.8,
        ),
        Claim(
            text="preprocessing rows/s, globo",
            rival="same transforms on time-ordered data",
            metric="preprocess_globo",
            target=1.3,
        ),
        Claim(
            text="training samples/s, transformer, `recd`",
            rival=PLAIN_TRAINING,
            metric="train_sequence",
            target=2.5,
            is_headline=True,
        ),
        Claim(
            text="training samples/s, transformer, globo",
            rival=PLAIN_TRAINING,
            metric="train_sequence_globo",
            target=1.5,
        ),
        Claim(text="training samples/s, pooled DLRM, `recd`", rival=PLAIN_TRAINING, metric="train_pooled", target=1.25),
        Claim(
            text="training samples/s, pooled DLRM, globo", rival=PLAIN_TRAINING, metric="train_pooled_globo", target=1.0
        ),
        Claim(
            text="training samples/s, one sample per session (control: no list repeats)",
            rival=PLAIN_TRAINING,
            metric="train_control",
            target=0.97,
        ),
        Claim(
            text="kernel that finds repeated lists, GB/s",
            rival="torch.unique(dim=0), one core",
            metric="dedup_kernel",
            target=30.0,
        ),
    ),
    "flexshard": (
        Claim(
            text="all-to-all bytes per step, Zipf 1.2", rival=ROW_WISE, metric="alltoall_bytes_zipf12", target=1 / 0.15
        ),
        Claim(text="all-to-all bytes per step, globo", rival=ROW_WISE, metric="alltoall_bytes_globo", target=1 / 0.15),
        Claim(text="all bytes per step, Zipf 1.2", rival=ROW_WISE_DEDUP, metric="total_vs_dedup_zipf12", target=1.0),
        Claim(text="all bytes per step, globo", rival=ROW_WISE_DEDUP, metric="total_vs_dedup_globo", target=1.0),
        Claim(text="communication time per step, Zipf 1.2", rival=ROW_WISE, metric="comm_time_zipf12", target=3.0),
        Claim(
            text="communication time per step, globo",
            rival=ROW_WISE,
            metric="comm_time_globo",
            target=3.0,
            is_headline=True,
        ),
        Claim(text="communication time per step, Zipf 1.0", rival=ROW_WISE, metric="comm_time_zipf10", target=1.0),
        Claim(text="communication time per step, Zipf 0.8", rival=ROW_WISE, metric="comm_time_zipf08", target=1.0),
        Claim(text="communication time per step, Zipf 1.2", rival=ROW_WISE_DEDUP, metric="comm_time_vs_dedup_zipf12"),
        Claim(
            text="communication time per step, globo",
            rival=ROW_WISE_DEDUP,
            metric="comm_time_vs_dedup_globo",
            is_headline=True,
        ),
        Claim(
            text="relative error of predicted bytes per step",
            rival="bytes counted at the interfaces",
            metric="predicted_bytes_error",
            target=0.1,
            is_below=True,
            is_value=True,
        ),
        Claim(
            text="relative gap of the plan's objective",
            rival="its proven lower bound",
            metric="planner_gap",
            target=0.01,
            is_below=True,
            is_value=True,
        ),
    ),
    "fae": (
        Claim(
            text="embedding part of a hot batch, seconds", rival=TABLE_WISE, metric="hot_batch_embedding", target=2.0
        ),
        Claim(
            text="training samples/s with hot batches, slow network, Zipf 1.2",
            rival=TABLE_WISE,
            metric="train_shaped",
            target=2.3,
            is_headline=True,
        ),
        Claim(
            text="training samples/s with hot batches, loopback", rival=TABLE_WISE, metric="train_loopback", target=1.2
        ),
        Claim(
            text="swapping 100,000 rows with optimiser state",
            rival="a Python loop over rows",
            metric="swap_rows",
            target=100.0,
        ),
        Claim(
            text="AUC difference of hot order, Zipf 1.2",
            rival="random order of the same samples",
            metric="auc_difference",
            target=0.001,
            is_below=True,
            is_value=True,
        ),
        Claim(
            text="layout speed, ids per second and core", rival="", metric="layout_ids_per_s", target=5e6, is_value=True
        ),
        Claim(
            text="training samples/s, low-skew data (hot batches disable themselves)",
            rival=TABLE_WISE,
            metric="low_skew",
            target=0.97,
        ),
        Claim(
            text="training samples/s, 50 GB table with 12 GB of memory",
            rival="",
            metric="beyond_memory_samples_per_s",
            is_value=True,
        ),
    ),
    "fae_order": (
        Claim(
            text="AUC difference of hot order, globo",
            rival="random order of the same samples",
            metric="auc_difference_globo",
            target=0.001,
            is_below=True,
            is_value=True,
        ),
    ),
    "pss": (
        Claim(
            text="training step of shared parameters",
            rival="plain torch with an index tensor",
            metric="step_vs_torch",
            target=10.0,
        ),
        Claim(
            text="training step of shared parameters, pooling 1",
            rival="FBGEMM, full table of 4,000,000 rows",
            metric="step_vs_fbgemm_pool1",
            target=1.3,
        ),
        Claim(
            text="training step of shared parameters, pooling 20",
            rival="FBGEMM, full table of 4,000,000 rows",
            metric="step_vs_fbgemm_pool20",
            target=1.0,
        ),
        Claim(text="test AUC on frappe, full table", rival="", metric="frappe_auc_full", is_value=True),
        Claim(
            text="test AUC on frappe, 10x fewer bytes",
            rival="full table",
            metric="frappe_auc_10x",
            target=0.002,
            is_value=True,
            reference="frappe_auc_full",
            is_headline=True,
        ),
        Claim(
            text="test AUC on frappe, 100x fewer bytes, hot rows exact",
            rival="best other method at 100x (shared rows without exact ones)",
            metric="frappe_auc_100x_hot",
            is_value=True,
            reference="best_peer_auc_100x",
        ),
        Claim(
            text="peak resident memory, training 100 GB of logical tables",
            rival="",
            metric="resident_100gb",
            target=2**30,
            is_below=True,
            is_value=True,
        ),
    ),
    "intune": (
        Claim(
            text="simulated rows/s, share of the oracle's",
            rival="oracle that knows the simulator",
            metric="sim_oracle_share",
            target=0.97,
            is_value=True,
        ),
        Claim(
            text="the same after an event",
            rival="oracle that knows the simulator",
            metric="sim_after_event",
            target=0.97,
            is_value=True,
        ),
        Claim(
            text="simulated rows/s",
            rival="linear programme, profiled again every interval",
            metric="sim_vs_lp",
            target=0.99,
        ),
        Claim(text="simulated rows/s", rival="even split of workers", metric="sim_vs_even", target=1.8),
        Claim(
            text="simulated out-of-memory kills",
            rival="AUTOTUNE-like controller without a memory guard",
            metric="sim_oom",
            target=0.0,
            is_below=True,
            is_value=True,
        ),
        Claim(
            text="rows/s from local Parquet",
            rival="best other loader (Grain; also torchdata, SPDL, tf.data, DataLoader)",
            metric="local_vs_best_peer",
            target=1.0,
            is_headline=True,
        ),
        Claim(
            text="rows/s when a read takes 50 ms", rival="one worker per stage", metric="latency_speedup", target=10.0
        ),
        Claim(
            text="run time with two slow stages",
            rival="worker counts set by hand",
            metric="two_stage_vs_preset",
            target=1 / 1.15,
        ),
    ),
    "together": (
        Claim(
            text="training samples/s, all switches, globo, slow network",
            rival=SWITCHES_OFF,
            metric="globo_all",
            target=3.0,
            is_headline=True,
        ),
        Claim(
            text="training samples/s, best single switch (`dedup`), globo",
            rival=SWITCHES_OFF,
            metric="globo_best_single",
        ),
        Claim(
            text="training samples/s, all switches, `recd`, slow network",
            rival=SWITCHES_OFF,
            metric="recd_all",
            target=5.0,
        ),
        Claim(
            text="time to the baseline's AUC, all switches, globo",
            rival=SWITCHES_OFF,
            metric="time_to_auc",
            target=2.5,
        ),
        Claim(
            text="AUC difference, all switches, globo",
            rival=SWITCHES_OFF,
            metric="auc_difference",
            target=-0.002,
            is_value=True,
        ),
        Claim(
            text="relative error of predicted bytes per step",
            rival="bytes counted on the wire",
            metric="prediction_error",
            target=0.15,
            is_below=True,
            is_value=True,
        ),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A claim with what its benchmark measured."""

    claim: Claim
    benchmark: str
    result: dict[str, Any]

    @property
    def measured(self) -> str:
        metric = self.result["metrics"].get(self.claim.metric)
        if metric is None:
            return f"skipped: {self.result['skipped'].get(self.claim.metric, 'not in this form')}"
        if self.claim.is_value or metric["ratio"] is None:
            return _number(metric["ours"], metric["unit"])
        low, high = metric["spread"].get("ratio", (metric["ratio"],) * 2)
        spread = f" ({low:.2f} to {high:.2f})" if high > low else ""
        return f"{metric['ratio']:.2f}x{spread}"

    @property
    def target(self) -> str:
        claim = self.claim
        if claim.reference:
            less = f" less {claim.target:g}" if claim.target else ""
            return f"{_number(self.result['metrics'][claim.reference]['ours'], '')}{less}"
        if claim.is_below:
            return f"at most {_number(claim.target, 'bytes' if claim.target > 1e6 else '')}"
        if not claim.target:
            return ""
        return _number(claim.target, "") if claim.is_value else f"{claim.target:.3g}x"

    @property
    def is_missed(self) -> bool:
        claim, metric = self.claim, self.result["metrics"].get(self.claim.metric)
        if metric is None or not self.target:
            return False
        value = metric["ours"] if claim.is_value or metric["ratio"] is None else metric["ratio"]
        if claim.reference:
            return bool(value < self.result["metrics"][claim.reference]["ours"] - claim.target)
        return bool(abs(value) > claim.target if claim.is_below else value < claim.target)

    @property
    def machine(self) -> str:
        """Processor and cores of "x86_64, AMD EPYC, 2 cores, 24 GiB, Linux, ..."."""
        parts = str(self.result["machine"]).split(", ")
        return f"{parts[1].replace('(R)', '').removesuffix(' Processor')}, {parts[2]}"


def read_rows() -> Iterator[Row]:
    for benchmark in BENCHMARKS:
        result = json.loads((RESULTS / f"{benchmark}.json").read_text(encoding="utf-8"))
        for claim in CLAIMS[benchmark]:
            yield Row(claim=claim, benchmark=benchmark, result=result)


def make_table() -> str:
    """All rows, with the commit, date and machine of each."""
    lines = [
        "| what | against | measured | target | benchmark | commit | date | machine |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in read_rows():
        verdict = " **missed**" if row.is_missed else ""
        source = f"`benchmarks/{row.benchmark}.py` | {row.result['commit'][:10]} | {row.result['date']} | {row.machine}"
        lines.append(f"| {row.claim.text} | {row.claim.rival} | {row.measured}{verdict} | {row.target} | {source} |")
    return "\n".join(lines)


def make_headlines() -> str:
    """The README's rows and how many targets are met."""
    rows = list(read_rows())
    lines = ["| what | measured | against |", "|---|---|---|"]
    for row in rows:
        if row.claim.is_headline:
            rival = f"{row.target.split(' less ')[0]}, {row.claim.rival}" if row.claim.reference else row.claim.rival
            lines.append(f"| {row.claim.text} | {row.measured} | {rival} |")
    targets, missed = [row for row in rows if row.target], [row for row in rows if row.is_missed]
    names = "; ".join(f"{row.claim.text}: {row.measured} ({row.target})" for row in missed)
    met = f"{len(targets) - len(missed)} of {len(targets)} targets are met."
    return "\n".join([*lines, "", met + (f" Missed: {names}." if missed else "")])


def _number(value: float, unit: str) -> str:
    if unit in ("bytes", "B"):
        return f"{value / 2**20:,.0f} MiB"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def update(page: Path, table: str) -> str:
    """The page's text with the table between its markers."""
    text = page.read_text(encoding="utf-8")
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise SystemExit(f"{page}: lacks {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the benchmarks first")
    parser.add_argument("--only", action="append", choices=BENCHMARKS, help="run only this one; repeatable")
    parser.add_argument("--check", action="store_true", help="change nothing, fail if a page is out of date")
    given = parser.parse_args()
    if given.run:
        RESULTS.mkdir(exist_ok=True)
        for name in given.only or BENCHMARKS:
            print(f"== {name}", flush=True)
            target = RESULTS / f"{name}.json"
            form = [] if name in FULL_FORM else ["--quick"]
            subprocess.run([sys.executable, HERE / f"{name}.py", *form, "--json", target], check=True)
    table = make_table()
    for page, content in ((README, make_headlines()), (PAGE, table)):
        text = update(page, content)
        if text == page.read_text(encoding="utf-8"):
            continue
        if given.check:
            raise SystemExit(
                f"{page.name}: its table differs from benchmarks/results; run python benchmarks/results.py"
            )
        page.write_text(text, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
