"""Text files as Spark reads them: with the names, types and nulls that DuckDB finds in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import fsspec

from recmill.data.inspection.text_files import column_names, header_of
from recmill.data.preparation.sources import SourceFiles

TEXT_FORMS = {  # what DuckDB takes for each kind
    "boolean": "^(?i)(true|false|t|f|yes|no|y|n)$",
    "bigint": "^ *-?(0|[1-9][0-9]*) *$",
    "double": r"^ *-?(0|[1-9][0-9]{0,17}|)(\.[0-9]*)?([eE][-+]?[0-9]+)? *$",
    "date": r"^\d{4}-\d{2}-\d{2}$",
    "timestamp": r"^\d{4}-\d{2}-\d{2}[ T]\d{2}:\d{2}(:\d{2}(\.\d+)?)? ?(Z|UTC|[-+]\d{2}:\d{2})?$",
}
CSV_KINDS, JSON_KINDS = tuple(TEXT_FORMS), ("date", "timestamp")


def read_csv(spark: Any, source: SourceFiles, paths: list[str]) -> Any:
    """As DuckDB reads it: line breaks inside quotes, quotes doubled, repeated names numbered."""
    options, names = source.options, list(source.options.get("names") or ())
    read = spark.read.options(header=not names, mode="FAILFAST")
    read = read.options(multiLine=True, escape='"', encoding=options.get("encoding") or "utf-8")
    read = read.options(enforceSchema=len(paths) == 1)  # else columns in another order would be mixed up
    default = "\t" if source.files[0].partition(".")[2].startswith("tsv") else ","
    delimiter = options.get("delimiter") or default
    frame = read.options(sep=delimiter, **({"quote": ""} if delimiter == "::" else {})).csv(paths)
    names = names or column_names(header_of(source))
    frame = frame.toDF(*names) if len(names) == len(frame.columns) else frame
    decimal, nulls = options.get("decimal") or ".", options.get("nulls") or ()
    return _with_types(frame, CSV_KINDS, decimal=decimal, nulls=nulls)


def read_json(spark: Any, source: SourceFiles, paths: list[str]) -> Any:
    """JSON lines, or one array of rows; Spark leaves times text."""
    rows = spark.read.options(mode="FAILFAST", multiLine=_holds_array(source.files[0])).json(paths)
    return _with_types(rows, JSON_KINDS)


def _holds_array(file: str) -> bool:
    """Whether a JSON file holds one array of rows instead of lines."""
    with fsspec.open(file, "rb", compression="infer") as opened:
        return bytes(opened.read(1_024)).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _with_types(frame: Any, kinds: Sequence[str], *, decimal: str = ".", nulls: Sequence[str] = ()) -> Any:
    """The rows with these texts as nulls, and columns of text as the first of `kinds` that fits all their texts.

    Spark's own guess takes 00123 for a number, which DuckDB leaves as it is.
    """
    from pyspark.sql import functions

    known, plain = {}, {}
    for field in frame.schema:
        if field.dataType.typeName() == "string":
            own = name_of(field.name)
            own = f"nullif({own}, '')" if kinds is CSV_KINDS else own
            own = f"CASE WHEN {own} NOT IN ({', '.join(map(_literal, nulls))}) THEN {own} END" if nulls else own
            known[field.name] = own
            # With a decimal comma 1.500 is no number.
            plain[field.name] = f"translate({own}, '.,', 'x.')" if decimal == "," else own
    if not plain:
        return frame
    tests = [_fits(own, kind) for own in plain.values() for kind in kinds]
    found = iter(frame.select(*(functions.expr(f"min({test})") for test in tests)).first())
    for name, own in plain.items():
        fitting = [kind for kind in kinds if next(found)]
        frame = frame.withColumn(name, functions.expr(f"CAST({own} AS {fitting[0]})" if fitting else known[name]))
    return frame


def _fits(value: str, kind: str) -> str:
    test = f"{value} RLIKE {_literal(TEXT_FORMS[kind])} AND try_cast({value} AS {kind}) IS NOT NULL"
    return f"CASE WHEN {value} IS NOT NULL THEN {test} END"


def _literal(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def name_of(column: str) -> str:
    """A column as Spark's expressions name it."""
    return "`" + column.replace("`", "``") + "`"
