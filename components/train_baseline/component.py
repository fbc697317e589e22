from kfp import dsl
from kfp.dsl import Artifact, ClassificationMetrics, Dataset, Input, Metrics, Model, Output

from components.images import TRAINER, image


@dsl.component(base_image=image(TRAINER), install_kfp_package=False)
def train_baseline(
    dataset: Input[Dataset],
    profile: Input[Artifact],
    model: Output[Model],
    metrics: Output[Metrics],
    roc: Output[ClassificationMetrics],
    nproc: int,
    memory_budget_bytes: int,
    settings: str,
    workdir: str,
    tracking_uri: str,
    parent_run_id: str,
    num_nodes: int = 1,
) -> None:
    """Train the same model with every switch off, on data in time order, placed by TorchRec's own planner."""
    import json

    from components.outputs import path_of, publish
    from components.train_model.step import BASELINE, show_training, train_beside
    from recmill.tracking import step_run

    inputs = {"dataset": path_of(dataset), "profile": path_of(profile)}
    with step_run(
        "train_baseline",
        workdir=workdir,
        tracking_uri=tracking_uri,
        parent_run_id=parent_run_id,
        inputs=inputs | {"nproc": nproc, "num_nodes": num_nodes},
    ) as step:
        result, checkpoint = train_beside(
            step,
            "baseline",
            inputs,
            nproc=nproc,
            num_nodes=num_nodes,
            settings=json.loads(settings) | BASELINE,
            memory_budget_bytes=memory_budget_bytes,
            strategy="torchrec",
        )
        publish(model, step.wrote("checkpoint", checkpoint))
        show_training(step, result, metrics, roc)
