"""Which of a plan's offers a run takes up. Light, so that the launcher can ask without loading torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recmill.artifacts import InputError, ShardPlan
from recmill.training.config import TrainConfig

# What comparisons turn on and off, and what each stands for; the manifest of such a comparison's folder.
SWITCHES = {
    "dedup": "deduplication (RecD)",
    "tiers": "tiers of rows (FlexShard)",
    "hot": "hot batches (FAE)",
    "shared": "shared parameters (PSS)",
    "tuned": "tuned ingestion (InTune)",
}
ABLATION_FILE = "ablation.json"


def wants_hot_batches(plan: ShardPlan | None, config: TrainConfig) -> bool:
    """Whether this run trains hot batches apart: asked for, or the plan says that it pays."""
    hot_set: Mapping[str, Any] | None = plan.body.get("hot_set") if plan else None
    if config.hot_batches == "true" and not hot_set:
        raise InputError("hot_batches=true, but no plan holds a hot set; make one with `recmill plan --hot-budget`")
    if config.hot_batches == "false" or not hot_set:
        return False
    return config.hot_batches == "true" or bool(hot_set["pays"])


def shared_tables(plan: ShardPlan, config: TrainConfig) -> frozenset[str]:
    """The tables that share parameters in this run."""
    return frozenset() if config.sharing == "false" else placed(plan, "shared")


def placed(plan: ShardPlan, kind: str) -> frozenset[str]:
    """The tables that the plan places so: "tiered" or "shared"."""
    return frozenset(name for name, table in plan.body["tables"].items() if table.get("placement") == kind)
