"""Writes a proposal as a commented log.yaml."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from recmill.artifacts import FORMAT_VERSION, is_remote
from recmill.data.inspection.columns import EPOCH_UNITS, ColumnFacts
from recmill.data.inspection.outcomes import WITHIN
from recmill.data.inspection.proposal import GAP, LogProposal
from recmill.data.inspection.reading import InspectedTable

COMMENT_WIDTH = 110


def write_document(proposal: LogProposal, *, out: str | Path) -> str:
    """The text of a log.yaml at `out`, relative to which paths are written."""
    blocks = [
        _head(proposal, out),
        [f"format_version: {FORMAT_VERSION}"],
        ["sources:", *(line for table in proposal.used_tables for line in _source(proposal, table, out))],
        _events(proposal),
        *_joins(proposal),
        *_labels(proposal),
        ["features:", *_features(proposal)],
        ["# Sessions that start last are held out for the metrics.", "splits: {test: 0.1}"],
    ]
    if proposal.times.is_sparse:
        days = f"{proposal.times.num_empty_days:,} of {proposal.times.num_days:,} days have no events"
        blocks.append([*comment(f"{days}: so many that no file seems to be missing"), "checks: {empty_days: allow}"])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def flow(value: Any) -> str:
    """A value in YAML on one line."""
    plain = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
    return plain.removesuffix("\n").removesuffix("\n...").strip()


def comment(text: str, indent: str = "") -> list[str]:
    prefix = f"{indent}# "
    return textwrap.wrap(
        text, COMMENT_WIDTH, initial_indent=prefix, subsequent_indent=prefix + "  ", break_long_words=False
    )


def _head(proposal: LogProposal, out: str | Path) -> list[str]:
    lines = [
        "# Proposed by recmill init from what the data looks like. Change what is wrong, then:",
        f"#   recmill init --check {out}",
        f"#   recmill run --data {out} --out runs/mine",
    ]
    if proposal.notes:
        lines += ["#", "# Look at these first:"]
        for number, note in enumerate(proposal.notes, start=1):
            lines += comment(f"{number}. {note}")
    return lines


def _source(proposal: LogProposal, table: InspectedTable, out: str | Path) -> Iterable[str]:
    found = table.found
    keys: dict[str, Any] = {"path": _relative(found.path, out)}
    if found.format in ("iceberg", "delta"):
        keys["format"] = found.format
    said = ("delimiter", "decimal", "nulls", "encoding", "names")
    keys |= {name: found.options[name] for name in said if name in found.options}
    for match in proposal.matches:
        if match.table == table.name:
            keys["key"] = match.key
            if match.valid_from:
                keys["valid_from"] = _time(table.column(match.valid_from))
    seen = f"looked at {table.sampling}" if table.is_sample else f"{table.num_rows:,} rows"
    if table.is_sample and table.num_total:
        seen += f" of {table.num_total:,}"
    yield from comment(f"{seen}: {', '.join(column.name for column in table.columns)}", "  ")
    if "names" in found.options:
        yield from comment("The file has no header line: rename the columns here and below as you like.", "  ")
    yield f"  {flow(table.name)}: {flow(keys)}"


def _relative(path: str, out: str | Path) -> str:
    """The path relative to the file's folder if it lies below it, else the whole path."""
    if is_remote(path) or is_remote(out):
        return path
    whole = os.path.abspath(path)
    near = os.path.relpath(whole, os.path.dirname(os.path.abspath(out)))
    return whole if near.startswith("..") else near


def _time(column: ColumnFacts) -> dict[str, str]:
    keys = {"column": column.name}
    if column.time_form in EPOCH_UNITS:
        keys["unit"] = column.time_form
    elif column.nature == "text" and column.time_form != "iso":
        keys["format"] = column.time_form
    return keys


def _events(proposal: LogProposal) -> list[str]:
    roles, times, table = proposal.roles, proposal.times, proposal.roles.table
    lines = ["events:", f"  source: {flow(table.name)}"]
    for role in ("user", "item"):
        choice = roles.chosen[role]
        lines += comment(f"{'; '.join(choice.reasons)}; {table.column(choice.column).describe()}", "  ")
        lines.append(f"  {role}: {flow(choice.column)}")
    lines += comment(f"{'; '.join(roles.time.reasons)}; {times.first} to {times.last}", "  ")
    lines.append(f"  time: {flow(_time(table.column(roles.time.column)))}")
    if roles.session:
        lines += comment("; ".join(roles.session.reasons), "  ")
        lines.append(f"  session: {flow({'column': roles.session.column})}")
    else:
        each = table.num_rows / max(1, times.num_sessions)
        lines += comment(
            f"no column names the session: a user's session ends after {GAP} without an event, which makes "
            f"{times.num_sessions:,} sessions of {each:.1f} events",
            "  ",
        )
        lines.append(f"  session: {flow({'gap': GAP})}")
    if roles.request:
        lines += comment("; ".join(roles.request.reasons), "  ")
        lines.append(f"  request: {flow(roles.request.column)}")
    if missing := _columns_with_nulls(proposal):
        lines += comment("events without a user, item or time are left out", "  ")
        lines.append(f"  where: {flow([{'column': name, 'is_null': False} for name in missing])}")
    if proposal.item_columns:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in proposal.item_columns.items())
        lines += comment(f"items with one value only, so the column describes the item: {shares}", "  ")
        lines.append(f"  item_columns: {flow(list(proposal.item_columns))}")
    return lines


