"""`recmill layout`."""

from __future__ import annotations

import time

import click

from recmill.cli.output import emit, json_option, progress_for, verify_option
from recmill.sizes import format_bytes


@click.command()
@click.argument("data", type=str)
@click.option("--plan", "plan_path", required=True, help="Plan with a hot set (`recmill plan --hot-budget`).")
@click.option("--out", required=True, help="Folder or URL for the new dataset; an existing dataset is replaced.")
@click.option(
    "--sessions",
    type=click.Choice(["auto", "whole", "split"]),
    default="auto",
    help="Treat a session with hot and cold samples as cold as a whole, or split it; auto: what the plan chose.",
)
@verify_option
@json_option
def layout(data: str, plan_path: str, out: str, sessions: str, as_json: bool) -> None:
    """Lay dataset DATA out for hot batches: samples that read hot rows only are stored separately.

    The training rows become the splits 'hot', whose ids are slots of the hot rows, and 'cold'; other splits stay.
    """
    from recmill.data.hot.layout import layout_hot

    started = time.perf_counter()
    chosen = None if sessions == "auto" else sessions
    dataset = layout_hot(data, plan_path, out=out, sessions=chosen, progress=progress_for(as_json))
    seconds = time.perf_counter() - started
    hot = dataset.to_json()["hot"]
    result = {
        "dataset": str(out),
        **hot,
        "num_rows": dataset.num_rows,
        "bytes": dataset.data_bytes,
        "seconds": seconds,
        "content_hash": dataset.content_hash,
    }
    lines = [
        f"{out}: {hot['num_hot']:,} hot and {hot['num_cold']:,} cold samples ({hot['sample_share']:.1%} hot), "
        f"sessions {hot['sessions']}",
        f"  {format_bytes(dataset.data_bytes)}, {seconds:.1f} s",
    ]
    emit(result, lines, as_json=as_json)
