"""`recmill prepare`, `recmill cluster` and `recmill profile`."""

from __future__ import annotations

import time
from typing import Any

import click

from recmill.cli.output import BYTES, emit, json_option, progress_for, verify_option
from recmill.sizes import format_bytes

ENGINE_OPTIONS = (
    click.option("--engine", type=click.Choice(["duckdb", "spark"]), default="duckdb", help="Query engine."),
    click.option(
        "--master", help="Spark master with --engine spark: local[4], spark://HOST:7077, k8s://https://HOST:6443."
    ),
    click.option(
        "--spark",
        "spark_flags",
        multiple=True,
        metavar="NAME=VALUE",
        help="Spark setting, e.g. spark.kubernetes.container.image=recmill/data:TAG; repeatable.",
    ),
    click.option(
        "--memory-limit",
        "memory_limit_bytes",
        type=BYTES,
        default="2GB",
        help="Memory limit of the process; further rows are spilled to disk.",
    ),
)


def engine_options(command: Any) -> Any:
    """`--engine` and what configures it."""
    for option in reversed(ENGINE_OPTIONS):
        command = option(command)
    return command


@click.command()
@click.argument("log_yaml", type=str)
@click.option("--out", required=True, help="Folder or URL for the raw log; a prepared log there is replaced.")
@engine_options
@click.option("--vocabulary", help="Log prepared before: its values keep their rows, new values follow.")
@click.option("--strict", "is_strict", is_flag=True, help="Refuse data with warnings: exit code 2, nothing is written.")
@json_option
def prepare(
    log_yaml: str,
    out: str,
    engine: str,
    master: str | None,
    spark_flags: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Make a raw log from events and side tables as LOG_YAML says (recmill init proposes one).

    Joins, sessions, labels, negatives, histories and rows for ids; writes log-*.parquet, schema.json and, per table,
    vocabulary/TABLE.parquet (value, row, count, since, last_seen). Both engines write the same rows. checks.json has
    what looks wrong in the data: nulls, duplicates, days that stand out, features that hold the label.
    """
    from recmill.data.checks.findings import LogFindings
    from recmill.data.cluster.spark_session import session_settings, spark_session
    from recmill.data.preparation.prepared_log import prepare_log
    from recmill.data.preparation.vocabulary import describe_new
    from recmill.data.sources.log_writer import summarise_log
    from recmill.data.vocabulary import VocabularyMap

    started = time.perf_counter()
    with spark_session(session_settings(engine, master, spark_flags)):
        prepare_log(log_yaml, out=out, engine=engine, progress=progress_for(as_json), **options)
    result = {**summarise_log(out, seconds=time.perf_counter() - started), "engine": engine}
    info = result["info"]
    lines = [
        f"{out}: {result['num_rows']:,} samples of {result['num_sessions']:,} sessions "
        f"from {info['num_events']:,} events, {info['base_rate']:.1%} positive",
        f"  {info['num_users']:,} users, {info['num_items']:,} items, {format_bytes(result['bytes'])}, "
        f"{result['seconds']:.1f} s, {result['samples_per_s']:,.0f} samples/s",
        *describe_new(VocabularyMap.from_json(info["vocabulary"], where=out)),
        *LogFindings.from_json(info["checks"]).lines(),
    ]
    emit(result, lines, as_json=as_json)


@click.command()
@click.argument("raw", type=str)
@click.option("--out", required=True, help="Folder or URL for the dataset; an existing dataset is replaced.")
@click.option(
    "--layout",
    type=click.Choice(["auto", "deduplicated", "session", "time"]),
    default="auto",
    help="Order and form of the rows; auto: what suits how much lists repeat inside sessions.",
)
@engine_options
@click.option(
    "--eval-fraction",
    type=float,
    default=0.0,
    help="Share of sessions held out as 'test'; ignored if the schema names splits.",
)
@click.option(
    "--eval-sessions",
    type=click.Choice(["last", "random"]),
    default="last",
    help="Hold out the sessions that start last, or random ones.",
)
@click.option(
    "--rows-per-group",
    type=int,
    help="Samples per Parquet row group. Default: 8192, or up to 32768 for 'deduplicated'.",
)
@click.option("--schema", "schema_path", help="Schema file. Default: schema.json beside the Parquet files.")
@json_option
def cluster(
    raw: str,
    out: str,
    layout: str,
    engine: str,
    master: str | None,
    spark_flags: tuple[str, ...],
    rows_per_group: int | None,
    schema_path: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Turn a raw log RAW (a Parquet file or a folder of them) into a dataset.

    Layout 'session' puts the rows of a session next to each other, in time order, never across a row group;
    'deduplicated' stores each distinct list of a session once; 'time' keeps time order, as a baseline. Engine 'spark'
    uses your Spark settings (spark.master, SPARK_REMOTE) or those given here.
    """
    from recmill.data.cluster.sessions import cluster_sessions
    from recmill.data.cluster.spark_session import session_settings, spark_session
    from recmill.data.log import RawLog

    started = time.perf_counter()
    log = RawLog.open(raw, schema_path)
    with spark_session(session_settings(engine, master, spark_flags)):
        dataset = cluster_sessions(
            log,
            out=out,
            layout=layout,
            engine=engine,
            rows_per_group=rows_per_group,
            rows_per_part=max(1_000_000, rows_per_group or 0),
            progress=progress_for(as_json),
            **options,
        )
    seconds = time.perf_counter() - started
    splits = {split: sum(part.num_rows for part in dataset.split_parts(split)) for split in dataset.splits}
    result = {
        "dataset": str(out),
        "layout": dataset.layout,
        "layout_why": dataset.layout_why,
        "engine": engine,
        "num_rows": dataset.num_rows,
        "num_sessions": dataset.num_sessions,
        "num_parts": len(dataset.parts),
        "splits": splits,
        "raw_bytes": log.num_bytes,
        "bytes": dataset.data_bytes,
        "seconds": seconds,
        "rows_per_s": dataset.num_rows / seconds,
        "content_hash": dataset.content_hash,
    }
    shown = ", ".join(f"{name} {rows:,}" for name, rows in splits.items())
    lines = [
        f"{out}: {dataset.num_rows:,} rows of {dataset.num_sessions:,} sessions ({shown}), layout {dataset.layout}",
        f"  {format_bytes(log.num_bytes)} raw -> {format_bytes(dataset.data_bytes)}, "
        f"{seconds:.1f} s, {dataset.num_rows / seconds:,.0f} rows/s",
    ]
    if dataset.layout_why:
        lines.append(f"  chosen because {dataset.layout_why}")
    emit(result, lines, as_json=as_json)


@click.command()
@click.argument("data", type=str)
@click.option("--out", required=True, help="Folder or URL for the profile; an existing profile is replaced.")
@click.option("--sample", type=float, default=1.0, help="Share of rows to read.")
@click.option("--confidence", type=float, default=0.999, help="Confidence level for sampled estimates.")
@click.option("--split", help="Split to profile. Default: train where there are several, else all rows.")
@verify_option
@json_option
def profile(data: str, out: str, sample: float, confidence: float, split: str | None, as_json: bool) -> None:
    """Count how often every row of every table of dataset DATA is read, and how much the lists of a session repeat.

    Writes profile.json and, per table, counts/TABLE.parquet (row, count; most read first).
    """
    from recmill.profiling.access import profile_access

    started = time.perf_counter()
    found = profile_access(
        data, out=out, split=split, sample=sample, confidence=confidence, progress=progress_for(as_json)
    )
    seconds = time.perf_counter() - started
    body = found.to_json()
    kept = ("num_samples", "num_sessions", "samples_per_session", "split", "sample", "tables", "duplication")
    result = {
        "profile": str(out),
        **{key: body[key] for key in kept},
        "seconds": seconds,
        "rows_per_s": found.num_samples / seconds,
        "content_hash": found.content_hash,
    }
    lines = [
        f"{out}: {found.num_samples:,} samples, {found.samples_per_session:.2f} per session, {seconds:.1f} s",
        f"  {'table':<20} {'rows':>12} {'accesses':>14} {'read':>12} {'top 1%':>7} {'Zipf':>6}",
    ]
    for name, table in found.tables.items():
        zipf = "-" if table.zipf_exponent is None else f"{table.zipf_exponent:.2f}"
        lines.append(
            f"  {name:<20} {table.num_rows:>12,} {table.num_accesses:>14,} {table.num_distinct:>12,} "
            f"{table.top_share['0.01']:>7.1%} {zipf:>6}"
        )
    lines.append(f"  {'feature':<20} {'length':>12} {'same as before':>14} {'shifted':>12} {'dedup factor':>14}")
    for name, feature in found.duplication.items():
        same, shifted = feature.same_as_previous, feature.shifted_by_one
        lines.append(
            f"  {name:<20} {feature.mean_length:>12.2f} {'-' if same is None else f'{same:.1%}':>14} "
            f"{'-' if shifted is None else f'{shifted:.1%}':>12} {feature.dedup_factor:>14.2f}"
        )
    emit(result, lines, as_json=as_json)
