from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq

from recmill.data.schema import Schema
from recmill.profiling.access import profile_access
from tests.datasets import ranking_schema, write_dataset


def test_counts_are_of_the_rows_that_transformed_ids_read(tmp_path):
    steps = ({"op": "truncate", "n": 2}, {"op": "clip", "min": 5, "max": 20})
    plain = ranking_schema()
    schema = Schema(
        features=tuple(replace(f, transforms=steps) if f.name == "interests" else f for f in plain.features)
    )
    dataset = write_dataset(tmp_path / "data", schema=schema, rows=(("train", 300),), rows_per_group=100)
    profile_access(dataset, out=tmp_path / "profile")
    lists = pq.read_table(tmp_path / "data" / "part-00000.parquet").column("interests").to_pylist()
    expected = np.bincount([min(max(i, 5), 20) for row in lists for i in row[-2:]], minlength=21)
    counts = pq.read_table(tmp_path / "profile" / "counts" / "interests.parquet").to_pydict()
    assert dict(zip(counts["row"], counts["count"], strict=True)) == {
        row: count for row, count in enumerate(expected.tolist()) if count
    }
