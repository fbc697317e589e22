"""Object stores through fsspec. A call that fails is tried again; one that keeps failing ends in one sentence.

The functions also take local paths, so that callers need not care where a folder is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import fsspec

ATTEMPTS = 4
FIRST_WAIT_S = 0.5  # doubled after every failure; the client of a store may have tried several times before
ATTEMPTS_VARIABLE = "RECMILL_STORE_ATTEMPTS"

T = TypeVar("T")


class InputError(ValueError):
    """The user's input is wrong; the message is one sentence that says what, where and what was expected."""


def is_remote(path: str | Path) -> bool:
    """Whether `path` is a URL for fsspec (s3://..., gs://..., memory://...) and not a local path."""
    return "://" in str(path) and not str(path).startswith("file://")


def join_path(folder: str | Path, name: str) -> str:
    return f"{str(folder).rstrip('/')}/{name}"


def open_store(url: str | Path) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it. Listings are not cached: other processes write too."""
    try:
        filesystem, root = fsspec.core.url_to_fs(str(url))
    except ImportError as error:
        raise InputError(f"{url}: {error}") from None
    except ValueError as error:  # an unknown protocol
        raise InputError(f"{url}: cannot be opened ({error})") from None
    filesystem.invalidate_cache()
    return filesystem, root


def use_store(url: str | Path, work: Callable[[Any, str], T], *, doing: str = "read") -> T:
    """The result of `work(filesystem, path)`, tried up to ATTEMPTS times.

    A file that is missing is an answer and not a failure: FileNotFoundError passes through.
    """
    attempts = int(os.environ.get(ATTEMPTS_VARIABLE, ATTEMPTS))
    for attempt in range(attempts):
        try:
            return work(*open_store(url))
        except InputError:
            raise
        except FileNotFoundError as error:
            if doing == "written":  # there is no such bucket
                raise InputError(f"{url}: cannot be written ({describe_error(error)})") from error
            raise
        except PermissionError as error:
            raise InputError(f"{url}: cannot be {doing}: permission denied ({describe_error(error)})") from error
        except Exception as error:  # the clients of stores have no error class in common
            if isinstance(error, AssertionError | TypeError | AttributeError | NameError):
                raise
            if attempt + 1 == attempts:
                times = "once" if attempts == 1 else f"{attempts} times"
                raise InputError(f"{url}: cannot be {doing}, tried {times} ({describe_error(error)})") from error
            time.sleep(FIRST_WAIT_S * 2**attempt)
    raise AssertionError("unreachable")


def describe_error(error: BaseException) -> str:
    """The first sentence of an error, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def is_store_error(error: BaseException) -> bool:
    """Whether the client of an object store raised it: an error of the network or the store, not of ours."""
    return any(
        isinstance(error, found)
        for module, names in (("botocore.exceptions", ("BotoCoreError", "ClientError")), ("aiohttp", ("ClientError",)))
        for name in names
        if (found := getattr(sys.modules.get(module), name, None)) is not None
    )


def read_bytes(path: str | Path, start: int | None = None, stop: int | None = None) -> bytes:
    """The bytes of a file, or those from `start` to `stop`: fewer than that are a failure of the store."""
    if not is_remote(path):
        with open(path, "rb") as file:
            file.seek(start or 0)
            return file.read() if stop is None else file.read(stop - (start or 0))

    def read(filesystem: Any, name: str) -> bytes:
        data: bytes = filesystem.cat_file(name, start=start, end=stop)
        if stop is not None and len(data) != stop - (start or 0):
            raise OSError(f"{len(data)} bytes came instead of {stop - (start or 0)}")
        return data

    return use_store(path, read)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a remote file; stores show it whole or not at all."""

    def write(filesystem: Any, name: str) -> None:
        if "file" in filesystem.protocol:  # stores have no folders
            filesystem.makedirs(name.rsplit("/", 1)[0], exist_ok=True)
        filesystem.pipe_file(name, data)

    use_store(path, write, doing="written")


def upload_file(local: Path, url: str) -> None:
    def put(filesystem: Any, name: str) -> None:
        filesystem.makedirs(name.rsplit("/", 1)[0], exist_ok=True)
        filesystem.put_file(str(local), name)
        if (size := filesystem.size(name)) != local.stat().st_size:
            raise OSError(f"{size} of {local.stat().st_size} bytes arrived")

    use_store(url, put, doing="written")


def path_exists(path: str | Path) -> bool:
    if not is_remote(path):
        return Path(path).exists()
    return use_store(path, lambda filesystem, name: bool(filesystem.exists(name)))


def list_names(folder: str | Path) -> list[str]:
    """The names in a folder, sorted; none if there is no such folder."""
    if not is_remote(folder):
        return sorted(os.listdir(folder)) if Path(folder).is_dir() else []
    try:
        found = use_store(folder, lambda filesystem, name: filesystem.ls(name, detail=False))
    except FileNotFoundError:
        return []
    names = (path.rstrip("/").rsplit("/", 1)[-1] for path in found)
    own = str(folder).rstrip("/").rsplit("/", 1)[-1]
    return sorted(name for name in names if name not in ("", own))


def remove_folder(folder: str | Path, *, first: str = "") -> None:
    """Remove a folder if it is there; in a store the file `first`, its manifest, goes before the others."""
    if not is_remote(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return

    def remove(filesystem: Any, root: str) -> None:
        manifest = join_path(root, first)
        if first and filesystem.exists(manifest):
            filesystem.rm_file(manifest)
        if filesystem.exists(root):
            filesystem.rm(root, recursive=True)

    try:
        use_store(folder, remove, doing="removed")
    except FileNotFoundError:  # somebody else removed it
        return


def remove_file(path: str | Path) -> None:
    """Remove a file if it is there."""
    if not is_remote(path):
        Path(path).unlink(missing_ok=True)
        return
    with suppress(FileNotFoundError):
        use_store(path, lambda filesystem, name: filesystem.rm_file(name), doing="removed")


def scratch_folder(url: str, purpose: str) -> Path:
    """A local folder that belongs to a URL: always the same on this machine, so that a killed run's is found again."""
    name = hashlib.sha256(url.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"recmill-{os.getuid()}-{purpose}-{name}"
