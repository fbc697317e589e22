"""Folders that appear whole or not at all, on a local disk or an object store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recmill.artifacts.files import explain_write_errors
from recmill.artifacts.places.scratch import exchange_paths, held_folder, is_leftover
from recmill.artifacts.places.stores import (
    InputError,
    is_remote,
    join_path,
    list_names,
    remove_folder,
    upload_file,
    use_store,
    write_bytes,
)

UNFINISHED = ".recmill-unfinished"  # in a remote folder from before its first file until after its manifest


@contextmanager
def write_folder(out: str | Path, *, manifest_name: str) -> Iterator[Path]:
    """A temporary folder that becomes `out` when the block ends without an error, and vanishes otherwise.

    An `out` that exists is replaced only if it is empty or written by recmill before (it holds `manifest_name`).
    A remote `out` is uploaded at the end, the manifest last, so that a reader never finds a manifest without its files.
    """
    refuse_foreign_folder(out, manifest_name)
    if is_remote(out):
        with explain_write_errors(out), held_folder(purpose="upload") as folder:
            yield folder
            _upload(folder, str(out), manifest_name)
        return
    target = Path(out).absolute()
    with explain_write_errors(out):
        target.parent.mkdir(parents=True, exist_ok=True)
        with held_folder(target) as folder:
            yield folder
            _swap_in(folder, target)


def refuse_foreign_folder(target: str | Path, manifest_name: str) -> None:
    """Raise if `target` holds files that recmill did not write, so that no user's file is ever overwritten."""
    foreign = f"exists, is not empty and holds no {manifest_name}; give another --out or empty it first"
    if is_remote(target):
        names = list_names(target)
        if names and manifest_name not in names and UNFINISHED not in names:
            raise InputError(f"{target}: {foreign}")
        return
    folder = Path(target).absolute()
    try:
        if folder.is_file():
            raise InputError(f"{folder}: exists and is a file; --out must be a folder")
        names = os.listdir(folder) if folder.is_dir() else []
        if manifest_name not in names and any(not is_leftover(name) for name in names):
            raise InputError(f"{folder}: {foreign}")
    except PermissionError:
        raise InputError(f"{folder}: cannot be written: permission denied") from None


def _swap_in(folder: Path, target: Path) -> None:
    """Give the folder its name. One that had the name before ends as the temporary folder, which is removed."""
    if not target.exists():
        os.rename(folder, target)
    elif not exchange_paths(folder, target):
        retired = folder.with_suffix(".old")
        os.rename(target, retired)
        os.rename(folder, target)
        shutil.rmtree(retired)


def _upload(folder: Path, url: str, manifest_name: str) -> None:
    """Replace what is at the URL. If this process is killed meanwhile, the mark says that the folder is ours."""
    write_bytes(join_path(url, UNFINISHED), manifest_name.encode())
    names = [name for name in list_names(url) if name != UNFINISHED]
    for name in sorted(names, key=lambda name: name != manifest_name):
        remove_folder(join_path(url, name))
    upload_folder(folder, url, last=manifest_name)
    remove_folder(join_path(url, UNFINISHED))


def upload_folder(folder: Path, url: str, *, last: str) -> None:
    """Copy the files of a folder to a URL, the file `last` after all others."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda path: path.relative_to(folder).as_posix() == last):
        upload_file(path, join_path(url, path.relative_to(folder).as_posix()))


@contextmanager
def local_folder(path: str | Path) -> Iterator[Path]:
    """The folder as a local path: itself, or a temporary download of a remote one."""
    if not is_remote(path):
        yield Path(path)
        return
    with held_folder(purpose="download") as scratch:
        try:
            use_store(path, lambda filesystem, root: filesystem.get(join_path(root, ""), f"{scratch}/", recursive=True))
        except FileNotFoundError:
            raise InputError(f"{path}: no such folder") from None
        yield scratch
