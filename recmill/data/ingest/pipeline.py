"""Batches from a Dataset, in an order that does not depend on how many workers or ranks read it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recmill.artifacts import Dataset, InputError
from recmill.data.ikjt.batch import Batch
from recmill.data.ingest.memory import (
    Budget,
    MemoryGuard,
    available_memory_bytes,
    choose_parts,
    default_memory_limit,
    split_budget,
)
from recmill.data.ingest.order import ORDER_VERSION, Order, num_lanes_for
from recmill.data.ingest.reader import STAGES, RowGroupReader
from recmill.data.ingest.runner import StageRunner
from recmill.data.ingest.schedule import Schedule
from recmill.data.ingest.splits import split_groups
from recmill.data.schema import Schema

DEFAULT_WORKERS = {"read": 1, "decode": 1, "transform": 1, "batch": 1}
CHECKED_EPOCHS = 20  # a tight memory limit is checked for this many permutations before anything starts


class IngestPipeline:
    """Iterates over the batches of one rank, epoch after epoch, while worker threads read ahead.

    Row groups are permuted and mixed with each other (recmill/data/ingest/order.py). The position is the number of
    batches delivered; `state_dict` saves it, and `load_state_dict` resumes there on any number of ranks that divides
    the number of lanes. Leaving the loop stops the workers, and a new loop continues where the last one stopped.

        with IngestPipeline("dataset", batch_size=4096, epochs=2) as pipeline:
            for batch in pipeline:
                ...
                pipeline.set_workers({"decode": 3})
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
        prefetch: int = 4,
        memory_limit_bytes: int | None = None,
        dedup: Sequence[Sequence[str]] | None = None,
        windows: Sequence[str] = (),
        decodes_pages: bool = True,
        keeps_sessions: bool = False,
        session_limit: int = 0,
        delays_s: Mapping[str, float] | None = None,
    ) -> None:
        """`batch_size` counts the samples of all ranks together, `prefetch` the batches that may wait for the consumer.

        `memory_limit_bytes` bounds what this rank's ingestion holds, and defaults to half of the free memory, shared by
        the ranks. No limit exceeds what the machine or its control group has left. Reading ahead pauses while the
        machine is short of memory.

        `dedup` lists groups of id features: batches then hold the distinct lists of each group once, as an
        InverseKeyedJaggedTensor, and features in no group as they are. `windows` names features whose distinct lists
        shift and should be windows of a shared buffer. Without `dedup`, batches are plain KeyedJaggedTensors.

        `session_limit` is the most samples of one session that a lane gives to a batch at once, where sessions are
        stored together; 0 keeps them whole.

        Parquet pages are decoded by a kernel, or with `decodes_pages=False` by Arrow, into the same batches. With
        `keeps_sessions` batches carry the session of each sample, which metrics need and training does not.
        `delays_s` gives the seconds that a stage waits before each item, as storage far away or a slow service would.
        """
        _check_counts(
            batch_size=batch_size, world_size=world_size, epochs=epochs, prefetch=prefetch, rank=rank, seed=seed
        )
        if session_limit < 0:
            raise InputError(f"session_limit is {session_limit}, expected 0 or more")
        self.dataset = data if isinstance(data, Dataset) else Dataset.load(data)
        self.schema = Schema.load(self.dataset.path)
        self.split, self.epochs = split, epochs
        self._groups = split_groups(self.dataset, split)
        self._order = Order(
            group_rows=tuple(group.num_rows for group in self._groups),
            batch_size=batch_size,
            num_lanes=num_lanes_for(world_size),
            rank=rank,
            world_size=world_size,
            seed=seed,
            shuffle=shuffle,
        )
        if world_size > min(self.num_rows, batch_size):
            what = f"a batch of {batch_size}" if batch_size < self.num_rows else f"split {split!r} of {self.num_rows}"
            raise InputError(f"{self.dataset.path}: {what} rows cannot be divided among {world_size} ranks")
        self._workers = DEFAULT_WORKERS | _checked_workers(workers or {})
        self._prefetch = prefetch
        self._session_limit = session_limit if shuffle and self.dataset.layout != "time" else 0
        self._guard = MemoryGuard()
        self._delays_s: dict[str, float] = {}
        self.set_delays(delays_s or {})
        self._reader = RowGroupReader(
            self.dataset,
            self.schema,
            dedup=dedup,
            windows=windows,
            decodes_pages=decodes_pages,
            keeps_sessions=keeps_sessions,
            session_limit=self._session_limit,
            seed=seed,
        )
        self._charges = self._reader.charges(self._groups)
        self._set_lanes(self.num_lanes)
        free_bytes = available_memory_bytes()
        self._hard_cap_bytes = max(1, free_bytes // world_size)
        wanted_bytes = memory_limit_bytes or default_memory_limit(world_size, free_bytes=free_bytes)
        self._limit_bytes = min(wanted_bytes, self._hard_cap_bytes)
        self._position = 0
        self._runner: StageRunner | None = None
        self._stats: dict[str, Any] = {stage: {"workers": count} for stage, count in self._workers.items()}
        self._budget = self._split_budget()

    @property
    def num_rows(self) -> int:
        """Rows of the split, over all ranks."""
        return self._order.num_rows

    @property
    def num_lanes(self) -> int:
        return self._order.num_lanes

    @property
    def batches_per_epoch(self) -> int:
        """The same on every rank."""
        return self._order.batches_per_epoch

    @property
    def position(self) -> int:
        """Batches delivered since the first epoch began."""
        return self._position

    @property
    def item_bytes(self) -> int:
        """The largest charge of a row group in progress."""
        return max(charge.admitted_bytes for charge in self._charges)

    @property
    def memory_limit_bytes(self) -> int:
        return self._limit_bytes

    @property
    def least_bytes(self) -> int:
        """The minimum limit: what one batch and the row groups it is cut from take."""
        return self._budget.least_bytes

    @property
    def workers(self) -> dict[str, int]:
        return dict(self._workers)

    def __len__(self) -> int:
        """Batches over all epochs."""
        return self.batches_per_epoch * self.epochs

    def __iter__(self) -> Iterator[Batch]:
        if self.position >= len(self):
            return
        self._stop_runner()  # one iteration at a time: an older one raises if it continues
        schedule = Schedule(
            self._order, self._groups, self._charges, budget=self._budget, batches=range(self._position, len(self))
        )
        runner = self._runner = StageRunner(
            self._reader,
            schedule,
            workers=self._workers,
            prefetch=self._prefetch,
            budget=self._budget,
            guard=self._guard,
            delays_s=self._delays_s,
        )
        finalizer = weakref.finalize(self, runner.request_stop)
        try:
            while (batch := runner.next_batch()) is not None:
                self._position += 1
                yield batch
        finally:
            finalizer.detach()
            runner.stop()
            if self._runner is runner:
                self._stats, self._runner = runner.stats(), None

    def set_workers(self, workers: Mapping[str, int]) -> None:
        """Change the workers of the named stages immediately, without losing or repeating a row."""
        self._workers |= _checked_workers(workers)
        if self._runner:
            self._runner.set_workers(workers)

    def set_delays(self, delays_s: Mapping[str, float]) -> None:
        """Change the seconds that the named stages wait before each item."""
        self._delays_s |= {_checked_stage(stage): float(delay_s) for stage, delay_s in delays_s.items()}

    def set_memory_limit(self, limit_bytes: int) -> None:
        """Change the limit; bytes above it drain, and an epoch in progress keeps the minimum it needs to finish."""
        self._limit_bytes = min(limit_bytes, self._hard_cap_bytes)
        self._budget = self._split_budget()
        if self._runner:
            self._runner.set_budget(self._budget)

    def stats(self) -> dict[str, Any]:
        """Statistics since the iteration began: one entry per stage, one for the consumer and one for memory."""
        return self._runner.stats() if self._runner else self._stats

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch, and everything that must match for it to be the same batch."""
        epoch, batch = divmod(self._position, self.batches_per_epoch)
        return {"epoch": epoch, "batch": batch, "num_lanes": self.num_lanes, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at `state`, possibly on another number of ranks."""
        saved = {"session_limit": 0, **state}  # older positions know no limit
        for key, expected in self._identity().items():
            if saved.get(key) != expected:
                raise InputError(f"the saved ingest position has {key} {saved.get(key)!r}, this run has {expected!r}")
        if state["num_lanes"] % self._order.world_size:
            raise InputError(
                f"the saved ingest position has {state['num_lanes']} lanes, "
                f"which cannot be divided among {self._order.world_size} ranks"
            )
        self._stop_runner()
        self._set_lanes(int(state["num_lanes"]))
        self._position = int(state["epoch"]) * self.batches_per_epoch + int(state["batch"])
        self._budget = self._split_budget()

    def _identity(self) -> dict[str, Any]:
        return {
            "order": ORDER_VERSION,
            "seed": self._order.seed,
            "batch_size": self._order.batch_size,
            "shuffle": self._order.shuffle,
            "split": self.split,
            "dataset": self.dataset.content_hash,
            "session_limit": self._session_limit,
        }

    def _set_lanes(self, num_lanes: int) -> None:
        self._order = replace(self._order, num_lanes=num_lanes, num_parts=choose_parts(self._charges, num_lanes))

    def _split_budget(self) -> Budget:
        first = min(self._position // self.batches_per_epoch, self.epochs - 1)
        return split_budget(
            self._order,
            self._charges,
            limit_bytes=self._limit_bytes,
            prefetch=self._prefetch,
            epochs=range(first, min(self.epochs, first + CHECKED_EPOCHS)),
        )

    def _stop_runner(self) -> None:
        if self._runner:
            self._runner.stop()
            self._stats, self._runner = self._runner.stats(), None

    def close(self) -> None:
        """Stop the workers and close the files."""
        self._stop_runner()
        self._reader.close()

    def __enter__(self) -> IngestPipeline:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _checked_stage(stage: str) -> str:
    if stage not in STAGES:
        raise InputError(f"unknown ingest stage {stage!r}, expected one of {', '.join(STAGES)}")
    return stage


def _checked_workers(workers: Mapping[str, int]) -> dict[str, int]:
    for stage, count in workers.items():
        if not isinstance(count, int) or count < 1:
            raise InputError(f"ingest stage {_checked_stage(stage)!r}: received {count!r} workers, expected at least 1")
    return {_checked_stage(stage): count for stage, count in workers.items()}


def _check_counts(*, rank: int, seed: int, **counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise InputError(f"{name} is {count}, expected at least 1")
    if not 0 <= rank < counts["world_size"]:
        raise InputError(f"rank is {rank}, expected 0 to {counts['world_size'] - 1}")
    if seed < 0:
        raise InputError(f"seed is {seed}, expected 0 or more")
