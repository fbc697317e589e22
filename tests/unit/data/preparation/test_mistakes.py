"""What is wrong with data: one sentence with file and column, and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recmill.artifacts import InputError
from recmill.cli import main
from recmill.data.preparation.prepared_log import prepare_log
from tests.event_logs import BASE_MS

SPEC = {
    "format_version": 1,
    "sources": {"events": {"path": "events.parquet"}, "products": {"path": "products.parquet", "key": "id"}},
    "events": {
        "source": "events",
        "user": "user",
        "item": "item",
        "time": {"column": "ts", "unit": "ms"},
        "session": {"gap": "5ms"},
    },
    "joins": [{"source": "products", "column": "item"}],
    "labels": [{"name": "label", "where": [{"column": "clicks", "at_least": 1}]}],
    "features": [
        {"name": "item", "column": "item", "kind": "sparse"},
        {"name": "brand", "column": "products.brand", "kind": "sparse"},
    ],
}
EVENTS = {"user": ["a", "a", "b"], "item": [1, 2, 1], "ts": [BASE_MS, BASE_MS + 1, BASE_MS + 2], "clicks": [0, 1, 1]}
PRODUCTS = {"id": [1, 2], "brand": ["x", "y"]}


def event_keys(**changes):
    return {"events": SPEC["events"] | changes}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (event_keys(user="users"), "events.user: {folder}/events.parquet has no column 'users'; it has user, item, ts"),
        (event_keys(user="User"), "has no column 'User' (did you mean 'user'?)"),
        (
            {"features": [{"name": "f", "column": "products.price", "kind": "dense"}]},
            "products.parquet has no column 'price'",
        ),
        ({"features": [{"name": "f", "column": "products.brand", "kind": "dense"}]}, "is string, expected numbers"),
        (
            {"features": [{"name": "f", "column": "clicks", "kind": "sparse", "separator": "|"}]},
            "column 'clicks' is int64, expected text for separator '|'",
        ),
        (
            {"features": [{"name": "f", "column": "products.brand", "kind": "sequence"}]},
            "column 'brand' is string, expected a list for kind sequence; name the separator of text",
        ),
        (
            {
                "products": {"id": [1, 2], "brand": [["x"], ["y", "x"]]},
                "features": [{"name": "f", "history": {"of": "products.brand"}}],
            },
            "column 'brand' is array<string>: a history is for columns with one value per row",
        ),
        (
            {"products": {"id": [1, 2], "brand": [[0.5], [1.5]]}},
            "is array<float64>, expected lists of whole numbers or text",
        ),
        (
            {"products": {"id": [7, 8], "brand": ["x", "y"]}},
            "joins[0]: no value of 'item' (such as 1) is in column 'id'",
        ),
        (
            {"products": {"id": [1, 1], "brand": ["x", "y"]}},
            "sources.products: 1 values of 'id' occur more than once in {folder}/products.parquet, for example 1",
        ),
        (
            {"events": EVENTS | {"user": ["a", None, "b"]}, "spec": {}},
            "events.user: column 'user' of {folder}/events.parquet is null in 1 of 3 events",
        ),
        ({"events": EVENTS | {"item": [1.0, 1.5, None]}, "spec": {}}, "events.item: column 'item'"),
        (
            {"events": EVENTS | {"ts": ["2020-01-01", "soon", ""]}, "spec": {}},
            "log.yaml: events: {folder}/events.parquet: a value cannot be converted",
        ),
        (
            event_keys(time={"column": "ts"}),
            "events.time: column 'ts' holds numbers; name their unit (s, ms, us or ns)",
        ),
        (
            event_keys(where=[{"column": "clicks", "at_least": 9}]),
            "events.source: {folder}/events.parquet holds no events that meet events.where",
        ),
        (
            event_keys(where=[{"column": "user", "equals": 3}]),
            "events.where[0]: column 'user' is string; quote the values",
        ),
        ({"splits": {"test": "2031-01-01"}}, "split 'test' holds no session; the log has 2 sessions"),
        ({"sources": SPEC["sources"] | {"events": {"path": "nothing-*.csv"}}}, "sources.events.path: no file at"),
        (
            {
                "negatives": {"kind": "popular"},
                "labels": [{"name": "x", "where": [{"column": "clicks", "at_least": 5}]}],
            },
            "labels[0]: no event is a positive of 'x'",
        ),
    ],
)
def test_wrong_data_gives_one_sentence(tmp_path, changes, sentence):
    spec = {name: value for name, value in changes.items() if name not in ("products", "spec")}
    data = {"products": changes["products"]} if "products" in changes else {}
    if "spec" in changes:
        data["events"] = spec.pop("events")
    with pytest.raises(InputError) as error:
        _prepare_changed(tmp_path, spec, data)
    assert sentence.format(folder=tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "raw").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def _prepare_changed(folder, spec, data):
    pq.write_table(pa.table(data.get("events", EVENTS)), folder / "events.parquet")
    pq.write_table(pa.table(data.get("products", PRODUCTS)), folder / "products.parquet")
    (folder / "log.yaml").write_text(json.dumps(SPEC | spec))
    return prepare_log(folder / "log.yaml", out=folder / "raw")


def test_the_command_exits_with_2_and_replaces_nothing_of_the_user(tmp_path):
    spec = SPEC | {"events": SPEC["events"] | {"session": {"gap": "0s"}}}
    (tmp_path / "log.yaml").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "recmill", "prepare", str(tmp_path / "log.yaml"), "--out", str(tmp_path / "raw")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.endswith("log.yaml: events.session: gap is '0s', expected more than zero\n")
    _prepare_changed(tmp_path, {}, {})
    (tmp_path / "raw" / "mine.txt").write_text("")
    with pytest.raises(InputError, match=r"holds files not from recmill \(mine.txt\)"):
        _prepare_changed(tmp_path, {}, {})


DAY_MS = 86_400_000
EMPTY_DAY = EVENTS | {"ts": [BASE_MS, BASE_MS + 2 * DAY_MS, BASE_MS + 2 * DAY_MS + 1]}


@pytest.mark.parametrize(
    ("changes", "data", "sentence"),
    [
        (
            event_keys(user="customer"),
            {},
            "{yaml}: events.user: {folder}/events.parquet has no column 'customer'; it has user, item, ts, clicks",
        ),
        (
            {},
            {"products": {"id": [7, 8], "brand": ["x", "y"]}},
            "{yaml}: joins[0]: no value of 'item' (such as 1) is in column 'id' of {folder}/products.parquet (such",
        ),
        (event_keys(session={"gap": "0min"}), {}, "{yaml}: events.session: gap is '0min', expected more than zero"),
        (
            {},
            {"events": EVENTS | {"item": [1, None, 1]}},
            "{yaml}: events.item: column 'item' of {folder}/events.parquet is null in 1 of 3 events",
        ),
        (
            {},
            {"products": {"id": [1, 1, 2], "brand": ["x", "y", "z"]}},
            "{yaml}: sources.products: 1 values of 'id' occur more than once in {folder}/products.parquet, for ",
        ),
        (
            {},
            {"events": EMPTY_DAY},
            "{yaml}: events.time: day 2023-11-15 has no events, but {folder}/events.parquet goes from 2023-11-14 to",
        ),
        (
            {},
            {"events": pa.table(EVENTS).slice(0, 0)},
            "{yaml}: events.source: {folder}/events.parquet holds no events",
        ),
    ],
    ids=["wrong column", "no join", "gap of zero", "nulls in ids", "duplicate keys", "empty day", "no events at all"],
)
def test_the_command_answers_a_mistake_with_one_sentence_and_exit_code_2(tmp_path, capsys, changes, data, sentence):
    """docs/data.md, "Data checks"."""
    for name, table in ({"events": EVENTS, "products": PRODUCTS} | data).items():
        pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), tmp_path / f"{name}.parquet")
    yaml = tmp_path / "log.yaml"
    yaml.write_text(json.dumps(SPEC | changes))
    with pytest.raises(SystemExit) as stop:
        main(["prepare", str(yaml), "--out", str(tmp_path / "raw")])
    (said,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("  ")]  # progress
    assert stop.value.code == 2
    assert said.startswith("recmill: error: ")
    assert sentence.format(yaml=yaml, folder=tmp_path) in said
    assert not (tmp_path / "raw").exists()


def test_empty_days_pass_where_log_yaml_allows_them(tmp_path):
    """Also with --strict: what was allowed is no warning."""
    for name, table in {"events": EMPTY_DAY, "products": PRODUCTS}.items():
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
    (tmp_path / "log.yaml").write_text(json.dumps(SPEC | {"checks": {"empty_days": "allow"}}))
    prepare_log(tmp_path / "log.yaml", out=tmp_path / "raw")
    found = json.loads((tmp_path / "raw/checks.json").read_text())["findings"]
    assert [own["level"] for own in found if "1 of 3 days have no events" in own["message"]] == ["info"]
