"""Ids that a schema's transforms will map may be any int64; every layout gives them back as they were."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.data.cluster import cluster_sessions
from recmill.data.dataset import read_table
from recmill.data.schema import Schema
from tests.datasets import random_columns, ranking_schema

# A few ids of any size and sign, the first of them far more often than the others.
RAW = np.array([10**15 + 7, -(2**63), -1, 0, -45, 29 * 10**15, 2**63 - 1, *(-(k**7) for k in range(2, 200))])


def test_every_layout_keeps_ids_of_any_size_and_sign(tmp_path):
    steps = ({"op": "hash_to_range", "num_rows": 40},)
    features = [
        replace(f, transforms=steps, shift=f.kind == "sequence") if f.kind != "dense" else f
        for f in ranking_schema().features
    ]
    schema = Schema(features=tuple(features))
    columns = random_columns(schema, 400)
    for feature in schema.id_features:
        lists = columns[feature.name]
        raw = RAW[np.random.default_rng(0).zipf(1.3, len(lists.values)) % len(RAW)]
        columns[feature.name] = pa.ListArray.from_arrays(lists.offsets, pa.array(raw))
    (tmp_path / "raw").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "raw" / "log.parquet")
    schema.save(tmp_path / "raw")
    session, deduplicated = (
        read_table(cluster_sessions(tmp_path / "raw", out=tmp_path / layout, layout=layout))
        for layout in ("session", "deduplicated")
    )
    for name in session.column_names:
        assert deduplicated.column(name).to_pylist() == session.column(name).to_pylist(), name
