"""What hot batches gain (FAE): lookups without exchange, whole epochs with swaps and syncs, accuracy, tables on disk.

    python benchmarks/fae.py [--quick] [--json PATH|-] [--seed K]

Baseline: TorchRec's sharded tables, table-wise, 2 ranks, the same data in random order through the same reader. Ours:
hot and cold batches as planned and scheduled, gradients of equal rows summed before they are sent ("reduced"); notes
give raw gradients, which are bitwise equal to TorchRec's. Both sides run in the same processes and are measured in
turns. The shaped network is two namespaces joined by a link of NETWORK_MBIT; if namespaces are not available, the run
says so and skips the metric.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from fae_data import Workload, make_clicks, make_globo
from fae_order import SEEDS, describe_aucs, measure_aucs
from fae_swap import swap_seconds
from harness import (
    MIN_PAIRS,
    Metric,
    Options,
    compare,
    fresh_processes,
    parse_options,
    plain_value,
    say,
    warn_if_busy,
)
from parts import Found, Parts
from session_logs import why_no_globo
from shaped_network import run_on_nodes

from recmill.artifacts import AccessProfile, record_json
from recmill.artifacts.topology import Topology
from recmill.data.hot.layout import layout_hot
from recmill.data.schema import Schema
from recmill.planning.hot.selection import choose_hot_set
from recmill.training.config import TrainConfig

FOLDER = Path(__file__).parent
NETWORK_MBIT = 200.0
MIB = 2**20
LOW_SKEW = 0.6
LOOKAHEAD_BATCHES = TrainConfig().lookahead_batches
AHEAD_RIVALS = {"ahead_vs_dedup": "striped", "ahead_vs_tables": "baseline", "ahead_vs_hot": "ours"}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a run."""

    num_samples: int
    flat_samples: int
    batch_size: int
    embedding_batches: int
    turns: int
    budget_bytes: int
    zipfs: tuple[float, ...]
    globo_one_in: int
    globo_budget_bytes: (
        int  # makes about half of globo's samples hot: with all of them hot both orders would be the same
    )
    swap_rows: int
    swap_repeats: int
    disk_runs: int
    disk_gb: float
    disk_batches: int
    auc_batch_size: int = 256  # for 72,000 samples: with batches of 1,024 random orders differ by 0.002


SIZES = {
    "tiny": Sizes(
        num_samples=6_000,
        flat_samples=4_000,
        batch_size=512,
        embedding_batches=2,
        turns=1,
        budget_bytes=MIB,
        zipfs=(1.2,),
        globo_one_in=2_000,
        globo_budget_bytes=40_000,
        swap_rows=2_000,
        swap_repeats=1,
        disk_runs=1,
        disk_gb=0.5,
        disk_batches=3,
    ),
    "quick": Sizes(
        num_samples=80_000,
        flat_samples=30_000,
        batch_size=8_192,
        embedding_batches=4,
        turns=4,
        budget_bytes=12 * MIB,  # 6% of the tables; makes 8 of 10 samples hot
        zipfs=(1.2,),
        globo_one_in=200,
        globo_budget_bytes=150_000,
        swap_rows=100_000,
        swap_repeats=2,
        disk_runs=1,
        disk_gb=50.0,
        disk_batches=20,
    ),
    "full": Sizes(
        num_samples=400_000,
        flat_samples=100_000,
        batch_size=8_192,
        embedding_batches=10,
        turns=9,
        budget_bytes=24 * MIB,
        zipfs=(1.2, 1.05),
        globo_one_in=10,
        globo_budget_bytes=MIB,
        swap_rows=100_000,
        swap_repeats=9,
        disk_runs=9,
        disk_gb=50.0,
        disk_batches=200,
    ),
}


def main() -> None:
    options = parse_options(__doc__ or "", quick="fewer samples and one Zipf exponent; under 90 s")
    sizes = SIZES[options.size]
    warn_if_busy()
    with (
        tempfile.TemporaryDirectory(prefix="recmill-fae-") as scratch,
        fresh_processes(os.cpu_count() or 1) as processes,
    ):
        bench = Benchmark(options, sizes, Path(scratch), next(processes))
        bench.run()
        bench.parts.finish()


