"""The rows to score: row groups of a dataset or of a raw log, read ahead in threads and cut into batches.

part of the scores   |------ 0 ------|------ 1 ------|     whole row groups, at least `rows_per_part` rows
row groups           |--A--|--B--|-C-|--D--|----E----|
batches              |#####|#####|###|#####|#####|###|     never across parts, so their rows do not depend on who
                                                           scores which part, nor on what was scored before
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts import Dataset, InputError, is_remote, join_path
from recmill.artifacts.dataset import DatasetPart
from recmill.data.dataset import read_rows
from recmill.data.ikjt.batch import Batch, BlockSlice, RowBlock
from recmill.data.ikjt.distinct import DistinctBlock
from recmill.data.ingest.reader import RowGroupReader
from recmill.data.ingest.splits import ALL_ROWS, StoredGroup, split_groups
from recmill.data.log import RawLog, read_file
from recmill.data.schema import Schema

KEYS = ("session_id", "timestamp")
LOG_BLOCK_ROWS = 32_768  # raw logs of other writers have row groups of any size
AHEAD_ROWS = 65_536  # of row groups that are read while the model works
AHEAD_BATCHES = 3
READERS = 2


@dataclass(frozen=True, kw_only=True)
class ScorePart:
    """Row groups whose scores are one file."""

    number: int
    groups: tuple[StoredGroup, ...]

    @property
    def file(self) -> str:
        return f"part-{self.number:05d}.parquet"

    @property
    def num_rows(self) -> int:
        return sum(group.num_rows for group in self.groups)


def cut_parts(groups: Sequence[StoredGroup], rows_per_part: int) -> list[ScorePart]:
    """Neighbouring row groups with at least `rows_per_part` rows together; the last part may have fewer."""
    parts: list[ScorePart] = []
    waiting: list[StoredGroup] = []
    for group in groups:
        waiting.append(group)
        if sum(own.num_rows for own in waiting) >= rows_per_part or group is groups[-1]:
            parts.append(ScorePart(number=len(parts), groups=tuple(waiting)))
            waiting = []
    return parts


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedGroup:
    """A row group as blocks that batches are cut from, and the keys of its rows."""

    blocks: Sequence[RowBlock | DistinctBlock]
    keys: pa.Table  # session_id, timestamp


class ScorableRows(Protocol):
    """Where rows come from."""

    path: str
    schema: Schema
    content_hash: str
    groups: list[StoredGroup]

    def open(self, *, dedup: Sequence[Sequence[str]] | None, windows: Sequence[str]) -> None:
        """Read from now on with these features deduplicated."""

    def load(self, group: StoredGroup) -> LoadedGroup: ...

    def first_row(self, group: StoredGroup) -> int:
        """The number of the group's first row in its file."""

    def assemble(self, slices: Sequence[BlockSlice]) -> Batch: ...

    def close(self) -> None: ...


class _Rows:
    """What both kinds of rows share: a reader that makes blocks of tables and batches of blocks."""

    def __init__(self, dataset: Dataset, schema: Schema) -> None:
        self.path, self.schema = dataset.path, schema
        self._dataset = dataset
        self._starts = {part.file: np.cumsum([0, *part.row_group_rows]) for part in dataset.parts}
        self._reader = RowGroupReader(dataset, schema)

    def open(self, *, dedup: Sequence[Sequence[str]] | None, windows: Sequence[str]) -> None:
        self._reader.close()
        self._reader = RowGroupReader(self._dataset, self.schema, dedup=dedup, windows=windows)

    def first_row(self, group: StoredGroup) -> int:
        return int(self._starts[group.file][group.index])

    def assemble(self, slices: Sequence[BlockSlice]) -> Batch:
        return self._reader.assemble(slices, num_global=sum(stop - start for _, start, stop in slices))

    def close(self) -> None:
        self._reader.close()


class DatasetRows(_Rows):
    """Rows of a split of a dataset, or of all of it."""

    def __init__(self, data: str | Path, split: str) -> None:
        dataset = Dataset.load(data)
        super().__init__(dataset, Schema.load(dataset.path))
        self.groups, self.content_hash = split_groups(dataset, split), dataset.content_hash

    def load(self, group: StoredGroup) -> LoadedGroup:
        table = self._reader.decode(group, self._reader.read(group))
        keys = read_rows(self._dataset, columns=KEYS, row_groups={group.file: [group.index]})
        return LoadedGroup(blocks=[self._reader.transform(group, table)], keys=pa.Table.from_batches(keys))


class LogRows(_Rows):
    """All rows of a raw log; labels, which a log of requests does not have yet, are not read."""

    def __init__(self, data: str | Path) -> None:
        log = RawLog.open(data, has_labels=False)
        filesystem, root = fsspec.core.url_to_fs(str(data))
        whole = str(data) if is_remote(data) else root  # the log names its files from the root
        folder = whole if filesystem.isdir(root) else whole.rpartition("/")[0]
        parts = [_describe_file(file.path, file.num_rows, file.num_bytes, folder) for file in log.files]
        body = {"layout": "time", "num_rows": log.num_rows, "num_sessions": 0, "parts": [], "source": {}}
        dataset = Dataset(**body | {"parts": tuple(parts), "path": folder})  # type: ignore[arg-type]
        super().__init__(dataset, log.schema)
        self.groups, self.content_hash = split_groups(dataset, ALL_ROWS), log.content_hash
        self._no_labels = {name: pa.float32() for name in log.schema.labels}
        self._columns = [name for name in log.schema.columns if name not in log.schema.labels]

    def load(self, group: StoredGroup) -> LoadedGroup:
        path, waiting, num_waiting = join_path(self.path, group.file), [], 0
        blocks, keys = [], []
        batches = read_file(path, columns=self._columns, row_groups=[group.index])
        for batch in (*batches, None):
            if batch is not None:
                waiting.append(batch)
                num_waiting += batch.num_rows
            if waiting and (batch is None or num_waiting >= LOG_BLOCK_ROWS):
                table = pa.Table.from_batches(waiting)
                keys.append(table.select(KEYS).cast(pa.schema(dict.fromkeys(KEYS, pa.int64()))))
                blocks.append(self._reader.transform(group, self._with_labels(table)))
                waiting, num_waiting = [], 0
        return LoadedGroup(blocks=blocks, keys=pa.concat_tables(keys))

    def _with_labels(self, table: pa.Table) -> pa.Table:
        for name, kind in self._no_labels.items():
            table = table.append_column(name, pa.array(np.zeros(table.num_rows, np.float32), kind))
        return table


