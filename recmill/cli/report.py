"""`recmill compare`: runs beside one another, on a page and in the terminal."""

from __future__ import annotations

import click

from recmill.cli.output import emit, json_option


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--out", default="report.html", show_default=True, help="Where the page is written.")
@click.option("--title", help="Title of the page. Default: the names of the runs.")
@json_option
def compare(runs: tuple[str, ...], out: str, title: str | None, as_json: bool) -> None:
    """Build one self-contained HTML page from one or more RUN folders.

    The first RUN is the baseline; every other one is set against it, figure by figure. A ratio above 1 always means
    better. A RUN is a folder as `recmill run --out` or `recmill train --out` writes it.

    \b
    recmill compare runs/demo --out report.html
    recmill compare runs/baseline runs/dedup runs/all --out ablation.html --json
    """
    from recmill.report import build_report
    from recmill.report.comparison import comparison_json, comparison_lines
    from recmill.report.runs import load_runs

    page = build_report(runs, out=out, title=title)
    loaded = load_runs(runs)
    result = {"report": str(page), **comparison_json(loaded)}
    lines = [*comparison_lines(loaded), "", f"Page: {page}"]
    missing = [f"  {run.label}: {sentence}" for run in loaded for sentence in run.missing]
    emit(result, lines + (["", "Missing:", *missing] if missing else []), as_json=as_json)
