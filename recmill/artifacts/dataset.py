"""dataset.json: clustered interaction data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from recmill.artifacts.manifest import Artifact
from recmill.artifacts.places.stores import InputError

Layout = Literal["time", "session", "deduplicated"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True, kw_only=True)
class DatasetPart:
    """A Parquet file of the dataset; all of its rows belong to one split."""

    file: str
    split: str
    num_rows: int
    num_sessions: int
    bytes: int
    row_group_rows: tuple[int, ...]
    # Of a file whose pages all have checksums: readers check this and the pages they read. None: written before.
    footer_sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class HotLayout:
    """How the training rows were divided into the splits "hot" and "cold"."""

    plan_hash: str
    sessions: Literal["whole", "split"]
    num_hot: int
    num_cold: int
    sample_share: float  # of hot samples
    tables: Mapping[str, int]  # hot rows


@dataclass(frozen=True, kw_only=True)
class Dataset(Artifact):
    """Clustered interaction data: Parquet parts, with the schema beside them."""

    kind: ClassVar[str] = "dataset"
    manifest_name: ClassVar[str] = "dataset.json"

    layout: Layout
    num_rows: int
    num_sessions: int
    parts: tuple[DatasetPart, ...]
    source: Mapping[str, Any] = field(default_factory=dict)  # the raw log: name, num_files, bytes
    layout_why: str = ""  # where the log itself chose the layout
    encoding: Any = None  # by feature, of the deduplicated layout (see recmill/data/storage)
    hot: HotLayout | None = None

    def __post_init__(self) -> None:
        if self.num_rows == 0:
            raise InputError("the dataset is empty (0 rows)")
        for number, part in enumerate(self.parts):
            if sum(part.row_group_rows) != part.num_rows:
                raise InputError(f"parts[{number}]: its row groups do not add up to its {part.num_rows} rows")
        if sum(part.num_rows for part in self.parts) != self.num_rows:
            raise InputError(f"the parts do not add up to {self.num_rows} rows")

    def named_files(self) -> frozenset[str]:
        return frozenset(part.file for part in self.parts)

    def checked_by_readers(self) -> frozenset[str]:
        return frozenset(part.file for part in self.parts if part.footer_sha256)

    @property
    def splits(self) -> list[str]:
        return list(dict.fromkeys(part.split for part in self.parts))

    def split_parts(self, split: str) -> list[DatasetPart]:
        return [part for part in self.parts if part.split == split]

    @property
    def data_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)
