"""Files in the safetensors format, written and read block by block with checksums.

    | 8 bytes: length of the header | header: JSON, {name: {dtype, shape, data_offsets}} | tensors, row-major |

https://github.com/huggingface/safetensors describes it; any reader of safetensors can open the files. The checksums
(CRC-32 of every BLOCK_BYTES of a tensor) are kept by the caller. `__metadata__` of the header holds strings.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recmill.artifacts.manifest import FileEntry
from recmill.artifacts.places.stores import InputError, is_remote, read_bytes, use_store

MAX_HEADER_BYTES = 100 * 2**20  # as in the format's own reader
METADATA = "__metadata__"
BLOCK_BYTES = 4 * 2**20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor to write; `read` is called when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return count_bytes(self.dtype, self.shape)


@dataclass(frozen=True, kw_only=True)
class TensorPlace:
    """Where in its file a tensor begins, and the checksums of its blocks."""

    begin: int
    crc32: tuple[int, ...]


def count_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    return num_bytes


def write_tensors(
    path: str | Path, tensors: Sequence[StoredTensor], *, metadata: Mapping[str, str] | None = None
) -> tuple[list[TensorPlace], FileEntry]:
    """Write a local or remote file; the places of the tensors, and the file's size and hash.

    The bytes are on the disk or in the store when this returns.
    """
    if not is_remote(path):
        with open(path, "wb") as file:
            written = _write(file, Path(path).name, tensors, metadata)
            file.flush()
            os.fsync(file.fileno())
        return written

    def upload(filesystem: Any, name: str) -> tuple[list[TensorPlace], FileEntry]:
        filesystem.makedirs(name.rsplit("/", 1)[0], exist_ok=True)
        with filesystem.open(name, "wb") as file:
            written = _write(file, name.rsplit("/", 1)[-1], tensors, metadata)
        if (size := filesystem.size(name)) != written[1].bytes:
            raise OSError(f"{size} of {written[1].bytes} bytes arrived")
        return written

    return use_store(path, upload, doing="written")


def _write(
    file: Any, name: str, tensors: Sequence[StoredTensor], metadata: Mapping[str, str] | None
) -> tuple[list[TensorPlace], FileEntry]:
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for tensor in tensors:
        if tensor.dtype not in NAMES:
            raise TypeError(f"{tensor.name}: {tensor.dtype} has no name in safetensors files")
        begin, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    places, at, digest = [], len(text), hashlib.sha256(text)
    file.write(text)
    for tensor in tensors:
        crcs = []
        data = bytes_of(tensor.read())
        assert len(data) == tensor.num_bytes, tensor.name
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            crcs.append(zlib.crc32(block))
            digest.update(block)
            file.write(block)
        places.append(TensorPlace(begin=at, crc32=tuple(crcs)))
        at += tensor.num_bytes
    return places, FileEntry(name=name, bytes=at, sha256=f"sha256:{digest.hexdigest()}")


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a small file, and its metadata. The header is checked; whether the content is right is not."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    body = 8 + int.from_bytes(data[:8], "little")
    try:
        if len(data) < 8 or body > min(len(data), MAX_HEADER_BYTES):
            raise ValueError("its header is longer than the file")
        header = json.loads(data[8:body])
        metadata = header.pop(METADATA, {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError(f"{METADATA} holds something else than strings")
        return {name: _read_entry(data, body, name, entry) for name, entry in header.items()}, metadata
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError, OverflowError) as error:
        raise InputError(f"{path}: is not a safetensors file ({' '.join(str(error).split())[:200]})") from None


def _read_entry(data: bytes, body: int, name: str, entry: Mapping[str, Any]) -> Tensor:
    dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
    begin, end = entry["data_offsets"]
    if not all(type(size) is int and size >= 0 for size in (*shape, begin, end)):
        raise ValueError(f"{name}: sizes and offsets must be whole numbers of at least 0")
    if end - begin != count_bytes(dtype, shape) or body + end > len(data):
        raise ValueError(f"{name}: its bytes lie outside the file, or are not as many as its shape needs")
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data[body + begin : body + end]), dtype=dtype).view(shape)


def read_rows(
    path: str | Path, place: TensorPlace, dtype: torch.dtype, shape: Sequence[int], *, start: int, stop: int
) -> Tensor:
    """Rows `start` to `stop` of a stored tensor, with the checksums of all blocks they touch checked."""
    row_bytes, num_bytes = count_bytes(dtype, shape[1:]), count_bytes(dtype, shape)
    begin, end = start * row_bytes, stop * row_bytes
    first, last = begin // BLOCK_BYTES * BLOCK_BYTES, min(num_bytes, -(-end // BLOCK_BYTES) * BLOCK_BYTES)
    try:
        data = _read(path, place.begin + first, max(last - first, 0))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    view, is_whole = memoryview(data), len(data) == max(last - first, 0)
    for at in range(0, len(data), BLOCK_BYTES):
        number = (first + at) // BLOCK_BYTES
        is_known = number < len(place.crc32) and zlib.crc32(view[at : at + BLOCK_BYTES]) == place.crc32[number]
        is_whole = is_whole and is_known
    if not is_whole:
        raise InputError(f"{path}: is damaged: its content is not what was written")
    if begin == end:
        return torch.empty((stop - start, *shape[1:]), dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8)[begin - first : end - first]
    return flat.view(dtype).view(stop - start, *shape[1:])


def _read(path: str | Path, begin: int, num_bytes: int) -> bytearray:
    """So many bytes from `begin`, or as many as the file has."""
    if is_remote(path):
        return bytearray(read_bytes(path, begin, begin + num_bytes) if num_bytes else b"")
    data = bytearray(num_bytes)
    view, done = memoryview(data), 0
    with open(path, "rb", buffering=0) as file:
        file.seek(begin)
        while done < num_bytes and (count := file.readinto(view[done : done + BLOCK_BYTES])):
            done += count
    view.release()
    return data if done == num_bytes else data[:done]


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on any device, row-major."""
    whole = tensor.detach().cpu().contiguous().reshape(-1)
    if whole.stride(0) != 1:  # a single element out of a matrix counts as contiguous
        whole = whole.clone(memory_format=torch.contiguous_format)
    return whole.view(torch.uint8).numpy().data if whole.numel() else memoryview(b"")
