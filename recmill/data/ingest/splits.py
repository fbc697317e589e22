"""Which row groups belong to a split, including datasets without a held-out split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recmill.artifacts import Dataset, InputError

ALL_ROWS = "all"
HELD_OUT_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class StoredGroup:
    """One row group of one part file."""

    file: str
    index: int
    num_rows: int

    def __str__(self) -> str:
        return f"{self.file}, row group {self.index}"


def evaluation_split(dataset: Dataset) -> str:
    """The split to evaluate on: "test", or "valid" if there is no "test"."""
    return "valid" if "valid" in dataset.splits and "test" not in dataset.splits else "test"


def split_groups(dataset: Dataset, split: str) -> list[StoredGroup]:
    """The row groups of a split in file order; "all" means every row group.

    A dataset with only "train" is split here: its last row groups, at least a tenth of the rows, become "test".
    """
    if split == ALL_ROWS:
        return _groups(dataset, dataset.splits)
    if dataset.splits == ["train"] and split in ("train", "test"):
        groups = _groups(dataset, ["train"])
        num_kept = _count_kept(groups, dataset)
        return groups[:num_kept] if split == "train" else groups[num_kept:]
    if split not in dataset.splits:
        raise InputError(f"{dataset.path}: has no split {split!r}; it has {', '.join(dataset.splits)}")
    return _groups(dataset, [split])


def _groups(dataset: Dataset, splits: Sequence[str]) -> list[StoredGroup]:
    return [
        StoredGroup(file=part.file, index=index, num_rows=num_rows)
        for part in dataset.parts
        if part.split in splits
        for index, num_rows in enumerate(part.row_group_rows)
        if num_rows
    ]


def _count_kept(groups: Sequence[StoredGroup], dataset: Dataset) -> int:
    if len(groups) < 2:
        raise InputError(
            f"{dataset.path}: its only row group cannot be split into training and test rows; "
            "cluster again with --eval-fraction or a smaller --rows-per-group"
        )
    num_rows = sum(group.num_rows for group in groups)
    held_out, num_kept = 0, len(groups)
    while num_kept > 1 and held_out < HELD_OUT_SHARE * num_rows:
        num_kept -= 1
        held_out += groups[num_kept].num_rows
    return num_kept
