"""Batches from a Dataset, in an order that does not depend on how many workers or ranks read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recmill.artifacts import Dataset, InputError
from recmill.data.batch import Batch, assemble_batch
from recmill.data.ingest.order import count_batches, global_batch_rows, num_lanes_for, permute_groups, plan_epoch
from recmill.data.ingest.splits import split_groups
from recmill.data.ingest.stages import STAGES, open_reader
from recmill.data.schema import Schema


class IngestPipeline:
    """Iterates over the batches of one rank, epoch after epoch.

    The position is the number of batches handed out; `state_dict` keeps it and `load_state_dict` continues there, at
    any number of ranks that divides the number of lanes.
    """

    def __init__(
        self,
        data: Dataset | str | Path,
        *,
        split: str = "train",
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        epochs: int = 1,
        shuffle: bool = True,
        workers: Mapping[str, int] | None = None,
    ) -> None:
        self.dataset = data if isinstance(data, Dataset) else Dataset.load(data)
        self.schema = Schema.load(self.dataset.path)
        self.split, self.batch_size, self.seed, self.epochs, self.shuffle = split, batch_size, seed, epochs, shuffle
        self.rank, self.world_size = rank, world_size
        self._groups = split_groups(self.dataset, split)
        self.num_rows = sum(group.num_rows for group in self._groups)
        if world_size > self.num_rows:
            raise InputError(
                f"{self.dataset.path}: split {split!r} has {self.num_rows} rows, fewer than {world_size} ranks"
            )
        self.num_lanes = num_lanes_for(world_size)
        self.batches_per_epoch = count_batches(self.num_rows, batch_size)
        self._reader = open_reader(self.dataset, self.schema)
        self._workers = {stage: 1 for stage in STAGES} | dict(workers or {})
        self._position = 0

    def __len__(self) -> int:
        """Batches over all epochs."""
        return self.batches_per_epoch * self.epochs

    def __iter__(self) -> Iterator[Batch]:
        while self._position < len(self):
            epoch, first_batch = divmod(self._position, self.batches_per_epoch)
            plan = plan_epoch(
                [group.num_rows for group in self._groups],
                order=permute_groups(len(self._groups), seed=self.seed, epoch=epoch, shuffle=self.shuffle),
                batch_size=self.batch_size,
                num_lanes=self.num_lanes,
                rank=self.rank,
                world_size=self.world_size,
                first_batch=first_batch,
            )
            blocks = {}
            for batch in range(first_batch, plan.num_batches):
                for item in range(len(blocks), plan.num_needed(batch)):
                    group = self._groups[plan.items[item].group]
                    table = self._reader.decode(group, self._reader.read(group))
                    blocks[item] = self._reader.transform(group, table)
                slices = [(blocks[source.item], source.start, source.stop) for source in plan.sources(batch)]
                num_global = global_batch_rows(
                    batch, num_rows=self.num_rows, batch_size=self.batch_size, num_lanes=self.num_lanes
                )
                self._position += 1
                yield assemble_batch(slices, self.schema, num_global=num_global)

    def set_workers(self, workers: Mapping[str, int]) -> None:
        self._workers |= workers

    def stats(self) -> dict[str, Any]:
        return {stage: {"workers": workers} for stage, workers in self._workers.items()}

    def state_dict(self) -> dict[str, Any]:
        epoch, batch = divmod(self._position, self.batches_per_epoch)
        return {"epoch": epoch, "batch": batch, "seed": self.seed, "num_lanes": self.num_lanes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._position = int(state["epoch"]) * self.batches_per_epoch + int(state["batch"])
        self.num_lanes = int(state["num_lanes"])

    def close(self) -> None:
        self._reader.close()

    def __enter__(self) -> IngestPipeline:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
