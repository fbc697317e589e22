"""Old runs on a volume: which folders are runs, when they were last written to, and which may go."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recmill.artifacts import InputError, read_json

RECORD = "run.json"


@dataclass(frozen=True, kw_only=True)
class OldRun:
    """The folder of a run."""

    path: Path
    written_at: float  # unix seconds of the newest file
    num_bytes: int


def find_runs(folder: str | Path) -> list[OldRun]:
    """The runs directly below a folder, newest first; other folders are not looked into."""
    root = Path(folder)
    if not root.is_dir():
        raise InputError(f"{folder}: no such folder; expected the folder that runs lie in")
    found = []
    for path in sorted(root.iterdir()):
        if path.is_symlink() or not path.is_dir() or not _is_run(path / RECORD):
            continue
        stats = [entry.lstat() for entry in path.rglob("*")]
        newest, size = max(entry.st_mtime for entry in stats), sum(entry.st_size for entry in stats)
        found.append(OldRun(path=path, written_at=newest, num_bytes=size))
    return sorted(found, key=lambda run: run.written_at, reverse=True)


def _is_run(record: Path) -> bool:
    try:
        return record.is_file() and read_json(record).get("kind") == "run"
    except (InputError, AttributeError):
        return False


def choose_old_runs(
    runs: Sequence[OldRun], *, older_than_s: float, keep: int, now: float | None = None
) -> list[OldRun]:
    """Runs that nothing was written to for so long, except the `keep` newest."""
    limit = (time.time() if now is None else now) - older_than_s
    return [run for run in runs[keep:] if run.written_at < limit]


def remove_run(run: OldRun) -> None:
    """Remove a run's folder. Its record goes last: an interrupted removal is finished by the next call."""
    for entry in run.path.iterdir():
        if entry.name == RECORD:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    shutil.rmtree(run.path)
