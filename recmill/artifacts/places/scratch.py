"""Temporary files and folders whose leftovers are recognised: a process that was killed cannot remove its own.

Whoever writes one holds a lock on it, which the kernel releases when the process ends, however it ends. One without a
holder is a leftover, and the next process that writes the same thing removes it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "recmill-tmp-"
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.(tmp|old)")
LOCK_FILE = ".lock"  # in the folder of a run
RENAME_EXCHANGE, AT_FDCWD = 2, -100  # of renameat2(2)


def temporary_name(target: Path) -> Path:
    """A new name beside `target`."""
    return target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"


@contextmanager
def held_folder(make: Path | None = None, *, purpose: str = "", beside: Path | None = None) -> Iterator[Path]:
    """A new folder that vanishes when the block ends: a sibling of `make`, or one in `beside` (the system's default).

    Leftovers of the same name are removed first.
    """
    prefix = f"{'.' if beside else ''}{PREFIX}{purpose}-"
    if make is not None:
        parent = make.parent
        remove_leftovers_of(make)
    else:
        parent = beside or Path(tempfile.gettempdir())
        _remove_scratch(parent, prefix)
    while True:
        folder = temporary_name(make) if make is not None else parent / f"{prefix}{uuid.uuid4().hex[:8]}"
        folder.mkdir(mode=0o700 if make is None else 0o777)
        if (held := _hold(folder)) is not None:
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def remove_scratch(purpose: str) -> None:
    """Remove what killed processes left of their `held_folder(purpose=...)`."""
    _remove_scratch(Path(tempfile.gettempdir()), f"{PREFIX}{purpose}-")


def _remove_scratch(parent: Path, prefix: str) -> None:
    remove_leftovers(parent, re.compile(rf"{re.escape(prefix)}[0-9a-f]{{8}}"))


def remove_leftovers(parent: Path, pattern: re.Pattern[str]) -> None:
    """Remove files and folders of this name that nobody holds."""
    with suppress(OSError):
        for name in os.listdir(parent):
            if pattern.fullmatch(name) and (held := _hold(parent / name)) is not None:
                remove_path(parent / name)
                os.close(held)


def remove_leftovers_of(target: Path) -> None:
    remove_leftovers(target.parent, _leftovers_of(target.name))


def is_leftover(name: str) -> bool:
    """Whether only a command that was killed right at its start leaves a file of this name alone in a folder."""
    return name == LOCK_FILE or TEMPORARY.fullmatch(name) is not None


def remove_path(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _leftovers_of(name: str) -> re.Pattern[str]:
    return re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{8}}\.(tmp|old)")


def _hold(path: Path) -> int | None:
    """A descriptor that locks the path until it is closed; None if somebody else holds it, or has removed it."""
    try:
        held = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(held), os.stat(path))
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.ENOLCK):  # a file system without locks: its leftovers stay
            return held
        is_there = False
    if not is_there:
        os.close(held)
        return None
    return held


def exchange_paths(one: Path, other: Path) -> bool:
    """Exchange two names in one step of the file system; False where that is not possible."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))
