"""Preprocessing that the schema declares (`Feature.transforms`, one object per step), run on distinct lists only.

    {"op": "hash_to_range", "num_rows": 100000, "seed": 7}    ids of any size to [0, num_rows)
    {"op": "map_ids", "mapping": {"17": 1}, "default": 0}     or "file": JSON of that form, or Parquet (id, mapped)
    {"op": "truncate", "n": 50}    the last n ids             {"op": "first_x", "n": 5}    the first n
    {"op": "ngram", "n": 2, "num_rows": 1000}                 every n consecutive ids, hashed
    {"op": "log"}    sign(x) log(1 + |x|)                     {"op": "normalise", "mean": 3, "std": 2}
    {"op": "clip", "min": 0, "max": 9}                        {"op": "bucketise", "boundaries": [1, 10, 100]}

A list is values[start : start + length], and lists may overlap (windows of a history). Steps work on the buffer of
values, not on the lists, so an id that many lists share is hashed once. Values outside all lists are transformed too,
but never read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from kernels.buffers import empty_array
from recmill.artifacts import InputError

if TYPE_CHECKING:
    from recmill.data.ikjt.distinct import DistinctBlock, DistinctGroup
    from recmill.data.schema import Schema

IdArray = npt.NDArray[np.int64]
LengthArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
Windows = tuple[IdArray, IdArray, LengthArray]  # values, starts, lengths
Numbers = npt.NDArray[Any]

BLOCK_VALUES = 16_384  # a hash makes several passes; blocks of this size stay in the cache


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One kind of step: its parameters, and what it does to values or to lists."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    on_values: Callable[..., Numbers] | None = None  # one result per value, which depends on that value alone
    on_lists: Callable[..., Windows] | None = None
    for_ids: bool = True
    for_dense: bool = False


def _hash(values: IdArray, *, num_rows: int, seed: int = 0) -> IdArray:
    """The ids spread over [0, num_rows): splitmix64, whose upper half selects a row by multiplication."""
    hashed: IdArray = empty_array(len(values), np.int64)
    for begin in range(0, len(values), BLOCK_VALUES):
        part = slice(begin, begin + BLOCK_VALUES)
        hashed[part] = spread_bits(mix_bits(values[part].view(np.uint64) + _offset_of(seed)), num_rows)
    return hashed


def _offset_of(seed: int) -> np.uint64:
    return np.uint64((0x9E3779B97F4A7C15 * (seed + 1)) % 2**64)


def mix_bits(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser, in place."""
    numbers ^= numbers >> np.uint64(30)
    numbers *= np.uint64(0xBF58476D1CE4E5B9)
    numbers ^= numbers >> np.uint64(27)
    numbers *= np.uint64(0x94D049BB133111EB)
    numbers ^= numbers >> np.uint64(31)
    return numbers


def spread_bits(numbers: npt.NDArray[np.uint64], num_rows: int) -> npt.NDArray[np.uint64]:
    numbers >>= np.uint64(32)
    numbers *= np.uint64(num_rows)
    numbers >>= np.uint64(32)
    return numbers


def _clip(values: Numbers, *, min: float | None = None, max: float | None = None) -> Numbers:
    return np.clip(values, min, max).astype(values.dtype, copy=False)


def _log(values: FloatArray) -> FloatArray:
    logarithms: FloatArray = np.copysign(np.log1p(np.abs(values)), values)
    return logarithms


def _normalise(values: FloatArray, *, mean: float, std: float) -> FloatArray:
    return (values - np.float32(mean)) / np.float32(std)


def _bucketise(values: Numbers, *, boundaries: Sequence[float]) -> Numbers:
    """How many boundaries each value reaches."""
    return np.searchsorted(np.asarray(boundaries, dtype=values.dtype), values, side="right").astype(values.dtype)


def _map(values: IdArray, *, known: IdArray, mapped: IdArray, default: int) -> IdArray:
    if not len(known):
        return np.full(len(values), default, dtype=np.int64)
    position = np.minimum(np.searchsorted(known, values), len(known) - 1)
    return np.where(known[position] == values, mapped[position], default)


def _truncate(values: IdArray, starts: IdArray, lengths: LengthArray, *, n: int) -> Windows:
    return values, starts + np.maximum(lengths - n, 0), np.minimum(lengths, n).astype(np.int32)


def _first_x(values: IdArray, starts: IdArray, lengths: LengthArray, *, n: int) -> Windows:
    return values, starts, np.minimum(lengths, n).astype(np.int32)


