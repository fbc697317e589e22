"""Clustered interaction data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from recmill.artifacts.files import InputError, join_path
from recmill.artifacts.manifest import BodyArtifact, check_fields

Layout = Literal["time", "session", "deduplicated"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True, kw_only=True)
class Dataset(BodyArtifact):
    """Clustered interaction data: Parquet parts, each belonging to one split, with the schema beside them.

    body: layout, num_rows, num_sessions, parts [{file, split, num_rows, num_sessions, bytes, row_group_rows}], source.
    """

    kind: ClassVar[str] = "dataset"
    manifest_name: ClassVar[str] = "dataset.json"

    def validate(self) -> None:
        self.require(layout=str, num_rows=int, num_sessions=int, parts=list)
        where = join_path(self.path, self.manifest_name)
        if self.layout not in LAYOUTS:
            raise InputError(f"{where}: layout is {self.layout!r}, expected one of {', '.join(LAYOUTS)}")
        if self.num_rows == 0:
            raise InputError(f"{self.path}: the dataset is empty (0 rows)")
        part_types = {
            "file": str,
            "split": str,
            "num_rows": int,
            "num_sessions": int,
            "bytes": int,
            "row_group_rows": list,
        }
        for number, part in enumerate(self.parts):
            check_fields(part, part_types, where=f"{where}: parts[{number}]")
            if any(type(rows) is not int or rows < 0 for rows in part["row_group_rows"]):
                raise InputError(f"{where}: parts[{number}]: 'row_group_rows' must list whole numbers")
            if sum(part["row_group_rows"]) != part["num_rows"]:
                raise InputError(
                    f"{where}: parts[{number}]: its row groups do not add up to its {part['num_rows']} rows"
                )
        if sum(part["num_rows"] for part in self.parts) != self.num_rows:
            raise InputError(f"{where}: the parts do not add up to {self.num_rows} rows")

    @property
    def layout(self) -> Layout:
        layout: Layout = self.body["layout"]
        return layout

    @property
    def num_rows(self) -> int:
        return int(self.body["num_rows"])

    @property
    def num_sessions(self) -> int:
        return int(self.body["num_sessions"])

    @property
    def parts(self) -> list[dict[str, Any]]:
        return list(self.body["parts"])

    @property
    def splits(self) -> list[str]:
        return list(dict.fromkeys(part["split"] for part in self.parts))

    def split_parts(self, split: str) -> list[dict[str, Any]]:
        return [part for part in self.parts if part["split"] == split]

    @property
    def data_bytes(self) -> int:
        return sum(int(part["bytes"]) for part in self.parts)
