"""`log.yaml`: how the rows of an event log become samples. Every key is a field here, with what it means.

Columns are named as in the source of the events (`price`), or with the join they come from (`products.price`).
"""

# ruff: noqa: RUF009 (`about` makes a field)
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from recmill.artifacts import FORMAT_VERSION, InputError

FORMATS = Literal["parquet", "csv", "jsonl", "iceberg", "delta"]
TIME_FEATURES = Literal["hour_of_day", "day_of_week", "hour_of_week", "hours_since_last_event"]
TIME_ROWS = {"hour_of_day": 24, "day_of_week": 7, "hour_of_week": 168}  # the others are dense
RULES = ("one_of", "equals", "at_least", "at_most", "is_null")
DEFAULT_DIM = 16
DEFAULT_LAST = 50
_UNITS_MS = {"ms": 1, "s": 1_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}


def about(meaning: str, default: Any = MISSING) -> Any:
    """A field with what it means, for the JSON schema and the docs; without a default the key must be given."""
    return field(default=default, metadata={"about": meaning})


def parse_duration(text: str) -> int:
    """Milliseconds from '30min', '1d', '1.5h', '500ms'."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|h|d|w)\s*", text)
    if not found:
        raise InputError(f"{text!r} is not a duration; write it like 30min, 12h or 1d (ms, s, min, h, d, w)")
    return round(float(found[1]) * _UNITS_MS[found[2]])


def parse_time(text: str) -> int:
    """Milliseconds since 1970 from '2017-12-03' or '2017-12-03 18:00:00', in UTC unless it names an offset."""
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(f"{text!r} is not a time; write it like 2017-12-03 or 2017-12-03 18:00:00") from None
    return round((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp() * 1_000)


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """Files or a table that rows are read from."""

    path: str = about(
        "File, pattern (events/*.parquet) or folder, relative to log.yaml; or a URL (s3://...) that DuckDB, Spark or "
        "fsspec reads."
    )
    format: FORMATS | None = about(
        "Format of the files. Default: from the ending (.parquet, .csv, .jsonl, .gz); found for Delta and Iceberg.",
        None,
    )
    version: int | None = about(
        "Version of a Delta table, or id of a snapshot of an Iceberg table. Default: the current one.", None
    )
    key: str = about("Column with one row per value, or per value and valid_from. Sources that are joined need it.", "")
    valid_from: TimeSpec | None = about(
        "When a row takes effect, for attributes that change: an event sees the newest row not later than itself.", None
    )
    delimiter: str = about("What separates the columns of CSV files, at most 4 characters ('::'). Default: found.", "")
    decimal: Literal[".", ","] | None = about("Decimal separator of numbers in CSV files. Default: '.'.", None)
    nulls: tuple[str, ...] = about(
        "Texts in CSV files that stand for a missing value (NULL), besides the empty one. Default: none.", ()
    )
    encoding: Literal["utf-8", "utf-16", "latin-1"] | None = about("Encoding of CSV files. Default: utf-8.", None)
    names: tuple[str, ...] = about("Columns of CSV files without a header line, in order.", ())

    def __post_init__(self) -> None:
        if len(self.delimiter) > 4:
            raise InputError(f"delimiter is {self.delimiter!r}, expected at most 4 characters")
        if twice := [name for name in self.names if self.names.count(name) > 1]:
            raise InputError(f"names lists {twice[0]!r} {self.names.count(twice[0])} times")


@dataclass(frozen=True, kw_only=True)
class TimeSpec:
    """A column of times."""

    column: str = about("Column of whole numbers, timestamps, dates or text. Times without a zone are UTC.")
    unit: Literal["s", "ms", "us", "ns"] | None = about("Unit of whole numbers since 1970; needed for them.", None)
    format: str = about("Format of text, as in strptime: '%d/%m/%Y %H:%M'. Default: ISO 8601.", "")


@dataclass(frozen=True, kw_only=True)
class SessionSpec:
    """What a session is: one of the two keys."""

    gap: str = about("A user's session ends when the next event is later than this (30min).", "")
    column: str = about("Column with the session's id; equal ids of two users are two sessions.", "")

    def __post_init__(self) -> None:
        if bool(self.gap) == bool(self.column):
            raise InputError("expected either gap or column")
        if self.gap and parse_duration(self.gap) == 0:
            raise InputError(f"gap is {self.gap!r}, expected more than zero")

    @property
    def gap_ms(self) -> int:
        return parse_duration(self.gap)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A rule about one column. A null meets no rule but is_null."""

    column: str = about("Column that is tested.")
    one_of: tuple[Any, ...] | None = about("The value is one of these.", None)
    equals: Any = about("The value is this.", None)
    at_least: float | None = about("The value is this or more.", None)
    at_most: float | None = about("The value is this or less.", None)
    is_null: bool | None = about("The value is missing (true) or present (false).", None)

    def __post_init__(self) -> None:
        given = [rule for rule in RULES if getattr(self, rule) is not None]
        if not given or (len(given) > 1 and given != ["at_least", "at_most"]):
            raise InputError(f"column {self.column!r}: expected one of {', '.join(RULES)}, found {given or 'none'}")
        listed = self.one_of if self.one_of is not None else (self.equals,)
        if not listed or not all(isinstance(value, str | int | float | None) for value in listed):
            raise InputError(f"column {self.column!r}: expected text or numbers in {given[0]}, received {listed}")
        if len({isinstance(value, str) for value in listed}) > 1:
            raise InputError(
                f"column {self.column!r}: {given[0]} mixes text and numbers: {list(listed)}; quote numbers"
            )


