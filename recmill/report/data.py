"""The data: its shape, the skew of accesses, and how much the features of a session repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from recmill.report.drawing.blocks import (
    Card,
    Cards,
    Cell,
    Details,
    Note,
    PageTable,
    Section,
    missing_notes,
    part_blocks,
    value_cell,
)
from recmill.report.drawing.charts import Axis, Bar, PageBlock, Point, Reference, Series, bar_block, line_block
from recmill.report.drawing.svg import NUM_COLOURS, Legend
from recmill.report.runs import Run, mapping, number, pairs, records
from recmill.report.units import (
    DASH,
    format_bytes,
    format_compact,
    format_count,
    format_metric,
    format_named,
    format_number,
    format_ratio,
    format_share,
    readable_name,
)

MAX_BARS = 24  # further features appear in the table only


def best_auc(run: Run) -> float | None:
    """The highest possible AUC on this data, known if the labels come from a synthetic model."""
    info = mapping(run.part("schema").get("info"))
    return next((number(value) for name, value in info.items() if "best" in name and name.endswith("auc")), None)


def data_section(runs: Sequence[Run]) -> Section:
    blocks = [
        *part_blocks(runs, "dataset", lambda run: [Cards(cards=data_cards(run))]),
        *part_blocks(runs, "schema", schema_blocks),
        *missing_notes(runs, "dataset", "schema"),
    ]
    return Section(id="data", title="The data", blocks=blocks)


def data_cards(run: Run) -> list[Card]:
    rows, sessions = run.number("dataset", "num_rows"), run.number("dataset", "num_sessions")
    size, best = run.data_bytes, best_auc(run)
    parts = records(run.part("dataset").get("parts"))
    splits: dict[str, float] = {}
    for part in parts:
        name = str(part.get("split", "train"))
        splits[name] = splits.get(name, 0) + (number(part.get("num_rows")) or 0)
    told = ", ".join(f"{format_compact(count)} {name}" for name, count in splits.items())
    each = f"{format_number(rows / sessions)} samples per session" if rows and sessions else ""
    per_row = f"{format_bytes(size / rows)} per sample" if rows and size is not None else ""
    layout = str(run.part("dataset").get("layout", DASH))
    cards = [
        Card(label="Samples", value=value_cell(rows, format_compact).text, note=told if len(splits) > 1 else ""),
        Card(label="Sessions", value=value_cell(sessions, format_compact).text, note=each),
        Card(label="On disk", value=value_cell(size, format_bytes).text, note=per_row),
        Card(label="Layout", value=layout, note=f"{len(parts)} file{'s' if len(parts) != 1 else ''}" if parts else ""),
    ]
    if best is not None:
        cards.append(Card(label="Best reachable AUC", value=format_metric(best), note="known from the synthetic model"))
    return cards


def schema_blocks(run: Run) -> list[PageBlock]:
    features = records(run.part("schema").get("features"))
    if not features:
        return [Note(text=f"{run.label}: dataset/schema.json lists no features.")]
    rows = []
    for feature in features:
        is_dense = feature.get("kind") == "dense"
        numbers = [None if is_dense else number(feature.get(key)) for key in ("num_rows", "dim")]
        rows.append(
            [
                Cell(text=str(feature.get("name", ""))),
                Cell(text=str(feature.get("kind", ""))),
                Cell(text="" if is_dense else str(feature.get("table") or feature.get("name", ""))),
                *(value_cell(value, format_count) for value in numbers),
                Cell(text="" if is_dense else str(feature.get("pooling", ""))),
                Cell(text=str(feature.get("group", ""))),
                Cell(text="shifts" if feature.get("shift") else ""),
            ]
        )
    columns = ("Feature", "Kind", "Table", "Rows", "Width", "Pooling", "Group", "History")
    table = PageTable(title="Features", columns=columns, rows=rows, numeric=frozenset({3, 4}))
    info = mapping(run.part("schema").get("info"))
    facts = [
        [Cell(text=readable_name(key)), Cell(text=format_named(key, value))]
        for key, value in info.items()
        if key != "checks"
    ]
    more = Details(
        summary="More about the data",
        blocks=[PageTable(columns=("Fact", "Value"), rows=facts, is_sortable=False)],
    )
    return [
        Details(summary=f"Features ({len(rows)})", blocks=[table]) if len(rows) > 30 else table,
        *([more] if facts else []),
    ]


def access_section(runs: Sequence[Run]) -> Section:
    blocks = [
        *part_blocks(runs, "profile", lambda run: [*skew_blocks(run), *duplication_blocks(run)]),
        *missing_notes(runs, "profile"),
    ]
    return Section(
        id="access",
        title="Skew and duplication",
        intro="The share of accesses that few rows serve determines what is worth replicating; "
        "the repetition within a session determines what deduplication saves.",
        blocks=blocks,
    )


def skew_blocks(run: Run) -> list[PageBlock]:
    tables = {name: mapping(entry) for name, entry in mapping(run.part("profile").get("tables")).items()}
    ranked = sorted(tables, key=lambda name: -(number(tables[name].get("num_accesses")) or 0))
    series = []
    for position, name in enumerate(ranked):
        points = access_curve(tables[name])
        # With more tables than colours, the most read ones get a colour each and the rest a thin grey.
        own = Legend.of(name, position) if position < NUM_COLOURS else Legend(name=name, colour=0)
        if points:
            series.append(Series(legend=own, points=points, marks=tier_marks(run, name, points)))
    blocks: list[PageBlock] = []
    if series:
        legend = [line.legend for line in series[:NUM_COLOURS]]
        if len(series) > NUM_COLOURS:
            legend.append(Legend(name=f"{len(series) - NUM_COLOURS} other tables", colour=0))
        chart = line_block(
            series[::-1],
            title="Accesses served by the most read rows",
            description="Share of a table's accesses that its most read rows serve, one line per table.",
            x=Axis(name="most read rows", format=format_compact, is_log=True, low=1.0),
            y=Axis(name="share of accesses", format=format_share, low=0.0, high=1.0),
            legend=legend,
            note="Rings mark the end of a tier of the plan." if any(line.marks for line in series) else "",
        )
        blocks.append(chart)
    blocks.append(tables_table(tables, ranked, note=sample_note(run)))
    return blocks


def sample_note(run: Run) -> str:
    """The part of the data that was counted; "" for all of it."""
    counted, whole = run.number("profile", "num_samples"), run.number("profile", "num_samples_total")
    if counted is None or whole is None or counted >= whole:
        return ""
    return (
        f"Counted over {format_compact(counted)} of {format_compact(whole)} samples ({format_share(counted / whole)})."
    )


def tables_table(tables: Mapping[str, Mapping[str, Any]], ranked: Sequence[str], *, note: str) -> PageTable:
    rows = []
    for name in ranked:
        entry = tables[name]
        values = [number(entry.get(key)) for key in ("num_rows", "num_accesses", "num_distinct")]
        top = number(mapping(entry.get("top_share")).get("0.01"))
        exponent = number(entry.get("zipf_exponent"))
        cells = [value_cell(value, format_compact) for value in values]
        share = replace(value_cell(top, format_share), bar=top)
        rows.append([Cell(text=name), *cells, value_cell(exponent, "{:.2f}".format), share])
    columns = ("Table", "Rows", "Accesses", "Rows read", "Zipf", "Top 1%")
    numeric = frozenset(range(1, len(columns)))
    return PageTable(title="Tables", columns=columns, rows=rows, numeric=numeric, note=note, is_wide=False)


def access_curve(table: Mapping[str, Any]) -> list[Point]:
    """(rows, share of accesses) from a table's entry of the profile."""
    return [(x, y) for x, y in pairs(records(table.get("curve")), "rows", "share") if x > 0]


