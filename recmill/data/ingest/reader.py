"""The work of each stage on one row group: read its bytes, decode them to Arrow, transform them to arrays.

Every function here runs in a worker thread and starts no threads of its own: Arrow, the codecs and NumPy release the
GIL, and the pipeline alone decides how many cores are busy.
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kernels.decode_pages import DecodedRows
from recmill.artifacts import Dataset, InputError, join_path
from recmill.data.dataset import load_encoding
from recmill.data.ikjt.batch import Batch, BlockSlice, RowBlock, assemble_batch, decode_block, expand_block
from recmill.data.ikjt.build import check_groups
from recmill.data.ikjt.cutting import pack_block, short_features
from recmill.data.ikjt.distinct import (
    DistinctBlock,
    check_ranges,
    find_distinct,
    find_windows,
    group_keys,
    regroup,
    reorder,
)
from recmill.data.ingest.memory import Charge
from recmill.data.ingest.order import spread_sessions
from recmill.data.ingest.parts import PartFile, RawGroup
from recmill.data.ingest.splits import StoredGroup
from recmill.data.schema import Schema
from recmill.data.storage.checks import first_line
from recmill.data.storage.deduplicated import decode_distinct, session_sizes
from recmill.data.storage.encoding import columns_of
from recmill.data.storage.writer import run_starts
from recmill.data.transforms import Transforms

STAGES = ("read", "decode", "transform", "batch")
NEXT_STAGE = {"read": "decode", "decode": "transform"}  # of a row group; batches are cut from several
LAYOUTS = ("time", "session", "deduplicated")
MAX_OPEN_PARTS = 256  # each keeps a file descriptor and a parsed footer
MAX_FOOTER_READERS = 8
MAX_EXPANDED_BYTES = 16 * 2**20  # ids of a row group with one list per sample; 8 lanes of 4 parts hold 32 row groups


class RowGroupReader:
    """Reads the row groups of a dataset, whatever its layout.

    `time` and `session` store one record per sample; `deduplicated` stores one per row group, in which repeats are
    known already. With `dedup`, groups of features, the repeats of each group are found once per row group and batches
    hold distinct lists; those of the features `windows` as windows where that saves values. Parquet pages are decoded
    by a kernel, or by Arrow unless `decodes_pages`. With `keeps_sessions` batches carry the session of each sample.
    `only` names the features to read; the default is all of them. With `session_limit`, sessions that are stored
    together are read in pieces of at most so many rows, in an order that `seed` determines (order.py).
    """

    def __init__(
        self,
        dataset: Dataset,
        schema: Schema,
        *,
        dedup: Sequence[Sequence[str]] | None = None,
        windows: Sequence[str] = (),
        decodes_pages: bool = True,
        keeps_sessions: bool = False,
        only: Sequence[str] | None = None,
        session_limit: int = 0,
        seed: int = 0,
    ) -> None:
        if dataset.layout not in LAYOUTS:
            raise InputError(
                f"{dataset.path}: layout {dataset.layout!r} cannot be read, expected one of {', '.join(LAYOUTS)}"
            )
        encoding = load_encoding(dataset, schema) if dataset.layout == "deduplicated" else None
        self._stored = schema
        if only is not None:
            schema = schema.select(only)
        check_groups(dedup or (), windows, known=[feature.name for feature in schema.id_features])
        self._dataset, self._schema = dataset, schema
        self._footers = {part.file: part.footer_sha256 for part in dataset.parts}
        self._encoding = encoding
        self._dedup, self._decodes_pages, self._keeps_sessions = dedup, decodes_pages, keeps_sessions
        self._windows = tuple(windows) if dedup is not None else ()
        self._transforms = Transforms(schema)
        self._session_limit = session_limit if dataset.layout != "time" else 0
        self._seed = seed
        # Whether the ids of a row group stay in the columns they were decoded to.
        self._keeps_columns = (
            self._encoding is None and dedup is None and not self._transforms and not self._session_limit
        )
        self._keys = [feature.name for feature in schema.id_features]
        bounds = {feature.name: feature.num_rows for feature in schema.id_features}
        self._bounds = bounds if self._keeps_columns else None
        self._columns = self._stored_columns()
        self._parts: OrderedDict[str, PartFile] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self._short: frozenset[str] | None = None  # features that are expanded once per row group
        self._expands: bool | None = None  # whether row groups are expanded as a whole

    def _stored_columns(self) -> list[str]:
        names = [*self._schema.labels, *(feature.name for feature in self._schema.features)]
        names += ["session_id"] if self._keeps_sessions else []
        if self._encoding is None:
            return list(dict.fromkeys([*names, *(["session_id"] if self._session_limit else [])]))
        stored = (columns_of(name, self._stored, self._encoding) for name in names)
        return list(dict.fromkeys(column for columns in stored for column in columns))

    def part(self, name: str) -> PartFile:
        """The open part with this file name."""
        with self._lock:
            if name in self._parts:
                self._parts.move_to_end(name)
                return self._parts[name]
        # Opened outside the lock: a remote footer takes long, and two threads that open the same part do no harm.
        path = join_path(self._dataset.path, name)
        opened = PartFile(
            path,
            columns=self._columns,
            label=self._schema.labels[0],
            decodes_pages=self._decodes_pages,
            bounds=self._bounds,
            footer_sha256=self._footers[name],
        )
        with self._lock:
            self._parts[name] = opened
            if len(self._parts) > MAX_OPEN_PARTS:
                self._parts.popitem(last=False)  # its file closes when the last worker lets go of it
        return opened

    def charges(self, groups: Sequence[StoredGroup]) -> list[Charge]:
        """The memory charge of each row group."""
        by_part: dict[str, list[StoredGroup]] = {}
        for group in groups:
            by_part.setdefault(group.file, []).append(group)
        with ExitStack() as stack:
            run: Any = map  # one footer needs no threads
            if len(by_part) > 1:
                run = stack.enter_context(ThreadPoolExecutor(max_workers=MAX_FOOTER_READERS)).map
            charges = dict(pair for pairs in run(self._part_charges, by_part.values()) for pair in pairs)
        return [charges[group] for group in groups]

    def _part_charges(self, groups: Sequence[StoredGroup]) -> list[tuple[StoredGroup, Charge]]:
        part = self.part(groups[0].file)
        for group in groups:
            part.check(group)
        num_lists = 0 if self._keeps_columns else len(self._keys)
        return [(group, part.charge(group.index, num_distinct_lists=num_lists)) for group in groups]

    def perform(self, stage: str, group: StoredGroup, payload: Any) -> Any:
        """The result of "read", "decode" or "transform", given that of the stage before."""
        if stage == "read":
            return self.read(group)
        return self.decode(group, payload) if stage == "decode" else self.transform(group, payload)

    def read(self, group: StoredGroup) -> RawGroup:
        try:
            return self.part(group.file).read(group.index)
        except OSError as error:
            raise InputError(f"{self.describe(group)}: cannot be read ({first_line(error)})") from error

    def decode(self, group: StoredGroup, raw: RawGroup) -> pa.Table | DecodedRows:
        try:
            return self.part(group.file).decode(group.index, raw)
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{self.describe(group)}: cannot be decoded ({first_line(error)})") from error

    def transform(self, group: StoredGroup, table: pa.Table | DecodedRows) -> RowBlock | DistinctBlock:
        where, keeps = self.describe(group), self._keeps_sessions
        if self._keeps_columns or isinstance(table, DecodedRows):  # rows only where columns are kept
            return decode_block(table, self._schema, where=where, keeps_sessions=keeps, packs_lists=True)
        if self._encoding is None:
            rows = decode_block(table, self._schema, where=where, checks_ranges=False, keeps_sessions=keeps)
            block = find_windows(find_distinct(rows, self._keys, self._dedup or ()), self._windows)
        else:
            block = decode_distinct(table, self._stored, self._encoding, keeps_sessions=keeps, wanted=self._schema)
            if self._dedup is not None:
                block = regroup(block, group_keys(self._keys, self._dedup))
        block = self._transforms.apply(block)
        check_ranges(block, self._schema, where=where)
        if self._session_limit:
            block = reorder(block, self._spread(group, table))
        if self._dedup is None and self._expands_group(block):
            return expand_block(block, self._keys)
        with self._lock:
            if self._short is None:  # the first row group decides for all: batches mix them
                self._short = short_features(block)
        return pack_block(block, dedup=self._dedup, windows=self._windows, expand=self._short)

    def _spread(self, group: StoredGroup, table: pa.Table) -> npt.NDArray[np.int64]:
        """The order in which the rows of a row group are read, the same in every epoch and for every reader."""
        if self._encoding is not None:
            sizes_S = session_sizes(table)
        else:
            sizes_S = np.diff(run_starts([table.column("session_id").to_numpy()]), append=table.num_rows)
        # Without the folder of the file: a hot layout in which every sample is hot is read in its source's order.
        seed = (self._seed, zlib.crc32(PurePosixPath(group.file).name.encode()), group.index)
        return spread_sessions(sizes_S, limit=self._session_limit, seed=seed)

    def _expands_group(self, block: DistinctBlock) -> bool:
        """Whether plain batches are cut from one list per sample, made once per row group; the first group decides.

        A plain batch of 2,048 samples then takes about half of the time. Long lists that repeat are picked for each
        batch instead: expanded, the row groups of all lanes would exceed the memory for mixing.
        """
        with self._lock:
            if self._expands is None:
                self._expands = all(own.num_distinct == len(block) for own in block.groups) or (
                    8 * block.num_ids <= MAX_EXPANDED_BYTES
                )
            return self._expands

    def assemble(self, slices: Sequence[BlockSlice], *, num_global: int) -> Batch:
        """One batch from the rows [start, stop) of each transformed row group."""
        return assemble_batch(slices, self._schema, num_global=num_global, dedup=self._dedup)

    def describe(self, group: StoredGroup) -> str:
        return join_path(self._dataset.path, str(group))

    def close(self) -> None:
        with self._lock:
            for part in self._parts.values():
                part.close()
            self._parts.clear()
