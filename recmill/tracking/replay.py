"""The MLflow side of a local run, in threads of the process that runs the pipeline.

A thread opens MLflow, which takes seconds, while the first step already works. It then replays the journals that the
steps write (recorder.py): each in a thread of its own, because MLflow's active run belongs to a thread.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from recmill.artifacts import dump_json, held_folder
from recmill.tracking.database import check_database, path_of
from recmill.tracking.recorder import JOURNAL_FOLDER, REFERENCE, MlflowRecorder
from recmill.tracking.server import RunReference, close_run, explain_tracking_errors, load_mlflow, open_run

POLL_S = 0.2


class Replayer:
    """Opens the MLflow run of a pipeline run and replays its steps' journals until `close`."""

    def __init__(self, tracking_uri: str, *, pipeline_run_id: str, **description: Any) -> None:
        """Start to open the run, with the `description` that `open_run` takes; wait for a server, which may be down."""
        self.tracking_uri = tracking_uri
        self._pipeline_run_id = pipeline_run_id
        self._scratch = ExitStack()
        self._folder = self._scratch.enter_context(held_folder(purpose="journals"))
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=32, thread_name_prefix="mlflow")
        self._opened: Future[RunReference] = self._pool.submit(
            self._open, tracking_uri=tracking_uri, pipeline_run_id=pipeline_run_id, **description
        )
        self._replayed = self._pool.submit(self._replay_all)
        try:
            if database := path_of(tracking_uri):
                check_database(database)
            else:
                self._opened.result()
        except BaseException:
            self._end()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make the steps write journals."""
        return {JOURNAL_FOLDER: str(self._folder)}

    def close(self, *, status: str, metrics: Mapping[str, float]) -> RunReference:
        """Wait until everything is replayed, and end the run; InputError if MLflow did not work."""
        self._stop.set()
        try:
            self._replayed.result()
            run = self._opened.result()
            close_run(run, status=status, metrics=metrics)
            return run
        finally:
            self._end()

    def _end(self) -> None:
        self._stop.set()
        self._pool.shutdown()
        self._scratch.close()

    def _open(self, **description: Any) -> RunReference:
        load_mlflow()
        logging.getLogger("mlflow").setLevel(logging.ERROR)  # its warnings would come between the lines of the run
        run = open_run(**description)
        written = self._folder / f".{REFERENCE}"
        written.write_text(dump_json(run.to_json()), encoding="utf-8")
        written.rename(self._folder / REFERENCE)
        return run

    def _replay_all(self) -> None:
        run = self._opened.result()
        found: dict[Path, Future[None]] = {}
        while True:
            is_last = self._stop.is_set()
            for path in sorted(self._folder.glob("*.jsonl")):
                if path not in found:
                    found[path] = self._pool.submit(self._replay, path, run)
            if is_last:
                break
            self._stop.wait(POLL_S)
        for replayed in found.values():
            replayed.result()

    def _replay(self, path: Path, run: RunReference) -> None:
        recorder: MlflowRecorder | None = None
        for call, arguments in self._calls(path):
            if call == "enter":
                recorder = MlflowRecorder(
                    arguments["step"],
                    tracking_uri=run.tracking_uri,
                    parent_run_id=run.run_id,
                    inputs=arguments["inputs"],
                    pipeline_run_id=self._pipeline_run_id,
                )
            else:
                with explain_tracking_errors(run.tracking_uri):
                    getattr(recorder, call)(**arguments)
            if call == "leave":
                return
        if recorder:  # a step that was killed
            recorder.leave(status="KILLED", metrics={})

    def _calls(self, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        """The lines of a journal as they are written, until `close` is called and no more come."""
        with open(path, encoding="utf-8") as file:
            partial = ""
            while True:
                is_last = self._stop.is_set()
                partial += file.readline()
                if partial.endswith("\n"):
                    call, arguments = json.loads(partial)
                    yield call, arguments
                    partial = ""
                elif is_last:
                    return
                else:
                    self._stop.wait(POLL_S)
