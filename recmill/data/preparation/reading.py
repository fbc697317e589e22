"""Reads `log.yaml` and checks that its parts fit together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import yaml

from recmill.artifacts import InputError, check_format_version, read_record, refuse_credentials
from recmill.data.preparation.spec import TIME_ROWS, FeatureSpec, LogSpec, parse_time


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values: `on`, `no` and 2017-12-03 are text. A key that occurs twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = Counter(self.construct_object(name) for name, _ in node.value)
        if twice := [name for name, number in names.items() if number > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"key {twice[0]!r} occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("bool", "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def load_spec(path: str | Path) -> LogSpec:
    """The `log.yaml` at `path`, checked; an InputError names the file and the path of the wrong key."""
    try:
        with fsspec.open(str(path), "rt", encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected a log.yaml (recmill init writes one)") from None
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise InputError(f"{path}: not a YAML file ({' '.join(str(error).split())})") from None
    return parse_spec(text, where=str(path))


def parse_spec(text: str, *, where: str) -> LogSpec:
    try:
        loaded = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise InputError(f"{where}: not a YAML file ({' '.join(str(error).split())})") from None
    if not isinstance(loaded, dict):
        raise InputError(f"{where}: expected sources, events and features, found a {type(loaded).__name__}")
    check_format_version(loaded, where)
    for word in text.split():  # records of the run and the checks repeat what the file says
        refuse_credentials(word, f"{where}:")
    spec = read_record(LogSpec, loaded, where=where, is_strict=True)
    for fault in _faults(spec):
        raise InputError(f"{where}: {fault}")
    return spec


def _faults(spec: LogSpec) -> Iterable[str]:
    """What does not fit together, each with the path of its key."""
    known = ", ".join(spec.sources) or "none"
    users = [("events", spec.events.source)]
    users += [(f"joins[{n}]", join.source) for n, join in enumerate(spec.joins)]
    users += [(f"outcomes[{n}]", outcome.source) for n, outcome in enumerate(spec.outcomes)]
    for place, source in users:
        if source not in spec.sources:
            yield f"{place}.source is {source!r}, expected one of sources ({known})"
    for n, join in enumerate(spec.joins):
        if not spec.sources[join.source].key:
            yield f"joins[{n}]: sources.{join.source} has no key; name the column that joins.column holds"
    for place, names in {
        "joins": [join.name or join.source for join in spec.joins],
        "outcomes": [outcome.name for outcome in spec.outcomes],
        "labels and features": [*(label.name for label in spec.labels), *(feature.name for feature in spec.features)],
    }.items():
        if twice := [name for name, number in Counter(names).items() if number > 1]:
            yield f"{place}: the name {twice[0]!r} occurs twice"
    yield from _label_faults(spec)
    yield from _feature_faults(spec)
    yield from _split_faults(spec)


def _label_faults(spec: LogSpec) -> Iterable[str]:
    if not spec.labels:
        yield "labels is empty, expected at least one label, or no such key"
    outcomes = [outcome.name for outcome in spec.outcomes]
    known = ", ".join(outcomes) or "none"
    for n, label in enumerate(spec.labels):
        if label.outcome and label.outcome not in outcomes:
            yield f"labels[{n}].outcome is {label.outcome!r}, expected one of outcomes ({known})"
    if spec.labels[0].every and not spec.negatives.are_drawn:
        yield f"label {spec.labels[0].name!r} is 1 for every sample; add negatives of kind popular, or give it a rule"
    if spec.negatives.kind == "impressions" and not spec.events.request:
        yield "negatives.kind is impressions, which needs events.request"


def _feature_faults(spec: LogSpec) -> Iterable[str]:
    if not spec.features:
        yield "features is empty, expected at least one feature"
    tables: dict[str, FeatureSpec] = {}
    for n, feature in enumerate(spec.features):
        if feature.kind_or_default == "dense":
            continue
        first = tables.setdefault(feature.table_or_default, feature)
        for name in ("rows", "dim"):
            if getattr(feature, name) not in (None, getattr(first, name)):
                table = first.table_or_default
                yield f"features[{n}].{name}: say it at {first.name!r} only, the first feature of table {table!r}"
        if first is not feature and (first.time in TIME_ROWS or feature.time):
            yield f"features[{n}]: {feature.name!r} cannot share the table of {first.name!r}: a time has its own table"


def _split_faults(spec: LogSpec) -> Iterable[str]:
    splits = spec.splits or {}
    shares = [value for value in splits.values() if isinstance(value, int | float)]
    if shares and (len(shares) < len(splits) or not all(0 < share < 1 for share in shares) or sum(shares) >= 1):
        yield f"splits is {dict(splits)}, expected only times, or only shares that add up to less than 1"
        return
    if shares:
        return
    for name, value in splits.items():
        if not isinstance(value, str):
            yield f"splits.{name} is {value!r}, expected a time (2017-12-03) or a share (0.1)"
            return
    times = []
    for name, value in splits.items():
        try:
            times.append(parse_time(value))
        except InputError as error:
            yield f"splits.{name}: {error}"
            return
    if any(later <= earlier for earlier, later in pairwise(times)):
        yield f"splits is {dict(splits)}, expected the oldest first"
