"""`recmill prepare` against its definition, one event at a time (tests/event_logs.py)."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from recmill.data.log import RawLog
from recmill.data.preparation.prepared_log import prepare_log
from recmill.data.schema import Schema
from tests.event_logs import Options, Reference, Shop, ranked, space_out

# Without shrinking: an example takes a quarter of a second, and random shops are small. 7 in `make test`, else 50.
FEW = settings(
    max_examples=settings.default.max_examples // 4,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
SHOPS = st.builds(Shop.random, st.integers(0, 10**6), st.integers(1, 70))


def prepare(shop: Shop, options: Options, folder: Path, **how) -> list[dict]:
    """The rows of the log, in the order of the file."""
    out = folder / "raw"
    prepare_log(shop.write(folder, options), out=out, **how)
    RawLog.open(out).validate()
    return [row for file in sorted(out.glob("log-*.parquet")) for row in pq.read_table(file).to_pylist()]


def by_session(rows: list[dict]) -> dict[int, list[dict]]:
    found = defaultdict(list)
    for row in rows:
        found[row["session_id"]].append(row)
    return found


def assert_same(found: dict, expected: dict) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        if name in ("idle", "price", "scaled"):
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
        else:
            assert found[name] == value, name


@FEW
@given(
    shop=SHOPS,
    options=st.builds(
        Options,
        gap_ms=st.sampled_from([0, 1, 5]),
        by_request=st.booleans(),
        only_views=st.booleans(),
        min_count=st.integers(1, 3),
    ),
)
def test_samples_are_those_of_the_definition(shop, options, tmp_path_factory):
    """Exactly: each event once, sessions split at the gap, histories before the request, labels, joins, rows."""
    reference = Reference(shop=shop, options=options)
    expected = defaultdict(list)
    for events in reference.timelines().values():
        for event in filter(reference.is_sample, events):
            expected[event["session_id"]].append(reference.row(event))
    if not expected:
        return
    rows = prepare(shop, options, tmp_path_factory.mktemp("shop"))
    assert [(row["timestamp"], row["session_id"]) for row in rows] == sorted(
        (row["timestamp"], row["session_id"]) for row in rows
    )
    found = by_session(rows)
    assert set(found) == set(expected)
    for session, own in expected.items():
        assert len(found[session]) == len(own)
        for row, wanted in zip(found[session], space_out(own), strict=True):
            assert_same(row, wanted)


@FEW
@given(shop=SHOPS, kind=st.sampled_from(["popular", "uniform"]), number=st.integers(1, 3), gap=st.sampled_from([0, 5]))
def test_every_positive_is_kept_once_with_negatives_that_are_never_positives(shop, kind, number, gap, tmp_path_factory):
    options = Options(negatives=kind, per_positive=number, gap_ms=gap)
    reference = Reference(shop=shop, options=options)
    timelines = reference.timelines()
    positives = {user: [e for e in events if e["wanted"]] for user, events in timelines.items()}
    if not any(positives.values()):
        return
    found = by_session(prepare(shop, options, tmp_path_factory.mktemp("shop")))
    items = {row: item for item, row in ranked([event["item"] for event in shop.events]).items()}
    drawable = set(items.values()) if kind == "uniform" else {e["item"] for own in positives.values() for e in own}
    for own in positives.values():
        taken = {event["item"] for event in own}
        free = drawable - taken
        for session in dict.fromkeys(event["session_id"] for event in own):
            expected, rows = [], found.pop(session)
            place = 0
            for event in (event for event in own if event["session_id"] == session):
                expected.append(reference.row(event))
                place += 1
                for row in rows[place : place + number] if free else []:
                    drawn = items[row["item"][0]]
                    assert drawn in free
                    expected.append(reference.row(event, drawn))
                    place += 1
            for row, wanted in zip(rows, space_out(expected), strict=True):
                assert_same(row, wanted)
    assert not found


@FEW
@given(shop=SHOPS, kind=st.sampled_from(["in_session", "impressions"]), number=st.integers(1, 2))
def test_kept_negatives_are_of_the_same_group_and_never_positives(shop, kind, number, tmp_path_factory):
    options = Options(negatives=kind, per_positive=number, by_request=True)
    reference = Reference(shop=shop, options=options)
    timelines = reference.timelines()
    requests, items = (
        {row: value for value, row in ranked([e[c] for e in shop.events]).items()} for c in ("request", "item")
    )

    def group_of(user: str, session: int, request: int):
        return session if kind == "in_session" else (user, request)

    num_positives, num_free = Counter(), Counter()
    for user, events in timelines.items():
        taken = {event["item"] for event in events if event["wanted"]}
        for event in events:
            group = group_of(user, event["session_id"], event["request"])
            num_positives[group] += bool(event["wanted"])
            num_free[group] += event["item"] not in taken
    if not sum(num_positives.values()):
        return
    users = sorted(timelines)
    kept, kept_positives = Counter(), Counter()
    for row in prepare(shop, options, tmp_path_factory.mktemp("shop")):
        user = users[row["session_id"] >> 24]
        group = group_of(user, row["session_id"], requests[row["request"][0]])
        (kept_positives if row["wanted"] else kept)[group] += 1
        if not row["wanted"]:
            assert items[row["item"][0]] not in {e["item"] for e in timelines[user] if e["wanted"]}
    assert kept_positives == +num_positives
    assert kept == +Counter({group: min(number * num_positives[group], num_free[group]) for group in num_free})


def test_the_vocabulary_is_stable_when_events_are_appended(tmp_path):
    shop = Shop.random(1, 60)
    more = Shop.random(2, 60)
    later = Shop(
        events=shop.events + [{**event, "item": event["item"] + "x", "ts": event["ts"] + 100} for event in more.events],
        products=shop.products,
        customers=shop.customers,
        purchases=shop.purchases,
    )
    prepare(shop, Options(min_count=3), tmp_path / "a")
    prepare(later, Options(min_count=3), tmp_path / "b", vocabulary=tmp_path / "a" / "raw")
    for table in ("item", "rare_item", "brand"):
        old, new = (
            {
                row["value"]: row
                for row in pq.read_table(tmp_path / day / "raw/vocabulary" / f"{table}.parquet").to_pylist()
            }
            for day in "ab"
        )
        counts = Counter(event["item"] for event in later.events)
        least = 3 if table == "rare_item" else 1
        assert {value: new[value]["row"] for value, row in old.items() if row["row"]} == {
            value: row["row"] for value, row in old.items() if row["row"]
        }
        if table != "brand":
            assert {value: row["count"] for value, row in new.items()} == counts
            last = max(row["row"] for row in old.values())
            fresh = [value for value in counts if counts[value] >= least and not (value in old and old[value]["row"])]
            fresh.sort(key=lambda value: (-counts[value], value))
            assert [new[value]["row"] for value in fresh] == list(range(last + 1, last + 1 + len(fresh)))
            schema = Schema.load(tmp_path / "b" / "raw")
            assert schema.feature(table).num_rows == last + 1 + len(fresh)


def test_a_second_seed_draws_others_and_a_rerun_the_same(tmp_path):
    shop = Shop.random(5, 60)
    options = Options(negatives="popular", per_positive=3)
    first = prepare(shop, options, tmp_path / "shop")
    assert prepare(shop, options, tmp_path / "shop") == first  # and replaces the folder
    path = tmp_path / "shop" / "log.yaml"
    path.write_text(path.read_text().replace('"seed": 3', '"seed": 4'))
    prepare_log(path, out=tmp_path / "other")
    assert pq.read_table(tmp_path / "other" / "log-00000.parquet").to_pylist() != first


@pytest.mark.parametrize("splits", [{"valid": 0.25}, {"test": "2023-11-14 22:13:20.020"}])
def test_splits_hold_the_last_sessions(tmp_path, splits):
    shop = Shop.random(7, 70)
    rows = prepare(shop, Options(splits=splits, gap_ms=1), tmp_path)
    starts = sorted(min(row["timestamp"] for row in own) for own in by_session(rows).values())
    ((name, begin),) = Schema.load(tmp_path / "raw").splits.items()
    assert begin == (starts[len(starts) - round(0.25 * len(starts))] if name == "valid" else 1_700_000_000_020)


SLIM = """
import sys
from recmill.data.preparation.prepared_log import prepare_log
prepare_log(sys.argv[1], out=sys.argv[2])
compilers = "ibis.backends.sql.compilers"
assert "pandas" not in sys.modules
assert f"{compilers}.snowflake" not in sys.modules
assert sys.modules[compilers].PySparkCompiler.__name__ == "PySparkCompiler"  # loads all of them, as Ibis does
assert f"{compilers}.snowflake" in sys.modules
"""


def test_preparing_loads_neither_pandas_nor_the_compilers_of_other_engines(tmp_path):
    """They took 0.3 of the 1.65 s of CPU time that a log of 1,000 events cost."""
    path = Shop.random(1, 40).write(tmp_path, Options(negatives="popular"))
    subprocess.run([sys.executable, "-c", SLIM, str(path), str(tmp_path / "raw")], check=True)
