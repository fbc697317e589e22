from typing import Optional

from kfp import dsl
from kfp.dsl import Artifact, Dataset, Input, Markdown, Output

from components.images import DATA, image


@dsl.component(base_image=image(DATA), install_kfp_package=False)
def generate_data(
    dataset: Output[Dataset],
    baseline_data: Output[Dataset],
    dataset_summary: Output[Markdown],
    preset: str,
    data: str,
    data_settings: str,
    layout: str,
    eval_fraction: float,
    workdir: str,
    engine: str = "duckdb",
    master: str = "none",
    with_baseline: bool = False,
    subfolder: str = "",
    data_version: str = "none",
    start_from: str = "{}",
    raw_log: Optional[Input[Artifact]] = None,  # noqa: UP045
) -> None:
    """Make, read or prepare a raw log and store it in the layout that suits it; for a baseline, in time order too."""
    import json
    from functools import partial

    from components.executors import spark_settings
    from components.outputs import path_of, publish
    from components.summaries import part_rows, write_table
    from recmill.data.cluster import cluster_sessions
    from recmill.data.cluster.spark_session import spark_session
    from recmill.data.sources import make_raw_log
    from recmill.tracking import step_run

    data = path_of(raw_log) if raw_log else data
    inputs = {"preset": preset, "data": data, "layout": layout, "eval_fraction": eval_fraction, "engine": engine}
    inputs["data_version"] = data_version
    with step_run(
        "generate_data",
        workdir=workdir,
        inputs=inputs,
        subfolder=subfolder,
    ) as step:
        known = {"vocabulary": json.loads(start_from).get("checkpoint")}
        source = {"data": data or None, "overrides": json.loads(data_settings), "engine": engine, **known}
        with spark_session(spark_settings(master, step="generate_data")):
            raw = make_raw_log(preset, out=step.path("raw"), progress=step.progress, **source)
            store = partial(cluster_sessions, raw, engine=engine, eval_fraction=eval_fraction, progress=step.progress)
            clustered = plain = store(out=step.path("dataset"), layout=layout)
            if with_baseline and clustered.layout != "time":
                plain = store(out=step.path("baseline/dataset"), layout="time")
        step.count(clustered.num_rows)
        step.record({"num_sessions": clustered.num_sessions, "data_bytes": clustered.data_bytes})
        step.log_dataset(clustered, context="training")
        reference = step.wrote("dataset", clustered)
        publish(dataset, reference | {"layout": clustered.layout, "why": clustered.layout_why})
        publish(baseline_data, reference if plain is clustered else step.wrote("baseline_data", plain))
        write_table(dataset_summary, "Dataset", part_rows(clustered))
