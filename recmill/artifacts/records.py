"""Frozen dataclasses from JSON and back.

A field of type `X | None` may be missing in the JSON, and so may a field with a default; every other key must be there.
Whole numbers are counts, so they start at 0. Keys that no field has are ignored: a newer recmill may have written them.
With `is_strict`, for files that people write, they are errors.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import repeat
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from recmill.artifacts.places.stores import InputError

Record = TypeVar("Record")

_SCALARS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number of at least 0 and below 2**63",
    float: "a finite number",
    str: "a string",
}


def read_record(kind: type[Record], loaded: Any, *, where: str, key: str = "", is_strict: bool = False) -> Record:
    """The JSON object `loaded` as a `kind`; an InputError names the file (`where`) and the path of the wrong key."""
    if not isinstance(loaded, dict):
        raise _unexpected(loaded, "an object", where, key)
    hints, found = _hints(kind), {}  # type: ignore[arg-type]
    if is_strict and (unknown := [name for name in loaded if name not in {field.name for field in fields(kind)}]):  # type: ignore[arg-type]
        known = ", ".join(field.name for field in fields(kind))  # type: ignore[arg-type]
        raise InputError(f"{where}: {key + '.' if key else ''}{unknown[0]} is not a key here; expected one of {known}")
    for field in fields(kind):  # type: ignore[arg-type]
        path = f"{key}.{field.name}" if key else field.name
        if field.name in loaded:
            found[field.name] = _read(hints[field.name], loaded[field.name], where, path, is_strict)
        elif field.default is MISSING and field.default_factory is MISSING:
            if NoneType not in get_args(hints[field.name]):
                raise InputError(f"{where}: {path} is missing")
            found[field.name] = None
    try:
        return kind(**found)
    except InputError as error:  # from the record's own checks
        place = f"{where}: {key}" if is_strict and key else where
        raise InputError(f"{place}: {error}") from None


def record_json(value: Any) -> Any:
    """The JSON form of a record; fields that default to None are left out while they are None."""
    if is_dataclass(value):
        pairs = ((field, getattr(value, field.name)) for field in fields(value))
        return {f.name: record_json(own) for f, own in pairs if own is not None or f.default is not None}
    if isinstance(value, Mapping):
        return {str(name): record_json(own) for name, own in value.items()}
    if isinstance(value, tuple | list):
        return [record_json(own) for own in value]
    return value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _read(kind: Any, found: Any, where: str, key: str, is_strict: bool) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return found
    if is_dataclass(kind):
        return read_record(kind, found, where=where, key=key, is_strict=is_strict)  # type: ignore[arg-type]
    if isinstance(kind, type) and issubclass(kind, Enum):
        if found not in (values := [own.value for own in kind]):
            raise _unexpected(found, f"one of {', '.join(map(str, values))}", where, key)
        return kind(found)
    if origin in (Union, UnionType):  # only ever with None
        return None if found is None else _read(inner[0], found, where, key, is_strict)
    if origin is Literal:
        if found not in inner:
            raise _unexpected(found, f"one of {', '.join(inner)}", where, key)
        return found
    if origin is tuple:
        is_open = inner[-1] is ...
        if not isinstance(found, list) or not (is_open or len(found) == len(inner)):
            raise _unexpected(found, "a list" if is_open else f"a list of {len(inner)} values", where, key)
        kinds = repeat(inner[0], len(found)) if is_open else inner
        return tuple(_read(own, found[n], where, f"{key}[{n}]", is_strict) for n, own in enumerate(kinds))
    if origin is Mapping:
        if not isinstance(found, dict):
            raise _unexpected(found, "an object", where, key)
        if inner[0] is int and not all(map(str.isdecimal, found)):
            raise _unexpected(found, "whole numbers as keys", where, key)
        paths = {name: f"{key}.{name if name.isprintable() else repr(name)}" for name in found}  # stays one line
        return {inner[0](name): _read(inner[1], value, where, paths[name], is_strict) for name, value in found.items()}
    if kind is float and type(found) is int:  # 10**400 is valid JSON
        found = float(found) if abs(found) <= sys.float_info.max else math.inf
    is_fine = type(found) is kind
    if not is_fine or (kind is int and not 0 <= found < 2**63) or (kind is float and not math.isfinite(found)):
        raise _unexpected(found, _SCALARS[kind], where, key)
    return found


def _unexpected(found: Any, expected: str, where: str, key: str) -> InputError:
    return InputError(f"{where}: {key + ' is ' if key else ''}{reprlib.repr(found)}, expected {expected}")