def share_at(points: Sequence[Point], rows: float) -> float | None:
    """The share that the most read `rows` serve, interpolated linearly between the points of the curve."""
    if not points or rows < points[0][0]:
        return None
    return float(np.interp(rows, [x for x, _ in points], [y for _, y in points]))


def tier_marks(run: Run, table: str, points: Sequence[Point]) -> list[tuple[float, float, str]]:
    """The points of the curve where a tier ends; none for a table in one piece."""
    tiers = records(mapping(mapping(run.part("plan").get("tables")).get(table)).get("tiers"))
    marks, rows = [], 0.0
    for tier in tiers[:-1]:
        rows += number(tier.get("num_rows")) or 0.0
        share = share_at(points, rows)
        if share is not None:
            where = f"{format_count(rows)} rows, {format_share(share)}"
            marks.append((rows, share, f"{table}: {tier.get('kind', 'tier')} ends at {where}"))
    return marks


# Key in the profile, title of the column, format of its values.
DUPLICATION: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("dedup_factor", "Dedup factor", format_ratio),
    ("same_as_previous", "Unchanged", format_share),
    ("shifted_by_one", "Shifted by one", format_share),
    ("distinct_per_session", "Distinct per session", format_number),
    ("mean_length", "Mean length", format_number),
)


def duplication_blocks(run: Run) -> list[PageBlock]:
    features = {name: mapping(entry) for name, entry in mapping(run.part("profile").get("duplication")).items()}
    if not features:
        return [Note(text=f"{run.label}: the profile has no duplication statistics.")]
    ranked = sorted(features, key=lambda name: -(number(features[name].get("dedup_factor")) or 0))
    charted = [name for name in ranked if features[name].get("kind") != "dense"][:MAX_BARS]
    table = duplication_table(features, ranked)
    return [
        *duplication_charts(features, charted),
        Details(summary=f"Duplication of every feature ({len(ranked)})", blocks=[table]),
    ]


