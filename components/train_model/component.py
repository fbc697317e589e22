from kfp import dsl
from kfp.dsl import Artifact, ClassificationMetrics, Dataset, Input, Metrics, Model, Output

from components.images import TRAINER, image


@dsl.component(base_image=image(TRAINER), install_kfp_package=False)
def train_model(
    dataset: Input[Dataset],
    plan: Input[Artifact],
    allocation: Input[Artifact],
    model: Output[Model],
    training_metrics: Output[Metrics],
    roc_curve: Output[ClassificationMetrics],
    nproc: int,
    settings: str,
    workdir: str,
    num_nodes: int = 1,
    variant: dict = {},  # noqa: B006
    subfolder: str = "",
    start_from: str = "{}",
) -> None:
    """Train with torchrun in this pod or on several nodes, evaluate on held-out sessions, register the model."""
    import json

    from components.outputs import path_of, publish
    from components.train_model.step import export_model, run_training, show_training
    from recmill.artifacts import Checkpoint
    from recmill.tracking import step_run

    inputs = {"dataset": path_of(dataset), "plan": path_of(plan), "allocation": path_of(allocation)}
    with step_run(
        "train_model",
        workdir=workdir,
        inputs=inputs | {"nproc": nproc, "num_nodes": num_nodes, "start_from": start_from} | variant,
        subfolder=subfolder,
    ) as step:
        chosen = json.loads(settings) | variant
        result = run_training(
            step,
            inputs,
            settings=chosen,
            nproc=nproc,
            num_nodes=num_nodes,
            export=step.path("model"),
            start_from=start_from,
        )
        checkpoint = Checkpoint.load(step.path("train/checkpoint"))
        export_model(step, checkpoint)
        publish(model, step.wrote("checkpoint", checkpoint) | step.log_model(step.path("model")))
        show_training(step, result, training_metrics, roc_curve)
