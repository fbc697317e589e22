"""The JSON schema of `log.yaml` for editors, made from the dataclasses of spec.py.

`log.schema.json` beside this file is its output. To write it again: python -m recmill.data.preparation.json_schema
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from recmill.artifacts import record_json
from recmill.data.preparation.spec import LogSpec

SCHEMA_FILE = Path(__file__).with_name("log.schema.json")
_SCALARS: dict[Any, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer", "minimum": 0},
    float: {"type": "number"},
    str: {"type": "string"},
    Any: {"type": ["string", "number", "boolean"]},
}


def json_schema() -> dict[str, Any]:
    """The schema: every record is a definition, every key has its description."""
    definitions: dict[str, Any] = {}
    root = _describe(LogSpec, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "log.yaml",
        **root,
        "$defs": definitions,
    }


def _describe(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        name = kind.__name__  # type: ignore[union-attr]
        if name not in definitions:
            definitions[name] = {}  # holds its place while it describes itself
            definitions[name] = _record(kind, definitions)
        return {"$ref": f"#/$defs/{name}"}
    if origin in (Union, UnionType):
        return _describe(next(own for own in inner if own is not NoneType), definitions)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is tuple:
        return {"type": "array", "items": _describe(inner[0], definitions)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _describe(inner[1], definitions)}
    return dict(_SCALARS[kind])


def _record(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    hints, properties, required = get_type_hints(kind), {}, []
    for own in fields(kind):
        properties[own.name] = {**_describe(hints[own.name], definitions), "description": own.metadata["about"]}
        if own.default is MISSING:
            required.append(own.name)
        elif own.default not in (None, "", ()):
            properties[own.name]["default"] = record_json(own.default)
    described = {"type": "object", "description": " ".join((kind.__doc__ or "").split()), "properties": properties}
    return {**described, "required": required, "additionalProperties": False}


if __name__ == "__main__":
    SCHEMA_FILE.write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
