"""The machines of a training run: nodes, ranks per node, and how fast they communicate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import fsspec
import yaml

from recmill.artifacts.files import write_text_atomically
from recmill.artifacts.places.stores import InputError

COLLECTIVES = ("all_to_all", "all_gather", "all_reduce")
LEVELS = ("intra", "inter")
MAX_RANKS = 65_536
_BANDWIDTHS = tuple(f"{level}_node_bytes_per_s" for level in LEVELS)
_LATENCIES = tuple(f"{level}_node_latency_s" for level in LEVELS)


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a message costs on one level of the network: `latency_s` + bytes / `bytes_per_s`."""

    bytes_per_s: float
    latency_s: float


def _number(value: Any) -> Any:
    """YAML reads 10e9 as text (only 10.0e+9 is a number); people mean a number."""
    if isinstance(value, dict):
        return {name: _number(inner) for name, inner in value.items()}
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """`nodes` machines with `ranks_per_node` training processes each. Bandwidths are bytes per second of one rank.

    A rank's share of a node's uplink is its `inter_node_bytes_per_s`. `collectives` says where one kind of collective
    differs: {"all_gather": {"inter_node_bytes_per_s": 1e9}}.
    """

    nodes: int = 1
    ranks_per_node: int = 1
    intra_node_bytes_per_s: float = 10e9
    inter_node_bytes_per_s: float = 1.25e9
    intra_node_latency_s: float = 20e-6
    inter_node_latency_s: float = 50e-6
    device: str = "cpu"
    collectives: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"topology: {name} is {value!r}, expected a whole number of 1 or more")
        if self.world_size > MAX_RANKS:
            raise InputError(
                f"topology: {self.nodes:,} nodes with {self.ranks_per_node:,} ranks are {self.world_size:,} ranks, "
                f"expected at most {MAX_RANKS:,}"
            )
        _check_speeds({name: getattr(self, name) for name in (*_BANDWIDTHS, *_LATENCIES)}, where="topology")
        if self.device not in ("cpu", "cuda"):
            raise InputError(f"topology: device is {self.device!r}, expected cpu or cuda")
        if not isinstance(self.collectives, Mapping) or set(self.collectives) - set(COLLECTIVES):
            raise InputError(
                f"topology: collectives is {self.collectives!r}, expected a mapping of {', '.join(COLLECTIVES)}"
            )
        for collective, speeds in self.collectives.items():
            where = f"topology: collectives: {collective}"
            if not isinstance(speeds, Mapping) or set(speeds) - {*_BANDWIDTHS, *_LATENCIES}:
                raise InputError(f"{where} is {speeds!r}, expected {', '.join((*_BANDWIDTHS, *_LATENCIES))}")
            _check_speeds(speeds, where=where)

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def link(self, collective: str, level: str) -> Link:
        """How fast a collective runs inside a node ("intra") or between nodes ("inter")."""
        speeds = self.collectives.get(collective, {})
        bandwidth, latency = f"{level}_node_bytes_per_s", f"{level}_node_latency_s"
        return Link(
            bytes_per_s=float(speeds.get(bandwidth, getattr(self, bandwidth))),
            latency_s=float(speeds.get(latency, getattr(self, latency))),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def local(cls, num_ranks: int) -> Self:
        """One machine with `num_ranks` processes."""
        return cls(nodes=1, ranks_per_node=num_ranks)

    def save(self, path: str | Path) -> None:
        """Write the YAML file that `load` reads."""
        write_text_atomically(path, yaml.safe_dump(self.to_json(), sort_keys=False))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a YAML file with these fields; what it leaves out keeps its default."""
        try:
            with fsspec.open(str(path), "rt", encoding="utf-8") as file:
                loaded = yaml.safe_load(file)
        except FileNotFoundError:
            raise InputError(f"{path}: no such file; expected a topology in YAML") from None
        except (yaml.YAMLError, UnicodeDecodeError, IsADirectoryError) as error:
            raise InputError(f"{path}: not a YAML file ({' '.join(str(error).split())})") from None
        return cls.from_json(loaded, where=str(path))

    @classmethod
    def from_json(cls, loaded: Any, *, where: str) -> Self:
        if not isinstance(loaded, dict):
            raise InputError(f"{where}: expected a mapping with nodes and ranks_per_node, found {loaded!r}")
        known = {entry.name for entry in fields(cls)}
        unknown = sorted(set(loaded) - known, key=str)
        if unknown:
            raise InputError(
                f"{where}: unknown keys {', '.join(map(str, unknown))}; known are {', '.join(sorted(known))}"
            )
        try:
            return cls(**{name: _number(value) for name, value in loaded.items()})
        except InputError as error:
            raise InputError(f"{where}: {error}") from None


def _check_speeds(speeds: Mapping[str, Any], *, where: str) -> None:
    for name, value in speeds.items():
        if name in _BANDWIDTHS and not (_is_number(value) and value > 0):
            raise InputError(f"{where}: {name} is {value!r}, expected a number above 0")
        if name in _LATENCIES and not (_is_number(value) and value >= 0):
            raise InputError(f"{where}: {name} is {value!r}, expected a number of 0 or more")
