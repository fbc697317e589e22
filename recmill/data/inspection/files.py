"""Which tables lie in the files and folders that a user names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import fsspec

from recmill.artifacts import InputError, is_remote
from recmill.data.inspection.naming import identifier

FORMATS = {
    "parquet": ("parquet", "pq"),
    "csv": ("csv", "tsv", "txt", "dat"),
    "jsonl": ("jsonl", "ndjson", "json"),
}
TABLES = ("delta", "iceberg")  # folders with a log of their own, which says what files belong to them
COMPRESSIONS = ("gz", "zst")
EXPECTED = "Parquet, CSV (.csv, .tsv, .txt, .dat) or JSON lines (.jsonl, .ndjson, .json)"
# What follows the name of a table in the names of its parts: events-2024-01-31.csv, part-00007.parquet.
PART_SUFFIX = re.compile(r"([-_.]?(part|chunk|of)?[-_.]?[0-9]+)+$")


@dataclass(frozen=True, kw_only=True)
class FoundTable:
    """Files that form one table."""

    name: str
    path: str  # one file, a pattern, or the folder of an Iceberg or Delta table
    format: str
    files: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)  # how a CSV file is read, where it is not plain


def find_tables(paths: Sequence[str]) -> list[FoundTable]:
    """The tables in files, folders and patterns, local or remote."""
    found = [table for path in paths for table in _tables_in(str(path))]
    if not found:
        raise InputError(f"{', '.join(paths)}: holds no data file; expected {EXPECTED}")
    taken: dict[str, int] = {}
    unique = []
    for table in found:
        taken[table.name] = taken.get(table.name, 0) + 1
        number = taken[table.name]
        unique.append(table if number == 1 else _renamed(table, f"{table.name}_{number}"))
    return unique


def _renamed(table: FoundTable, name: str) -> FoundTable:
    return FoundTable(name=name, path=table.path, format=table.format, files=table.files, options=table.options)


def _tables_in(path: str) -> list[FoundTable]:
    filesystem, root = open_filesystem(path)
    shown = filesystem.unstrip_protocol if is_remote(path) else str
    if any(mark in root for mark in "*?[") and not filesystem.exists(root):
        files = sorted(filesystem.glob(root))
        if not files:
            raise InputError(f"{path}: no file matches the pattern")
        return [_table(re.split(r"[*?\[]", root)[0].rstrip("/"), path, files, shown)]
    if not filesystem.exists(root):
        raise InputError(f"{path}: no such file or folder")
    if filesystem.isdir(root):
        return _tables_in_folder(filesystem, root.rstrip("/"), shown)
    if format_of(root) is None:
        raise InputError(f"{path}: cannot tell its format by the name; expected {EXPECTED}")
    return [_table(root, path, [root], shown)]


def open_filesystem(path: str) -> tuple[Any, str]:
    """fsspec's file system of a path; a protocol whose package is missing is one sentence."""
    try:
        filesystem, root = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise InputError(f"{path}: cannot be opened: {str(error).rstrip('.')}") from None
    return filesystem, str(root)


def format_of(path: str) -> str | None:
    """The format that a file's name says; None if it says none."""
    suffixes = path.rpartition("/")[2].lower().split(".")[1:]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return next((kind for kind, endings in FORMATS.items() if suffixes and suffixes[-1] in endings), None)


def table_format(filesystem: Any, folder: str) -> str | None:
    """delta or iceberg, if the folder is such a table."""
    if filesystem.exists(f"{folder}/_delta_log"):
        return "delta"
    if filesystem.exists(f"{folder}/metadata") and filesystem.glob(f"{folder}/metadata/*.metadata.json"):
        return "iceberg"
    return None


def stem_of(path: str) -> str:
    """The file's name without endings and part numbers."""
    stem = path.rstrip("/").rpartition("/")[2].split(".")[0]
    return PART_SUFFIX.sub("", stem)


def _table(named: str, path: str, files: Sequence[str], shown: Any) -> FoundTable:
    kinds = {format_of(file) for file in files} - {None}
    if len(kinds) != 1:
        kept = ", ".join(sorted(map(str, kinds))) or "none"
        raise InputError(f"{path}: expected files of one format, found {kept}; name each table's files")
    # A part such as 0001.parquet or part-7.csv is named by its folder.
    stem = stem_of(named)
    name = stem if stem not in ("", "part", "data", "chunk") else named.rstrip("/").split("/")[-2:][0]
    return FoundTable(
        name=identifier(name), path=path, format=str(kinds.pop()), files=tuple(shown(file) for file in files)
    )


def _tables_in_folder(filesystem: Any, root: str, shown: Any) -> list[FoundTable]:
    """One table per subfolder, and one per name of the files, where numbers and dates at the end do not count."""
    name = identifier(root.rpartition("/")[2])
    if kind := table_format(filesystem, root):
        return [FoundTable(name=name, path=shown(root), format=kind, files=(shown(root),))]
    entries = sorted(filesystem.ls(root, detail=True), key=lambda entry: entry["name"])
    visible = [entry for entry in entries if not entry["name"].rpartition("/")[2].startswith((".", "_"))]
    folders = [entry["name"] for entry in visible if entry["type"] == "directory"]
    files = [entry["name"] for entry in visible if entry["type"] != "directory" and format_of(entry["name"])]
    if folders and all("=" in folder.rpartition("/")[2] for folder in folders):  # partitions of one table
        below = [file for file in sorted(filesystem.find(root)) if _is_data(file, root)]
        if below:
            ending = below[0].rpartition("/")[2].partition(".")[2]
            return [_table(root, shown(f"{root}/**/*.{ending}"), below, shown)]
    tables = [_of_parts(root, group, shown) for group in _grouped(files)]
    return tables + [table for folder in folders for table in _tables_in_folder(filesystem, folder, shown)]


def _is_data(file: str, root: str) -> bool:
    hidden = any(part.startswith((".", "_")) for part in file[len(root) + 1 :].split("/"))
    return not hidden and format_of(file) is not None


def _grouped(files: Iterable[str]) -> list[list[str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for file in files:
        ending = file.rpartition("/")[2].partition(".")[2]
        groups.setdefault((stem_of(file), ending), []).append(file)
    return list(groups.values())


def _of_parts(root: str, files: list[str], shown: Any) -> FoundTable:
    if len(files) == 1:
        return _table(files[0], shown(files[0]), files, shown)
    ending = files[0].rpartition("/")[2].partition(".")[2]
    stem = stem_of(files[0])
    return _table(f"{root}/{stem}" if stem else root, shown(f"{root}/{stem}*.{ending}"), files, shown)
