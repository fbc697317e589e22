"""What the steps that train share: train_model, and train_baseline and train_shared beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from components.memory import explain_memory_limit
from components.outputs import log_numbers
from components.placement import ClusterPlacement
from components.train_model.planning import plan_apart
from components.train_model.train_job import TrainJobLauncher
from recmill.artifacts import Checkpoint, Dataset, InputError, is_remote, join_path, path_exists
from recmill.planning.planner import Topology
from recmill.tracking import StepRun
from recmill.tracking.models import package_model
from recmill.tracking.steps import say
from recmill.training.config import TrainConfig
from recmill.training.metrics.catalogue import headline_numbers
from recmill.training.preload import preloaded_ranks
from recmill.training.processes import threads_of
from recmill.training.switches import Switch
from recmill.training.trainer import train

BASELINE = {switch.value: "false" for switch in Switch}


def run_training(
    step: StepRun,
    inputs: Mapping[str, str],
    *,
    settings: Mapping[str, str],
    nproc: int,
    num_nodes: int,
    folder: str = "",
    export: str = "",
    start_from: str = "{}",
) -> dict[str, Any]:
    """Train in this pod or on several nodes, in RUN/folder/train; record and log what came out.

    `inputs` are the paths of dataset, plan and, if there is one, allocation. The first rank writes the servable model
    to `export`. `start_from` names the checkpoint that goes on, as JSON.
    """
    if num_nodes > 1 and is_remote(step.path("train")):
        raise InputError(f"{step.path('train')}: training on several nodes writes to a mounted folder, not to a URL")
    step.log_dataset(Dataset.load(inputs["dataset"]), context="training")
    launcher = TrainJobLauncher(
        num_nodes=num_nodes,
        placement=ClusterPlacement.from_environment(),
        progress=step.progress,
        notice=partial(say, step.step),
    )
    with explain_memory_limit():
        result = train(
            inputs["dataset"],
            out=step.path(join_path(folder, "train") if folder else "train"),
            plan=inputs["plan"],
            allocation=inputs.get("allocation"),
            nproc=num_nodes * nproc,
            config=TrainConfig.from_overrides(settings),
            start_from=json.loads(start_from).get("checkpoint"),
            launcher=launcher if num_nodes > 1 else None,
            export=export,
            progress=step.progress,
        )
    speed = {name: result[name] for name in ("samples_per_s", "peak_memory_bytes")}
    step.record(headline_numbers(result["metrics"]) | speed)
    step.log_training(result)
    step.startup_seconds += result["usage"].get("startup_seconds", 0.0)
    return result


def train_beside(
    step: StepRun,
    folder: str,
    inputs: Mapping[str, str],
    *,
    settings: Mapping[str, str],
    nproc: int,
    num_nodes: int,
    start_from: str = "{}",
    **plan_options: Any,
) -> tuple[dict[str, Any], Checkpoint]:
    """Plan (from inputs["profile"]) and train a variant in RUN/folder; the result and the checkpoint."""
    config = TrainConfig.from_overrides(settings)
    threads = threads_of(config.threads, nproc)
    # Ranks in this pod and the planner are forks of one process: TorchRec is loaded once, and is in memory once.
    with preloaded_ranks(threads) if num_nodes == 1 else nullcontext():
        try:
            with explain_memory_limit():
                planned = plan_apart(
                    inputs["profile"],
                    out=step.path(f"{folder}/plan"),
                    topology=Topology(nodes=num_nodes, ranks_per_node=nproc),
                    threads=threads,
                    batch_size=config.batch_size,
                    progress=step.progress,
                    **plan_options,
                )
        except InputError as error:
            text = f"the variant {folder!r} cannot be planned: {error}; leave it out of the pipeline"
            raise InputError(text) from error
        parts = {**inputs, "plan": planned.path}
        result = run_training(
            step, parts, settings=settings, nproc=nproc, num_nodes=num_nodes, folder=folder, start_from=start_from
        )
    return result, Checkpoint.load(step.path(f"{folder}/train/checkpoint"))


def export_model(step: StepRun, checkpoint: Checkpoint) -> None:
    """RUN/model, unless the first rank has written it; with its MLflow form if nobody will log the model."""
    folder = step.path("model")
    if not path_exists(join_path(folder, "signature.json")):
        from recmill.training.serving import export_checkpoint  # loads TorchRec, in seconds

        export_checkpoint(checkpoint.path, out=folder, for_mlflow=False)
    if not step.recorder and not is_remote(folder):
        package_model(Path(folder))


def show_training(step: StepRun, result: Mapping[str, Any], metrics: Any, roc: Any) -> None:
    """Fill the KFP artifacts that the UI shows of a training."""
    log_numbers(metrics, step.metrics)
    roc.log_roc_curve(result["roc"]["fpr"], result["roc"]["tpr"], result["roc"]["threshold"])
