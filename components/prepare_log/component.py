from kfp import dsl
from kfp.dsl import Artifact, Markdown, Metrics, Output

from components.images import DATA, image


@dsl.component(base_image=image(DATA), install_kfp_package=False)
def prepare_log(
    raw_log: Output[Artifact],
    log_summary: Output[Markdown],
    log_metrics: Output[Metrics],
    preset: str,
    data: str,
    data_settings: str,
    data_version: str,
    workdir: str,
    engine: str = "duckdb",
    master: str = "none",
    start_from: str = "{}",
) -> None:
    """Make a raw log of the events and side tables that a log.yaml describes, and check the data."""
    import json

    from components.executors import spark_settings
    from components.outputs import log_numbers, publish
    from components.summaries import log_tables, write_tables
    from recmill.artifacts import InputError
    from recmill.data.cluster.spark_session import spark_session
    from recmill.data.log import RawLog
    from recmill.data.preparation.vocabulary import count_values
    from recmill.data.sources import is_log_yaml, make_raw_log
    from recmill.tracking import step_run

    inputs = {"data": data, "data_version": data_version, "engine": engine, "start_from": start_from}
    with step_run("prepare_log", workdir=workdir, inputs=inputs) as step:
        if preset != "parquet" or not is_log_yaml(data):
            raise InputError(f"data is {data!r}, preset {preset!r}: this pipeline was compiled for a log.yaml")
        known = {"vocabulary": json.loads(start_from).get("checkpoint")}
        source = {"data": data, "overrides": json.loads(data_settings), "engine": engine, **known}
        with spark_session(spark_settings(master, step="prepare_log")):
            log = RawLog.open(make_raw_log(preset, out=step.path("raw"), progress=step.progress, **source))
        info = log.schema.info
        step.count(log.num_rows)
        step.record({name: info[name] for name in ("num_sessions", "num_events", "base_rate")})
        step.record({"num_warnings": info["checks"]["num_warnings"]})
        wrote = step.wrote_files("raw_log", log.path, content_hash=log.content_hash, num_bytes=log.num_bytes)
        publish(raw_log, wrote)
        log_numbers(log_metrics, step.metrics)
        write_tables(log_summary, log_tables(log, count_values(log.path)))
