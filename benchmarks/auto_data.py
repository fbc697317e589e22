"""The data sets of benchmarks/auto_grid.py: presets in small, and raw logs that are made here to be awkward.

`single` has one sample per session, so nothing repeats; `dense` has no ids worth placing: one small table and twenty
numbers; `taobao` is the public sample of shop behaviour, read here because no preset does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recmill.artifacts import InputError
from recmill.data.schema import Feature, Schema
from recmill.data.sources import make_raw_log
from recmill.data.sources.raw_log import DATA_DIR_VARIABLE

DIM = 16
HISTORY = 16
SESSION_GAP_S = 30 * 60
# Settings of presets: (quick, full)
PRESETS: dict[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "tiny": ({}, {}),
    "small": ({"sessions": "4000"}, {"sessions": "15000"}),
    "recd": ({"sessions": "1500"}, {"sessions": "4000"}),
    "globo": ({"one_in": "40"}, {"one_in": "8"}),
    "frappe": ({}, {}),
}


def names() -> tuple[str, ...]:
    return (*PRESETS, "taobao", "single", "dense")


def make_log(name: str, *, out: Path, quick: bool, seed: int) -> None:
    """Write the raw log of a data set; InputError if its files are missing."""
    if name in PRESETS:
        make_raw_log(name, out=out, overrides=dict(PRESETS[name][0 if quick else 1]))
        return
    made: dict[str, Callable[[], tuple[Schema, dict[str, pa.Array]]]] = {
        "taobao": read_taobao,
        "single": lambda: single(60_000 if quick else 200_000, seed),
        "dense": lambda: dense(60_000 if quick else 200_000, seed),
    }
    schema, columns = made[name]()
    out.mkdir(parents=True)
    table = pa.table({name: columns[name] for name in schema.arrow_schema().names}).cast(schema.arrow_schema())
    pq.write_table(table.sort_by("timestamp"), out / "log.parquet")
    schema.save(out)


def cut_log(raw: Path, *, out: Path, num_rows: int) -> None:
    """Write a log of about `num_rows` rows of another one: random sessions, each whole; all of them if it has fewer."""
    table = pq.read_table(sorted(raw.rglob("*.parquet")))
    sessions, sizes = np.unique(table["session_id"].to_numpy(), return_counts=True)
    order = np.random.default_rng(0).permutation(len(sessions))
    kept = sessions[order[: int(np.searchsorted(np.cumsum(sizes[order]), num_rows)) + 1]]
    out.mkdir(parents=True)
    pq.write_table(table.filter(pc.is_in(table["session_id"], pa.array(kept))), out / "log.parquet")
    Schema.load(raw).save(out)


def single(num_rows: int, seed: int) -> tuple[Schema, dict[str, pa.Array]]:
    """One sample per session: skewed ids, a short list, a label that depends on both."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, 20_000, num_rows), np.minimum(rng.zipf(1.2, num_rows), 10_000) - 1
    tags = [(row + 7 * np.arange(3)) % 500 for row in item]
    score = np.sin(user) + np.sin(3.0 * item)
    return _schema(
        Feature(name="user", kind="sparse", num_rows=20_000, dim=DIM),
        Feature(name="item", kind="sparse", num_rows=10_000, dim=DIM),
        Feature(name="tags", kind="sparse", num_rows=500, dim=DIM),
    ), _columns(np.arange(num_rows), score, rng) | {
        "user": _singles(user),
        "item": _singles(item),
        "tags": pa.array(tags, pa.list_(pa.int64())),
    }


def dense(num_rows: int, seed: int) -> tuple[Schema, dict[str, pa.Array]]:
    """Numbers only, besides one table of ten rows (a plan needs a table); eight samples per session."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(num_rows, 20)).astype(np.float32)
    day = rng.integers(0, 10, num_rows)
    score = values[:, 0] * values[:, 1] + values[:, 2] - values[:, 3] + 0.1 * day
    features = [Feature(name=f"value_{number}", kind="dense") for number in range(20)]
    columns = {f"value_{number}": pa.array(values[:, number]) for number in range(20)}
    schema = _schema(*features, Feature(name="day", kind="sparse", num_rows=10, dim=DIM))
    return schema, _columns(np.arange(num_rows) // 8, score, rng) | columns | {"day": _singles(day)}


def read_taobao() -> tuple[Schema, dict[str, pa.Array]]:
    """Views and purchases of a shop: is an interaction more than a view, given who, what, and what was seen before?"""
    path = Path(os.environ.get(DATA_DIR_VARIABLE, ""), "taobao", "behavior.parquet")
    if not path.exists():
        raise InputError(f"taobao: {DATA_DIR_VARIABLE} has no taobao/behavior.parquet")
    table = pq.read_table(path).sort_by([("user", "ascending"), ("ts", "ascending")])
    _, user = np.unique(table["user"].to_numpy(), return_inverse=True)
    items, item = np.unique(table["item"].to_numpy(), return_inverse=True)
    categories, category = np.unique(table["category"].to_numpy(), return_inverse=True)
    seconds = table["ts"].to_numpy()
    is_new_user = np.diff(user, prepend=-1) != 0
    session = np.cumsum(is_new_user | (np.diff(seconds, prepend=seconds[0]) > SESSION_GAP_S)) - 1
    first = np.flatnonzero(is_new_user)[np.cumsum(is_new_user) - 1]  # the user's first row
    begins = np.maximum(first, np.arange(len(user)) - HISTORY)
    history = [item[begin:row] for row, begin in enumerate(begins.tolist())]
    schema = _schema(
        Feature(name="user", kind="sparse", num_rows=int(user.max()) + 1, dim=DIM),
        Feature(name="category", kind="sparse", num_rows=len(categories), dim=DIM),
        Feature(name="item", kind="sparse", num_rows=len(items), dim=DIM, table="items"),
        Feature(name="history", kind="sequence", num_rows=len(items), dim=DIM, table="items", shift=True),
    )
    label = np.array(table["behavior"].to_numpy(zero_copy_only=False) != "pv", np.float32)
    return schema, {
        "session_id": pa.array(session),
        "timestamp": pa.array(seconds * 1000),
        "label": pa.array(label),
        "user": _singles(user),
        "category": _singles(category),
        "item": _singles(item),
        "history": pa.array(history, pa.list_(pa.int64())),
    }


def _schema(*features: Feature) -> Schema:
    return Schema(features=features)


def _columns(
    session: npt.NDArray[np.int64], score: npt.NDArray[np.floating], rng: np.random.Generator
) -> dict[str, pa.Array]:
    label = rng.random(len(score)) < 1 / (1 + np.exp(-score))
    return {
        "session_id": pa.array(session),
        "timestamp": pa.array(np.arange(len(session)) * 10),
        "label": pa.array(label.astype(np.float32)),
    }


def _singles(ids: npt.NDArray[np.integer]) -> pa.Array:
    return pa.array(ids.astype(np.int64)[:, None].tolist(), pa.list_(pa.int64()))
