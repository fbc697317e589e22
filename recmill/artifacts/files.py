"""Local and remote files: JSON, hashes, and small files that appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recmill.artifacts.places.scratch import remove_leftovers_of, temporary_name
from recmill.artifacts.places.stores import InputError, is_remote, read_bytes, write_bytes


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in a local or remote file."""
    try:
        loaded = json.loads(read_bytes(path).decode("utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except InputError:
        raise
    except ValueError as error:  # also raised for invalid UTF-8
        raise InputError(f"{path}: not valid JSON ({error})") from None
    except RecursionError:
        raise InputError(f"{path}: not valid JSON (nested too deeply)") from None
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if not isinstance(loaded, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(loaded).__name__}")
    return loaded


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def dump_json(value: Any) -> str:
    """JSON as we write it: stable, readable, refusing NaN (which is not JSON)."""
    return json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"


def dump_record(record: Mapping[str, Any]) -> str:
    """JSON with a checksum over the rest of it, for files that no manifest lists; `read_checked_json` checks it."""
    rest = json.loads(dump_json({name: value for name, value in record.items() if name != "checksum"}))
    return dump_json({**rest, "checksum": hash_json(rest)})


def read_checked_json(path: str | Path, *, kind: str | None = None, may_lack_checksum: bool = False) -> dict[str, Any]:
    """The JSON object that `dump_record` wrote, without its checksum; `kind` is what its entry "kind" must be."""
    loaded = read_json(path)
    checksum = loaded.pop("checksum", None)
    if checksum is None and may_lack_checksum:
        return loaded
    if checksum is None:
        raise InputError(f"{path}: has no checksum: it was changed after it was written, or an older recmill wrote it")
    if checksum != hash_json(loaded):
        raise InputError(f"{path}: was changed after it was written")
    if kind is not None and loaded.get("kind") != kind:
        raise InputError(f"{path}: is a {loaded.get('kind')!r}, expected a {kind!r}")
    return loaded


def hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def hash_json(value: Any) -> str:
    """Content hash of a JSON value."""
    return "sha256:" + hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextmanager
def explain_write_errors(path: str | Path) -> Iterator[None]:
    """Turn errors of the file system while writing `path` into one sentence."""
    try:
        yield
    except OSError as error:
        reasons = {
            errno.ENOSPC: "the disk is full",
            errno.EDQUOT: "the disk quota is used up",
            errno.EACCES: "permission denied",
            errno.EPERM: "permission denied",
            errno.EROFS: "the file system is read-only",
            errno.ENOTDIR: "a parent of it is a file, not a folder",
            errno.EEXIST: "a parent of it is a file, not a folder",
        }
        if error.errno not in reasons:
            raise
        raise InputError(f"{path}: cannot be written: {reasons[error.errno]}") from error


def write_text_atomically(path: str | Path, text: str) -> None:
    """Write a small file so that a reader sees the old or the new content, never half of it."""
    if is_remote(path):
        write_bytes(path, text.encode("utf-8"))
        return
    target = Path(path)
    with explain_write_errors(path):
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers_of(target)
        temporary = temporary_name(target)
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(text)
                file.flush()
                os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