Where = tuple[Condition, ...]
_WHERE = "; all conditions must hold"


@dataclass(frozen=True, kw_only=True)
class EventsSpec:
    """The rows that samples are made from."""

    source: str = about("Name of the source.")
    user: str = about("Column with the user's id.")
    item: str = about("Column with the item's id.")
    time: TimeSpec = about("When the event happened.")
    session: SessionSpec = about("What a session is.")
    request: str = about(
        "Column with the id of a request. Events of one user with the same id were shown together: all of them see the "
        "history before the first. Default: events of one user at the same time.",
        "",
    )
    where: Where = about(f"Events to read{_WHERE}. Others are not in samples, histories or counts.", ())
    item_columns: tuple[str, ...] = about(
        "Columns of the events that describe the item. A drawn negative takes them from the newest event of its item, "
        "all other columns from its positive.",
        (),
    )


@dataclass(frozen=True, kw_only=True)
class SamplesSpec:
    """Which events become samples."""

    where: Where = about(f"Events that become samples{_WHERE}. Others are in histories only. Default: all.", ())


@dataclass(frozen=True, kw_only=True)
class JoinSpec:
    """A source whose columns are added to each event."""

    source: str = about("Name of the source; it has a key.")
    column: str = about("Column of the events that holds the key.")
    name: str = about("Prefix of the columns: products.price. Default: the name of the source.", "")


@dataclass(frozen=True, kw_only=True)
class OutcomeSpec:
    """What happened later, in another source."""

    name: str = about("Name that labels refer to.")
    source: str = about("Name of the source.")
    match: Mapping[str, str] = about("Columns that must be equal, as column of the events: column of the outcome.")
    time: TimeSpec = about("When the outcome happened.")
    within: str = about("An event has the outcome if one follows at the same time or at most this much later (1d).")
    where: Where = about(f"Rows of the source that count{_WHERE}.", ())

    def __post_init__(self) -> None:
        if not self.match:
            raise InputError("match is empty, expected at least one pair of columns")
        _ = self.within_ms

    @property
    def within_ms(self) -> int:
        return parse_duration(self.within)


