"""`recmill init`: a log.yaml from what the data looks like."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from recmill.artifacts import InputError, is_remote, write_text_atomically
from recmill.cli.output import emit, json_option, progress_for

optional = partial(click.option, default="", show_default=False)


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="FILE_OR_FOLDER...")
@click.option("--out", default="log.yaml", help="File to write.")
@click.option("--check", "is_check", is_flag=True, help="Check an existing log.yaml against its data; write nothing.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@optional("--events", metavar="TABLE", help="Table with the events. Default: the one that looks like it.")
@optional("--user", metavar="COLUMN", help="Column of the user. Default: found.")
@optional("--item", metavar="COLUMN", help="Column of the item. Default: found.")
@optional("--time", metavar="COLUMN", help="Column of the time. Default: found.")
@optional("--session", metavar="COLUMN", help="Column of the session. Default: found, or a gap of 30min.")
@click.option("--rows", "sample_rows", type=int, default=1_000_000, help="Rows to look at per table.")
@json_option
def init(
    paths: tuple[str, ...],
    out: str,
    force: bool,
    is_check: bool,
    events: str,
    sample_rows: int,
    as_json: bool,
    **given: str,
) -> None:
    """Look at tables (Parquet, CSV, JSON lines, Iceberg, Delta) and propose how they become a log.

    \b
    Examples:
      recmill init shop/ --out log.yaml
      recmill init events/*.parquet products.csv --user customer --out log.yaml
      recmill init --check log.yaml

    Writes a commented log.yaml: which columns are the user, the item and the time, which table joins on what, what a
    success is, and a feature for every useful column, each with its evidence. Reads no more than --rows rows per table.
    """
    if is_check:
        _check(paths, as_json=as_json)
        return
    from recmill.data.inspection.document import proposal_json, write_document
    from recmill.data.inspection.proposal import propose_log
    from recmill.data.preparation.reading import parse_spec

    if not is_remote(out) and Path(out).exists() and not force:
        raise InputError(f"{out}: exists; give another --out, or --force to replace it")
    proposal = propose_log(paths, events=events, given=given, sample_rows=sample_rows, progress=progress_for(as_json))
    text = write_document(proposal, out=out)
    parse_spec(text, where=out)  # what is written can be read
    write_text_atomically(out, text)
    emit({"path": out, **proposal_json(proposal), "text": text}, _describe(proposal, out), as_json=as_json)


def _describe(proposal: Any, out: str) -> list[str]:
    roles, label = proposal.roles, proposal.label
    kept = [feature for feature in proposal.features if not feature.left_out]
    lines = [f"{out}: {len(proposal.used_tables)} table(s), {len(kept)} features"]
    lines += [f"  {role:<9} {roles.table.name}.{choice.column}" for role, choice in roles.chosen.items()]
    lines += [f"  {'joins':<9} {match.table}.{match.key}: {match.describe()}" for match in proposal.matches]
    what = {
        "every": "every event, with drawn negatives",
        "outcome": f"an outcome in {label.outcome and label.outcome.table}",
    }
    value = ", ".join(label.value) if isinstance(label.value, tuple) else label.value
    shown = what.get(label.kind) or f"{roles.table.name}.{label.column} {label.rule.replace('_', ' ')} {value}"
    lines.append(f"  {'label':<9} {shown}" + ("" if label.rate is None else f" ({label.rate:.1%} of the events)"))
    lines += [f"  look at   {note}" for note in proposal.notes]
    return [*lines, f"next: recmill run --data {out} --out runs/mine"]


def _check(paths: tuple[str, ...], *, as_json: bool) -> None:
    from recmill.data.preparation.prepared_log import check_log

    if len(paths) != 1:
        raise InputError(f"--check takes one log.yaml, received {len(paths)} paths")
    found = check_log(paths[0], progress=progress_for(as_json))
    emit({"path": paths[0], **found.to_json()}, [*found.lines(), f"{paths[0]}: {found.summary()}"], as_json=as_json)