def _columns_with_nulls(proposal: LogProposal) -> list[str]:
    chosen = proposal.roles.chosen
    names = dict.fromkeys(chosen[role].column for role in ("user", "item", "time", "session") if role in chosen)
    return [name for name in names if proposal.roles.table.column(name).num_nulls]


def _joins(proposal: LogProposal) -> Iterable[list[str]]:
    if not proposal.matches:
        return
    lines = ["joins:"]
    for match in proposal.matches:
        lines += comment(match.describe(), "  ")
        lines.append(f"  - {flow({'source': match.table, 'column': match.column})}")
    yield lines


def _labels(proposal: LogProposal) -> Iterable[list[str]]:
    label = proposal.label
    if label.outcome:
        entry: dict[str, Any] = {
            "name": label.outcome.table,
            "source": label.outcome.table,
            "match": {
                proposal.roles.user.column: label.outcome.user,
                proposal.roles.item.column: label.outcome.item,
            },
            "time": _time(label.outcome.time),
            "within": WITHIN,
        }
        yield ["outcomes:", *comment("; ".join(label.reasons), "  "), f"  - {flow(entry)}"]
        yield ["labels:", f"  - {flow({'name': 'label', 'outcome': label.outcome.table})}"]
    elif label.kind == "every":
        yield ["labels:", *comment("; ".join(label.reasons), "  "), f"  - {flow({'name': 'label', 'every': True})}"]
        yield [
            *comment("Every event is a success, so items that the user did not choose are drawn as label 0."),
            f"negatives: {flow({'kind': 'popular', 'per_positive': 1})}",
        ]
        return
    else:
        value = list(label.value) if isinstance(label.value, tuple) else label.value
        entry = {"name": "label", "where": [{"column": label.column, label.rule: value}]}
        rate = f"; 1 for {label.rate:.1%} of the events" if label.rate is not None else ""
        yield ["labels:", *comment(f"{'; '.join(label.reasons)}{rate}", "  "), f"  - {flow(entry)}"]
    yield [
        *comment("Events with label 0 are the negatives. Too few? kind: popular draws items instead."),
        "negatives: {kind: none}",
    ]


def _features(proposal: LogProposal) -> Iterable[str]:
    for feature in proposal.features:
        if feature.left_out:
            yield from comment(f"left out: {feature.name}: {feature.left_out}", "  ")
        else:
            yield from comment(feature.evidence, "  ")
            yield f"  - {flow({'name': feature.name, **feature.keys})}"


def proposal_json(proposal: LogProposal) -> dict[str, Any]:
    """The proposal for machines: tables with their columns, roles with points and reasons, joins, label, features."""
    label = proposal.label
    return {
        "tables": [
            {
                "name": table.name,
                "path": table.found.path,
                "format": table.found.format,
                "num_rows": table.num_rows if not table.is_sample else table.num_total,
                "num_rows_seen": table.num_rows,
                "sampling": table.sampling,
                "columns": [
                    {"name": c.name, "type": c.type, "num_nulls": c.num_nulls, "num_distinct": c.num_distinct}
                    | {"time_form": c.time_form, "examples": list(c.examples)}
                    for c in table.columns
                ],
            }
            for table in proposal.tables
        ],
        "events": proposal.roles.table.name,
        "roles": {role: choice.to_json() for role, choice in proposal.roles.chosen.items()},
        "joins": [vars(match) for match in proposal.matches],
        "label": {"kind": label.kind, "column": label.column, "rule": label.rule, "value": label.value}
        | {"rate": label.rate, "why": list(label.reasons), "outcome": label.outcome and label.outcome.table},
        "features": [
            {"name": f.name, **f.keys, "evidence": f.evidence}
            if not f.left_out
            else {"name": f.name, "left_out": f.left_out}
            for f in proposal.features
        ],
        "notes": list(proposal.notes),
    }