@dataclass(frozen=True, kw_only=True)
class LabelSpec:
    """A label: 1 where the rule holds, else 0. One of where, outcome and every."""

    name: str = about("Column in the log.")
    where: Where = about(f"1 where{_WHERE}.", ())
    outcome: str = about("1 where the event has this outcome.", "")
    every: bool = about("1 for every event; needs drawn negatives.", False)

    def __post_init__(self) -> None:
        if sum(map(bool, (self.where, self.outcome, self.every))) != 1:
            raise InputError(f"label {self.name!r}: expected one of where, outcome and every")


@dataclass(frozen=True, kw_only=True)
class NegativesSpec:
    """Samples with label 0. A negative is never an item that the user has as a positive anywhere in the log.

    A positive is a sample whose first label is 1. `popular` and `uniform` draw items: samples are then the positives,
    each followed by its negatives with the same time, user, history and context. `in_session` and `impressions` keep
    a share of the samples with label 0. Draws depend on the seed and on the sample, not on the engine.
    """

    kind: Literal["none", "popular", "uniform", "in_session", "impressions"] = about(
        "none: samples as they are; popular: items drawn as often as they are positives; uniform: items drawn evenly; "
        "in_session, impressions: samples with label 0 of the same session or request.",
        "none",
    )
    per_positive: int = about("Negatives per positive.", 1)
    seed: int = about("Another seed draws other negatives.", 0)

    def __post_init__(self) -> None:
        if self.per_positive < 1:
            raise InputError("per_positive is 0, expected at least 1; kind: none keeps samples as they are")

    @property
    def are_drawn(self) -> bool:
        return self.kind in ("popular", "uniform")


@dataclass(frozen=True, kw_only=True)
class RowsSpec:
    """How values become rows of a table. Row 0 is for nulls and unknown values."""

    min_count: int = about("Values with fewer events share row 0, or the rare_rows.", 1)
    rare_rows: int = about(
        "Rows that values without a row of their own are hashed to. Default: they share row 0; the rows of a table are "
        "0, the rare rows, then one per value.",
        0,
    )
    retire_after: str = about(
        "With --vocabulary, values not seen for longer than this before the newest event (30d) lose their row, and new "
        "values take it. Default: rows are kept.",
        "",
    )
    hash: int | None = about("Number of rows that values are hashed to; no vocabulary is kept.", None)

    def __post_init__(self) -> None:
        others = (self.min_count, self.rare_rows, self.retire_after)
        if self.hash is not None and (self.hash < 2 or others != (1, 0, "")):
            raise InputError(f"hash is {self.hash}, expected at least 2 rows, and no other key beside it")
        if self.retire_after and parse_duration(self.retire_after) == 0:
            raise InputError(f"retire_after is {self.retire_after!r}, expected more than zero")

    @property
    def retire_ms(self) -> int:
        """0: never."""
        return parse_duration(self.retire_after) if self.retire_after else 0


