"""Folders that appear whole or not at all, on a local disk or an object store."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec

from recmill.artifacts.files import InputError, explain_write_errors, is_remote, join_path


@contextmanager
def write_folder(out: str | Path, *, manifest_name: str) -> Iterator[Path]:
    """A temporary folder that becomes `out` when the block ends without an error, and vanishes otherwise.

    An `out` that exists is replaced only if it is empty or written by recmill before (it holds `manifest_name`).
    A remote `out` is uploaded at the end, the manifest last, so that a reader never finds a manifest without its files.
    """
    refuse_foreign_folder(out, manifest_name)
    if is_remote(out):
        with tempfile.TemporaryDirectory(prefix="recmill-") as scratch:
            folder = Path(scratch)
            yield folder
            _upload(folder, str(out), manifest_name)
        return
    target = Path(out).absolute()
    with explain_write_errors(out):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
        folder.mkdir()
        try:
            yield folder
            _swap_in(folder, target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def refuse_foreign_folder(target: str | Path, manifest_name: str) -> None:
    """Raise if `target` holds files that recmill did not write, so that no user's file is ever overwritten."""
    foreign = f"exists, is not empty and holds no {manifest_name}; give another --out or empty it first"
    if is_remote(target):
        filesystem, root = fsspec.core.url_to_fs(str(target))
        if filesystem.exists(root) and filesystem.ls(root) and not filesystem.exists(join_path(root, manifest_name)):
            raise InputError(f"{target}: {foreign}")
        return
    folder = Path(target).absolute()
    try:
        if folder.is_file():
            raise InputError(f"{folder}: exists and is a file; --out must be a folder")
        if folder.is_dir() and any(folder.iterdir()) and not (folder / manifest_name).exists():
            raise InputError(f"{folder}: {foreign}")
    except PermissionError:
        raise InputError(f"{folder}: cannot be written: permission denied") from None


def _swap_in(folder: Path, target: Path) -> None:
    if target.exists():
        retired = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.old"
        os.rename(target, retired)
        os.rename(folder, target)
        shutil.rmtree(retired)
    else:
        os.rename(folder, target)


def _upload(folder: Path, url: str, manifest_name: str) -> None:
    filesystem, root = fsspec.core.url_to_fs(url)
    if filesystem.exists(root):
        filesystem.rm(root, recursive=True)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda path: path.name == manifest_name):
        destination = join_path(root, path.relative_to(folder).as_posix())
        filesystem.makedirs(destination.rsplit("/", 1)[0], exist_ok=True)
        filesystem.put_file(str(path), destination)


@contextmanager
def local_folder(path: str | Path) -> Iterator[Path]:
    """The folder as a local path: itself, or a temporary download of a remote one."""
    if not is_remote(path):
        yield Path(path)
        return
    filesystem, root = fsspec.core.url_to_fs(str(path))
    with tempfile.TemporaryDirectory(prefix="recmill-") as scratch:
        filesystem.get(join_path(root, ""), scratch + "/", recursive=True)
        yield Path(scratch)
