"""torch.distributed.checkpoint on safetensors files: its planners divide tensors among ranks, this stores them.

    rank-00000.safetensors   what rank 0 wrote: whole tensors, and its parts of tables
    tensors.json             every tensor: dtype, shape, and for each part its offset, shape, file, place and checksums

torch's own storage keeps the index as a pickle. Its writer for safetensors (HuggingFaceStorageWriter) needs two more
packages, holds a whole file in memory, allows one part of a tensor per file, and has no checksums.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from recmill.artifacts import (
    FileEntry,
    InputError,
    dump_json,
    is_remote,
    join_path,
    read_json,
    read_record,
    record_json,
)
from recmill.artifacts.places.stores import use_store
from recmill.artifacts.tensors import (
    DTYPES,
    NAMES,
    StoredTensor,
    TensorPlace,
    count_bytes,
    read_rows,
    write_tensors,
)

INDEX_FILE = "tensors.json"
FORMAT_VERSION = 1
READ_BYTES = 64 * 2**20
FILE_NAME = re.compile(r"rank-\d{5,}\.safetensors")


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """A part of a tensor: where it lies in the tensor, and where in which file it is stored."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    begin: int
    crc32: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]


@dataclass(frozen=True, kw_only=True)
class TensorIndex:
    """tensors.json"""

    format_version: int
    tensors: Mapping[str, TensorEntry]

    def save(self, folder: Path) -> None:
        """Write it to a local folder."""
        (folder / INDEX_FILE).write_text(dump_json(record_json(self)), encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> TensorIndex:
        """Read and check it: parts lie inside their tensor and inside files of this folder."""
        where = join_path(folder, INDEX_FILE)
        sizes = _file_sizes(folder)
        if ".metadata" in sizes:
            raise InputError(
                f"{folder}: an older recmill wrote it; convert it: recmill convert-checkpoint {folder} --out NEW"
            )
        index = read_record(cls, read_json(where), where=where)
        if index.format_version != FORMAT_VERSION:
            raise InputError(f"{where}: format_version is {index.format_version}, this recmill reads {FORMAT_VERSION}")
        sizes = {name: size for name, size in sizes.items() if FILE_NAME.fullmatch(name)}
        for name, entry in index.tensors.items():
            if entry.dtype not in DTYPES:
                raise InputError(f"{where}: {name} has dtype {entry.dtype!r}, expected one of {', '.join(DTYPES)}")
            for part in entry.parts:
                ranks = {len(entry.shape), len(part.shape), len(part.offset)}
                spans = zip(part.offset, part.shape, entry.shape, strict=False)
                if len(ranks) > 1 or any(offset + size > whole for offset, size, whole in spans):
                    raise InputError(f"{where}: a part of {name} lies outside the tensor")
                end = part.begin + count_bytes(DTYPES[entry.dtype], part.shape)
                if end > sizes.get(part.file, -1):
                    raise InputError(f"{where}: a part of {name} lies outside its file {part.file!r}")
        return index


def _file_sizes(folder: str | Path) -> dict[str, int]:
    if not is_remote(folder):
        return {path.name: path.stat().st_size for path in Path(folder).iterdir() if path.is_file()}

    def sizes(filesystem: Any, root: str) -> dict[str, int]:
        found = (entry for entry in filesystem.ls(root, detail=True) if entry["type"] == "file")
        return {entry["name"].rsplit("/", 1)[-1]: int(entry["size"]) for entry in found}

    return use_store(folder, sizes)


def save_tensors(state: dict[str, Any], folder: Path, **options: Any) -> None:
    """Write the tensors of a state to a local folder in this process alone."""
    writer = TensorWriter(folder)
    writer.plan(state, **options)
    written = writer.write()
    writer.save_index([written], folder)


def load_tensors(state: dict[str, Any], folder: str | Path, **options: Any) -> None:
    """Fill the tensors of a state, whatever number of ranks wrote them and reads them."""
    try:
        with _raising_causes():
            dcp.load(state, storage_reader=TensorReader(folder), **options)
    except (RuntimeError, ValueError) as error:  # a tensor that is missing or has another shape
        if isinstance(error, InputError):
            raise
        raise InputError(f"{folder}: is not a checkpoint of this model ({' '.join(str(error).split())})") from error


@contextmanager
def _raising_causes() -> Iterator[None]:
    """Silence torch's warnings, and raise what was raised on some rank instead of torch's collection of tracebacks."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except dcp.CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        raise next((cause for cause in causes if isinstance(cause, InputError)), causes[0]) from None


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """What a rank wrote: its file, and the places of the tensors by name and offset."""

    entry: FileEntry
    places: Mapping[tuple[str, tuple[int, ...] | None], TensorPlace]

    def to_json(self) -> dict[str, Any]:
        places = [[name, offset, place.begin, place.crc32] for (name, offset), place in self.places.items()]
        return {"entry": record_json(self.entry), "places": places}

    @classmethod
    def from_json(cls, loaded: Mapping[str, Any]) -> WrittenFile:
        places = {
            (name, None if offset is None else tuple(offset)): TensorPlace(begin=begin, crc32=tuple(crc32))
            for name, offset, begin, crc32 in loaded["places"]
        }
        return cls(entry=FileEntry(**loaded["entry"]), places=places)


class TensorWriter(dcp.StorageWriter):  # type: ignore[misc]
    """Every rank writes one file; the first one writes the index.

    All ranks `plan` together, `write` each by itself and at any time, and the first calls `save_index` with what they
    wrote. With `copies(num_bytes of all ranks)` the plan ends with a copy of the state in memory, so that the live one
    may change before it is written.
    """

    def __init__(self, folder: str | Path, *, copies: Callable[[int], bool] = lambda _: False) -> None:
        self._folder, self._copies = folder, copies
        self.has_copied, self.num_bytes = False, 0  # of this rank
        self._file = ""
        self._items: list[WriteItem] = []
        self._tensors: list[StoredTensor] = []
        self._metadata: Metadata | None = None

    def plan(self, state: dict[str, Any], **options: Any) -> None:
        """Divide the tensors of a nested dictionary among the ranks of the process group."""
        with _raising_causes():
            dcp.save(state, storage_writer=self, **options)

    def write(self) -> WrittenFile:
        """Write this rank's file; a copy is freed afterwards."""
        places, entry = write_tensors(join_path(self._folder, self._file), self._tensors)
        self._tensors = []
        indexes = (item.index for item in self._items)
        keys = [(index.fqn, None if index.offset is None else tuple(index.offset)) for index in indexes]
        return WrittenFile(entry=entry, places=dict(zip(keys, places, strict=True)))

    def save_index(self, written: Sequence[WrittenFile], folder: Path) -> None:
        """Write tensors.json to a local folder, from what all ranks have written; only on the first rank."""
        assert self._metadata is not None
        places = {key: (own.entry.name, place) for own in written for key, place in own.places.items()}
        tensors = {}
        for name, stored in self._metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            parts = []
            for chunk in stored.chunks:
                key = (name, tuple(chunk.offsets))
                file, place = places[key] if key in places else places[name, None]
                parts.append(TensorPart(offset=key[1], shape=tuple(chunk.sizes), file=file, **vars(place)))
            dtype = NAMES[stored.properties.dtype]
            tensors[name] = TensorEntry(dtype=dtype, shape=tuple(stored.size), parts=tuple(parts))
        TensorIndex(format_version=FORMAT_VERSION, tensors=tensors).save(folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        num_bytes = sum(_describe(item).num_bytes for plan in plans for item in plan.items)
        copies = self._copies(num_bytes)
        names = [f"rank-{rank:05d}.safetensors" for rank in range(len(plans))]
        return [replace(plan, storage_data=(name, copies)) for name, plan in zip(names, plans, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Keep what is to be written, or a copy of it."""
        self._file, self.has_copied = plan.storage_data
        self._items = list(plan.items)
        self._tensors = [_describe(item, planner, copies=self.has_copied) for item in plan.items]
        self.num_bytes = sum(tensor.num_bytes for tensor in self._tensors)
        done: Future[list[WriteResult]] = Future()
        pairs = zip(self._items, self._tensors, strict=True)
        done.set_result([WriteResult(index=i.index, size_in_bytes=t.num_bytes, storage_data=None) for i, t in pairs])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._metadata = metadata

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _describe(item: WriteItem, planner: SavePlanner | None = None, *, copies: bool = False) -> StoredTensor:
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        raise TypeError(f"{item.index.fqn}: not a tensor; checkpoints hold tensors only")

    def read() -> Tensor:
        assert planner is not None
        found = planner.resolve_data(item)
        assert isinstance(found, Tensor)
        return found

    tensor = StoredTensor(
        name=stored_name(item.index.fqn, item.index.offset),
        dtype=item.tensor_data.properties.dtype,
        shape=tuple(item.tensor_data.chunk.sizes),
        read=read,
    )
    if not copies:
        return tensor
    copy = read().detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return replace(tensor, read=lambda: copy)


def stored_name(name: str, offset: Sequence[int] | None) -> str:
    """The name of a part in its file: that of the tensor for the first part, which most tensors consist of."""
    return f"{name}@{','.join(map(str, offset))}" if offset and any(offset) else name


class TensorReader(dcp.StorageReader):  # type: ignore[misc]
    """Reads the rows that a rank needs from the files of all ranks that wrote."""

    def __init__(self, folder: str | Path) -> None:
        self._folder, self._index = folder, TensorIndex.load(folder)  # torch would hide why an index cannot be read
        self._parts: dict[MetadataIndex, tuple[TensorEntry, TensorPart]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index = self._index
        self._parts = {
            MetadataIndex(name, torch.Size(part.offset)): (entry, part)
            for name, entry in index.tensors.items()
            for part in entry.parts
        }
        described: dict[str, Any] = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[entry.dtype]),
                size=torch.Size(entry.shape),
                chunks=[
                    ChunkStorageMetadata(offsets=torch.Size(part.offset), sizes=torch.Size(part.shape))
                    for part in entry.parts
                ],
            )
            for name, entry in index.tensors.items()
        }
        return Metadata(state_dict_metadata=described, storage_data=self._parts)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._parts = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            entry, part = self._parts[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]
            offsets, lengths = tuple(item.storage_offsets) or (0,), tuple(item.lengths) or (1,)
            target = planner.resolve_tensor(item).detach()
            rows = target if target.dim() else target.unsqueeze(0)
            dtype, shape = DTYPES[entry.dtype], part.shape or (1,)
            step = max(1, READ_BYTES // max(1, count_bytes(dtype, shape[1:])))
            for start in range(0, lengths[0], step):  # a part may be larger than the memory that is left
                stop = min(lengths[0], start + step)
                first, place = offsets[0], TensorPlace(begin=part.begin, crc32=part.crc32)
                path = join_path(self._folder, part.file)
                stored = read_rows(path, place, dtype, shape, start=first + start, stop=first + stop)
                for axis in range(1, len(offsets)):
                    stored = stored.narrow(axis, offsets[axis], lengths[axis])
                rows[start:stop].copy_(stored)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
