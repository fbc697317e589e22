"""Vocabularies on disk: `vocabulary/<table>.parquet` with `value`, `row` and `count` beside a prepared log.

Rows come first in their order, then the values that share row 0 because they are rare.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recmill.artifacts import InputError, is_remote, join_path
from recmill.data.log import VOCABULARY_FOLDER
from recmill.data.preparation.queries.tables import QueryEngine
from recmill.data.preparation.sources import SourceFiles


def write_vocabularies(vocabularies: Mapping[str, Any], folder: Path, engine: QueryEngine) -> dict[str, int]:
    """Write every vocabulary below `folder`; returns how many values each knows."""
    sizes = {}
    for name, table in vocabularies.items():
        (folder / VOCABULARY_FOLDER).mkdir(exist_ok=True)
        found = engine.fetch(table.select("value", "row", "count"))
        kind = pa.int64() if pa.types.is_integer(found.schema.field("value").type) else pa.string()
        found = found.cast(pa.schema({"value": kind, "row": pa.int64(), "count": pa.int64()}))
        ordered = found.append_column("is_rare", pc.equal(found["row"], 0)).sort_by(
            [("is_rare", "ascending"), ("row", "ascending"), ("count", "descending"), ("value", "ascending")]
        )
        path = folder / VOCABULARY_FOLDER / f"{name}.parquet"
        pq.write_table(ordered.drop_columns("is_rare"), path, compression="zstd")
        sizes[name] = found.num_rows
    return sizes


def open_vocabularies(log: str | Path, engine: QueryEngine) -> dict[str, tuple[str, Any]]:
    """The vocabularies of a log that was prepared before, by table: where each is, and its Ibis table."""
    folder = join_path(log, VOCABULARY_FOLDER)
    filesystem, root = fsspec.core.url_to_fs(folder)
    if not filesystem.isdir(root):
        raise InputError(f"{log}: holds no {VOCABULARY_FOLDER} folder; expected a log from recmill prepare")
    found = {}
    for path in sorted(filesystem.glob(join_path(root, "*.parquet"))):
        shown = filesystem.unstrip_protocol(path) if is_remote(log) else path
        source = SourceFiles(name=path, format="parquet", path=shown, files=(shown,))
        found[path.rpartition("/")[2].removesuffix(".parquet")] = (shown, engine.open(source))
    return found
