"""Access counts and duplication statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recmill.artifacts.files import join_path
from recmill.artifacts.manifest import Artifact, check_fields


@dataclass(frozen=True, kw_only=True)
class AccessProfile(Artifact):
    """How often every row of every table is read, and how much the features of a session repeat.

    body: num_samples, tables {name: {num_rows, dim, features, num_accesses, num_distinct, ...}}, duplication
    {feature: {...}}.
    """

    kind: ClassVar[str] = "profile"
    manifest_name: ClassVar[str] = "profile.json"

    def validate(self) -> None:
        self.require(num_samples=int, tables=dict, duplication=dict)
        shape = {"num_rows": int, "dim": int, "features": list, "num_accesses": int, "num_distinct": int}
        for name, table in self.body["tables"].items():
            check_fields(table, shape, where=f"{join_path(self.path, self.manifest_name)}: table {name!r}")
