"""Small datasets that tests write themselves, with a signal a model can learn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts import Dataset, write_folder
from recmill.data.schema import Feature, Schema


def ranking_schema(dim: int = 8) -> Schema:
    """Two dense values, a user list, an item id and a history over the item's table."""
    return Schema(
        features=(
            Feature(name="age", kind="dense"),
            Feature(name="price", kind="dense"),
            Feature(name="interests", kind="sparse", num_rows=50, dim=dim, pooling="mean"),
            Feature(name="country", kind="sparse", num_rows=7, dim=dim),
            Feature(name="item", kind="sparse", table="items", num_rows=40, dim=dim),
            Feature(name="history", kind="sequence", table="items", num_rows=40, dim=dim),
        ),
        user="country",
        item="item",
    )


def random_columns(schema: Schema, num_rows: int, *, seed: int = 0) -> dict[str, pa.Array]:
    """Columns of a log in session order: 4 samples a session; the label follows the item and the first dense value."""
    rng = np.random.default_rng(seed)
    columns: dict[str, pa.Array] = {
        "session_id": pa.array(np.arange(num_rows) // 4),
        "timestamp": pa.array(np.arange(num_rows) * 10),
    }
    score = np.zeros(num_rows)
    for feature in schema.features:
        if feature.kind == "dense":
            values = rng.normal(size=num_rows).astype(np.float32)
            score += values
            columns[feature.name] = pa.array(values)
        else:
            is_single = feature.name in ("item", "country")
            lengths = np.ones(num_rows, dtype=int) if is_single else rng.integers(0, 6, size=num_rows)
            ids = rng.integers(0, feature.num_rows, size=lengths.sum())
            if is_single:
                score += np.sin(ids * 1.7)
            offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), type=pa.int32())
            columns[feature.name] = pa.ListArray.from_arrays(offsets, pa.array(ids))
    label = rng.random(num_rows) < 1 / (1 + np.exp(-score))
    columns["label"] = pa.array(label.astype(np.float32))
    return {name: columns[name] for name in schema.columns}


def write_dataset(
    out: Path,
    *,
    schema: Schema | None = None,
    rows: Sequence[tuple[str, int]] = (("train", 1600), ("test", 400)),
    rows_per_group: int = 200,
    seed: int = 0,
) -> Dataset:
    """A session-layout Dataset with one part a split."""
    schema = schema or ranking_schema()
    parts = []
    with write_folder(out, manifest_name=Dataset.manifest_name) as folder:
        for number, (split, num_rows) in enumerate(rows):
            file = folder / f"part-{number:05d}.parquet"
            table = pa.table(random_columns(schema, num_rows, seed=seed + number))
            pq.write_table(table, file, row_group_size=rows_per_group)
            footer = pq.read_metadata(file)
            parts.append(
                {
                    "file": file.name,
                    "split": split,
                    "num_rows": num_rows,
                    "num_sessions": -(-num_rows // 4),
                    "bytes": file.stat().st_size,
                    "row_group_rows": [footer.row_group(i).num_rows for i in range(footer.num_row_groups)],
                }
            )
        schema.save(folder)
        total = sum(count for _, count in rows)
        body = {"layout": "session", "num_rows": total, "num_sessions": -(-total // 4), "parts": parts, "source": {}}
        Dataset.of_json(body).seal(folder)
    return Dataset.load(out)
