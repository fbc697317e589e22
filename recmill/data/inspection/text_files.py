"""CSV and JSON lines: how they write numbers and missing values, what a reader may expect, which line is wrong."""

from __future__ import annotations

import csv
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import fsspec

from recmill.data.inspection.columns import ColumnFacts, literal, quoted
from recmill.data.inspection.files import FoundTable

DECIMAL = r"[-+]?\d*,\d+|[-+]?\d+"  # a number with a decimal comma
GROUPED = r"[-+]?\d{1,3}([., ]\d{3})+([.,]\d+)?"  # a number whose thousands are separated
# Texts that stand for a missing value whatever the column; NA and - may mean something.
NULLS = ("NULL", "null", "N/A", "n/a", "#N/A", "NaN", "nan", "None", "\\N")


def guess_numbers(connection: Any, view: str) -> dict[str, Any]:
    """How a CSV file writes numbers and missing values, if it is not as in 1.5 and an empty field."""
    texts = [name for name, kind, *_ in connection.execute(f"DESCRIBE {view}").fetchall() if kind == "VARCHAR"]
    listed = ", ".join(map(literal, NULLS))
    known: Counter[str] = Counter()
    decimals: list[str] = []
    for name in map(quoted, texts):
        nulls = f"SELECT {name}, count(*) FROM {view} WHERE {name} IN ({listed}) GROUP BY 1"
        known.update(dict(connection.execute(nulls).fetchall()))
        query = (
            f"SELECT avg(regexp_full_match({name}, {literal(DECIMAL)})::INT), min({name}) FILTER ({name} LIKE '%,%') "
            f"FROM {view} WHERE {name} IS NOT NULL AND {name} NOT IN ({listed})"
        )
        share, example = connection.execute(query).fetchone()
        decimals += [example] if share == 1 and example else []
    options: dict[str, Any] = {"nulls": sorted(known)} if known else {}
    return options | ({"decimal": ",", "decimal_example": decimals[0]} if decimals else {})


def explain_oddities(connection: Any, found: FoundTable, view: str, columns: Sequence[ColumnFacts]) -> Iterator[str]:
    """What a reader of the file may expect otherwise than it was read."""
    if empty := found.options.get("empty_files"):
        yield f"{found.name}: empty files are left out: {', '.join(empty[:3])}{', ...' if len(empty) > 3 else ''}."
    header = [] if found.options.get("names") else header_of(found)
    for name in dict.fromkeys(own for own in header if [h.casefold() for h in header].count(own.casefold()) > 1):
        others = [c.name for n, c in enumerate(columns) if header[n : n + 1] == [name] and c.name != name]
        if others:
            yield f"{found.name}: its header has {name} more than once; the later ones are read as {', '.join(others)}."
    if nulls := found.options.get("nulls"):
        yield f"{found.name}: the texts {', '.join(nulls)} are read as missing values (nulls)."
    if example := found.options.get("decimal_example"):
        yield f"{found.name}: numbers are read with a decimal comma: {example} is {example.replace(',', '.')}."
    for column in columns:
        if column.nature == "text":
            query = (
                f"SELECT avg(regexp_full_match({quoted(column.name)}, {literal(GROUPED)})::INT) FROM {view} "
                f"WHERE {quoted(column.name)} IS NOT NULL"
            )
            if (connection.execute(query).fetchone()[0] or 0) > 0.5:  # smaller amounts have no thousands
                yield (
                    f"{column.label}: looks like amounts ({column.examples[0]}), but is read as text; "
                    "write them without separators of thousands."
                )


def find_line(found: FoundTable, text: str) -> str:
    """Where a text stands first below the header: "events.csv, line 17"; "" if it is not found."""
    for file in found.files:
        for number, line in _lines(found, file):
            if text in line and (number > 1 or found.options.get("names") or found.format != "csv"):
                return f"{file}, line {number}"
    return ""


def find_uneven_line(found: FoundTable) -> str:
    """The first line of CSV files with another number of fields than the file's first line, in one clause."""
    mark = found.options.get("delimiter") or ("\t" if ".tsv" in found.path.lower() else ",")
    for file in found.files if len(mark) == 1 else ():
        reader = csv.reader((line for _, line in _lines(found, file)), delimiter=mark)
        where = f"{file}, " if len(found.files) > 1 else ""
        try:
            expected = len(next(reader, []))
            for fields in reader:
                if fields and len(fields) != expected:
                    return f"{where}line {reader.line_num} has {len(fields)} fields, the first line has {expected}"
        except csv.Error as error:
            return f"{where}line {reader.line_num}: {error}"
    return ""


def find_broken_line(found: FoundTable) -> str:
    """The first line of JSON lines that is no JSON, in one clause; "" if there is none, or an array of rows."""
    for file in found.files:
        for number, line in _lines(found, file):
            if number == 1 and line.lstrip("\ufeff ").startswith("["):
                break
            try:
                json.loads(line.lstrip("\ufeff") if line.strip() else "0")
            except ValueError as error:
                return f"{file}, line {number}: {error}"
    return ""


def find_foreign_line(found: FoundTable) -> str:
    """The first line of CSV files that its encoding has no characters for, in one clause."""
    encoding = found.options.get("encoding") or "utf-8"
    for file in found.files if encoding in ("utf-8", "latin-1") else ():
        try:
            with fsspec.open(file, "rb", compression="infer") as opened:
                for number, line in enumerate(opened, start=1):
                    # DuckDB's Latin-1 is without the control characters, which Windows uses for others.
                    if re.search(rb"[\x80-\x9f]", line) if encoding == "latin-1" else not _is_utf8(line):
                        what = "neither UTF-8 nor Latin-1 (Windows-1252?)" if encoding == "latin-1" else "not UTF-8"
                        return f"{file}, line {number} is {what}; save the file as UTF-8"
        except (OSError, EOFError, zlib.error):
            return ""
    return ""


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def header_of(found: FoundTable) -> list[str]:
    """The names in the first line of a CSV file as they stand there; [] if its delimiter has several characters."""
    mark = found.options.get("delimiter") or ("\t" if ".tsv" in found.path.lower() else ",")
    lines = (line for _, line in _lines(found, found.files[0]))
    try:
        names = next(csv.reader(lines, delimiter=mark), []) if len(mark) == 1 else []
    except csv.Error:
        return []
    return [name.removeprefix("\ufeff") for name in names[:1]] + names[1:]


def column_names(header: Sequence[str]) -> list[str]:
    """What DuckDB calls the columns below a header: repeated names are numbered, and those without one by place."""
    seen: Counter[str] = Counter()
    names = []
    for place, name in enumerate(header):
        number = seen[name.casefold()]
        seen[name.casefold()] += 1
        names.append(f"column{place}" if not name else f"{name}_{number}" if number else name)
    return names


def _lines(found: FoundTable, file: str) -> Iterator[tuple[int, str]]:
    """The numbered lines of a text file, as far as it can be read."""
    encoding = found.options.get("encoding") or "utf-8"
    try:
        with fsspec.open(file, "rt", compression="infer", encoding=encoding, errors="replace", newline="") as opened:
            yield from enumerate(opened, start=1)
    except (OSError, EOFError, zlib.error):
        return
