from kfp import dsl
from kfp.dsl import Artifact, Dataset, Input, Metrics, Output

from components.images import TRAINER, image


@dsl.component(base_image=image(TRAINER), install_kfp_package=False)
def tune_ingest(
    dataset: Input[Dataset],
    allocation: Output[Artifact],
    ingest_metrics: Output[Metrics],
    settings: str,
    workdir: str,
) -> None:
    """Give each ingestion stage its number of workers."""
    import json

    from components.outputs import log_numbers, path_of, publish
    from recmill.tracking import step_run
    from recmill.training.config import TrainConfig
    from recmill.training.processes import paused_collections

    with paused_collections():
        from recmill.tuning.allocation import tune_ingest as allocate_workers  # loads TorchRec

    inputs = {"dataset": path_of(dataset)}
    with step_run("tune_ingest", workdir=workdir, inputs=inputs) as step:
        allocated = allocate_workers(
            path_of(dataset),
            out=step.path("allocation"),
            batch_size=TrainConfig.from_overrides(json.loads(settings)).batch_size,
            log=step.recorder.points if step.recorder else None,
            progress=step.progress,
        )
        step.record({"rows_per_s": allocated.rows_per_s, "memory_bytes": allocated.memory_bytes})
        step.record({"one_worker_rows_per_s": allocated.baseline.rows_per_s})
        step.record({f"workers_{stage}": workers for stage, workers in allocated.stages.items()})
        publish(allocation, step.wrote("allocation", allocated))
        log_numbers(ingest_metrics, step.metrics)
