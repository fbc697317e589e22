"""The names of the metrics in tables and reports, and what each means in one phrase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class MetricName(NamedTuple):
    """One metric as people read it; `key` is its name in result.json."""

    key: str
    title: str
    meaning: str


METRICS = (
    MetricName("auc", "AUC", "chance that a positive scores above a negative; 0.5 is guessing"),
    MetricName("gauc", "GAUC", "AUC within each group, weighted by its samples"),
    MetricName("log_loss", "Log loss", "mean negative log likelihood of the labels; lower is better"),
    MetricName(
        "normalised_entropy", "Normalised entropy", "log loss over that of predicting the base rate; below 1 is better"
    ),
    MetricName(
        "calibration", "Calibration", "predicted positives over observed ones; 1 is right, above 1 predicts too many"
    ),
    MetricName("ece", "ECE", "distance of predicted and observed rates, mean over 20 bins of equal mass; 0 is right"),
    MetricName("mrr", "MRR", "mean of 1 / rank of a session's first positive"),
    MetricName("ndcg", "NDCG@{k}", "order of a session's first {k}, early positives count most"),
    MetricName("recall", "Recall@{k}", "share of a session's positives among its first {k}"),
    MetricName("hit_rate", "Hit rate@{k}", "share of sessions with a positive among their first {k}"),
)


def metric_names(metrics: Mapping[str, Any]) -> list[MetricName]:
    """The metrics that `metrics` (of result.json) holds, in the order of a table."""
    found = []
    for entry in METRICS:
        if entry.key in metrics:
            found.append(entry)
        for k in cutoffs_of(entry.key, metrics):
            title, meaning = entry.title.format(k=k), entry.meaning.format(k=k)
            found.append(MetricName(f"{entry.key}_at_{k}", title, meaning))
    return found


def cutoffs_of(key: str, names: Sequence[str] | Mapping[str, Any]) -> list[int]:
    """[5, 10] if `names` holds ndcg_at_5 and ndcg_at_10 and the key is ndcg."""
    ends = (name.removeprefix(f"{key}_at_") for name in names if name.startswith(f"{key}_at_"))
    return sorted(int(end) for end in ends if end.isdecimal())


def headline_numbers(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """The plain numbers among the metrics of a result, with the standard error of AUC: for trackers.

    Those of labels after the first have the label in front: purchase_auc.
    """
    numbers = {name: value for name, value in metrics.items() if value is None or isinstance(value, int | float)}
    errors = metrics.get("standard_errors", {})
    numbers |= {"auc_standard_error": errors["auc"]} if "auc" in errors else {}
    for label in metrics.get("labels", [])[1:]:
        numbers |= {f"{label}_{name}": value for name, value in headline_numbers(metrics["tasks"][label]).items()}
    return numbers


def metrics_by_label(metrics: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The metrics of each label in order; {"": metrics} if there is one."""
    tasks = metrics.get("tasks")
    if not isinstance(tasks, Mapping):
        return {"": metrics}
    order = [name for name in metrics.get("labels", []) if name in tasks]
    return {name: tasks[name] for name in (*order, *(name for name in tasks if name not in order))}
