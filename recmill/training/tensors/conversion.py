"""Checkpoints of older versions, written by torch's own storage, as safetensors.

Their index (`.metadata`) is a pickle and their tensors are files of `torch.save`. The index is read by an unpickler
that knows the classes of such an index and refuses every other name; tensors are read with `weights_only=True`. So
nothing in a checkpoint is run, as far as those two readers keep their promise.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from recmill.artifacts import Checkpoint, InputError, local_folder, write_folder
from recmill.artifacts.tensors import NAMES, StoredTensor, write_tensors
from recmill.training.tensors.storage import FORMAT_VERSION, TensorEntry, TensorIndex, TensorPart, stored_name

OLD_INDEX = ".metadata"
# What a damaged pickle leads to.
PICKLE_ERRORS = (
    *(pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, ImportError),
    *(LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError),
)
DCP = "torch.distributed.checkpoint"
KNOWN = {
    *((f"{DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata")),
    *((f"{DCP}.metadata", name) for name in ("TensorProperties", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING")),
    (f"{DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    *(("torch", str(dtype).removeprefix("torch.")) for dtype in NAMES),
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"names {module}.{name}, which no index of a checkpoint needs")
        return super().find_class(module, name)


def convert_checkpoint(old: str | Path, *, out: str | Path) -> Checkpoint:
    """Write the checkpoint `old` to `out` in today's format: the same tensors, tensor by tensor."""
    with local_folder(old) as folder:
        return _convert(folder, old, out=out)


def _convert(folder: Path, old: str | Path, *, out: str | Path) -> Checkpoint:
    checkpoint = Checkpoint.load(folder, verify=True)
    if not (folder / OLD_INDEX).exists():
        raise InputError(f"{old}: holds no {OLD_INDEX}: there is nothing to convert")
    index = _read_index(folder)
    by_file: dict[str, list[MetadataIndex]] = {}
    for key, place in index.storage_data.items():
        by_file.setdefault(place.relative_path, []).append(key)
    with write_folder(out, manifest_name=Checkpoint.manifest_name) as target:
        parts: dict[str, list[TensorPart]] = {}
        for rank, (_, keys) in enumerate(sorted(by_file.items())):
            tensors = [_describe(folder, index, key) for key in keys]
            new = f"rank-{rank:05d}.safetensors"
            places, _ = write_tensors(target / new, tensors)
            for key, tensor, place in zip(keys, tensors, places, strict=True):
                offset = tuple(key.offset or (0 for _ in tensor.shape))
                part = TensorPart(offset=offset, shape=tensor.shape, file=new, **vars(place))
                parts.setdefault(key.fqn, []).append(part)
        entries = {
            name: TensorEntry(dtype=NAMES[stored.properties.dtype], shape=tuple(stored.size), parts=tuple(parts[name]))
            for name, stored in index.state_dict_metadata.items()
        }
        TensorIndex(format_version=FORMAT_VERSION, tensors=entries).save(target)
        replace(checkpoint, path="", content_hash="", files=()).seal(target)
    return Checkpoint.load(out)


def _read_index(folder: Path) -> Any:
    path = folder / OLD_INDEX
    try:
        with open(path, "rb") as file:
            index = _IndexUnpickler(file).load()
        for name, stored in index.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata) or stored.properties.dtype not in NAMES:
                raise InputError(f"{path}: {name} is not a tensor")
        for place in index.storage_data.values():
            if Path(place.relative_path).name != place.relative_path:
                raise InputError(f"{path}: names {place.relative_path!r}, which is outside the folder")
    except InputError:
        raise
    except PICKLE_ERRORS as error:
        raise InputError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]})") from None
    return index


def _describe(folder: Path, index: Any, key: MetadataIndex) -> StoredTensor:
    stored, place = index.state_dict_metadata[key.fqn], index.storage_data[key]
    offset = torch.Size(key.offset or [0] * len(stored.size))
    chunk = next(chunk for chunk in stored.chunks if chunk.offsets == offset)
    read: Callable[[], Tensor] = partial(_read_tensor, folder / place.relative_path, place.offset, place.length)
    return StoredTensor(
        name=stored_name(key.fqn, offset), dtype=stored.properties.dtype, shape=tuple(chunk.sizes), read=read
    )


def _read_tensor(path: Path, begin: int, length: int) -> Tensor:
    with open(path, "rb") as file:
        file.seek(begin)
        data = io.BytesIO(file.read(length))
    try:
        found = torch.load(data, map_location="cpu", weights_only=True)
    except PICKLE_ERRORS as error:
        raise InputError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]})") from None
    assert isinstance(found, Tensor)
    return found
