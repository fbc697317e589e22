"""Checks of samples: what they say about logs with a known fault, and that they stay quiet without one."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

from recmill.artifacts import InputError
from recmill.data.checks import samples
from recmill.data.checks.findings import LogFindings
from recmill.data.checks.samples import check_samples
from recmill.data.checks.single_values import auc_of_groups
from recmill.data.schema import Feature, Schema

NUM_ROWS = 6_000


def check(folder: Path, splits: dict[str, int] | None = None, **columns: np.ndarray | list[list[int]]) -> LogFindings:
    """The findings about a log of 6,000 samples, ten per session, with random columns except those given."""
    rng = np.random.default_rng(0)
    row = np.arange(NUM_ROWS)
    found = {
        "session_id": row // 10,
        "timestamp": row * 1_000,
        "label": (rng.random(NUM_ROWS) < 0.3).astype(np.float32),
        "price": rng.normal(size=NUM_ROWS).astype(np.float32),
        "user": rng.integers(1, 50, NUM_ROWS),
        "item": rng.integers(1, 200, NUM_ROWS),
        "history": rng.integers(1, 200, (NUM_ROWS, 4)).tolist(),
    } | columns
    schema = Schema(
        features=(
            Feature(name="price", kind="dense"),
            Feature(name="user", kind="sparse", num_rows=50, dim=4),
            Feature(name="item", kind="sparse", num_rows=200, dim=4),
            Feature(name="history", kind="sequence", table="item", num_rows=200, dim=4),
        ),
        user="user",
        item="item",
        splits=splits or {},
    )
    for name in ("user", "item"):
        found[name] = [[int(value)] for value in found[name]]
    arrays = [pa.array(found[field.name], field.type) for field in schema.arrow_schema()]
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema.arrow_schema()), folder / "log-00000.parquet")
    return check_samples(folder, schema)


def label() -> np.ndarray:
    return (np.random.default_rng(0).random(NUM_ROWS) < 0.3).astype(np.float32)


def test_random_features_raise_no_warning(tmp_path: Path) -> None:
    assert check(tmp_path).warnings == []


def test_auc_of_groups_is_the_auc_of_their_samples() -> None:
    rng = np.random.default_rng(1)
    score, num = rng.integers(0, 5, 30).astype(float), rng.integers(1, 20, 30).astype(float)
    positive = np.floor(num * rng.random(30))
    labels = np.concatenate([[1] * int(p) + [0] * int(n - p) for n, p in zip(num, positive, strict=True)])
    expected = roc_auc_score(labels, np.repeat(score, num.astype(int)))
    assert auc_of_groups(score, num, positive) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("column", ["price", "item"])
def test_a_feature_that_holds_the_label_is_a_warning(tmp_path: Path, column: str) -> None:
    rng, y = np.random.default_rng(2), label()
    price = (rng.normal(size=NUM_ROWS) + 6 * y).astype(np.float32)
    item = np.where(y > 0, rng.integers(1, 100, NUM_ROWS), rng.integers(100, 200, NUM_ROWS))
    (warning,) = check(tmp_path, **{column: {"price": price, "item": item}[column]}).warnings
    assert (warning.check, warning.subject) == ("single features", column)
    assert warning.numbers["auc"] > 0.99


def test_a_dense_feature_whose_middle_is_the_label_is_a_warning(tmp_path: Path) -> None:
    # Positives lie between the negatives: no order of the values tells them apart, but their bins do.
    y, rng = label(), np.random.default_rng(3)
    price = np.where(y > 0, rng.uniform(-1, 1, NUM_ROWS), rng.choice([-1, 1], NUM_ROWS) * rng.uniform(2, 3, NUM_ROWS))
    (warning,) = check(tmp_path, price=price.astype(np.float32)).warnings
    assert warning.subject == "price"


def test_ids_that_occur_once_say_nothing(tmp_path: Path) -> None:
    # Each value has one label, so a rate per value would be an AUC of 1 on the values it was taken from.
    assert check(tmp_path, item=np.arange(NUM_ROWS) % 200, price=np.arange(NUM_ROWS).astype(np.float32)).warnings == []


def test_a_history_whose_newest_element_is_the_own_item_is_a_warning(tmp_path: Path) -> None:
    y, rng = label(), np.random.default_rng(4)
    item = rng.integers(1, 200, NUM_ROWS)
    newest = np.where(y > 0, item, rng.integers(1, 200, NUM_ROWS))
    history = np.column_stack([rng.integers(1, 200, (NUM_ROWS, 3)), newest]).tolist()
    (warning,) = check(tmp_path, item=item, history=history).warnings
    assert (warning.check, warning.subject) == ("histories", "history")
    assert warning.numbers["positives"] == 1.0
    assert warning.examples[0]["newest"][-1] == warning.examples[0]["item"]


def test_sessions_across_a_split_are_counted(tmp_path: Path) -> None:
    # Ten samples per session, one per second: the boundary cuts session 500 in its middle, and no other.
    found = check(tmp_path, splits={"test": 5_005_000})
    (finding,) = [own for own in found.found if own.check == "splits" and "num_late" in own.numbers]
    assert (finding.level, finding.numbers) == ("info", {"num_late": 1, "num_sessions": 99})
    assert finding.examples[0]["session_id"] == 500


def test_sessions_that_last_over_the_split_are_a_warning(tmp_path: Path) -> None:
    found = check(tmp_path, splits={"test": 3_000_000}, session_id=np.arange(NUM_ROWS) % 600)
    assert [own.numbers["num_late"] for own in found.warnings if own.check == "splits"] == [600]


def test_what_was_not_looked_at_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve row groups of 500: every second for features, every fourth for histories."""
    assert not [own for own in check(tmp_path).found if own.subject == "samples"]
    for name, number in (("ROWS_PER_GROUP", 500), ("SAMPLE_ROWS", 3_000), ("HISTORY_ROWS", 1_500)):
        monkeypatch.setattr(samples, name, number)
    found = check(tmp_path)
    (finding,) = [own for own in found.found if own.subject == "samples"]
    assert (finding.level, found.warnings) == ("info", [])
    assert "of 6,000 samples, looked at 3,000 for single features, 1,500 for histories" in finding.message


