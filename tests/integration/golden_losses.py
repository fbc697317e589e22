"""Loss curves of every preset and switch as they were recorded: tests/golden/losses/CASE.json.

A case (golden_cases.py) is a dataset, a plan and settings. It trains for a few steps on 1 and on 2 processes, each with
one thread, through the same `train()` as users call. One case file holds, per number of processes, the loss of every
step and the final evaluation, and with them the software and processor of the recording. test_golden_losses.py
compares them.

    python -m tests.integration.golden_losses             trains all cases and lists what differs
    python -m tests.integration.golden_losses --record    writes all files again; only for a change meant to be seen
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from recmill.training.trainer import Launcher, train
from tests.integration import golden_rank
from tests.integration.golden_cases import PROCESSES, Case, Inputs, cases

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "losses"
RECORD = "python -m tests.integration.golden_losses --record"

# Another build of torch or another processor rounds sums differently. Measured over all cases on the machine of the
# recording: ATEN_CPU_CAPABILITY=default changes losses by up to 5.3e-7 of their value and AUC by up to 2.4e-6, avx2 by
# 1.2e-7 and 0, MKL_CBWR=COMPATIBLE by 7.0e-7 and 0. The tolerances are 15 to 20 times that. What they must notice is
# far larger: hot_sync_every=3 instead of 1 changes the second loss by 1.6e-3.
LOSS_TOLERANCE = 1e-5  # relative
AUC_TOLERANCE = 5e-5  # absolute


class Ranks:
    """`nproc` processes that train one job after another; `launch` is a launcher for `train()`."""

    def __init__(self, nproc: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([golden_rank.__name__])  # torch and torchrec are imported once for all ranks
        self.ranks = []
        for rank in range(nproc):
            ours, theirs = context.Pipe()
            process = context.Process(target=golden_rank.train_in_turn, args=(theirs, rank, nproc), daemon=True)
            process.start()
            theirs.close()
            self.ranks.append((process, ours))

    def launch(self, job: Mapping[str, Any], folder: Path, nproc: int) -> None:
        assert nproc == len(self.ranks)
        port = free_port()
        for _, connection in self.ranks:
            connection.send((port, dict(job)))
        errors = [connection.recv() for _, connection in self.ranks]
        if any(errors):
            raise RuntimeError(f"{folder}: " + "\n".join(f"rank {rank}: {error}" for rank, error in enumerate(errors)))

    def close(self) -> None:
        for process, connection in self.ranks:
            process.kill()
            process.join()
            connection.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


Results = dict[str, dict[int, dict[str, Any]]]  # case -> number of processes -> what its golden file holds for it


def train_cases(chosen: list[Case], inputs: Inputs) -> Results:
    """What the cases give, but for those whose data is missing."""
    folder = inputs.folder
    with ExitStack() as stack:
        ranks = {nproc: Ranks(nproc) for nproc in PROCESSES}  # they import while the inputs are made
        for each in ranks.values():
            stack.callback(each.close)
        made = {(case.name, nproc): inputs.of(case, nproc) for case in chosen for nproc in case.processes}
        results: Results = {case.name: {} for case in chosen if case.data not in inputs.missing}

        def train_in_turn(nproc: int) -> None:
            for case in chosen:
                paths = made.get((case.name, nproc))
                if paths is not None:
                    out = folder / f"out-{nproc}" / case.name
                    results[case.name][nproc] = run_case(case, paths, out, nproc, launcher=ranks[nproc].launch)

        with ThreadPoolExecutor(len(PROCESSES)) as pool:
            list(pool.map(train_in_turn, PROCESSES))
    return results


def run_case(
    case: Case, paths: tuple[Path, Path | None], out: Path, nproc: int, *, launcher: Launcher | None = None
) -> dict[str, Any]:
    data, plan = paths
    result = train(data, plan=plan, out=out, nproc=nproc, config=case.config(), launcher=launcher)
    hot = result["hot"]["batches"] if result["hot"] else {"hot": 0, "cold": result["num_steps"]}
    return {
        "losses": [point["loss"] for point in result["curve"]],
        "evaluations_auc": [entry["auc"] for entry in result["evaluations"]],
        "evaluations_log_loss": [entry["log_loss"] for entry in result["evaluations"]],
        "auc": result["metrics"]["auc"],
        "log_loss": result["metrics"]["log_loss"],
        "hot_batches": hot["hot"],
        "cold_batches": hot["cold"],
    }


def this_machine() -> dict[str, str]:
    """What decides the last bits of a sum: the build of torch, the instructions it uses and the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    rounding = {name: os.environ[name] for name in ("MKL_CBWR",) if name in os.environ}
    return {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "processor": models[0] if models else platform.processor(),
        **rounding,
    }


def read_golden(name: str) -> dict[str, Any]:
    path = golden_file(name)
    if not path.exists():
        raise FileNotFoundError(f"{path}: missing; record it with {RECORD} --case {name}")
    body: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return body


def differences(golden: Mapping[str, Any], runs: Mapping[int, Mapping[str, Any]], *, is_exact: bool) -> list[str]:
    """One sentence per number that is not as recorded: in every bit, or within the tolerances."""
    if set(golden["processes"]) != set(map(str, runs)):
        return [f"recorded for {', '.join(golden['processes'])} processes, trained with {', '.join(map(str, runs))}"]
    found = []
    for nproc, run in runs.items():
        expected = flatten(golden["processes"][str(nproc)])
        actual = flatten(run)
        if len(expected) != len(actual):
            found.append(f"{nproc} processes: {len(actual)} numbers, recorded {len(expected)}")
        for (what, before), (_, now) in zip(expected, actual, strict=False):
            if not (before == now if is_exact else is_close(what, before, now)):
                found.append(f"{nproc} processes: {what} is {now!r}, recorded {before!r}")
    return found


def flatten(run: Mapping[str, Any]) -> list[tuple[str, float]]:
    """[("losses 1", 0.7), ("losses 2", 0.6), ..., ("auc", 0.5), ...]"""
    entries = []
    for key, value in run.items():
        if isinstance(value, list):
            entries += [(f"{key} {number + 1}", each) for number, each in enumerate(value)]
        else:
            entries.append((key, value))
    return entries


def is_close(what: str, before: float, now: float) -> bool:
    if what.endswith("batches"):
        return before == now
    if "auc" in what:
        return abs(before - now) <= AUC_TOLERANCE
    return abs(before - now) <= LOSS_TOLERANCE * abs(before)


def golden_file(name: str) -> Path:
    return GOLDEN / f"{name}.json"


def record(results: Results) -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, runs in results.items():
        body = {"recorded_with": this_machine(), "processes": {str(nproc): run for nproc, run in runs.items()}}
        golden_file(name).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare loss curves with the recorded ones, or record them.")
    parser.add_argument("--record", action="store_true", help="write tests/golden/losses again")
    parser.add_argument("--case", action="append", help="train this case only; may be repeated")
    given = parser.parse_args()
    chosen = [case for case in cases() if not given.case or case.name in given.case]
    with tempfile.TemporaryDirectory(prefix="recmill-golden-") as folder:
        inputs = Inputs(Path(folder))
        results = train_cases(chosen, inputs)
    for data, why in inputs.missing.items():
        print(f"cases of {data} left out: {why}")
    if given.record:
        record(results)
        return 0
    lines = [
        f"{name}: {line}"
        for name, runs in results.items()
        for line in differences(read_golden(name), runs, is_exact=True)
    ]
    print("\n".join(lines) or "every number is as recorded")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