def _ngram(values: IdArray, starts: IdArray, lengths: LengthArray, *, n: int, num_rows: int, seed: int = 0) -> Windows:
    """Position p of the buffer becomes the hash of the n ids from p on; a list loses its last n - 1 positions."""
    grams = np.zeros(len(values), dtype=np.int64)
    for begin in range(0, len(values) - n + 1, BLOCK_VALUES):
        size = min(BLOCK_VALUES, len(values) - n + 1 - begin)
        hashes = mix_bits(values[begin : begin + size].view(np.uint64) + _offset_of(seed))
        for step in range(1, n):
            hashes *= np.uint64(31)  # so that the order of the ids matters
            hashes += values[begin + step : begin + step + size].view(np.uint64)
            mix_bits(hashes)
        grams[begin : begin + size] = spread_bits(hashes, num_rows)
    return grams, starts, np.maximum(lengths - (n - 1), 0).astype(np.int32)


OPERATIONS = {
    "hash_to_range": Operation(required=("num_rows",), optional=("seed",), on_values=_hash),
    "map_ids": Operation(required=("default",), optional=("mapping", "file"), on_values=_map),
    "truncate": Operation(required=("n",), on_lists=_truncate),
    "first_x": Operation(required=("n",), on_lists=_first_x),
    "ngram": Operation(required=("n", "num_rows"), optional=("seed",), on_lists=_ngram),
    "log": Operation(on_values=_log, for_ids=False, for_dense=True),
    "normalise": Operation(required=("mean", "std"), on_values=_normalise, for_ids=False, for_dense=True),
    "clip": Operation(optional=("min", "max"), on_values=_clip, for_dense=True),
    "bucketise": Operation(required=("boundaries",), on_values=_bucketise, for_dense=True),
}


def _is_whole(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    return type(value) is int and low <= value <= high


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _are_boundaries(value: Any) -> bool:
    if not isinstance(value, Sequence) or not value or not all(map(_is_number, value)):
        return False
    return all(before < after for before, after in pairwise(value))


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and key.removeprefix("-").isdecimal() and _is_whole(to) for key, to in value.items()
    )


# What is expected of a parameter, whatever the step, and how to tell.
PARAMETERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "num_rows": ("a whole number from 1 to 2**32", lambda value: _is_whole(value, 1, 2**32)),
    "seed": ("0 or more", lambda value: _is_whole(value, 0)),
    "n": ("a whole number of at least 1", lambda value: _is_whole(value, 1)),
    **dict.fromkeys(("mean", "min", "max"), ("a finite number", _is_number)),
    "std": ("a number above 0", lambda value: _is_number(value) and value > 0),
    "boundaries": ("a list of rising numbers", _are_boundaries),
    "mapping": ('an object such as {"17": 1}', _is_mapping),
    "file": ("a path", lambda value: isinstance(value, str)),
    "default": ("a whole number", _is_whole),
}


def check_transform(step: Any, *, is_dense: bool, where: str) -> None:
    """Raise InputError if the step is not one that a feature of this kind can have."""
    if not isinstance(step, Mapping) or "op" not in step:
        raise InputError(
            f'{where}: a transform must be an object such as {{"op": "clip", "max": 9}}, received {step!r}'
        )
    operation = OPERATIONS.get(step["op"]) if isinstance(step["op"], str) else None
    if operation is None:
        raise InputError(f"{where}: unknown transform {step['op']!r}, expected one of {', '.join(OPERATIONS)}")
    where = f"{where}: transform {step['op']!r}"
    if not (operation.for_dense if is_dense else operation.for_ids):
        raise InputError(f"{where} is for {'ids' if is_dense else 'dense features'} only")
    known = operation.required + operation.optional
    for name, value in step.items():
        if name != "op" and name not in known:
            raise InputError(f"{where} has no parameter {name!r}; its parameters: {', '.join(known) or 'none'}")
        if name != "op" and not PARAMETERS[name][1](value):
            raise InputError(f"{where}: {name} is {value!r}, expected {PARAMETERS[name][0]}")
    for name in operation.required:
        if name not in step:
            raise InputError(f"{where} lacks {name!r}, expected {PARAMETERS[name][0]}")
    _check_together(step, is_dense=is_dense, where=where)