def _describe_file(path: str, num_rows: int, num_bytes: int, folder: str) -> DatasetPart:
    with fsspec.open(path, "rb") as file:
        footer = pq.read_metadata(file)
    name = path.removeprefix(str(Path(folder)) + "/").removeprefix(folder).lstrip("/")
    sizes = tuple(footer.row_group(number).num_rows for number in range(footer.num_row_groups))
    return DatasetPart(file=name, split="log", num_rows=num_rows, num_sessions=0, bytes=num_bytes, row_group_rows=sizes)


def open_rows(data: str | Path, split: str | None) -> DatasetRows | LogRows:
    """The rows of a dataset, or of a raw log, which has no splits."""
    filesystem, root = fsspec.core.url_to_fs(join_path(data, Dataset.manifest_name))
    if filesystem.exists(root):
        return DatasetRows(data, split or ALL_ROWS)
    if split not in (None, ALL_ROWS):
        raise InputError(f"{data}: is a raw log, which has no splits, but --split is {split!r}")
    return LogRows(data)


@dataclass(frozen=True, kw_only=True, eq=False)
class PartBatch:
    """A batch of a part; the last one comes with the keys of the part's rows."""

    part: ScorePart
    batch: Batch
    keys: pa.Table | None = None  # session_id, timestamp, file, row


def read_batches(source: ScorableRows, parts: Sequence[ScorePart], *, batch_size: int) -> Iterator[PartBatch]:
    """The batches of the parts in their order, made ahead by threads."""
    return _ahead(_cut_batches(source, parts, batch_size), AHEAD_BATCHES)


def _cut_batches(source: ScorableRows, parts: Sequence[ScorePart], batch_size: int) -> Iterator[PartBatch]:
    loaded = _load_ahead(source, [group for part in parts for group in part.groups])
    for part in parts:
        keys, slices, num_waiting, num_left = [], [], 0, part.num_rows
        for group in part.groups:
            found = next(loaded)
            keys.append(_with_place(found.keys, group, source.first_row(group)))
            for block in found.blocks:
                start = 0
                while start < len(block):
                    stop = min(len(block), start + batch_size - num_waiting)
                    slices.append((block, start, stop))
                    num_waiting, num_left, start = num_waiting + stop - start, num_left - (stop - start), stop
                    if num_waiting == batch_size and num_left:
                        yield PartBatch(part=part, batch=source.assemble(slices))
                        slices, num_waiting = [], 0
        if num_left:
            found_rows, first = part.num_rows - num_left, join_path(source.path, str(part.groups[0]))
            raise InputError(f"{first}: it and the next have {found_rows} rows, expected {part.num_rows}")
        yield PartBatch(part=part, batch=source.assemble(slices), keys=pa.concat_tables(keys))


def _with_place(keys: pa.Table, group: StoredGroup, first_row: int) -> pa.Table:
    rows: npt.NDArray[np.int64] = np.arange(first_row, first_row + len(keys))
    places = pa.array(np.zeros(len(keys), np.int32))
    file = pa.DictionaryArray.from_arrays(places, pa.array([group.file]))
    return keys.append_column("file", file).append_column("row", pa.array(rows))


def _load_ahead(source: ScorableRows, groups: Sequence[StoredGroup]) -> Iterator[LoadedGroup]:
    """Row groups in order, while the next ones are read."""
    waiting: deque[tuple[int, Future[LoadedGroup]]] = deque()
    with ThreadPoolExecutor(READERS) as pool:
        try:
            for group in groups:
                waiting.append((group.num_rows, pool.submit(source.load, group)))
                while len(waiting) > 1 and sum(rows for rows, _ in waiting) > AHEAD_ROWS:
                    yield waiting.popleft()[1].result()
            while waiting:
                yield waiting.popleft()[1].result()
        finally:
            for _, future in waiting:
                future.cancel()


def _ahead(items: Iterator[Any], depth: int) -> Iterator[Any]:
    """The items of an iterator that runs in a thread, up to `depth` items ahead."""
    ready: queue.Queue[tuple[bool, Any]] = queue.Queue(depth)
    stopped = threading.Event()

    def offer(entry: tuple[bool, Any]) -> bool:
        while not stopped.is_set():
            try:
                ready.put(entry, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def run() -> None:
        try:
            for item in items:
                if not offer((True, item)):
                    return
            offer((False, None))
        except BaseException as error:  # noqa: BLE001 - raised by whoever takes the items
            offer((False, error))

    thread = threading.Thread(target=run, name="batches", daemon=True)
    thread.start()
    try:
        while True:
            is_item, value = ready.get()
            if not is_item:
                if value is not None:
                    raise value
                return
            yield value
    finally:
        stopped.set()
        thread.join()
