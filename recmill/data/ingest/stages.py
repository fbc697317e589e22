"""The work of each stage on one row group: read its bytes, decode them to Arrow, transform them to arrays.

Every function here runs in a worker thread and uses no threads of its own: Arrow, the codecs and NumPy release the
GIL, and the pipeline alone decides how many cores are busy.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pyarrow as pa

from recmill.artifacts import Dataset, InputError, join_path
from recmill.data.dataset import load_encoding
from recmill.data.ikjt.batch import Batch, RowBlock, assemble_batch, decode_block, expand_block
from recmill.data.ikjt.cutting import CutBlock, group_keys, prepare_block, short_features
from recmill.data.ikjt.distinct import DistinctBlock, check_ranges, find_distinct, find_windows, regroup
from recmill.data.ingest.memory import Charge
from recmill.data.ingest.parts import PartFile, RawGroup, first_line
from recmill.data.ingest.splits import RowGroup
from recmill.data.schema import Schema
from recmill.data.storage.deduplicated import decode_distinct
from recmill.data.storage.encoding import columns_of
from recmill.data.transforms import Transforms

STAGES = ("read", "decode", "transform", "batch")
MAX_OPEN_PARTS = 256  # each keeps a file descriptor and a parsed footer
MAX_FOOTER_READERS = 8


class PlainReader:
    """The stages for the layouts that store one record a sample (`time`, `session`).

    With `dedup`, groups of features, the repeats of each group are found once a row group and batches hold distinct
    lists; those of the features `windows` as windows where that saves values. Without `decodes_pages` Arrow decodes.
    """

    def __init__(
        self,
        dataset: Dataset,
        schema: Schema,
        *,
        dedup: Sequence[Sequence[str]] | None = None,
        windows: Sequence[str] = (),
        decodes_pages: bool = True,
    ) -> None:
        self._dataset = dataset
        self._schema = schema
        self._dedup, self._decodes_pages = dedup, decodes_pages
        self._windows = tuple(windows) if dedup is not None else ()
        self._transforms = Transforms(schema)
        self._keys = [feature.name for feature in schema.id_features]
        self._columns = self._stored_columns()
        self._parts: OrderedDict[str, PartFile] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self._short: frozenset[str] | None = None  # features that are expanded a row group at a time
        self._never_repeats: bool | None = None  # what the first row group says of its lists

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what belongs to one process: another one opens the files itself."""
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_parts")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._parts, self._lock = OrderedDict(), threading.Lock()

    def _stored_columns(self) -> list[str]:
        return ["label", *(feature.name for feature in self._schema.features)]

    def part(self, name: str) -> PartFile:
        """The open part with this file name."""
        with self._lock:
            if name in self._parts:
                self._parts.move_to_end(name)
                return self._parts[name]
        # Opened outside of the lock: a remote footer takes long, and two threads that open the same part do no harm.
        path = join_path(self._dataset.path, name)
        opened = PartFile(
            path, columns=self._columns, decodes_pages=self._decodes_pages, keeps_lists=self._keeps_columns()
        )
        with self._lock:
            self._parts[name] = opened
            if len(self._parts) > MAX_OPEN_PARTS:
                self._parts.popitem(last=False)  # its file closes when the last worker lets go of it
        return opened

    def charges(self, groups: Sequence[RowGroup]) -> list[Charge]:
        """What each row group is charged on its way."""
        by_part: dict[str, list[RowGroup]] = {}
        for group in groups:
            by_part.setdefault(group.file, []).append(group)
        with ExitStack() as stack:
            run: Any = map  # one footer needs no threads
            if len(by_part) > 1:
                run = stack.enter_context(ThreadPoolExecutor(max_workers=MAX_FOOTER_READERS)).map
            charges = dict(pair for pairs in run(self._part_charges, by_part.values()) for pair in pairs)
        return [charges[group] for group in groups]

    def _part_charges(self, groups: Sequence[RowGroup]) -> list[tuple[RowGroup, Charge]]:
        part = self.part(groups[0].file)
        for group in groups:
            part.check(group)
        num_lists = 0 if type(self) is PlainReader and self._keeps_columns() else len(self._keys)
        return [(group, part.charge(group.index, num_distinct_lists=num_lists)) for group in groups]

    def _keeps_columns(self) -> bool:
        """Whether the ids of a row group stay in the columns they were decoded to."""
        return self._dedup is None and not self._transforms

    def read(self, group: RowGroup) -> RawGroup:
        try:
            return self.part(group.file).read(group.index)
        except OSError as error:
            raise InputError(f"{self.describe(group)}: cannot be read ({first_line(error)})") from error

    def decode(self, group: RowGroup, raw: RawGroup) -> pa.Table:
        try:
            return self.part(group.file).decode(group.index, raw)
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{self.describe(group)}: cannot be decoded ({first_line(error)})") from error

    def transform(self, group: RowGroup, table: pa.Table) -> RowBlock | CutBlock:
        where = self.describe(group)
        if self._keeps_columns():
            return decode_block(table, self._schema, where=where)
        rows = decode_block(table, self._schema, where=where, checks_ranges=False)
        found = find_distinct(rows, self._keys, self._dedup or ())
        return self._prepare(find_windows(found, self._windows), where)

    def _prepare(self, block: DistinctBlock, where: str) -> CutBlock:
        block = self._transforms.apply(block)
        check_ranges(block, self._schema, where=where)
        with self._lock:
            if self._short is None:  # the first row group decides for all: batches mix them
                self._short = short_features(block)
        return prepare_block(block, dedup=self._dedup, windows=self._windows, expand=self._short)

    def assemble(self, slices: Sequence[tuple[RowBlock | CutBlock, int, int]], *, num_global: int) -> Batch:
        """One batch from the rows [start, stop) of each transformed row group."""
        return assemble_batch(slices, self._schema, num_global=num_global, dedup=self._dedup)

    def describe(self, group: RowGroup) -> str:
        return join_path(self._dataset.path, str(group))

    def close(self) -> None:
        with self._lock:
            for part in self._parts.values():
                part.close()
            self._parts.clear()