class Benchmark:
    """Creates the data once and measures the parts."""

    def __init__(self, options: Options, sizes: Sizes, folder: Path, pool: ProcessPoolExecutor) -> None:
        self.options, self.sizes, self.folder, self.pool = options, sizes, folder, pool
        self.parts = Parts(options)
        self.topology = Topology(nodes=2, ranks_per_node=1, inter_node_bytes_per_s=NETWORK_MBIT * 1e6 / 8)

    def run(self) -> None:
        # The quick form does not train on it.
        made, flat, globo = self._make_data(with_globo=self.options.size == "full" and why_no_globo() is None)
        described = {own.name: self._describe(own) for own in [*made, flat, *([globo] if globo else [])]}
        shares = {own.name: self._shares(own.profile) for own in made}
        self.parts.extra["series"] = {"workloads": described, "share_against_budget": shares}
        self.parts.measure("layout", lambda: self._measure_layout(made[0]))
        self.parts.measure("swap", self._measure_swap)
        jobs = self._jobs(made, flat, globo)
        self.parts.measure("loopback", lambda: self._measure_loopback(jobs, made[0], flat))
        self.parts.measure("shaped network", lambda: self._measure_shaped(jobs, made[0]))
        self.parts.measure("accuracy", lambda: self._measure_auc(made[0]))
        self.parts.measure("disk", self._measure_disk)

    def _make_data(self, *, with_globo: bool) -> tuple[list[Workload], Workload, Workload | None]:
        """(clicks per exponent, clicks of low skew, globo), each on its own core: nothing is timed meanwhile."""
        sizes = self.sizes
        shared: dict[str, Any] = {"topology": self.topology, "seed": self.options.seed}
        globo = None
        if with_globo:  # first: it takes longest
            globo = self.pool.submit(
                make_globo,
                self.folder,
                sizes.globo_one_in,
                budget_bytes=sizes.globo_budget_bytes,
                batch_size=sizes.batch_size // 8,
                **shared,
            )
        shared |= {"budget_bytes": sizes.budget_bytes, "batch_size": sizes.batch_size}
        counts = {**dict.fromkeys(sizes.zipfs, sizes.num_samples), LOW_SKEW: sizes.flat_samples}
        clicks = [self.pool.submit(make_clicks, self.folder, zipf, count, **shared) for zipf, count in counts.items()]
        *made, flat = [own.result() for own in clicks]
        return made, flat, globo.result() if globo else None

    def _describe(self, workload: Workload) -> dict[str, Any]:
        stated = record_json(workload.hot_set)
        return {key: stated[key] for key in stated if key != "tables"} | {
            "measured_share": workload.laid_out.hot.sample_share,
        }

    def _shares(self, profile: AccessProfile) -> list[dict[str, float]]:
        budgets = [self.sizes.budget_bytes * factor // 4 for factor in (1, 2, 4, 8)]
        found = [choose_hot_set(profile, budget_bytes=budget, topology=self.topology).hot_set for budget in budgets]
        return [
            {"budget_bytes": own.budget_bytes, "sample_share": own.sample_share, "access_share": own.access_share}
            for own in found
        ]

    def _measure_layout(self, workload: Workload) -> Found:
        """Ids that the layout reads, looks up and writes per CPU second, files and manifest included."""
        schema = Schema.load(workload.data.path)
        num_ids = sum(part.num_rows for part in workload.data.split_parts("train")) * len(schema.id_features)
        rates, seconds = [], []
        for turn in range(MIN_PAIRS if self.options.size == "full" else 3):
            start, used = time.perf_counter(), time.process_time()
            layout_hot(workload.data, workload.plan, out=self.folder / f"layout-{turn}")
            rates.append(num_ids / (time.process_time() - used))
            seconds.append(time.perf_counter() - start)
        note = f"{num_ids:,} ids of {workload.name}, CPU time of all threads"
        metrics = {"layout_ids_per_s": plain_value(rates, unit="ids/s per core", note=note)}
        return Found(metrics=metrics, extra={"series": {"layout_s": seconds}})

    def _measure_swap(self) -> Found:
        say("swap rows")
        baseline, ours = swap_seconds(self.sizes.swap_rows, repeats=self.sizes.swap_repeats)
        count = f"{self.sizes.swap_rows:,}"
        note = f"{count} rows of 64 with optimiser state from TorchRec's table and back; index_select and index_copy_"
        metric = compare(baseline, ours, unit="s", note=note, less_is_better=True)
        return Found(metrics={"swap_rows_vs_index": metric})

    def _jobs(self, made: list[Workload], flat: Workload, globo: Workload | None) -> dict[str, dict[str, Any]]:
        jobs = {"embedding": self._job("embedding", made[0]), "low_skew": self._job("training", flat)}
        jobs["low_skew"]["turns"] = 2 * self.sizes.turns  # short turns; only noise differs
        jobs |= {f"train {own.name}": self._job("training", own) for own in made}
        jobs[f"train {made[0].name}"]["is_ahead"] = True
        if globo is not None:
            jobs["train globo"] = self._job("training", globo)
        return jobs

    def _measure_loopback(self, jobs: dict[str, dict[str, Any]], clicks: Workload, flat: Workload) -> Found:
        say("two ranks over loopback")
        found = self._run(jobs, mbit=None)["results"][0]
        embedding = found["embedding"]
        raw = compare(embedding["baseline"], embedding["raw"], unit="s", less_is_better=True)
        metrics = {
            "hot_batch_embedding": compare(
                embedding["baseline"],
                embedding["reduced"],
                unit="s/batch",
                less_is_better=True,
                note=f"loopback, {self.sizes.batch_size} samples, Zipf 1.2; raw gradients {raw['ratio']:.2f}x",
            ),
            "train_loopback": self._training(found, clicks),
            **self._lookahead(found, clicks, "loopback"),
            "low_skew": compare(
                found["low_skew"]["baseline"],
                found["low_skew"]["ours"],
                unit="samples/s",
                note=f"Zipf 0.6: pays is {flat.hot_set.pays}; {flat.hot_set.reason}",
            ),
        }
        return Found(metrics=metrics, extra={"series": {"loopback": found}})

    def _measure_shaped(self, jobs: dict[str, dict[str, Any]], clicks: Workload) -> Found:
        say(f"two ranks over {NETWORK_MBIT:g} Mbit/s")
        left_out = {"low_skew", *(["embedding"] if self.options.quick else [])}
        turns = 1 if self.options.quick else self.sizes.turns  # an epoch of the baseline takes 10 s there
        shaped = {name: {**job, "turns": turns, "warm_ups": 0} for name, job in jobs.items() if name not in left_out}
        answer = self._run(shaped, mbit=NETWORK_MBIT)
        series = {"shaped": {"network": answer["network"], "note": answer["note"], **answer["results"][0]}}
        if answer["network"] == "loopback":
            skipped = ("train_shaped", *(f"{name}_shaped" for name in AHEAD_RIVALS))
            return Found(skipped=dict.fromkeys(skipped, answer["note"]), extra={"series": series})
        series["epoch_s_saved"] = self._saved(clicks, answer["results"][0][f"train {clicks.name}"])
        found = answer["results"][0]
        metrics = {"train_shaped": self._training(found, clicks), **self._lookahead(found, clicks, "shaped")}
        return Found(metrics=metrics, extra={"series": series})

    def _lookahead(self, found: dict[str, Any], workload: Workload, network: str) -> dict[str, Metric]:
        """Lookahead against the same rows without it, table-wise tables and hot batches."""
        own = found[f"train {workload.name}"]
        cpu = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in own["epoch_cpu_s"].items())
        sent = ", ".join(f"{name} {count / 1e6:.0f} MB" for name, count in own["epoch_sent_bytes"].items())
        note = (
            f"{workload.name}, windows of {LOOKAHEAD_BATCHES} batches; rank 0 per epoch: CPU {cpu}; sent {sent or '?'}"
        )
        return {
            f"{name}_{network}": compare(own[side], own["ahead"], unit="samples/s", note=note)
            for name, side in AHEAD_RIVALS.items()
        }

    def _training(self, found: dict[str, Any], workload: Workload) -> Metric:
        own = found[f"train {workload.name}"]
        share = workload.laid_out.hot.sample_share
        note = f"{workload.name}, {share:.0%} of the samples hot, swaps {own['swap_s']:.2f} s per epoch"
        others = [
            f"{name.removeprefix('train ')} {compare(entry['baseline'], entry['ours'], unit='')['ratio']:.2f}x"
            for name, entry in found.items()
            if name.startswith("train ") and entry is not own
        ]
        return compare(own["baseline"], own["ours"], unit="samples/s", note="; ".join([note, *others]))

    def _saved(self, workload: Workload, own: dict[str, list[float]]) -> dict[str, float]:
        """Seconds per epoch that hot batches save on the shaped network: what the layout has to pay for."""
        num_samples = sum(part.num_rows for part in workload.data.split_parts("train"))
        before, after = (num_samples / (sum(own[side]) / len(own[side])) for side in ("baseline", "ours"))
        return {"baseline": before, "ours": after, "saved": before - after}

    def _job(self, task: str, workload: Workload) -> dict[str, Any]:
        """Like `hot_batches=auto`: hot batches are trained if the plan says that they pay off."""
        return {
            "task": task,
            "data": workload.data.path,
            "plan": workload.plan.path,
            "laid_out": workload.laid_out.path if task == "embedding" or workload.hot_set.pays else None,
            "batch_size": self.sizes.batch_size if workload.name != "globo" else self.sizes.batch_size // 8,
            "num_batches": self.sizes.embedding_batches,
            "turns": self.sizes.turns,
            "warm_ups": 1,
        }

    def _run(self, jobs: dict[str, Any], *, mbit: float | None) -> dict[str, Any]:
        path = self.folder / "jobs.json"
        path.write_text(json.dumps(jobs), encoding="utf-8")
        return run_on_nodes(
            FOLDER / "fae_rank.py",
            [str(path)],
            nodes=2 if mbit else 1,
            ranks_per_node=1 if mbit else 2,
            inter_mbit=mbit,
            intra_mbit=None,
            env={"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(FOLDER.parent)},
        )

    def _measure_auc(self, clicks: Workload) -> Found:
        say("accuracy of hot and cold turns against random order")
        has_control = self.options.size != "quick"
        settings, seeds = {"batch_size": self.sizes.auc_batch_size}, SEEDS[self.options.size]
        own = measure_aucs(self.pool, clicks, settings, seeds=seeds, has_control=has_control, parts=self.parts)
        found = {clicks.name: own}
        note = f"mean difference, {seeds} seeds; {describe_aucs(found)}; globo: benchmarks/fae_order.py"
        metrics = {"auc_difference": plain_value(own["difference"], unit="AUC", note=note)}
        skipped = {}
        if has_control:
            note = "what auc_difference would be without hot batches: two random orders"
            metrics["auc_random_orders"] = plain_value(own["control"], unit="AUC", note=note)
            note = "turns of one cold batch, the most swaps: is it the length of turns that costs?"
            metrics["auc_finest_turns"] = plain_value(own["finest_difference"], unit="AUC", note=note)
        else:
            why = "left out of --quick, which would take longer than 90 s"
            skipped = dict.fromkeys(("auc_random_orders", "auc_finest_turns"), why)
        return Found(metrics=metrics, skipped=skipped, extra={"series": {"auc": found}})

    def _measure_disk(self) -> Found:
        say("a table larger than memory")
        command = [sys.executable, str(FOLDER / "fae_disk.py"), str(self.folder / "disk")]
        command += [str(self.sizes.disk_batches), str(self.sizes.disk_gb)]
        environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
        runs = []
        for _ in range(self.sizes.disk_runs):
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if done.returncode:
                raise RuntimeError(f"fae_disk.py: {done.stderr.strip()[-500:]}")
            runs.append(json.loads(done.stdout))
        found = runs[0]
        note = (
            f"table {found['table_bytes'] / 1e9:.1f} GB, peak resident {found['peak_bytes'] / 1e9:.2f} GB of 12, "
            f"{found['hot_share']:.0%} of reads in memory, {found['written_bytes'] / 1e9:.2f} GB written"
        )
        rates = [run["samples_per_s"] for run in runs]
        metric = plain_value(rates, unit="samples/s", note=note)
        return Found(metrics={"beyond_memory_samples_per_s": metric}, extra={"series": {"disk": runs}})


if __name__ == "__main__":
    main()
