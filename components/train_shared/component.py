from kfp import dsl
from kfp.dsl import Artifact, ClassificationMetrics, Dataset, Input, Metrics, Model, Output

from components.images import TRAINER, image


@dsl.component(base_image=image(TRAINER), install_kfp_package=False)
def train_shared(
    dataset: Input[Dataset],
    profile: Input[Artifact],
    allocation: Input[Artifact],
    shared_model: Output[Model],
    shared_metrics: Output[Metrics],
    shared_roc_curve: Output[ClassificationMetrics],
    nproc: int,
    memory_budget_bytes: int,
    hot_budget: str,
    compress: str,
    settings: str,
    workdir: str,
    num_nodes: int = 1,
    start_from: str = "{}",
) -> None:
    """Train the variant whose tables share parameters: a smaller model, compressed as `compress` says."""
    import json

    from components.form import read_hot_budget
    from components.outputs import path_of, publish
    from components.train_model.step import show_training, train_beside
    from recmill.tracking import step_run

    inputs = {"dataset": path_of(dataset), "profile": path_of(profile), "allocation": path_of(allocation)}
    with step_run(
        "train_shared",
        workdir=workdir,
        inputs=inputs | {"nproc": nproc, "num_nodes": num_nodes, "start_from": start_from, "compress": compress},
    ) as step:
        result, checkpoint = train_beside(
            step,
            "shared",
            inputs,
            nproc=nproc,
            num_nodes=num_nodes,
            start_from=start_from,
            settings=json.loads(settings) | {"sharing": "true"},
            memory_budget_bytes=memory_budget_bytes,
            hot_budget_bytes=read_hot_budget(hot_budget),
            compress=compress,
        )
        publish(shared_model, step.wrote("checkpoint", checkpoint))
        show_training(step, result, shared_metrics, shared_roc_curve)
