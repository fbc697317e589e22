"""The batches of a run in training order: one stream, or hot and cold batches in turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

import torch
from torchrec import KeyedJaggedTensor

from recmill.artifacts import Dataset, InputError
from recmill.data.hot.layout import COLD, HOT
from recmill.data.ikjt.batch import Batch
from recmill.data.ingest import IngestPipeline
from recmill.training.config import TrainConfig
from recmill.training.rank.hot_schedule import BatchBlock, HotSchedule

# A session that is trained in one batch teaches the rows that only it reads less than the same samples in several
# batches, the more so the fewer steps there are. AUC against time order (docs/auto.md): tiny, 23 steps: whole sessions
# -0.006, pieces of 8 or 4 samples none; taobao, 33 steps: whole -0.039, of 8 -0.006, of 4 none; taobao, 234 steps:
# whole -0.004, pieces of 8 +0.009. Globo (2,632 steps) is better with whole sessions.
PIECES = {100: 4, 1_000: 8}  # runs of fewer steps -> the most samples of a session in a batch
TRAINED = ("train", COLD, HOT)  # splits; the last two replace the first in a hot layout
AHEAD = 2  # batches whose rows are read from disk while earlier ones are trained


def session_limit(dataset: Dataset, config: TrainConfig) -> int:
    """The most samples of a session in a batch of this run; 0: no limit. How long a run could be decides, not
    `max_steps`: a run that is cut short is a part of the longer one.
    """
    if config.session_limit >= 0:
        return config.session_limit
    num_steps = _full_steps(dataset, config)
    return next((limit for below, limit in PIECES.items() if num_steps < below), 0)


def planned_steps(dataset: Dataset, config: TrainConfig) -> int:
    """The steps of this run, unless it stops early."""
    full = _full_steps(dataset, config)
    return min(full, config.max_steps) if config.max_steps else full


def _full_steps(dataset: Dataset, config: TrainConfig) -> int:
    num_rows = sum(part.num_rows for part in dataset.parts if part.split in TRAINED)
    return config.epochs * -(-num_rows // config.batch_size)


@cache
def blank_ids(keys: tuple[str, ...], device: torch.device) -> KeyedJaggedTensor:
    """The ids of a sample with nothing but empty lists; the same object in every call, as tables expect what they were
    told is coming.
    """
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.empty(0, dtype=torch.int64, device=device),
        lengths=torch.zeros(len(keys), dtype=torch.int32, device=device),
    )


class Feed:
    """Batches of one rank over all epochs, each with a flag: whether it holds slots of hot rows instead of ids.

    With `hot`, its batches and those of `cold` alternate in turns that the schedule sets. After a turn, `wants_loss` is
    true until `observe` receives the held-out loss, which determines the length of the next turns.

    `prefetch` receives every batch of a single stream `ahead` batches before it is trained.
    """

    def __init__(
        self,
        cold: IngestPipeline | None,
        hot: IngestPipeline | None = None,
        *,
        prefetch: Callable[[Batch], None] | None = None,
        ahead: int = AHEAD,
    ) -> None:
        # By whether their batches are hot.
        self.streams = {is_hot: stream for is_hot, stream in ((False, cold), (True, hot)) if stream is not None}
        assert self.streams, "a feed needs at least one stream"
        self.schedule: HotSchedule | None = None
        if hot is not None:
            counts = {kind: stream.batches_per_epoch for kind, stream in self.streams.items()}
            self.schedule = HotSchedule(num_hot=counts[True], num_cold=counts.get(False, 0))
        self.wants_loss = False
        self._block: BatchBlock | None = None
        self._left = 0  # batches left in the block
        self._num_done = 0
        self._prefetch, self._ahead = prefetch, ahead
        self._position: dict[str, Any] | None = None  # of training, in a stream that is read ahead

    @property
    def pipelines(self) -> list[IngestPipeline]:
        return list(self.streams.values())

    @property
    def batches_per_epoch(self) -> int:
        return sum(pipeline.batches_per_epoch for pipeline in self.pipelines)

    def __len__(self) -> int:
        return self.batches_per_epoch * self.pipelines[0].epochs

    def __iter__(self) -> Iterator[tuple[Batch, bool]]:
        streams: dict[bool, Iterator[Batch]] = {is_hot: iter(pipeline) for is_hot, pipeline in self.streams.items()}
        if self._prefetch is not None and self.schedule is None:
            streams = {False: self._read_ahead(self.pipelines[0], self._prefetch)}
        while self._num_done < len(self):
            is_hot = self._next_kind()
            batch = next(streams[is_hot])
            self._num_done += 1
            yield batch, is_hot

    def _read_ahead(self, pipeline: IngestPipeline, prefetch: Callable[[Batch], None]) -> Iterator[Batch]:
        waiting: deque[tuple[Batch, dict[str, Any]]] = deque()
        self._position = pipeline.state_dict()
        for batch in pipeline:
            prefetch(batch)
            waiting.append((batch, pipeline.state_dict()))
            if len(waiting) > self._ahead:
                batch, self._position = waiting.popleft()
                yield batch
        for batch, self._position in waiting:
            yield batch

    def _next_kind(self) -> bool:
        if self.schedule is None:
            return False
        if not self._left:
            if self.schedule.is_epoch_over:
                self.schedule.start_epoch()
            self._block = self.schedule.next_block()
            assert self._block is not None  # the epoch was not over
            self._left = self._block.count
        assert self._block is not None
        self._left -= 1
        self.wants_loss = not self._left and self.schedule.is_turn_over
        return self._block.is_hot

    def observe(self, loss: float) -> None:
        """Take the held-out loss after a turn; it must be the same on all ranks."""
        if self.schedule is not None:
            self.schedule.observe(loss)
        self.wants_loss = False

    def state_dict(self) -> dict[str, Any]:
        if self.schedule is None:
            return self.pipelines[0].state_dict() if self._position is None else self._position
        return {
            "streams": {_name(is_hot): stream.state_dict() for is_hot, stream in self.streams.items()},
            "schedule": self.schedule.state_dict(),
            "block": asdict(self._block) if self._block else None,
            "left": self._left,
            "num_done": self._num_done,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.schedule is None:
            self.pipelines[0].load_state_dict(state)
            self._num_done = self.pipelines[0].position
            return
        if "streams" not in state:
            raise InputError("the checkpoint was written without hot batches; resume with hot_batches=false")
        for is_hot, stream in self.streams.items():
            stream.load_state_dict(state["streams"][_name(is_hot)])
        self.schedule.load_state_dict(state["schedule"])
        self._block = BatchBlock(**state["block"]) if state["block"] else None
        self._left, self._num_done = int(state["left"]), int(state["num_done"])

    def stats(self) -> dict[str, Any]:
        """Statistics of ingestion; with two streams, those of the cold one, and of the hot one under "hot"."""
        first, *others = (stream.stats() for stream in self.pipelines)
        return {**first, "hot": others[0]} if others else first

    def close(self) -> None:
        for pipeline in self.pipelines:
            pipeline.close()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _name(is_hot: bool) -> str:
    return "hot" if is_hot else "cold"
