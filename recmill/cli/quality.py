"""Metrics as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recmill.training.metrics.catalogue import metric_names, metrics_by_label


def quality_lines(split: str, metrics: Mapping[str, Any]) -> list[str]:
    """One line per metric with its standard error and meaning, then one per slice; label by label."""
    lines: list[str] = []
    for name, own in metrics_by_label(metrics).items():
        lines += [*([""] if lines else []), *_lines(f"{split}, {name}" if name else split, own)]
    return lines


def _lines(title: str, metrics: Mapping[str, Any]) -> list[str]:
    errors = metrics["standard_errors"]
    lines = [f"{title}: {metrics['num_samples']:,} samples, base rate {metrics['base_rate']:.4f}", ""]
    lines.append(f"{'metric':<20}{'value':>9}{'std error':>11}   meaning")
    lines += [
        f"{entry.title:<20}{_number(metrics[entry.key]):>9}{_number(errors.get(entry.key)):>11}   {entry.meaning}"
        for entry in metric_names(metrics)
    ]
    if metrics["slices"]:
        lines += ["", f"{'samples with':<20}{'samples':>9}{'AUC':>9}{'std error':>11}{'log loss':>10}{'std error':>11}"]
    for entry in metrics["slices"]:
        cells = [f"{entry['kind']} {entry['feature']}".ljust(20), f"{entry['num_samples']:,}".rjust(9)]
        for key, widths in (("auc", (9, 11)), ("log_loss", (10, 11))):
            values = (entry[key], entry["standard_errors"].get(key))
            cells += [_number(value).rjust(width) for value, width in zip(values, widths, strict=True)]
        lines.append("".join(cells))
    groups = metrics["groups"]
    lines += [
        "",
        f"GAUC: {groups['num_groups']:,} {groups['kind']}s, {groups['num_one_class']:,} of one class left out",
    ]
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
