"""docs/data.md lists every key of log.yaml, and its example uses every key."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from recmill.artifacts import record_json
from recmill.data.preparation.reading import parse_spec
from tests.unit.data.preparation.key_table import PLACES, between, key_table, records


def test_every_record_is_listed() -> None:
    assert set(PLACES) == set(records())


def test_the_table_of_keys_is_that_of_the_code() -> None:
    assert between("keys") == key_table(), "run: python -m tests.unit.data.preparation.key_table"


def keys_in(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys_in, value.values()))
    return set().union(*map(keys_in, value)) if isinstance(value, list) else set()


def test_the_example_is_valid_and_uses_every_key() -> None:
    import yaml

    text = between("example").removeprefix("```yaml\n").removesuffix("```")
    parsed = parse_spec(text, where="docs/data.md")
    assert record_json(parsed)["events"]["user"] == "customer_id"
    known = {own.name for kind in records().values() for own in fields(kind)}
    assert known - keys_in(yaml.safe_load(text)) == {"every"}  # excludes the other rules; named in a comment
    assert "every: true" in text
