"""The rows of one table in a sparse file on disk: read and written in bulk, initialised on first touch.

    record of a row:   | D weights | S floats of optimiser state |     float32, row after row

The file is as long as the whole table, but only written pages take space: creating a table of 50 GB takes no time.
Untouched rows have no bytes; their initial values are a hash of the row number. The mapping is dropped from memory from
time to time: written pages stay with the operating system, which may cache them.

Shape suffixes: R = rows, D = embedding width, S = floats of state per row.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from recmill.artifacts import InputError, explain_write_errors

IdArray = npt.NDArray[np.int64]
PAGE_BYTES = mmap.PAGESIZE
BLOCK_ROWS = 1 << 16


def hashed_rows(rows_R: IdArray, dim: int, *, scale: float, seed: int) -> Tensor:
    """[R, D] uniform in +-scale, each row computed from its number alone (splitmix64), at any time."""
    with np.errstate(over="ignore"):
        base_R = (rows_R.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = base_R[:, None] ^ (np.arange(1, dim + 1, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03))[None, :]
        mixed += np.uint64((seed * 0x2545F4914F6CDD1D + 0x632BE59BD9B4E019) % 2**64)
        mixed ^= mixed >> np.uint64(30)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(27)
        mixed *= np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    unit = (mixed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return torch.from_numpy((2 * unit - 1) * np.float32(scale))


class RowBlocks(Tensor):
    """All rows of a table for a checkpoint, block by block: a table beyond memory is never copied as one tensor.

    A view of the file (`rows.as_subclass(RowBlocks)`) with the methods that torch's distributed checkpoints need for a
    tensor stored in parts (`_Checkpointable`). Reading a checkpoint into the blocks writes the rows.
    """

    # Results of operations on it are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        shape = self.shape
        return [
            ChunkStorageMetadata(
                offsets=torch.Size([start, *(0 for _ in shape[1:])]),
                sizes=torch.Size([min(BLOCK_ROWS, shape[0] - start), *shape[1:]]),
            )
            for start in range(0, shape[0], BLOCK_ROWS)
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.shape
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.as_subclass(Tensor)[index.offset[0] : index.offset[0] + BLOCK_ROWS]


class DiskRows:
    """Rows by number, weights next to state. Not thread-safe."""

    def __init__(
        self,
        path: Path,
        *,
        num_rows: int,
        dim: int,
        state_width: int,
        scale: float,
        seed: int,
        resident_bytes: int = 256 * 2**20,
    ) -> None:
        """`resident_bytes` limits how much of the file stays mapped into this process."""
        self.num_rows, self.dim, self.width = num_rows, dim, dim + state_width
        self.scale, self.seed = scale, seed
        self._max_pages = max(1, resident_bytes // PAGE_BYTES)
        self._pages_per_row = 1 + 4 * self.width // PAGE_BYTES
        self._pages = 0
        self.num_bytes = 4 * num_rows * self.width
        with explain_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "w+b")  # noqa: SIM115  open as long as the mapping
            os.ftruncate(self._file.fileno(), self.num_bytes)
        try:
            self._map = mmap.mmap(self._file.fileno(), self.num_bytes)
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: {self.num_bytes:,} bytes cannot be mapped ({error})") from error
        self._map.madvise(mmap.MADV_RANDOM)  # rows are scattered: kernel read-ahead would fetch unneeded pages
        self._rows = torch.frombuffer(self._map, dtype=torch.float32).view(num_rows, self.width)
        self._touched = np.zeros(-(-num_rows // 8), np.uint8)

    @property
    def address(self) -> int:
        """Address of the first row in memory."""
        return self._rows.data_ptr()

    def clear(self) -> None:
        """Reset all rows to untouched."""
        self._release()
        os.ftruncate(self._file.fileno(), 0)
        os.ftruncate(self._file.fileno(), self.num_bytes)
        self._touched[:] = 0

    def read(self, rows_R: IdArray) -> Tensor:
        """[R, D + S]."""
        is_there = self._is_touched(rows_R)
        if is_there.all():
            found = self._rows.index_select(0, torch.from_numpy(rows_R))
        else:
            found = torch.zeros(len(rows_R), self.width)
            fresh = np.flatnonzero(~is_there)
            drawn = hashed_rows(rows_R[fresh], self.dim, scale=self.scale, seed=self.seed)
            found[torch.from_numpy(fresh), : self.dim] = drawn
            known = np.flatnonzero(is_there)
            found[torch.from_numpy(known)] = self._rows.index_select(0, torch.from_numpy(rows_R[known]))
        self._count_pages(len(rows_R))
        return found

    def write(self, rows_R: IdArray, values: Tensor) -> None:
        """Rows must be distinct."""
        self._rows.index_copy_(0, torch.from_numpy(rows_R), values)
        np.bitwise_or.at(self._touched, rows_R >> 3, (1 << (rows_R & 7)).astype(np.uint8))
        self._count_pages(len(rows_R))

    def fill(self) -> Tensor:
        """Write every untouched row and return the whole table: [num_rows, D + S], a view of the file."""
        for start in range(0, self.num_rows, BLOCK_ROWS):
            rows = np.arange(start, min(start + BLOCK_ROWS, self.num_rows))
            fresh = rows[~self._is_touched(rows)]
            if len(fresh):
                self.write(fresh, self.read(fresh))
        return self._rows

    def _is_touched(self, rows_R: IdArray) -> npt.NDArray[np.bool_]:
        return np.asarray((self._touched[rows_R >> 3] >> (rows_R & 7).astype(np.uint8)) & 1, bool)

    def _count_pages(self, num_rows: int) -> None:
        self._pages += num_rows * self._pages_per_row
        if self._pages > self._max_pages:
            self._release()

    def _release(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)  # the mapping is shared: nothing written is lost
        self._pages = 0

    def close(self) -> None:
        self._release()
        self._file.close()