class DeduplicatedReader(PlainReader):
    """The stages for the layout that stores one record a session (`deduplicated`): repeats are known already."""

    def _stored_columns(self) -> list[str]:
        self._encoding = load_encoding(self._dataset, self._schema)
        names = ["label", *(feature.name for feature in self._schema.features)]
        return list(
            dict.fromkeys(column for name in names for column in columns_of(name, self._schema, self._encoding))
        )

    def transform(self, group: RowGroup, table: pa.Table) -> RowBlock | CutBlock:
        where = self.describe(group)
        block = decode_distinct(table, self._schema, self._encoding)
        if self._dedup is not None:
            block = regroup(block, group_keys(self._keys, self._dedup))
        elif not self._transforms and self._is_plain(block):
            return expand_block(block, self._keys, schema=self._schema, where=where)
        return self._prepare(block, where)

    def _keeps_columns(self) -> bool:
        return False

    def _is_plain(self, block: DistinctBlock) -> bool:
        """Whether lists hardly repeat, so that batches are cut from a list a sample; the first row group decides."""
        with self._lock:
            if self._never_repeats is None:
                self._never_repeats = all(group.num_distinct == len(block) for group in block.groups)
            return self._never_repeats


READERS: dict[str, type[PlainReader]] = {
    "time": PlainReader,
    "session": PlainReader,
    "deduplicated": DeduplicatedReader,
}


def open_reader(
    dataset: Dataset,
    schema: Schema,
    *,
    dedup: Sequence[Sequence[str]] | None = None,
    windows: Sequence[str] = (),
    decodes_pages: bool = True,
) -> PlainReader:
    """The reader of the dataset's layout."""
    if dataset.layout not in READERS:
        known = " or ".join(READERS)
        raise InputError(f"{dataset.path}: layout {dataset.layout!r} cannot be read, expected {known}")
    _check_groups(dedup or (), windows, schema)
    return READERS[dataset.layout](dataset, schema, dedup=dedup, windows=windows, decodes_pages=decodes_pages)


def _check_groups(dedup: Sequence[Sequence[str]], windows: Sequence[str], schema: Schema) -> None:
    known = {feature.name for feature in schema.id_features}
    seen: set[str] = set()
    for name in [*(name for group in dedup for name in group), *windows]:
        if name not in known:
            raise InputError(f"{name!r} cannot be deduplicated; the id features are {', '.join(sorted(known))}")
    for group in dedup:
        if not group or seen & set(group) or len(set(group)) != len(group):
            raise InputError(f"dedup: expected each feature once and no empty group, received {dedup}")
        seen |= set(group)
