"""Opens tables in DuckDB: how their files are read, and a sample of large ones."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import fsspec

from recmill.artifacts import InputError, is_remote
from recmill.data.inspection.columns import ColumnFacts, literal, measure_columns, quoted
from recmill.data.inspection.files import TABLES, FoundTable
from recmill.data.inspection.snapshots import scan_snapshot
from recmill.data.inspection.text_files import (
    explain_oddities,
    find_broken_line,
    find_foreign_line,
    find_line,
    find_uneven_line,
    guess_numbers,
)

Found = TypeVar("Found", bound=FoundTable)

SAMPLE_ROWS = 1_000_000
MAX_SAMPLED_FILES = 16
SNIFF_BYTES = 262_144
SNIFFED_ROWS = 200_000  # from which DuckDB guesses the types of a CSV file
# Other times stay text: DuckDB would read 03/04/2025 as the 3rd of April and not say that it could be the 4th of March.
CSV_TIMES = "timestampformat = '%Y-%m-%d %H:%M:%S', dateformat = '%Y-%m-%d'"
MAGIC = {
    b"\x1f\x8b": "compressed with gzip; its name should end in .gz",
    b"PK\x03\x04": "a zip archive or a workbook of Excel; export it as CSV",
    b"PAR1": "a Parquet file; its name should end in .parquet",
}
JSON_DEPTH = 5  # of records in JSON lines whose fields become columns; what is deeper stays JSON


@dataclass(frozen=True, kw_only=True)
class InspectedTable:
    """A table, the rows of it that were looked at, and what its columns are."""

    found: FoundTable
    columns: tuple[ColumnFacts, ...]
    num_rows: int  # in the sample
    num_total: int | None  # in the table; None if counting would have read all of it
    sampling: str  # how the sample was taken; "" if it is everything
    view: str  # DuckDB's name of the sample
    query: str  # DuckDB's expression for the whole table
    notes: tuple[str, ...] = ()  # what is ambiguous about the file itself

    @property
    def name(self) -> str:
        return self.found.name

    @property
    def is_sample(self) -> bool:
        return bool(self.sampling)

    @property
    def whole(self) -> str:
        """All rows: the sample if it is everything, which is read already."""
        return self.query if self.is_sample else self.view

    def column(self, name: str) -> ColumnFacts:
        return next(column for column in self.columns if column.name == name)


def connect() -> Any:
    import duckdb

    connection = duckdb.connect()
    connection.execute("SET enable_progress_bar = false")
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("SET autoinstall_known_extensions = false")
    return connection


def inspect_table(connection: Any, found: FoundTable, *, sample_rows: int = SAMPLE_ROWS) -> InspectedTable:
    """Look at a table: all of it, or `sample_rows` rows of at most 16 files that are spread over its files."""
    found = without_empty_files(found)
    found = with_csv_options(found)
    view = f"sample_{found.name}"
    with explain_errors(found):
        found = _with_delimiter(connection, found)
        query, sampling, num_total = _sample(connection, found, view, sample_rows)
        if found.format == "csv" and (more := guess_numbers(connection, view)):
            found = replace(found, options={**found.options, **more})
            query, sampling, num_total = _sample(connection, found, view, sample_rows)
        columns = measure_columns(connection, found.name, view)
    if found.format == "csv" and all(column.name == f"column{n}" for n, column in enumerate(columns)):
        found.options["names"] = [column.name for column in columns]  # DuckDB found no header line
    _refuse_one_column(found, columns)
    _refuse_repeated_header(connection, found, view, columns)
    num_rows = columns[0].num_rows
    if num_rows == 0:
        raise InputError(f"{found.path}: the table is empty")
    return InspectedTable(
        found=found,
        columns=columns,
        num_rows=num_rows,
        num_total=num_total,
        sampling=sampling,
        view=view,
        query=query,
        notes=tuple(explain_oddities(connection, found, view, columns)) if found.format == "csv" else (),
    )


def _sample(connection: Any, found: FoundTable, view: str, sample_rows: int) -> tuple[str, str, int | None]:
    """Make `view`; DuckDB's expression for the whole table, how the sample was taken, and the rows of the table."""
    import duckdb

    query = scan(connection, found, found.files)
    try:
        return query, *_take_sample(connection, found, view, query, sample_rows)
    except duckdb.ConversionException:  # a column of numbers has a text below the rows that types are guessed from
        if found.format != "csv" or found.options.get("all_rows"):
            raise
        found.options["all_rows"] = True
        return _sample(connection, found, view, sample_rows)


