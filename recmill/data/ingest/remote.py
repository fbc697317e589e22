"""The engine in a process of its own, so that the trainer's Python and the workers' do not share one GIL.

this process                          the ingest process
RemoteEngine  --- commands ------>    Engine with its worker threads
              <-- answers --------
              <-- parcels --------    batches in shared memory, WINDOW of them ahead
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from recmill.data.ikjt.batch import Batch
from recmill.data.ingest.engine import Engine
from recmill.data.ingest.memory import Budget
from recmill.data.ingest.transport import pack, shared_folder, unpack

WINDOW = 2  # batches in shared memory: one that is read, one that waits
JOIN_S = 10.0


class RemoteEngine:
    """Stands for an Engine that runs elsewhere; takes the same arguments and answers the same calls."""

    def __init__(self, reader: Any, schedule: Any, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
        self._folder = shared_folder()
        self._commands, commands = context.Pipe()
        self._parcels, parcels = context.Pipe()
        self._lock = threading.Lock()
        self._stats: dict[str, Any] = {}
        self._is_ended = False
        self._process = context.Process(
            target=_serve,
            args=(reader, schedule, options, self._folder.name, commands, parcels),
            name="ingest",
            daemon=True,
        )
        self._process.start()
        commands.close()
        parcels.close()

    def next_batch(self) -> tuple[int, Batch] | None:
        """The next batch with its number, or None after the last; raises what the other process raised."""
        if self._is_ended:
            return None
        try:
            kind, content = self._parcels.recv()
            if kind == "batch":
                self._parcels.send("taken")
                number, parcel = content
                return number, unpack(parcel)
        except (EOFError, OSError) as error:
            if self._process.exitcode is None and self._commands.closed:
                raise RuntimeError("the ingest pipeline was closed while it was read") from None
            self._process.join(JOIN_S)
            raise RuntimeError(f"the ingest process ended with exit code {self._process.exitcode}") from error
        self._is_ended = True
        if kind == "error":
            raise content
        return None

    def set_workers(self, workers: Mapping[str, int]) -> None:
        self._ask("set_workers", dict(workers))

    def set_budget(self, budget: Budget) -> None:
        self._ask("set_budget", budget)

    def stats(self) -> dict[str, Any]:
        if self._process.is_alive():
            found = self._ask("stats")
            self._stats = found or self._stats
        return self._stats

    def _ask(self, name: str, *arguments: Any) -> Any:
        """The answer to a command; None if the process is gone."""
        with self._lock, contextlib.suppress(EOFError, OSError, ValueError):
            self._commands.send((name, arguments))
            return self._commands.recv()
        return None

    def request_stop(self) -> None:
        """Let the process end: it does when nobody listens any more."""
        self._parcels.close()
        self._commands.close()

    def stop(self) -> None:
        """End the process and wait until it is gone."""
        if self._process.is_alive():
            self.stats()
        with self._lock:
            self.request_stop()
        self._process.join(JOIN_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._folder.cleanup()


def _serve(
    reader: Any, schedule: Any, options: Mapping[str, Any], folder: str, commands: Connection, parcels: Connection
) -> None:
    """Run an engine until its batches are handed out or nobody listens."""
    engine = Engine(reader, schedule, **options)
    threading.Thread(target=_answer, args=(engine, commands), daemon=True).start()
    num_unread = 0
    try:
        while (found := engine.next_batch()) is not None:
            number, batch = found
            while num_unread >= WINDOW:
                parcels.recv()
                num_unread -= 1
            parcels.send(("batch", (number, pack(batch, folder))))
            num_unread += 1
        parcels.send(("end", None))
        while True:  # until the trainer hangs up: it may still ask for the figures
            parcels.recv()
    except (EOFError, OSError, BrokenPipeError):
        return  # the trainer has gone
    except Exception as error:  # noqa: BLE001 - the consumer raises it
        with contextlib.suppress(OSError):
            parcels.send(("error", error))
            while True:
                parcels.recv()
    finally:
        engine.stop()


def _answer(engine: Engine, commands: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            name, arguments = commands.recv()
            commands.send(getattr(engine, name)(*arguments))
    engine.request_stop()
