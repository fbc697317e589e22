"""What a user's first command gives: `recmill run` with its defaults against the baseline that it trains itself.

rate        samples/s of the full system over the baseline's (time-ordered data, all switches off, TorchRec's planner);
            neither has start-up, evaluation or the trial in it
with_trial  the same with the seconds of the trial on our side: what this one run gained
time        training seconds to the baseline's AUC less 0.002, baseline over ours, where both sides reach it
auc         AUC of the full system less the baseline's
gauc        the same for the AUC inside sessions

The first seed is a whole run, `recmill run --preset PRESET --nproc 2`; the others train both sides again on its data
and plan, each with a trial of its own. The note of rate counts the seeds that turned each switch on. Finished runs are
kept in --work, so that an interrupted benchmark continues.

    python benchmarks/main_job.py [--preset globo] [--seeds 8] [--quick] [--json PATH|-] [--work FOLDER]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auto_grid import times_to_auc
from harness import Metric, Options, compare, finish, plain_value, say, warn_if_busy

from recmill.training.switches import Switch

NPROC = 2
SEEDS = {"tiny": 2, "quick": 4, "full": 8}
QUICK_SETTINGS = ("max_steps=60",)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The results of one `recmill run`: the baseline's and the full system's."""

    baseline: dict[str, Any]
    ours: dict[str, Any]

    @classmethod
    def load(cls, folder: Path) -> Run:
        sides = (folder / "baseline" / "train", folder / "train")
        baseline, ours = (json.loads((side / "result.json").read_text(encoding="utf-8")) for side in sides)
        return cls(baseline=baseline, ours=ours)

    @property
    def on(self) -> list[str]:
        return [entry["switch"] for entry in self.ours["decisions"] if entry["is_on"]]

    def rates(self, *, with_trial: bool = False) -> tuple[float, float]:
        seconds = self.ours["seconds"] + (self.ours["trial_seconds"] if with_trial else 0.0)
        return self.baseline["samples_per_s"], self.ours["num_samples"] / seconds

    def times(self) -> tuple[float, float] | None:
        """Seconds of both sides to the baseline's AUC; None where one does not reach it."""
        return times_to_auc(self.baseline, self.ours, self.baseline["metrics"]["auc"])

    def difference(self, figure: str) -> float:
        return float(self.ours["metrics"][figure] - self.baseline["metrics"][figure])


@dataclass(frozen=True, kw_only=True)
class MainJob:
    """The runs of one preset: a whole one for the first seed, and both trainings again for every other."""

    preset: str
    settings: tuple[str, ...]
    work: Path

    def run(self, seed: int, first: int) -> Run:
        """The results of one seed, or those of before."""
        folder, whole = self.work / f"seed-{seed}", self.work / f"seed-{first}"
        if seed == first and not (folder / "report.html").exists():
            data = ("--preset", self.preset, "--nproc", str(NPROC), "--no-tracking")
            self._call("run", *data, *self._flags(seed), "--out", str(folder))
        elif seed != first:
            baseline = (*self._flags(seed), *(f"--set={switch}=false" for switch in Switch), "--set=trial=false")
            self._train(whole / "baseline", folder / "baseline" / "train", baseline)
            shutil.rmtree(whole / "plan.trials", ignore_errors=True)  # this seed tries for itself
            own = (*self._flags(seed), "--set=tuning=auto", "--allocation", str(whole / "allocation"))
            self._train(whole, folder / "train", own)
        return Run.load(folder)

    def _train(self, made: Path, out: Path, flags: Sequence[str]) -> None:
        if not (out / "result.json").exists():
            inputs = (str(made / "dataset"), "--plan", str(made / "plan"), "--nproc", str(NPROC))
            self._call("train", *inputs, "--out", str(out), *flags)

    def _flags(self, seed: int) -> list[str]:
        return [f"--set={setting}" for setting in (f"seed={seed}", *self.settings)]

    @staticmethod
    def _call(*arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "recmill", *arguments], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"recmill {' '.join(arguments)} failed:\n{done.stderr[-4000:]}")


def measure(runs: Sequence[Run]) -> tuple[dict[str, Metric], dict[str, str]]:
    """The metrics of all runs, and why some are left out."""
    counts = Counter(name for run in runs for name in run.on)
    chosen = ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "nothing"
    on = f"runs that turned a switch on: {chosen}"
    metrics = {
        "rate": compare(*zip(*(run.rates() for run in runs), strict=True), unit="samples/s", note=on),
        "with_trial": compare(*zip(*(run.rates(with_trial=True) for run in runs), strict=True), unit="samples/s"),
        "auc": plain_value([run.difference("auc") for run in runs], unit="AUC"),
        "gauc": plain_value([run.difference("gauc") for run in runs], unit="GAUC"),
    }
    reached = [found for run in runs if (found := run.times())]
    if not reached:
        return metrics, {"time": "no run reached its baseline's AUC at an evaluation"}
    note = f"reached in {len(reached)} of {len(runs)} runs"
    metrics["time"] = compare(*zip(*reached, strict=True), unit="s", note=note, less_is_better=True)
    return metrics, {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="globo", help="data of the run. Default: globo")
    parser.add_argument("--seeds", type=int, metavar="N", help="whole runs; 8, with --quick 4")
    parser.add_argument("--quick", action="store_true", help="4 seeds, 60 steps")
    parser.add_argument("--tiny", action="store_true", help="only show that it runs: too small to measure anything")
    parser.add_argument("--json", metavar="PATH", help="write the result to this file; - for standard output")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--work", help="folder of the runs; the same command resumes. Default: runs/main-job-PRESET")
    given = parser.parse_args()
    is_quick = given.quick or given.tiny
    options = Options(benchmark="main_job", quick=is_quick, tiny=given.tiny, json_path=given.json, seed=given.seed)
    warn_if_busy()
    preset = "tiny" if given.tiny else given.preset
    work = Path(given.work or f"runs/main-job-{preset}") / options.size
    job = MainJob(preset=preset, settings=QUICK_SETTINGS if is_quick else (), work=work)
    runs, count = list[Run](), given.seeds or SEEDS[options.size]
    for number in range(count):
        seed = options.seed + number
        runs.append(job.run(seed, options.seed))
        theirs, ours = runs[-1].rates()
        say(
            f"{number + 1} of {count}  {preset}, seed {seed}: {theirs:,.0f} -> {ours:,.0f} samples/s"
            f" ({ours / theirs:.2f}x), AUC {runs[-1].difference('auc'):+.4f}, on: {', '.join(runs[-1].on) or 'nothing'}"
        )
    metrics, skipped = measure(runs)
    finish(options, metrics, skipped=skipped, extra={"preset": preset})


if __name__ == "__main__":
    main()