@contextmanager
def explain_errors(found: FoundTable) -> Iterator[None]:
    import duckdb

    try:
        yield
    except (duckdb.Error, OSError, UnicodeError, EOFError, zlib.error) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        if found.format == "csv" and isinstance(error, duckdb.Error):
            reason = find_foreign_line(found) or find_uneven_line(found) or reason
        if found.format == "jsonl" and isinstance(error, duckdb.Error):
            reason = find_broken_line(found) or reason
        raise InputError(f"{found.path}: cannot be read as {found.format} ({reason})") from None


def scan(connection: Any, found: FoundTable, files: Sequence[str]) -> str:
    """DuckDB's expression that reads these files of the table."""
    if found.format in TABLES:
        return scan_snapshot(connection, found)
    if is_remote(found.path):
        filesystem = fsspec.core.url_to_fs(found.path)[0]
        name = filesystem.protocol if isinstance(filesystem.protocol, str) else filesystem.protocol[0]
        if not connection.filesystem_is_registered(name):
            connection.register_filesystem(filesystem)
    listed = f"[{', '.join(map(literal, files))}]"
    if found.format == "parquet":
        return _flat(connection, f"read_parquet({listed}, union_by_name = true)")
    if found.format == "jsonl":
        depth = f"maximum_depth = {JSON_DEPTH}"
        return _flat(connection, f"read_json({listed}, format = 'auto', union_by_name = true, {depth})")
    given = {"delim": "delimiter", "encoding": "encoding", "decimal_separator": "decimal"}
    options = [f"{name} = {literal(found.options[key])}" for name, key in given.items() if found.options.get(key)]
    if found.options.get("delimiter") == "::":
        options.append("quote = '', escape = ''")
    if names := found.options.get("names"):
        options.append(f"header = false, names = [{', '.join(map(literal, names))}]")
    if nulls := found.options.get("nulls"):
        options.append(f"nullstr = [{', '.join(map(literal, ('', *nulls)))}]")
    options.append(f"sample_size = {-1 if found.options.get('all_rows') else SNIFFED_ROWS}")
    return f"read_csv({listed}, {', '.join(options)}, union_by_name = true, {CSV_TIMES})"


def _flat(connection: Any, rows: str) -> str:
    """DuckDB's expression for the rows with fields of records as columns of their own: user.id."""
    relation = connection.sql(f"SELECT * FROM {rows}")
    if not any(kind.id == "struct" for kind in relation.types):
        return rows
    columns = [
        own for name, kind in zip(relation.columns, relation.types, strict=True) for own in _fields([name], kind)
    ]
    chosen = ", ".join(f"{'.'.join(map(quoted, path))} AS {quoted('.'.join(path))}" for path in columns)
    return f"(SELECT {chosen} FROM {rows})"


def _fields(path: list[str], kind: Any) -> Iterator[list[str]]:
    if kind.id != "struct":
        yield path
        return
    for name, own in kind.children:
        yield from _fields([*path, name], own)


def _refuse_one_column(found: FoundTable, columns: Sequence[ColumnFacts]) -> None:
    """DuckDB finds no delimiter where a line has too many or too few of them."""
    mark = max(",;\t|", key=columns[0].name.count)
    if found.format == "csv" and len(columns) == 1 and mark in columns[0].name:
        uneven = find_uneven_line(replace(found, options={**found.options, "delimiter": mark}))
        raise InputError(f"{found.path}: cannot be read as csv ({uneven or f'found no column separated by {mark!r}'})")


def _refuse_repeated_header(connection: Any, found: FoundTable, view: str, columns: Sequence[ColumnFacts]) -> None:
    """Exports that were put one after another: every column is text then, and the header one of its rows."""
    if found.format != "csv" or any(column.nature != "text" for column in columns):
        return
    same = " AND ".join(f"{quoted(column.name)} = {literal(column.name)}" for column in columns)
    if connection.execute(f"SELECT count(*) FROM {view} WHERE {same}").fetchone()[0]:
        where = find_line(found, columns[0].name)
        raise InputError(f"{where or found.path}: repeats the header line, expected it once, at the top")


