"""Results of a finished run: collected from its folder, printed as a table."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recmill.artifacts import join_path, read_json
from recmill.sizes import format_bytes
from recmill.training.trainer import layout_note

QUALITY = {
    "auc": "AUC",
    "best_reachable_auc": "best reachable AUC",
    "log_loss": "log loss",
    "normalised_entropy": "normalised entropy",
    "gauc": "GAUC",
    "ndcg_at_10": "NDCG@10",
    "calibration": "calibration",
}


def collect_results(workdir: str, steps: tuple[str, ...]) -> dict[str, Any]:
    """The run's figures: every step's seconds and metrics, and the headline metrics of the model."""
    recorded = {step: read_json(join_path(workdir, f"steps/{step}.json")) for step in steps}
    run = read_json(join_path(workdir, "run.json"))
    trained = recorded["train_model"]["metrics"] | _best_auc(workdir)
    data = read_json(join_path(workdir, "train/result.json"))["data"]
    return {
        "path": workdir,
        "report": join_path(workdir, "report.html"),
        "preset": run["preset"],
        "pipeline_run_id": run["pipeline_run_id"],
        "mlflow": run["mlflow"],
        "seconds": run["seconds"],
        "data": data,
        "metrics": {name: trained[name] for name in (*QUALITY, "samples_per_s") if name in trained},
        "startup_seconds": sum(entry["startup_seconds"] for entry in recorded.values()),
        "steps": {
            step: {name: entry[name] for name in ("seconds", "startup_seconds", "metrics")}
            for step, entry in recorded.items()
        },
    }


def _best_auc(workdir: str) -> dict[str, float]:
    """The AUC that no model can beat, where the data's hidden model is known."""
    info = read_json(join_path(workdir, "dataset/schema.json")).get("info", {})
    return {"best_reachable_auc": info["best_auc"]} if "best_auc" in info else {}


def describe_results(results: Mapping[str, Any]) -> list[str]:
    """The results as lines for people."""
    lines = ["", f"{'step':<16}{'seconds':>9}{'start-up':>10}{'rows/s':>13}{'written':>12}"]
    lines += [describe_step(step, entry) for step, entry in results["steps"].items()]
    lines += ["-" * 60, f"{'whole run':<16}{results['seconds']:>9.1f}{results['startup_seconds']:>10.1f}", ""]
    metrics = results["metrics"]
    lines += [f"{title:<22}{metrics[name]:.4f}" for name, title in QUALITY.items() if name in metrics]
    if "samples_per_s" in metrics:
        lines.append(f"{'training samples/s':<22}{metrics['samples_per_s']:,.0f}")
    lines += [*layout_note(results), "", f"report: {results['report']}"]
    tracking_uri = results["mlflow"]["tracking_uri"]
    if tracking_uri.startswith("http"):
        lines.append(f"MLflow: {tracking_uri}")
    elif tracking_uri:
        program = Path(sys.executable).with_name("mlflow")
        lines.append(f"MLflow: {program} ui --backend-store-uri {tracking_uri}")
    return lines


def describe_step(step: str, entry: Mapping[str, Any]) -> str:
    metrics = entry["metrics"]
    rate = metrics.get("rows_per_s", metrics.get("samples_per_s"))
    size = metrics.get("written_bytes") or None  # 0: only a manifest was written
    return (
        f"{step:<16}{entry['seconds']:>9.1f}{entry['startup_seconds']:>10.1f}"
        f"{f'{rate:,.0f}' if rate is not None else '-':>13}{format_bytes(size) if size is not None else '-':>12}"
    )


class Follower:
    """Shows the running step and its progress on standard error: lines in a log, a live line on a terminal."""

    def __init__(self, workdir: str, steps: tuple[str, ...], *, is_silent: bool = False) -> None:
        self.workdir, self.steps, self.is_silent = workdir, steps, is_silent
        self.is_terminal = sys.stderr.isatty()
        self.shown = 0.0
        self.num_started = 0

    def __call__(self, step: str, text: str) -> None:
        if self.is_silent:
            return
        if text == "started":
            self.num_started += 1  # kfp may reorder independent steps
            self.shown = time.monotonic()
        place = f"[{self.num_started}/{len(self.steps)}]"
        if text == "started":
            self._show(f"{place} {step} ...", is_last=False)
        elif text.startswith("done in"):
            self._show(f"{place} {step}  {text}", is_last=True)
        elif text.startswith(("error: ", "failed: ")):
            self._show(f"{place} {step}  failed", is_last=True)
        elif self.is_terminal or time.monotonic() - self.shown > 5:
            self.shown = time.monotonic()
            self._show(f"{place} {step}  {text}", is_last=False)

    def _show(self, line: str, *, is_last: bool) -> None:
        if self.is_terminal:
            sys.stderr.write(f"\r\x1b[K{line[:110]}" + ("\n" if is_last else ""))
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()