@pytest.mark.parametrize("most_rows", [2_000_000, 2_000])
def test_repeated_samples_are_counted_for_whole_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_rows: int
) -> None:
    """Of the users that are looked at no training sample is left out, else few held-out samples would repeat one."""
    monkeypatch.setattr(samples, "SAMPLE_ROWS", most_rows)
    rng = np.random.default_rng(5)
    user, item = rng.integers(1, 50, NUM_ROWS), rng.integers(1, 60, NUM_ROWS)
    (finding,) = [
        own
        for own in check(tmp_path, splits={"test": 5_000_000}, user=user, item=item).found
        if "num_repeated" in own.numbers
    ]
    one_in = -(-NUM_ROWS // most_rows)
    looked_at = {u for u in range(1, 50) if duckdb.sql(f"SELECT hash({u}::BIGINT) % {one_in}").fetchall() == [(0,)]}
    rows = list(zip(user.tolist(), item.tolist(), label().tolist(), strict=True))
    trained = {row for row in rows[:5_000] if row[0] in looked_at}
    held_out = [row for row in rows[5_000:] if row[0] in looked_at]
    repeated = [row for row in held_out if row in trained]
    assert finding.numbers == {"num_repeated": len(repeated), "num_samples": len(held_out)}
    assert (f"of one in {one_in} users" in finding.message) == (one_in > 1)
    assert [(own["user"], own["item"], own["label"]) for own in finding.examples] == repeated[:3]


def test_strict_makes_a_warning_one_sentence(tmp_path: Path) -> None:
    found = check(tmp_path, price=label())
    with pytest.raises(InputError, match=r"log\.yaml: single features: feature 'price' predicts 'label' alone"):
        found.refuse_warnings("log.yaml")
    check(tmp_path).refuse_warnings("log.yaml")
