"""Parameters of a compiled pipeline from NAME=VALUE flags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from recmill.artifacts import InputError


def parse_parameters(flags: tuple[str, ...], options: Mapping[str, Any], package: Path) -> dict[str, Any]:
    """Parameters from NAME=VALUE flags and from options of their own, checked against the compiled pipeline."""
    spec = next(iter(yaml.safe_load_all(package.read_text(encoding="utf-8"))))
    known = spec["root"]["inputDefinitions"]["parameters"]
    given: dict[str, Any] = {}
    for flag in flags:
        name, equals, text = flag.partition("=")
        if not equals or name not in known:
            raise InputError(f"--param {flag!r}: expected NAME=VALUE with one of {', '.join(known)}")
        given[name] = _parse(name, text, known[name]["parameterType"])
    for name, value in options.items():
        if name not in known:
            raise InputError(f"{name}: this pipeline has no such parameter, but {', '.join(known)}")
        if name in given:
            raise InputError(f"{name} is given twice, as a flag and by --param")
        given[name] = value
    missing = [name for name, entry in known.items() if name not in given and "defaultValue" not in entry]
    if missing:
        raise InputError(f"--param {missing[0]}=VALUE is missing; the pipeline has no default for it")
    return given


def proposed_nproc(flags: tuple[str, ...], options: Mapping[str, Any]) -> int:
    """Training processes per pod, which pods are sized for: before there is a compiled pipeline to check flags with."""
    named = [flag.removeprefix("nproc=") for flag in flags if flag.startswith("nproc=")]
    return int(options.get("nproc") or next((text for text in named if text.isdigit()), 1))


def _parse(name: str, text: str, kind: str) -> Any:
    parsers: dict[str, Any] = {"NUMBER_INTEGER": int, "NUMBER_DOUBLE": float, "LIST": _parse_list}
    try:
        return parsers.get(kind, str)(text)
    except ValueError:
        wanted = {"NUMBER_INTEGER": "a whole number", "LIST": "a list as JSON"}.get(kind, "a number")
        raise InputError(f"--param {name}={text!r}: expected {wanted}") from None


def _parse_list(text: str) -> list[Any]:
    loaded = json.loads(text)
    if not isinstance(loaded, list):
        raise ValueError(text)
    return loaded
