"""Results of a finished run: collected from its folder, printed as tables."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recmill.artifacts import join_path, read_checked_json, read_json
from recmill.report.gains import decision_lines, find_trainings, gains_lines
from recmill.report.runs import load_run
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
    """The run's figures: every step's seconds and metrics, what the switches decided, and the model's main metrics."""
    recorded = {step: read_checked_json(join_path(workdir, f"steps/{step}.json")) for step in steps}
    run = read_checked_json(join_path(workdir, "run.json"))
    trained = recorded["train_model"]["metrics"] | _best_auc(workdir)
    result = read_checked_json(join_path(workdir, "train/result.json"))
    return {
        "path": workdir,
        "report": join_path(workdir, "report.html"),
        "preset": run["preset"],
        "pipeline_run_id": run["pipeline_run_id"],
        "mlflow": run["mlflow"],
        "seconds": run["seconds"],
        "data": result["data"],
        "decisions": result["decisions"],
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
    """The results as lines for people: steps, switches, quality, and the comparison with the baseline."""
    run = load_run(results["path"])
    trainings, metrics = find_trainings(run), results["metrics"]
    lines = ["", *describe_steps(results), "", *decision_lines(run), ""]
    if trainings:
        lines += [*gains_lines(trainings), ""]
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


def describe_steps(results: Mapping[str, Any]) -> list[str]:
    lines = [f"{'step':<16}{'seconds':>9}{'start-up':>10}{'rows/s':>13}{'written':>12}"]
    lines += [describe_step(step, entry) for step, entry in results["steps"].items()]
    return [*lines, "-" * 60, f"{'whole run':<16}{results['seconds']:>9.1f}{results['startup_seconds']:>10.1f}"]


def describe_step(step: str, entry: Mapping[str, Any]) -> str:
    metrics = entry["metrics"]
    rate = metrics.get("rows_per_s", metrics.get("samples_per_s"))
    size = metrics.get("written_bytes") or None  # 0: only a manifest was written
    return (
        f"{step:<16}{entry['seconds']:>9.1f}{entry['startup_seconds']:>10.1f}"
        f"{f'{rate:,.0f}' if rate is not None else '-':>13}{format_bytes(size) if size is not None else '-':>12}"
    )
