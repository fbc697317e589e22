"""The machines a model is planned for: nodes, ranks on each, and how fast they talk."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import fsspec
import yaml

from recmill.artifacts import InputError


def _number(value: Any) -> Any:
    """YAML takes 10e9 for text (it wants 10.0e+9); people mean a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


@dataclass(frozen=True, kw_only=True)
class Topology:
    """`nodes` machines with `ranks_per_node` training processes each. Bandwidths are bytes a second of one rank."""

    nodes: int = 1
    ranks_per_node: int = 1
    intra_node_bytes_per_s: float = 10e9
    inter_node_bytes_per_s: float = 1.25e9
    intra_node_latency_s: float = 20e-6
    inter_node_latency_s: float = 50e-6
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"topology: {name} is {value!r}, expected a whole number of 1 or more")
        for name in ("intra_node_bytes_per_s", "inter_node_bytes_per_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not value > 0:
                raise InputError(f"topology: {name} is {value!r}, expected a number above 0")
        for name in ("intra_node_latency_s", "inter_node_latency_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or value < 0:
                raise InputError(f"topology: {name} is {value!r}, expected a number of 0 or more")
        if self.device not in ("cpu", "cuda"):
            raise InputError(f"topology: device is {self.device!r}, expected cpu or cuda")

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def local(cls, num_ranks: int) -> Self:
        """One machine with `num_ranks` processes."""
        return cls(nodes=1, ranks_per_node=num_ranks)

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
        if not isinstance(loaded, dict):
            raise InputError(f"{path}: expected a mapping with nodes and ranks_per_node, found {loaded!r}")
        known = {entry.name for entry in fields(cls)}
        unknown = sorted(set(loaded) - known)
        if unknown:
            raise InputError(
                f"{path}: unknown keys {', '.join(map(str, unknown))}; known are {', '.join(sorted(known))}"
            )
        try:
            return cls(**{name: _number(value) for name, value in loaded.items()})
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
