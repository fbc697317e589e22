"""The files of a source: where they are, their format, and the SQL that reads them with one type per kind of column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

import fsspec

from recmill.artifacts import InputError, is_remote, join_path
from recmill.data.inspection.files import COMPRESSIONS, FORMATS, TABLES, FoundTable, table_format
from recmill.data.inspection.reading import without_empty_files
from recmill.data.preparation.spec import LogSpec

ENDINGS = {f".{ending}": name for name, endings in FORMATS.items() for ending in endings}
COMPRESSED = tuple(f".{ending}" for ending in COMPRESSIONS)


@dataclass(frozen=True, kw_only=True)
class SourceFiles(FoundTable):
    """A source with its files found."""

    @property
    def is_text(self) -> bool:
        """Whether reading it twice costs more than storing it as Parquet."""
        return self.format in ("csv", "jsonl")


def find_sources(spec: LogSpec, log_yaml: str) -> Mapping[str, SourceFiles]:
    """The sources that `log_yaml` uses, with their files; paths are relative to its folder."""
    used = {spec.events.source, *(join.source for join in spec.joins), *(outcome.source for outcome in spec.outcomes)}
    return {name: _find_files(spec, name, log_yaml) for name in spec.sources if name in used}


def _find_files(spec: LogSpec, name: str, log_yaml: str) -> SourceFiles:
    source, folder = spec.sources[name], log_yaml.rpartition("/")[0] or "."
    path = source.path if is_remote(source.path) or source.path.startswith("/") else join_path(folder, source.path)
    where = f"{log_yaml}: sources.{name}.path"
    filesystem, root = fsspec.core.url_to_fs(path)
    is_folder = filesystem.isdir(root)
    kind = source.format or (table_format(filesystem, root.rstrip("/")) if is_folder else None)
    if kind in TABLES:
        at = {} if source.version is None else {"version": source.version}
        return SourceFiles(name=name, format=str(kind), path=path, files=(path,), options=at)
    if source.version is not None:
        raise InputError(f"{log_yaml}: sources.{name}.version is for Delta and Iceberg tables, {path} is none")
    if is_folder:
        found = [
            own for own in filesystem.find(root) if not any(p[:1] in "._" for p in own[len(root) :].split("/") if p)
        ]
    else:
        found = sorted(filesystem.glob(root)) if any(sign in root for sign in "*?[") else [root]
        found = [own for own in found if filesystem.isfile(own)]
    if source.format is None:
        found = [own for own in found if _ending(own) in ENDINGS] or found
    if not found:
        raise InputError(f"{where}: no file at {path}")
    formats = {source.format} if source.format else {ENDINGS.get(_ending(own)) for own in found}
    if len(formats) > 1 or None in formats:
        endings = ", ".join(sorted({PurePath(own).suffix or own for own in found}))
        raise InputError(f"{where}: the files end in {endings}; name their format (parquet, csv or jsonl)")
    shown = filesystem.unstrip_protocol if is_remote(path) else str
    said = ("delimiter", "decimal", "nulls", "encoding", "names")
    files = tuple(map(shown, sorted(found)))
    own = SourceFiles(
        name=name,
        format=str(formats.pop()),
        path=path,
        files=files,
        options={key: getattr(source, key) for key in said},
    )
    return without_empty_files(own)


def _ending(path: str) -> str:
    pure = PurePath(path)
    return PurePath(pure.stem).suffix if pure.suffix in COMPRESSED else pure.suffix


def check_columns(found: Mapping[str, str], wanted: Mapping[str, str], source: SourceFiles, log_yaml: str) -> None:
    """Raise unless the source has the `wanted` columns, given with the key of log.yaml that names each."""
    for column, place in wanted.items():
        if column not in found:
            alike = [name for name in found if name.casefold() == column.casefold()]
            hint = f" (did you mean {alike[0]!r}?)" if alike else ""
            raise InputError(
                f"{log_yaml}: {place}: {source.path} has no column {column!r}{hint}; it has {', '.join(found)}"
            )