def duplication_table(features: Mapping[str, Mapping[str, Any]], ranked: Sequence[str]) -> PageTable:
    factors = {name: mapping(features[name].get("batch_dedup_factor")) for name in ranked}
    sizes = sorted({size for entry in factors.values() for size in entry}, key=lambda size: (len(size), size))
    rows = []
    for name in ranked:
        cells = [value_cell(number(features[name].get(key)), style) for key, _, style in DUPLICATION]
        rows.append(
            [Cell(text=name), *cells, *(value_cell(number(factors[name].get(size)), format_ratio) for size in sizes)]
        )
    columns = ("Feature", *(title for _, title, _ in DUPLICATION), *(f"In batches of {size}" for size in sizes))
    return PageTable(columns=columns, rows=rows, numeric=frozenset(range(1, len(columns))))


def duplication_charts(features: Mapping[str, Mapping[str, Any]], ranked: Sequence[str]) -> list[PageBlock]:
    factors, shares = [], []
    for name in ranked:
        factor = number(features[name].get("dedup_factor"))
        unchanged = number(features[name].get("same_as_previous")) or 0.0
        shifted = number(features[name].get("shifted_by_one")) or 0.0
        if factor is not None:
            factors.append(Bar(name=name, values=[factor], text=format_ratio(factor)))
        titles = [
            f"{name}: {format_share(value)} {what}" for value, what in ((unchanged, "unchanged"), (shifted, "shifted"))
        ]
        shares.append(
            Bar(name=name, values=[unchanged, shifted], titles=titles, text=format_share(unchanged + shifted))
        )
    blocks: list[PageBlock] = []
    if factors:
        chart = bar_block(
            factors,
            title="Dedup factor by feature",
            description="Number of lists of a feature per distinct list.",
            axis=Axis(name="lists per distinct list", format=lambda value: f"{format_number(value)}×"),
            reference=Reference(name="no repetition", value=1.0),
        )
        blocks.append(chart)
    chart = bar_block(
        shares,
        title="Repetition between consecutive samples",
        description="Share of consecutive samples of a session whose list is unchanged or shifted by one.",
        legend=[Legend(name="unchanged", colour=1), Legend(name="shifted by one", colour=2)],
        axis=Axis(name="share of consecutive samples", format=format_share, high=1.0),
    )
    return [*blocks, chart]