def _check_together(step: Mapping[str, Any], *, is_dense: bool, where: str) -> None:
    if step["op"] == "map_ids" and ("mapping" in step) == ("file" in step):
        raise InputError(f"{where} needs either 'mapping' or 'file'")
    bounds = [step[name] for name in ("min", "max") if name in step]
    if step["op"] == "clip" and (not bounds or bounds != sorted(bounds)):
        raise InputError(f"{where} needs 'min', 'max' or both with min <= max, received {bounds}")
    numbers = [*step.get("boundaries", ()), *bounds]
    if not is_dense and not all(map(_is_whole, numbers)):
        raise InputError(f"{where}: ids are whole numbers, received {numbers}")


class Transforms:
    """The transforms of a schema with their mappings loaded. Thread-safe."""

    def __init__(self, schema: Schema) -> None:
        self._steps = {
            feature.name: [_prepare(step, where=f"feature {feature.name!r}") for step in feature.transforms]
            for feature in schema.features
            if feature.transforms
        }
        self._dense = [(at, feature.name) for at, feature in enumerate(schema.dense) if feature.transforms]

    def __bool__(self) -> bool:
        return bool(self._steps)

    def apply(self, block: DistinctBlock) -> DistinctBlock:
        """The block with all dense values and distinct lists transformed."""
        dense_RF = block.dense_RF.copy() if self._dense else block.dense_RF
        for position, name in self._dense:
            dense_RF[:, position] = self.values(name, np.ascontiguousarray(dense_RF[:, position]))
        return replace(block, dense_RF=dense_RF, groups=tuple(self._apply_group(group) for group in block.groups))

    def _apply_group(self, group: DistinctGroup) -> DistinctGroup:
        if self._steps.keys().isdisjoint(group.keys):
            return group
        values, starts, lengths = zip(*(self.lists(*feature) for feature in group.features()), strict=True)
        return replace(group, values=values, starts_FU=np.stack(starts), lengths_FU=np.stack(lengths, dtype=np.int32))

    def values(self, name: str, values: Numbers) -> Numbers:
        """The values of a dense feature, transformed."""
        for operation, options in self._steps.get(name, ()):
            assert operation.on_values is not None, "dense features have no lists"
            values = operation.on_values(values, **options)
        return values

    def lists(self, name: str, values: IdArray, starts: IdArray, lengths: LengthArray) -> Windows:
        """The lists of an id feature, transformed: list u is values[starts[u] : starts[u] + lengths[u]]."""
        for operation, options in self._steps.get(name, ()):
            if operation.on_lists is not None:
                values, starts, lengths = operation.on_lists(values, starts, lengths, **options)
            elif operation.on_values is not None:
                values, starts = _drop_unused(values, starts, lengths)
                values = operation.on_values(values, **options)
        return values, starts, lengths


def _drop_unused(values: IdArray, starts: IdArray, lengths: LengthArray) -> tuple[IdArray, IdArray]:
    """The lists packed one after another if they use less than half of the buffer, as after truncating long ones."""
    if 2 * int(lengths.sum()) >= len(values):
        return values, starts
    from recmill.data.ikjt.distinct import take_lists  # which imports the schema, which imports this module

    return take_lists(values, starts, lengths), np.cumsum(lengths, dtype=np.int64) - lengths


def _prepare(step: Mapping[str, Any], *, where: str) -> tuple[Operation, dict[str, Any]]:
    options = {name: value for name, value in step.items() if name not in ("op", "mapping", "file")}
    if step["op"] == "map_ids":
        known, mapped = _read_mapping(step["file"], where) if "file" in step else _mapping_arrays(step["mapping"])
        order = np.argsort(known, kind="stable")
        options |= {"known": known[order], "mapped": mapped[order]}
    return OPERATIONS[step["op"]], options


def _mapping_arrays(mapping: Mapping[str, int]) -> tuple[IdArray, IdArray]:
    return np.array([int(key) for key in mapping], np.int64), np.array(list(mapping.values()), np.int64)


def _read_mapping(path: str, where: str) -> tuple[IdArray, IdArray]:
    try:
        with fsspec.open(path, "rb") as file:
            if path.endswith(".parquet"):
                table = pq.read_table(file, columns=["id", "mapped"])
                known, mapped = (table[name].to_numpy().astype(np.int64) for name in ("id", "mapped"))
                return known, mapped
            mapping = json.load(file)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{where}: the mapping {path} cannot be read ({error})") from error
    if not _is_mapping(mapping):
        raise InputError(f"{where}: the mapping {path} must be {PARAMETERS['mapping'][0]}")
    return _mapping_arrays(mapping)
