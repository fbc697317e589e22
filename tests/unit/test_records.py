"""Records are read from JSON with the file and the key path of what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from recmill.artifacts import InputError, read_record, record_json


@dataclass(frozen=True, kw_only=True)
class Wheel:
    size: float
    num_spokes: int = 32
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Bicycle:
    kind: Literal["road", "city"]
    wheels: tuple[Wheel, ...]
    position: tuple[float, float]
    prices: Mapping[int, float]
    is_sold: bool
    owner: str | None
    extra: Mapping[str, Any]
    seats: Mapping[str, str] = field(default_factory=dict)


BICYCLE = {
    "kind": "road",
    "wheels": [{"size": 28.0, "num_spokes": 32}, {"size": 28.0, "num_spokes": 36, "note": "new"}],
    "position": [1.0, 2.0],
    "prices": {"2024": 100.0},
    "is_sold": False,
    "owner": None,
    "extra": {"colour": ["red"]},
    "seats": {"front": "leather"},
}


def test_a_record_read_from_json_gives_the_same_json() -> None:
    found = read_record(Bicycle, BICYCLE, where="b.json")
    assert found.wheels[1] == Wheel(size=28.0, num_spokes=36, note="new")
    assert found.prices == {2024: 100.0}
    assert record_json(found) == BICYCLE


def test_optional_keys_may_be_missing_and_unknown_ones_are_ignored() -> None:
    changed = {**BICYCLE, "wheels": [{"size": 28}], "maker": "unknown"}
    del changed["owner"]
    assert read_record(Bicycle, changed, where="b.json").wheels == (Wheel(size=28.0),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "sport"}, "b.json: kind is 'sport', expected one of road, city"),
        ({"wheels": [{"num_spokes": 3}]}, "b.json: wheels[0].size is missing"),
        ({"wheels": [{"size": 1.0, "num_spokes": -3}]}, "b.json: wheels[0].num_spokes is -3, expected a whole number"),
        ({"wheels": [{"size": 1.0, "num_spokes": True}]}, "b.json: wheels[0].num_spokes is True, expected a whole"),
        ({"wheels": [{"size": "1"}]}, "b.json: wheels[0].size is '1', expected a finite number"),
        ({"wheels": [{"size": 10**400}]}, "b.json: wheels[0].size is inf, expected a finite number"),
        (
            {"wheels": [{"size": 1.0, "num_spokes": 2**63}]},
            "b.json: wheels[0].num_spokes is 9223372036854775808, expected",
        ),
        ({"wheels": {}}, "b.json: wheels is {}, expected a list"),
        ({"position": [1.0]}, "b.json: position is [1.0], expected a list of 2 values"),
        ({"prices": {"now": 1.0}}, "b.json: prices is {'now': 1.0}, expected whole numbers as keys"),
        ({"prices": {"2024": None}}, "b.json: prices.2024 is None, expected a finite number"),
        ({"seats": {"a\nb": 1}}, r"b.json: seats.'a\nb' is 1, expected a string"),
        ({"is_sold": 0}, "b.json: is_sold is 0, expected true or false"),
        ({"owner": 3}, "b.json: owner is 3, expected a string"),
        ({"extra": []}, "b.json: extra is [], expected an object"),
    ],
)
def test_an_error_names_file_and_key_path(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        read_record(Bicycle, {**BICYCLE, **change}, where="b.json")
    assert str(error.value).startswith(message)
    with pytest.raises(InputError, match=r"b\.json: 3, expected an object"):
        read_record(Bicycle, 3, where="b.json")
