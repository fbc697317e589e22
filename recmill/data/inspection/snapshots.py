"""Delta and Iceberg tables: the rows of one version of a table, as DuckDB's expression.

DuckDB's own extension reads them where it is installed. Elsewhere the packages deltalake and pyiceberg say which files
a version consists of, and DuckDB reads these through Arrow, out of core. Where a file holds rows that were deleted, or
columns under another name or type, the package reads the rows once, into a table that DuckDB may spill.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import fsspec

from recmill.artifacts import InputError, is_remote
from recmill.data.inspection.files import FoundTable

# Format -> (how it is called, the package that reads it)
PACKAGES = {"delta": ("a Delta", "deltalake"), "iceberg": ("an Iceberg", "pyiceberg")}
EXTRA = "recmill[tables]"
FSSPEC = {"py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO"}  # finds stores and credentials as the rest of recmill does


def scan_snapshot(connection: Any, found: FoundTable) -> str:
    """The rows of the table's current version, or of the one that its options name."""
    path = _newest_metadata(found.path) if found.format == "iceberg" else found.path
    version = found.options.get("version")
    if _has_extension(connection, found.format):
        return _extension_scan(found.format, path, version)
    name = f"rows of {found.name}"
    quoted = '"' + name.replace('"', '""') + '"'
    if connection.execute("SELECT 1 FROM information_schema.tables WHERE table_name = ?", [name]).fetchone():
        return quoted
    _require_package(found)
    with _explained(found):
        rows = (_open_delta if found.format == "delta" else _open_iceberg)(path, version)
        if not callable(rows):
            connection.register(name, rows)
            return quoted
        connection.register("a stream", rows())  # which can be read once
        connection.execute(f'CREATE TEMP TABLE {quoted} AS SELECT * FROM "a stream"')
        connection.unregister("a stream")
    return quoted


def _has_extension(connection: Any, name: str) -> bool:
    query = "SELECT installed OR loaded FROM duckdb_extensions() WHERE extension_name = ?"  # LOAD would download
    found = connection.execute(query, [name]).fetchone()
    if found is None or not found[0]:
        return False
    connection.execute(f"LOAD {name}")
    return True


def _extension_scan(kind: str, path: str, version: int | None) -> str:
    at = "" if version is None else f", {'version' if kind == 'delta' else 'snapshot_from_id'} => {version}"
    return f"{kind}_scan('{path.replace(chr(39), chr(39) * 2)}'{at})"


def _require_package(found: FoundTable) -> None:
    called, package = PACKAGES[found.format]
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"{found.path}: is {called} table; install {package}, which reads it: pip install '{EXTRA}'; or DuckDB's "
            f"extension, where there is a network: python -c \"import duckdb; duckdb.sql('INSTALL {found.format}')\""
        )


@contextmanager
def _explained(found: FoundTable) -> Iterator[None]:
    """What the packages say about a table that is not there, is damaged, or needs more than they can do."""
    expected: tuple[type[Exception], ...] = (ValueError, OSError, NotImplementedError)
    if found.format == "delta":
        from deltalake.exceptions import DeltaError

        expected += (DeltaError,)
    else:
        from pyiceberg.exceptions import ValidationError

        expected += (ValidationError,)
    try:
        yield
    except InputError:
        raise
    except expected as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise InputError(f"{found.path}: cannot be read as {found.format} ({reason})") from None


def _open_delta(path: str, version: int | None) -> Any | Callable[[], Any]:
    """An Arrow dataset, or a function that opens a stream of the rows."""
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaProtocolError

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    options = {"allow_http": "true"} if endpoint.startswith("http://") else {}  # deltalake asks twice
    table = DeltaTable(path, version=version, storage_options=options)
    try:
        return table.to_pyarrow_dataset()
    except DeltaProtocolError:  # deletion vectors, or columns that have another name in the files
        return table.scan


def _open_iceberg(metadata: str, version: int | None) -> Any | Callable[[], Any]:
    """An Arrow dataset, or a function that opens a stream of the rows."""
    import pyarrow.dataset
    from pyiceberg.io.pyarrow import schema_to_pyarrow
    from pyiceberg.table import StaticTable

    table = StaticTable.from_metadata(metadata, FSSPEC if is_remote(metadata) else {})
    if version is not None and table.snapshot_by_id(version) is None:
        known = ", ".join(str(own.snapshot_id) for own in table.snapshots()) or "none"
        raise InputError(f"{metadata}: has no snapshot {version}; it has {known}")
    scan = table.scan(snapshot_id=version)
    tasks = list(scan.plan_files())
    if not _are_plain(table, tasks):
        return scan.to_arrow_batch_reader
    filesystem = fsspec.core.url_to_fs(metadata)[0]
    files = [filesystem._strip_protocol(task.file.file_path) for task in tasks]
    schema = schema_to_pyarrow(scan.projection(), include_field_ids=False)
    return pyarrow.dataset.dataset(files, schema=schema, format="parquet", filesystem=filesystem)


def _are_plain(table: Any, tasks: Sequence[Any]) -> bool:
    """Whether every file holds exactly its rows of the table, under the names and types of today."""
    from pyiceberg.manifest import FileFormat
    from pyiceberg.schema import index_name_by_id
    from pyiceberg.transforms import IdentityTransform

    if any(task.delete_files or task.file.file_format != FileFormat.PARQUET for task in tasks):
        return False
    if any(isinstance(own.transform, IdentityTransform) for spec in table.specs().values() for own in spec.fields):
        return False  # files that were added later may leave the column out
    fields = {
        (number, name, str(schema.find_type(number)), schema.find_field(number).initial_default)
        for schema in table.schemas().values()
        for number, name in index_name_by_id(schema).items()
    }
    names = [name for _, name, _, _ in fields]
    return len(set(names)) == len(names) == len({own[0] for own in fields}) and not any(own[3] for own in fields)


def _newest_metadata(path: str) -> str:
    """The file that describes the current version of an Iceberg table in a folder without a catalogue."""
    if path.endswith(".metadata.json"):
        return path
    filesystem, root = fsspec.core.url_to_fs(path)
    folder = f"{str(root).rstrip('/')}/metadata"
    filesystem.invalidate_cache()  # listings of stores are cached
    names = sorted(own.rpartition("/")[2] for own in filesystem.glob(f"{folder}/*.metadata.json"))
    if not names:
        raise InputError(f"{path}: is no Iceberg table; expected metadata/*.metadata.json in it")
    numbers = {name: int(found[1]) if (found := re.match(r"v?(\d+)", name)) else -1 for name in names}
    newest = [name for name in names if numbers[name] == max(numbers.values())]
    if filesystem.exists(f"{folder}/version-hint.text"):
        hint = filesystem.cat_file(f"{folder}/version-hint.text").decode().strip()
        newest = [name for name in names if name in (hint, f"v{hint}.metadata.json", f"{hint}.metadata.json")]
    if len(newest) != 1:
        raise InputError(
            f"{path}: cannot tell which of {', '.join(newest or names)} is current; name the file as the source's path"
        )
    shown = filesystem.unstrip_protocol if is_remote(path) else str
    return str(shown(f"{folder}/{newest[0]}"))
