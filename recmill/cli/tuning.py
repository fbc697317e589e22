"""`recmill tune`."""

from __future__ import annotations

from typing import Any

import click

from recmill.artifacts import WorkerAllocation
from recmill.cli.output import BYTES, emit, json_option, progress_for, verify_option
from recmill.sizes import format_bytes


@click.command()
@click.argument("data")
@click.option("--out", required=True, help="Folder for allocation.json.")
@click.option(
    "--cores", type=click.IntRange(min=1), help="Cores to divide among stages. Default: those this process may use."
)
@click.option(
    "--memory-limit",
    "memory_limit_bytes",
    type=BYTES,
    help="Ingestion memory limit, e.g. 512MiB. Default: half of the free memory.",
)
@click.option("--batch-size", type=click.IntRange(min=1), default=4096, help="Samples per step, over all ranks.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=7.0,
    help="Time for measuring and tuning in seconds, without starting pipelines.",
)
@verify_option
@json_option
def tune(data: str, out: str, as_json: bool, **options: Any) -> None:
    """Measure the ingestion stages on DATA and decide how many workers each gets.

    An agent tunes a running pipeline. Its allocation is measured against that of the linear programme, the even split
    and one worker per stage, and the best is written. `train --set tuning=true` continues from there.

    \b
    Examples:
      recmill tune data/session --out data/allocation
      recmill tune data/session --cores 8 --memory-limit 2GiB --out data/allocation
      recmill train data/session --allocation data/allocation --out runs/first
    """
    from recmill.tuning.allocation import tune_ingest

    allocation = tune_ingest(data, out=out, progress=progress_for(as_json), **options)
    emit(
        {"path": out, "content_hash": allocation.content_hash, **allocation.to_json()},
        _describe(allocation, out),
        as_json=as_json,
    )


def _describe(allocation: WorkerAllocation, out: str) -> list[str]:
    lines = [f"{'stage':<12}{'workers':>8}{'per group':>14}"]
    for stage, taken in sorted(allocation.stage_times.items(), key=lambda entry: -entry[1].seconds):
        lines.append(f"{stage:<12}{allocation.stages[stage]:>8}{taken.seconds * 1e3:>11.1f} ms")
    lines += ["", f"{'measured':<20}{'rows/s':>12}  read/decode/transform/batch"]
    for name, found in sorted(allocation.candidates.items(), key=lambda entry: -entry[1].rows_per_s):
        counts = "/".join(str(found.stages[stage]) for stage in ("read", "decode", "transform", "batch"))
        mark = "  <- chosen" if name == allocation.controller else ""
        lines.append(f"{name:<20}{found.rows_per_s:>12,.0f}  {counts}{mark}")
    lines += ["", f"memory at most {format_bytes(allocation.memory_bytes)}; allocation in {out}"]
    return lines
