"""`recmill tune`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from recmill.cli.output import BYTES, emit, format_bytes, json_option, progress_for


@click.command()
@click.argument("data")
@click.option("--out", required=True, help="Folder to write allocation.json to.")
@click.option("--cores", type=click.IntRange(min=1), help="Cores to share out. Default: those this process may use.")
@click.option(
    "--memory-limit", type=BYTES, help="Most that ingestion may hold, such as 512MiB. Default: half of what is free."
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Samples of one step over all ranks.",
)
@json_option
def tune(data: str, out: str, cores: int | None, memory_limit: int | None, batch_size: int, as_json: bool) -> None:
    """Measure the ingestion stages on DATA and decide how many workers each gets.

    \b
    Examples:
      recmill tune data/session --out data/allocation
      recmill tune data/session --cores 8 --memory-limit 2GiB --out data/allocation
      recmill train data/session --allocation data/allocation --out runs/first
    """
    from recmill.tuning.allocation import tune_ingest

    allocation = tune_ingest(
        data,
        out=out,
        cores=cores,
        memory_limit_bytes=memory_limit,
        batch_size=batch_size,
        progress=progress_for(as_json),
    )
    emit(
        {"path": out, "content_hash": allocation.content_hash, **allocation.body},
        _describe(allocation.body, allocation.stages, out),
        as_json=as_json,
    )


def _describe(body: Mapping[str, Any], stages: Mapping[str, int], out: str) -> list[str]:
    lines = [f"{'stage':<12}{'workers':>8}{'a row group':>14}"]
    for stage, taken in sorted(body["stage_times"].items(), key=lambda entry: -entry[1]["seconds"]):
        lines.append(f"{stage:<12}{stages[stage]:>8}{taken['seconds'] * 1e3:>11.1f} ms")
    baseline = body["baseline"]
    lines.append(
        f"{body['rows_per_s']:,.0f} rows/s with at most {format_bytes(body['memory_bytes'])} "
        f"(one worker a stage: {baseline['rows_per_s']:,.0f} rows/s); allocation in {out}"
    )
    return lines
