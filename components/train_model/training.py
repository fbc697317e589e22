"""Training in this pod or, with more than one node, in pods of a TrainJob."""

from __future__ import annotations

from typing import Any

from components.placement import Placement
from recmill.progress import Progress
from recmill.training.config import TrainConfig
from recmill.training.trainer import train


def train_anywhere(
    data: str,
    *,
    out: str,
    plan: str,
    allocation: str,
    num_nodes: int,
    nproc: int,
    config: TrainConfig,
    progress: Progress,
) -> dict[str, Any]:
    """The content of OUT/result.json, whoever wrote it."""
    inputs = {"out": out, "plan": plan, "allocation": allocation, "nproc": nproc, "config": config}
    if num_nodes == 1:
        return train(data, **inputs, progress=progress)
    from components.train_model.nodes import train_on_nodes

    return train_on_nodes(
        data, **inputs, num_nodes=num_nodes, placement=Placement.from_environment(), progress=progress
    )