def copy_table(found: FoundTable, path: str) -> None:
    """Write the table's rows to a Parquet file, local or remote."""
    filesystem, root = fsspec.core.url_to_fs(path)
    filesystem.makedirs(root.rpartition("/")[0], exist_ok=True)
    with closing(connect()) as connection, explain_errors(found):
        if is_remote(path):
            connection.register_filesystem(filesystem)
        rows = scan(connection, found, found.files)
        connection.execute(f"COPY (SELECT * FROM {rows}) TO {literal(path)} (FORMAT parquet, COMPRESSION zstd)")


def without_empty_files(found: Found) -> Found:
    """The table without files of no bytes, which parallel exports leave; InputError if all are."""
    if found.format not in ("csv", "jsonl"):
        return found
    filesystem = fsspec.core.url_to_fs(found.path)[0]
    empty = [file for file in found.files if filesystem.size(filesystem._strip_protocol(file)) == 0]
    if len(empty) == len(found.files):
        raise InputError(
            f"{found.path}: the file is empty" if len(empty) == 1 else f"{found.path}: all files are empty"
        )
    if not empty:
        return found
    kept = tuple(file for file in found.files if file not in empty)
    return replace(found, files=kept, options={**found.options, "empty_files": empty})


def with_csv_options(found: FoundTable) -> FoundTable:
    """The table with what its CSV files need: an encoding other than UTF-8, a delimiter of two characters."""
    if found.format != "csv":
        return found
    with explain_errors(found), fsspec.open(found.files[0], "rb", compression="infer") as file:
        head = file.read(SNIFF_BYTES)
    for magic, kind in MAGIC.items():
        if head.startswith(magic):
            raise InputError(f"{found.files[0]}: is {kind}")
    options: dict[str, Any] = dict(found.options)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        options["encoding"] = "utf-16"
    try:
        text = head.decode(options.get("encoding", "utf-8"))
    except UnicodeDecodeError as error:
        # A character may be cut at the end of what was read.
        is_cut = len(head) == SNIFF_BYTES and error.start >= len(head) - 4
        text = head.decode("utf-8" if is_cut else "latin-1", errors="ignore")
        if not is_cut:
            options["encoding"] = "latin-1"
    lines = [line for line in text.splitlines()[:100] if line]
    if not lines:
        raise InputError(f"{found.files[0]}: the file is empty")
    if lines[0].count("::") > 0 and len({line.count("::") for line in lines[:-1] or lines}) == 1:
        options["delimiter"] = "::"
    return replace(found, options=options)


def _with_delimiter(connection: Any, found: FoundTable) -> FoundTable:
    """The table with the delimiter that DuckDB finds, if it is none that the file's name says: Spark finds none."""
    if found.format != "csv" or "delimiter" in found.options:
        return found
    scan(connection, found, found.files[:1])  # registers a remote file system
    encoding = f", encoding = {literal(found.options['encoding'])}" if "encoding" in found.options else ""
    sniffed = connection.execute(f"SELECT Delimiter FROM sniff_csv({literal(found.files[0])}{encoding})").fetchone()
    default = "\t" if ".tsv" in found.files[0].rpartition("/")[2].lower() else ","
    if sniffed is None or sniffed[0] == default:
        return found
    return replace(found, options={**found.options, "delimiter": sniffed[0]})


def _take_sample(connection: Any, found: FoundTable, view: str, query: str, sample_rows: int) -> tuple[str, int | None]:
    """Make `view` and say how the sample was taken ("": all rows), and the rows of the table where that is cheap."""
    num_total = None
    if found.format not in ("csv", "jsonl"):
        num_total = connection.execute(f"SELECT count(*) FROM {query}").fetchone()[0]
    if num_total is None or num_total <= sample_rows:
        connection.execute(f"CREATE OR REPLACE TEMP TABLE {view} AS SELECT * FROM {query} LIMIT {sample_rows + 1}")
        num_rows = connection.execute(f"SELECT count(*) FROM {view}").fetchone()[0]
        if num_rows <= sample_rows:
            return "", num_rows
    files = found.files
    step = -(-len(files) // MAX_SAMPLED_FILES)
    chosen = files[::step]
    each = max(1, sample_rows // len(chosen))
    parts = [f"(SELECT * FROM {scan(connection, found, [file])} LIMIT {each})" for file in chosen]
    connection.execute(f"CREATE OR REPLACE TEMP TABLE {view} AS {' UNION ALL BY NAME '.join(parts)}")
    if len(files) == 1:
        return f"the first {each:,} rows", num_total
    return f"the first {each:,} rows of {len(chosen)} of {len(files)} files", num_total
