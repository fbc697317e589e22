from kfp import dsl
from kfp.dsl import Artifact, ClassificationMetrics, Dataset, Input, Metrics, Model, Output

from components.images import TRAINER, image


@dsl.component(base_image=image(TRAINER), install_kfp_package=False)
def train_model(
    dataset: Input[Dataset],
    plan: Input[Artifact],
    allocation: Input[Artifact],
    model: Output[Model],
    metrics: Output[Metrics],
    roc: Output[ClassificationMetrics],
    nproc: int,
    settings: str,
    workdir: str,
    tracking_uri: str,
    parent_run_id: str,
    num_nodes: int = 1,
    variant: dict = {},  # noqa: B006
    subfolder: str = "",
) -> None:
    """Train with torchrun in this pod or on several nodes, evaluate on held-out sessions, register the model."""
    import json

    from components.memory import explain_memory_limit
    from components.outputs import log_numbers, path_of, publish
    from components.placement import ClusterPlacement
    from components.train_model.train_job import TrainJobLauncher
    from recmill import artifacts
    from recmill.tracking import step_run
    from recmill.training.config import TrainConfig
    from recmill.training.serving import export_checkpoint
    from recmill.training.trainer import train

    data = artifacts.Dataset.load(path_of(dataset))
    inputs = {"dataset": data.path, "plan": path_of(plan), "allocation": path_of(allocation), "nproc": nproc}
    inputs |= {"num_nodes": num_nodes, **variant}
    with step_run(
        "train_model",
        workdir=workdir,
        tracking_uri=tracking_uri,
        parent_run_id=parent_run_id,
        inputs=inputs,
        subfolder=subfolder,
    ) as step:
        step.log_dataset(data, context="training")
        placement = ClusterPlacement.from_environment()
        launcher = TrainJobLauncher(num_nodes=num_nodes, placement=placement, progress=step.progress)
        with explain_memory_limit():
            result = train(
                data.path,
                out=step.path("train"),
                plan=path_of(plan),
                allocation=path_of(allocation),
                nproc=num_nodes * nproc,
                config=TrainConfig.from_overrides(json.loads(settings) | variant),
                launcher=launcher if num_nodes > 1 else None,
                progress=step.progress,
            )
        step.record({**result["metrics"], **{name: result[name] for name in ("samples_per_s", "peak_memory_bytes")}})
        step.log_training(result)
        checkpoint = artifacts.Checkpoint.load(step.path("train/checkpoint"))
        export_checkpoint(checkpoint.path, out=step.path("model"))
        publish(model, step.wrote("checkpoint", checkpoint) | step.log_model(step.path("model")))
        log_numbers(metrics, step.metrics)
        roc.log_roc_curve(result["roc"]["fpr"], result["roc"]["tpr"], result["roc"]["threshold"])
