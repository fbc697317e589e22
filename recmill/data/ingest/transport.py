"""Objects between processes through shared memory: one copy into it, none out of it."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SHARED_MEMORY = Path("/dev/shm")
ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """A pickled object whose arrays lie in a file: small enough for a pipe."""

    header: bytes
    path: str
    sizes: tuple[int, ...]


class _Pickler(pickle.Pickler):
    """Lets tensors travel as arrays, whose bytes stay out of the pickle."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return torch.from_numpy, (obj.detach().cpu().numpy(),)
        return NotImplemented


def shared_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for parcels: in memory where there is /dev/shm. What is left in it goes with it."""
    where = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    return tempfile.TemporaryDirectory(prefix="recmill-", dir=where, ignore_cleanup_errors=True)


def pack(obj: Any, folder: str) -> Parcel:
    """Put the arrays of an object into a new file of the folder."""
    buffers: list[pickle.PickleBuffer] = []
    header = io.BytesIO()
    _Pickler(header, protocol=5, buffer_callback=buffers.append).dump(obj)
    if not buffers:
        return Parcel(header=header.getvalue(), path="", sizes=())
    handle, path = tempfile.mkstemp(dir=folder)
    sizes = []
    with os.fdopen(handle, "wb") as file:
        for buffer in buffers:
            raw = buffer.raw()
            file.write(raw)
            file.write(bytes(-raw.nbytes % ALIGNMENT))
            sizes.append(raw.nbytes)
    return Parcel(header=header.getvalue(), path=path, sizes=tuple(sizes))


def unpack(parcel: Parcel) -> Any:
    """The object; its arrays are the file's pages, which go when the last of them does."""
    if not any(parcel.sizes):
        return pickle.loads(parcel.header, buffers=[bytearray() for _ in parcel.sizes])
    with Path(parcel.path).open("r+b") as file:
        pages = memoryview(mmap.mmap(file.fileno(), 0))
    Path(parcel.path).unlink()
    views, start = [], 0
    for size in parcel.sizes:
        views.append(pages[start : start + size])
        start += size + -size % ALIGNMENT
    return pickle.loads(parcel.header, buffers=views)
