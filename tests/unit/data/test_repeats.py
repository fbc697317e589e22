"""Which layout a log asks for, and how its repeats are counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from recmill.data.cluster import cluster_sessions
from recmill.data.repeats import SessionRepeats, count_repeats, hash_lists, layout_for
from recmill.data.schema import Feature, Schema
from recmill.data.sources.presets import tiny
from recmill.data.sources.synthetic.generator import generate_log

SCHEMA = Schema(
    features=(
        Feature(name="tags", kind="sparse", num_rows=100, dim=8),
        Feature(name="seen", kind="sequence", num_rows=100, dim=8),
    )
)


def test_repeats_are_counted_inside_sessions_and_order_counts() -> None:
    """Session 1 holds [7, 9] twice and [9, 7] once; session 2 holds [7, 9] again, which is no repeat of session 1."""
    tags = [[7, 9], [7, 9], [9, 7], [7, 9]]
    rows = pa.table(
        {
            "session_id": [1, 1, 1, 2],
            "tags": pa.array(tags, pa.list_(pa.int64())),
            "seen": pa.array([[], [], [], [0]], pa.list_(pa.int64())),
        }
    )
    found, samples_per_session = count_repeats(rows, SCHEMA)
    assert samples_per_session == 2.0
    assert (found["tags"].factor, found["tags"].mean_length) == (4 / 3, 2.0)
    assert (found["seen"].factor, found["seen"].is_sequence) == (2.0, True)


def test_lists_with_equal_sums_lengths_or_prefixes_hash_apart() -> None:
    lists = [[1, 4], [4, 1], [2, 3], [1], [1, 0], [], [0], [0, 0], [5]]
    offsets = np.cumsum([0, *map(len, lists)])
    values = np.array([value for own in lists for value in own], np.int64)
    assert len(np.unique(hash_lists(values, offsets))) == len(lists)


@pytest.mark.parametrize(
    ("factor", "samples_per_session", "layout"),
    [(4.0, 8.0, "deduplicated"), (1.2, 8.0, "session"), (1.0, 1.0, "time")],
)
def test_the_layout_follows_from_the_repeats(factor: float, samples_per_session: float, layout: str) -> None:
    features = {"tags": SessionRepeats(factor=factor, mean_length=5.0, is_sequence=False)}
    chosen, why = layout_for(features, samples_per_session)
    assert chosen == layout
    assert why


@pytest.mark.parametrize(
    ("stay_prob", "samples_per_session", "layout"),
    [(0.9, 12.0, "deduplicated"), (0.0, 12.0, "session"), (0.9, 1.0, "time")],
)
def test_a_log_chooses_its_own_layout_and_the_dataset_says_why(
    tmp_path: Path, stay_prob: float, samples_per_session: float, layout: str
) -> None:
    config = replace(
        tiny(), num_sessions=300, stay_prob=stay_prob, shift_prob=1.0, samples_per_session=samples_per_session
    )
    raw = generate_log(config, out=tmp_path / "raw")
    chosen = cluster_sessions(raw, out=tmp_path / "auto", layout="auto", eval_fraction=0.1)
    assert chosen.layout == layout
    assert "sessions" in chosen.layout_why
    named = cluster_sessions(raw, out=tmp_path / "named", layout=layout, eval_fraction=0.1)
    assert named.layout_why == ""
    assert named.files == chosen.files
