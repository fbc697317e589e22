"""log.yaml: what is read, and the sentence for each mistake."""

import json
from dataclasses import fields, is_dataclass

import pytest

from recmill.artifacts import InputError
from recmill.data.preparation import json_schema, spec
from recmill.data.preparation.reading import load_spec, parse_spec

SHOP = """
format_version: 1
sources:
  events: {path: "events/*.parquet"}
  products: {path: products.csv, key: product_id}
  customers: {path: customers.parquet, key: customer_id, valid_from: {column: since}}
  purchases: {path: purchases.jsonl.gz}
events:
  source: events
  user: customer_id
  item: product_id
  time: {column: ts, unit: ms}
  session: {gap: 30min}
joins:
  - {source: products, column: product_id}
  - {source: customers, column: customer_id, name: buyer}
outcomes:
  - {name: bought, source: purchases, match: {customer_id: customer}, time: {column: at}, within: 1d}
labels:
  - {name: liked, where: [{column: behavior, one_of: [cart, on]}]}
  - {name: bought, outcome: bought}
negatives: {kind: popular, per_positive: 2}
features:
  - {name: user, column: customer_id, kind: sparse, rows: {min_count: 2}, dim: 8}
  - {name: item, column: product_id, kind: sparse, rows: {hash: 1000}}
  - {name: history, history: {of: product_id, where: [{column: behavior, equals: pv}]}, table: item}
  - {name: hour, time: hour_of_day}
  - {name: price, column: products.price, kind: dense, transform: [log1p, standardise]}
splits: {valid: 2017-12-03, test: 2017-12-04 12:00:00}
"""


def test_reads_a_whole_log_yaml(tmp_path):
    path = tmp_path / "log.yaml"
    path.write_text(SHOP)
    found = load_spec(path)
    assert found.sources["customers"].valid_from == spec.TimeSpec(column="since")
    assert found.labels[0].where[0].one_of == ("cart", "on")  # not YAML 1.1's true
    assert found.splits == {"valid": "2017-12-03", "test": "2017-12-04 12:00:00"}
    assert [feature.kind_or_default for feature in found.features] == [
        "sparse",
        "sparse",
        "sequence",
        "sparse",
        "dense",
    ]
    assert found.features[2].history == spec.HistorySpec(
        of="product_id", last=50, where=(spec.Condition(column="behavior", equals="pv"),)
    )


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("gap: 30min", "gap: 0min", "log.yaml: events.session: gap is '0min', expected more than zero"),
        ("gap: 30min", "gap: 30 minutes", "is not a duration; write it like 30min"),
        ("{gap: 30min}", "{}", "events.session: expected either gap or column"),
        ("user: customer_id", "usr: customer_id", "events.usr is not a key here; expected one of source, user"),
        ("  user: customer_id\n", "", "events.user is missing"),
        ("unit: ms", "unit: minutes", "events.time.unit is 'minutes', expected one of s, ms, us, ns"),
        ("source: events\n", "source: event\n", "events.source is 'event', expected one of sources (events, products"),
        ("{path: products.csv, key: product_id}", "{path: products.csv}", "sources.products has no key"),
        ("outcome: bought}", "outcome: buy}", "labels[1].outcome is 'buy', expected one of outcomes (bought)"),
        ("kind: popular", "kind: random", "negatives.kind is 'random', expected one of none, popular"),
        ("kind: popular", "kind: impressions", "which needs events.request"),
        ("per_positive: 2", "per_positive: 0", "negatives: per_positive is 0, expected at least 1"),
        ("one_of: [cart, on]", "one_of: [cart, 1]", "labels[0].where[0]: column 'behavior': one_of mixes text and"),
        ("equals: pv", "", "expected one of one_of, equals"),
        ("name: price", "name: liked", "the name 'liked' occurs twice"),
        ("kind: dense, ", "", "features[4]: feature 'price': kind is None, expected dense or sparse"),
        ("time: hour_of_day", "time: hour", "features[3].time is 'hour', expected one of hour_of_day"),
        ("table: item}", "table: item, dim: 4}", "features[2].dim: say it at 'item' only"),
        ("valid: 2017-12-03", "valid: 2017-12-05", "expected the oldest first"),
        ("valid: 2017-12-03", "valid: 0.1", "expected only times, or only shares"),
        ("valid: 2017-12-03", "valid: 3. Dec", "splits.valid: '3. Dec' is not a time"),
        ("format_version: 1", "format_version: 7", "format_version is 7, this recmill reads 1"),
        ("negatives:", "labels:", "key 'labels' occurs twice"),
        (SHOP, "- 1", "expected sources, events and features, found a list"),
        (SHOP, "a: [", "not a YAML file"),
    ],
)
def test_a_mistake_gives_one_sentence_with_the_key(old, new, sentence):
    assert old in SHOP
    with pytest.raises(InputError) as error:
        parse_spec(SHOP.replace(old, new, 1), where="log.yaml")
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_every_event_a_positive_needs_drawn_negatives():
    text = SHOP[: SHOP.index("labels:")] + SHOP[SHOP.index("features:") :]
    with pytest.raises(InputError, match="label 'label' is 1 for every sample; add negatives of kind popular"):
        parse_spec(text, where="log.yaml")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nothing.yaml: no such file; expected a log.yaml"):
        load_spec(tmp_path / "nothing.yaml")


def test_durations_and_times():
    assert [spec.parse_duration(text) for text in ("500ms", "1.5h", "2d")] == [500, 5_400_000, 172_800_000]
    assert spec.parse_time("1970-01-02") == 86_400_000
    assert spec.parse_time("1970-01-01T02:00:00+02:00") == 0


def test_the_shipped_json_schema_is_that_of_the_dataclasses():
    shipped = json.loads(json_schema.SCHEMA_FILE.read_text())
    assert shipped == json_schema.json_schema(), "run: python -m recmill.data.preparation.json_schema"


def test_every_key_says_what_it_means():
    kinds = [kind for kind in vars(spec).values() if isinstance(kind, type) and is_dataclass(kind)]
    assert len(kinds) == 15
    for kind in kinds:
        assert kind.__doc__
        for own in fields(kind):
            assert own.metadata["about"].endswith("."), f"{kind.__name__}.{own.name}"
