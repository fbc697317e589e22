"""Saving beside training: the state is copied to memory, and a thread of every rank writes the copy.

    training   ...step | wait for the save before | plan, copy | step | step | step ...
    thread                                                     | write own file, exchange what was written |
                                                               | rank 0: index, manifest, rename           |

Training stops until the copy is made. There is one save at a time, and who writes it does not change what is written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from recmill.artifacts import InputError, explain_write_errors
from recmill.data.ingest.memory import available_memory_bytes
from recmill.model.stores.collectives import gather_json
from recmill.training.tensors.storage import TensorWriter, WrittenFile

COPY_SHARE = 0.25  # of the free memory, that "auto" uses for the copies of all ranks
PATIENCE = timedelta(hours=2)  # for a rank that writes to a slow store; one that is gone is noticed at once
Finish = Callable[[TensorWriter, Sequence[WrittenFile]], None]


@dataclass(kw_only=True)
class SaveTimes:
    """What saving took on this rank so far."""

    num_saves: int = 0
    num_copied: int = 0  # saves that were written beside training
    copied_bytes: int = 0  # of the largest copy
    pause_seconds: float = 0.0  # training stood still: plan, copy, and writing where nothing was copied
    longest_pause_seconds: float = 0.0
    wait_seconds: float = 0.0  # for the end of the save before, or of the last one
    write_seconds: float = 0.0  # all writing, beside training or not


class Saver:
    """Saves of one run. All ranks call every method together, except `check`.

    `mode`: "true" copies and writes beside training, "false" writes at once, "auto" copies if memory suffices.
    """

    def __init__(self, mode: str = "auto") -> None:
        self._mode = mode
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._answers: list[dict[str, Any]] = []
        self.times = SaveTimes()

    def save(
        self, state: Callable[[], dict[str, Any]], folder: str | Path, *, finish: Finish, is_last: bool = False
    ) -> None:
        """Write a state to `folder`, which exists or is remote; rank 0 calls `finish` when all files are written.

        With `is_last` it is complete when this returns; else `wait` or the next save says so, or `check` why it failed.
        """
        self.wait()
        started = time.perf_counter()
        if self._group is None and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        writer = TensorWriter(folder, copies=(lambda _: False) if is_last else self._wants_copy)
        writer.plan(state())
        if writer.has_copied:
            self.times.num_copied += 1
            self.times.copied_bytes = max(self.times.copied_bytes, writer.num_bytes)
            self._thread = threading.Thread(target=self._write, args=(writer, folder, finish), daemon=True)
            self._thread.start()
        else:
            self._write(writer, folder, finish)
        pause = time.perf_counter() - started
        self.times.num_saves += 1
        self.times.pause_seconds += pause
        self.times.longest_pause_seconds = max(self.times.longest_pause_seconds, pause)
        if not writer.has_copied:
            self.check()

    def wait(self) -> None:
        """Wait until the last save is complete; raise if it failed."""
        if self._thread is not None:
            started = time.perf_counter()
            self._thread.join()
            self._thread = None
            self.times.wait_seconds += time.perf_counter() - started
        self.check()

    def check(self) -> None:
        """Raise if the last save has failed by now."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self.wait()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def to_json(self) -> dict[str, Any]:
        return {name: round(value, 6) for name, value in asdict(self.times).items()}

    def _wants_copy(self, num_bytes: int) -> bool:
        if self._mode == "auto":
            return num_bytes <= COPY_SHARE * available_memory_bytes()
        return self._mode == "true"

    def _write(self, writer: TensorWriter, folder: str | Path, finish: Finish) -> None:
        started = time.perf_counter()
        try:
            self._write_together(writer, folder, finish)
        except BaseException as error:  # noqa: BLE001  the training thread raises it
            self._failure = error
        self.times.write_seconds += time.perf_counter() - started

    def _write_together(self, writer: TensorWriter, folder: str | Path, finish: Finish) -> None:
        """Write this rank's file and agree with the others on whether all did; rank 0 then finishes."""
        with self._together() as told, explain_write_errors(folder):
            told.update(writer.write().to_json())
        everything = [WrittenFile.from_json(own) for own in self._answers]
        with self._together():
            if dist.get_rank() == 0:
                with explain_write_errors(folder):
                    finish(writer, everything)

    @contextmanager
    def _together(self) -> Iterator[dict[str, Any]]:
        """A block of every rank: afterwards all know what each told, or all raise what one of them raised."""
        told: dict[str, Any] = {}
        failure: Exception | None = None
        try:
            yield told
        except Exception as error:  # noqa: BLE001  every rank must take part in the exchange
            failure = error
            text = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
            told = {"failure": text, "is_input": isinstance(error, InputError)}
        self._answers = [told] if self._group is None else gather_json(told, self._group)
        if failure is not None:
            raise failure
        for answer in self._answers:
            if "failure" in answer:
                raise (InputError if answer["is_input"] else RuntimeError)(answer["failure"])