@dataclass(frozen=True, kw_only=True)
class HistorySpec:
    """The user's events before the request, oldest first."""

    of: str = about("Column of the events whose values are listed.")
    last: int = about("Largest number of events.", DEFAULT_LAST)
    where: Where = about(f"Events that are listed{_WHERE}.", ())

    def __post_init__(self) -> None:
        if self.last < 1:
            raise InputError("last is 0, expected at least 1")


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """A column of the samples. One of column, history and time."""

    name: str = about("Column in the log.")
    column: str = about("Column of the events (price) or of a join (products.price).", "")
    separator: str = about("For text with several values (a|b|c): what separates them. Columns of lists need none.", "")
    history: HistorySpec | None = about("A list of the user's earlier events.", None)
    time: TIME_FEATURES | None = about("A feature of the event's time (UTC); hours_since_last_event is dense.", None)
    kind: Literal["dense", "sparse", "sequence"] | None = about(
        "dense: a number; sparse: ids that are pooled; sequence: ids in order. Default for history: sequence.", None
    )
    table: str = about("Features that name the same table share its rows. Default: the feature's name.", "")
    rows: RowsSpec | None = about("How values become rows; one feature per table says it.", None)
    dim: int | None = about(f"Embedding width; one feature per table says it. Default: {DEFAULT_DIM}.", None)
    pooling: str = about("sum, mean, none or attention. Default: sum for sparse, attention for sequence.", "")
    group: str = about("Features of one group change together within a session.", "")
    target: str = about("For a sequence: the sparse feature that sequence_encoder=din weighs it for.", "")
    transform: tuple[Literal["log1p", "standardise"], ...] = about(
        "For a dense feature, in this order: log1p is log(1 + max(x, 0)); standardise subtracts the mean of the "
        "events and divides by their standard deviation.",
        (),
    )
    null_value: float | None = about(
        "For a dense feature: replaces nulls before the transforms. Default: the mean after the transforms; 0 for a "
        "time.",
        None,
    )

    def __post_init__(self) -> None:
        where = f"feature {self.name!r}"
        if sum(map(bool, (self.column, self.history, self.time))) != 1:
            raise InputError(f"{where}: expected one of column, history and time")
        if self.column and self.kind is None:
            raise InputError(
                f"{where}: kind is {self.kind}, expected dense or sparse for a column, or sequence for lists"
            )
        if self.separator and (not self.column or self.kind == "dense"):
            raise InputError(f"{where}: separator is for a sparse or sequence feature of a column of text")
        if self.history and self.kind == "dense":
            raise InputError(f"{where}: kind is dense, expected sequence or sparse for a history")
        if self.time and self.kind not in (None, self.kind_or_default):
            raise InputError(f"{where}: kind is {self.kind}, expected {self.kind_or_default} for {self.time}")
        if self.kind_or_default == "dense" and (self.table or self.rows or self.dim):
            raise InputError(f"{where}: a dense feature has no table, rows or dim")
        if self.kind_or_default != "dense" and (self.transform or self.null_value is not None):
            raise InputError(f"{where}: only a dense feature has transform and null_value")
        if "standardise" in self.transform[:-1] or (self.time and "standardise" in self.transform):
            raise InputError(f"{where}: standardise comes last, and not for a time")
        if self.time and (self.rows or self.table):
            raise InputError(f"{where}: {self.time} has its own table")

    @property
    def kind_or_default(self) -> str:
        if self.kind:
            return self.kind
        if self.time:
            return "sparse" if self.time in TIME_ROWS else "dense"
        return "sequence"

    @property
    def table_or_default(self) -> str:
        return self.table or self.name


@dataclass(frozen=True, kw_only=True)
class ChecksSpec:
    """What the checks of the data let pass."""

    empty_days: Literal["refuse", "allow"] = about(
        "Days (UTC) without events between the first and the last event: an error, or a remark in checks.json.",
        "refuse",
    )


@dataclass(frozen=True, kw_only=True)
class LogSpec:
    """A whole `log.yaml`."""

    format_version: int = about(f"Version of this format: {FORMAT_VERSION}.")
    sources: Mapping[str, SourceSpec] = about("Files by name.")
    events: EventsSpec = about("The rows that samples are made from.")
    samples: SamplesSpec = about("Which events become samples.", SamplesSpec())
    joins: tuple[JoinSpec, ...] = about("Sources whose columns are added to each event.", ())
    outcomes: tuple[OutcomeSpec, ...] = about("What happened later, in other sources.", ())
    labels: tuple[LabelSpec, ...] = about(
        "What a model predicts, the main label first. Default: a label that is 1 for every event.",
        (LabelSpec(name="label", every=True),),
    )
    negatives: NegativesSpec = about("Where samples with label 0 come from.", NegativesSpec())
    features: tuple[FeatureSpec, ...] = about("What a model sees.")
    splits: Mapping[str, Any] | None = about(
        "Held-out splits, oldest first, each with the time its first session starts (2017-12-03) or its share of the "
        "sessions, which are the last ones (0.1).",
        None,
    )
    checks: ChecksSpec = about("What the checks of the data let pass.", ChecksSpec())
