from kfp import dsl
from kfp.dsl import Artifact, ClassificationMetrics, Dataset, Input, Metrics, Model, Output

from components.images import TRAINER, image


@dsl.component(base_image=image(TRAINER), install_kfp_package=False)
def train_baseline(
    dataset: Input[Dataset],
    profile: Input[Artifact],
    baseline_model: Output[Model],
    baseline_metrics: Output[Metrics],
    baseline_roc_curve: Output[ClassificationMetrics],
    nproc: int,
    memory_budget_bytes: int,
    settings: str,
    workdir: str,
    num_nodes: int = 1,
    start_from: str = "{}",
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
        inputs=inputs | {"nproc": nproc, "num_nodes": num_nodes, "start_from": start_from},
    ) as step:
        result, checkpoint = train_beside(
            step,
            "baseline",
            inputs,
            nproc=nproc,
            num_nodes=num_nodes,
            start_from=start_from,
            settings=json.loads(settings) | BASELINE,
            memory_budget_bytes=memory_budget_bytes,
            strategy="torchrec",
        )
        publish(baseline_model, step.wrote("checkpoint", checkpoint))
        show_training(step, result, baseline_metrics, baseline_roc_curve)
