"""The input of a training step, and how it is cut from Arrow columns without touching single rows.

Shape suffixes: B = samples, F = dense features, K = id features, R = rows of a row group, T = labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from kernels.buffers import join_arrays
from kernels.decode_pages import MAX_BOUND, DecodedRows
from kernels.join_lists import ListBlock, Lists, join_lists, pack_lists, scan_lists
from kernels.recycled import recycled_array, recycled_arrays
from recmill.artifacts import InputError
from recmill.data.ikjt.build import split_list_column
from recmill.data.ikjt.cutting import cut_ids
from recmill.data.ikjt.distinct import DistinctBlock, check_ranges, find_distinct, is_packed, stack_labels, take_lists
from recmill.data.ikjt.tensor import InverseKeyedJaggedTensor
from recmill.data.schema import Schema

FloatArray = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The samples one rank trains on in one step.

    `ids` holds every id feature in schema order, key-major, or with repeated lists stored once (tensor.py):

        sample:         0       1            0     1
        lists:   a: [7, 9]    [4]     b:    []   [3]
        values  = [7, 9, 4, 3]      lengths = [2, 1, 0, 1]
    """

    dense_BF: Tensor
    ids: KeyedJaggedTensor | InverseKeyedJaggedTensor
    label_BT: Tensor  # one column per label of the schema
    num_global: int  # samples of the same step over all ranks
    session_B: Tensor | None = None  # only if the reader was told to keep sessions, as for evaluation; stays on the CPU

    def __len__(self) -> int:
        return int(self.label_BT.shape[0])

    @property
    def label_B(self) -> Tensor:
        """The first label."""
        return self.label_BT[:, 0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        target = torch.device(device)
        return replace(
            self,
            dense_BF=self.dense_BF.to(target, non_blocking=non_blocking),
            ids=self.ids.to(target, non_blocking=non_blocking),
            label_BT=self.label_BT.to(target, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Self:
        return replace(
            self, dense_BF=self.dense_BF.pin_memory(), ids=self.ids.pin_memory(), label_BT=self.label_BT.pin_memory()
        )

    def record_stream(self, stream: torch.cuda.streams.Stream) -> None:
        """Tell CUDA's allocator that `stream` uses these tensors (called by TorchRec's train pipelines)."""
        self.dense_BF.record_stream(stream)
        self.ids.record_stream(stream)
        self.label_BT.record_stream(stream)

    def size_in_bytes(self) -> int:
        if isinstance(self.ids, InverseKeyedJaggedTensor):
            return int(self.dense_BF.nbytes + self.label_BT.nbytes + self.ids.size_in_bytes())
        return sum(t.nbytes for t in (self.dense_BF, self.ids.values(), self.ids.lengths(), self.label_BT))


@dataclass(frozen=True, kw_only=True, eq=False)
class RowBlock:
    """Decoded rows of one row group, with one list per sample; batches are slices of it.

    The ids stay where they were decoded: row r of feature k is values[k][offsets[k][r] : offsets[k][r + 1]].
    """

    dense_RF: FloatArray
    label_RT: FloatArray
    lists: Lists
    num_values_R: IdArray  # number of ids of all features in the rows before r; one entry more than rows
    session_R: IdArray | None = None

    @property
    def values(self) -> tuple[npt.NDArray[np.integer], ...]:
        return self.lists.values

    @property
    def offsets(self) -> tuple[npt.NDArray[np.integer], ...]:
        return self.lists.offsets

    def __len__(self) -> int:
        return int(self.label_RT.shape[0])

    def batch_bytes(self, start: int, stop: int) -> int:
        """Bytes that the rows [start, stop) add to a batch."""
        num_values = int(self.num_values_R[stop] - self.num_values_R[start])
        num_plain = int(self.dense_RF.shape[1]) + self.lists.num_features + int(self.label_RT.shape[1])
        return 8 * num_values + 4 * (stop - start) * num_plain

    @property
    def nbytes(self) -> int:
        return self.lists.nbytes + sum(int(array.nbytes) for array in (self.dense_RF, self.label_RT, self.num_values_R))


BlockSlice = tuple[RowBlock | DistinctBlock, int, int]  # rows [start, stop) of a row group


def _stack(columns: Sequence[FloatArray], num_rows: int) -> FloatArray:
    stacked_RF: FloatArray = recycled_array((num_rows, len(columns)), np.float32)
    for position, column in enumerate(columns):
        stacked_RF[:, position] = column
    return stacked_RF


def decode_block(
    table: pa.Table | DecodedRows,
    schema: Schema,
    *,
    where: str = "table",
    checks_ranges: bool = True,
    keeps_sessions: bool = False,
    packs_lists: bool = False,
) -> RowBlock:
    """The columns of `table` as arrays: id lists as views of Arrow's buffers, dense features side by side.

    With `packs_lists` ids are copied into 4 bytes each where their tables allow it, for blocks that are held for long:
    they take half of the memory, and Arrow's is used again for the next table.

    A missing list is empty and a missing dense value is 0; a missing label or id is an error. Callers that check the
    ids later, after deduplication or transforms, pass `checks_ranges=False`.
    """
    if isinstance(table, DecodedRows):
        return _block_of_rows(table, schema, where=where, keeps_sessions=keeps_sessions)
    num_rows = table.num_rows
    numbers = [_dense_column(_column(table, feature.name, where), feature.name, where) for feature in schema.dense]
    dense_RF = _stack(numbers, num_rows)
    if not np.isfinite(dense_RF).all():
        filled = [_filled(column, feature.name, where) for column, feature in zip(numbers, schema.dense, strict=True)]
        dense_RF = _stack(filled, num_rows)
    columns = [_id_column(_column(table, feature.name, where), feature.name, where) for feature in schema.id_features]
    lists = _list_block(columns, num_rows)
    bounds = [feature.num_rows for feature in schema.id_features] if checks_ranges else None
    packed = pack_lists(lists, bounds) if packs_lists and bounds and max(bounds) <= MAX_BOUND else None
    num_values_R, wrong = (packed[1], None) if packed else scan_lists(lists, bounds)
    block = RowBlock(
        dense_RF=dense_RF,
        label_RT=stack_labels([_label_column(_column(table, name, where), name, where) for name in schema.labels]),
        lists=packed[0] if packed else lists,
        num_values_R=num_values_R,
        session_R=_column(table, "session_id", where).to_numpy().astype(np.int64) if keeps_sessions else None,
    )
    if wrong is not None:
        check_ranges(find_distinct(block, [feature.name for feature in schema.id_features], ()), schema, where=where)
    return block


def _block_of_rows(rows: DecodedRows, schema: Schema, *, where: str, keeps_sessions: bool) -> RowBlock:
    """The same as `decode_block`; ids were checked when they were decoded."""
    dense_RF, label_RT = recycled_arrays(
        [((rows.num_rows, len(schema.dense)), np.float32), ((rows.num_rows, len(schema.labels)), np.float32)]
    )
    infinite = rows.stack([feature.name for feature in schema.dense], dense_RF)
    if infinite is not None:
        _filled(rows.numbers(infinite), infinite, where)
    wrong = rows.stack(schema.labels, label_RT, keeps_missing=True)
    if wrong is not None:
        _checked_labels(rows.numbers(wrong), wrong, where)
    lists = rows.lists_of([feature.name for feature in schema.id_features])
    return RowBlock(
        dense_RF=dense_RF,
        label_RT=label_RT,
        lists=lists,
        num_values_R=scan_lists(lists)[0],
        session_R=np.array(rows.numbers("session_id")) if keeps_sessions else None,
    )


def _list_block(columns: Sequence[tuple[IdArray, npt.NDArray[np.integer]]], num_rows: int) -> ListBlock:
    values, offsets = zip(*columns, strict=True) if columns else ((), ())
    return ListBlock(values=values, offsets=offsets, num_rows=num_rows)


def expand_block(
    block: DistinctBlock, keys: Sequence[str], *, schema: Schema | None = None, where: str = ""
) -> RowBlock:
    """The block with one list per sample. Lists that never repeat and follow one another are not copied.

    With a schema, an id outside its table is an error; `where` names the row group.
    """
    lists: dict[str, tuple[IdArray, IdArray]] = {}
    for group in block.groups:
        is_own = group.inverse_R is None or group.num_distinct == len(block)  # rows are numbered in order of first use
        for key, values, starts, lengths in group.features():
            if not is_own:
                starts, lengths = starts[group.inverse_R], lengths[group.inverse_R]
            if not is_packed(starts, lengths):
                values = take_lists(values, starts, lengths)
                starts = np.cumsum(lengths, dtype=np.int64) - lengths
            lists[key] = values, np.append(starts, starts[-1] + lengths[-1] if len(starts) else 0)
    joined = _list_block([lists[key] for key in keys], len(block))
    bounds = None if schema is None else [schema.feature(key).num_rows for key in keys]
    num_values_R, wrong = scan_lists(joined, bounds)
    if wrong is not None and schema is not None:
        check_ranges(block, schema, where=where)
    return RowBlock(
        dense_RF=block.dense_RF,
        label_RT=block.label_RT,
        lists=joined,
        num_values_R=num_values_R,
        session_R=block.session_R,
    )


def assemble_batch(
    slices: Sequence[BlockSlice],
    schema: Schema,
    *,
    num_global: int,
    dedup: Sequence[Sequence[str]] | None = None,
) -> Batch:
    """One batch from the rows [start, stop) of each block, in the order given.

    From DistinctBlocks, the groups `dedup` of the batch are deduplicated; with None the batch is plain.
    """
    keys = [feature.name for feature in schema.id_features]
    slices = [piece for piece in slices if piece[1] < piece[2]]
    plain = [(block, start, stop) for block, start, stop in slices if isinstance(block, RowBlock)]
    stored = [(block, start, stop) for block, start, stop in slices if isinstance(block, DistinctBlock)]
    assert not (plain and (stored or dedup is not None)), "the blocks of a batch must come from one reader"
    if plain:
        return _plain_batch(plain, keys, num_global)
    ids = cut_ids(stored, keys, dedup=dedup)
    dense = [block.dense_RF[start:stop] for block, start, stop in stored]
    labels = [block.label_RT[start:stop] for block, start, stop in stored]
    sessions = [block.session_R[start:stop] for block, start, stop in stored if block.session_R is not None]
    return Batch(
        dense_BF=torch.from_numpy(join_arrays(dense)) if dense else torch.empty(0, len(schema.dense)),
        ids=ids,
        label_BT=torch.from_numpy(np.concatenate(labels)) if labels else torch.empty(0, len(schema.labels)),
        num_global=num_global,
        session_B=torch.from_numpy(np.concatenate(sessions)) if sessions else None,
    )


def _plain_batch(slices: Sequence[tuple[RowBlock, int, int]], keys: list[str], num_global: int) -> Batch:
    """The batch in one call that does not hold the GIL."""
    sessions = [block.session_R for block, _, _ in slices if block.session_R is not None]
    joined = join_lists(
        [(block.lists, start, stop) for block, start, stop in slices],
        num_values=sum(int(block.num_values_R[stop] - block.num_values_R[start]) for block, start, stop in slices),
        numbers=[
            [block.dense_RF for block, _, _ in slices],
            [block.label_RT for block, _, _ in slices],
            *([sessions] if sessions else []),
        ],
    )
    dense_BF, label_BT, *session_B = map(torch.from_numpy, joined.numbers)
    ids = KeyedJaggedTensor(
        keys=keys,
        values=torch.from_numpy(joined.values_N),
        lengths=torch.from_numpy(joined.lengths_KB.reshape(-1)),
        stride=len(label_BT),
        length_per_key=joined.counts,
    )
    return Batch(
        dense_BF=dense_BF,
        ids=ids,
        label_BT=label_BT,
        num_global=num_global,
        session_B=session_B[0] if session_B else None,
    )


def _column(table: pa.Table, name: str, where: str) -> pa.Array:
    position = table.schema.get_field_index(name)
    if position < 0:
        raise InputError(f"{where}: column {name!r} is missing")
    column = table.column(position)
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], type=column.type)


FLOAT32, ID_LISTS = pa.float32(), pa.list_(pa.int64())


def _dense_column(column: pa.Array, name: str, where: str) -> FloatArray:
    if column.type != FLOAT32:
        kind = column.type
        if not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
            raise InputError(f"{where}: column {name!r} is {kind}, expected float32")
        column = pc.cast(column, FLOAT32, safe=False)
    if len(column) and not column.null_count:
        return _view(column.buffers()[1], np.float32, column.offset, len(column))
    numbers: FloatArray = column.to_numpy(zero_copy_only=False)
    return numbers


def _view(buffer: pa.Buffer, dtype: type[np.generic], first: int, count: int) -> npt.NDArray[Any]:
    """The numbers of a buffer, not copied. `to_numpy` takes longer and releases the GIL for each column."""
    return np.frombuffer(buffer, dtype, count=count, offset=first * np.dtype(dtype).itemsize)


def _filled(numbers: FloatArray, name: str, where: str) -> FloatArray:
    if np.isinf(numbers).any():
        row = int(np.flatnonzero(np.isinf(numbers))[0])
        raise InputError(f"{where}: column {name!r}, row {row}: infinite, expected a finite number")
    return np.nan_to_num(numbers, nan=0.0)


def _label_column(column: pa.Array, name: str, where: str) -> FloatArray:
    return _checked_labels(_dense_column(column, name, where), name, where)


def _checked_labels(column: FloatArray, name: str, where: str) -> FloatArray:
    labels: FloatArray = np.array(column)  # copied, so that the table can be freed
    if not np.isfinite(labels.sum(dtype=np.float64)):
        row = int(np.flatnonzero(~np.isfinite(labels))[0])
        raise InputError(f"{where}: column {name!r}, row {row}: missing or not finite, expected a number")
    return labels


def _id_column(column: pa.Array, name: str, where: str) -> tuple[IdArray, npt.NDArray[np.integer]]:
    """Values and offsets of a list column; a plain integer column reads as lists of one."""
    if column.type == ID_LISTS and len(column) and not column.null_count:
        values, offsets = column.values, _view(column.buffers()[1], np.int32, column.offset, len(column) + 1)
        if len(values) and not values.null_count:
            return _view(values.buffers()[1], np.int64, values.offset, len(values)), offsets
    values, offsets = split_list_column(column, where=f"{where}: column {name!r}")
    if values.null_count:
        raise InputError(f"{where}: column {name!r} holds {values.null_count} missing ids, expected numbers")
    ids: IdArray = values.to_numpy()
    return ids, offsets
