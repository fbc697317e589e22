"""Damaged pages of Parquet files are found, and intact ones are not."""

from __future__ import annotations

import io
import random
import zlib
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kernels import _cpu
from kernels.check_pages import BACKENDS, describe_chunks, find_damaged_chunk
from kernels.decode_pages import GroupDecoder
from tests.kernels.forced import forced

BITS_TRIED = 400


@pytest.mark.parametrize("is_portable", [False, True])
def test_crc32_is_that_of_zlib(is_portable: bool) -> None:
    data = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    with forced(is_portable=is_portable):
        for size in (*range(300), 1023, 1024, 1025, 4999):
            for start in (0, 1, 7):
                assert _cpu.crc32(data[start : start + size].copy()) == zlib.crc32(data[start : start + size]), size


def make_file(**options: Any) -> bytes:
    rng = np.random.default_rng(1)
    lists = [rng.integers(0, 50, rng.integers(0, 5)).tolist() for _ in range(700)]
    table = pa.table(
        {
            "dense": pa.array(rng.normal(size=700).astype(np.float32)),
            "ids": pa.array(lists, pa.list_(pa.int64())),
            "time": pa.array(np.arange(700)),
        }
    )
    sink = io.BytesIO()
    encodings = {"dense": "BYTE_STREAM_SPLIT", "time": "DELTA_BINARY_PACKED"}
    settings = {"compression": "zstd", "use_dictionary": ["ids.list.element"], "data_page_size": 1000}
    pq.write_table(table, sink, write_page_checksum=True, column_encoding=encodings, **(settings | options))
    return sink.getvalue()


@pytest.mark.parametrize("kernel", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"compression": "none"}, {"use_dictionary": False}])
def test_intact_pages_pass_and_pages_without_checksums_do_not(kernel: str, options: dict[str, Any]) -> None:
    stored = make_file(**options)
    group = pq.read_metadata(io.BytesIO(stored)).row_group(0)
    chunks = describe_chunks(group, range(3))
    assert find_damaged_chunk(stored, 0, chunks, needs_checksums=True, kernel=kernel) is None
    assert find_damaged_chunk(stored[4:], 4, chunks, needs_checksums=True, kernel=kernel) is None
    sink = io.BytesIO()
    pq.write_table(pq.read_table(io.BytesIO(stored)), sink, compression="zstd")
    bare = describe_chunks(pq.read_metadata(sink).row_group(0), range(3))
    assert find_damaged_chunk(sink.getvalue(), 0, bare, needs_checksums=True, kernel=kernel) == 0
    assert find_damaged_chunk(sink.getvalue(), 0, bare, needs_checksums=False) is None


@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_every_flipped_bit_is_found_or_leaves_the_values_alone(compression: str) -> None:
    """The kernel finds what the reference finds; what both miss in headers changes no value, or cannot be decoded."""
    stored, draw = make_file(compression=compression), random.Random(2)
    metadata = pq.read_metadata(io.BytesIO(stored))
    chunks = describe_chunks(metadata.row_group(0), range(3))
    expected = pq.read_table(io.BytesIO(stored))
    begin, end = int(chunks[0, 0]), int(chunks[-1, 0] + chunks[-1, 1])
    headers = [position for chunk in chunks.tolist() for position in range(chunk[0], chunk[0] + 40)]
    places = [(place, bit) for place in headers for bit in range(8)]
    places += [(draw.randrange(begin, end), draw.randrange(8)) for _ in range(BITS_TRIED)]
    num_found = 0
    for place, bit in places:
        damaged = bytearray(stored)
        damaged[place] ^= 1 << bit
        found = [
            find_damaged_chunk(bytes(damaged), 0, chunks, needs_checksums=True, kernel=kernel) for kernel in BACKENDS
        ]
        assert found[0] == found[1], (place, bit)
        decoder = GroupDecoder(metadata, range(3), needs_checksums=True)
        if found[0] is None:
            with suppress(OSError, pa.ArrowException):  # a wrong size of the page before compression
                assert decoder.decode(bytes(damaged), 0, 0).equals(expected), (place, bit)
        else:
            num_found += 1
            assert chunks[found[0], 0] <= place < chunks[found[0]][:2].sum()
            with pytest.raises(OSError, match="is damaged: a page does not match its checksum"):
                decoder.decode(bytes(damaged), 0, 0)
    assert num_found > BITS_TRIED


def test_chunks_outside_the_data_are_damaged() -> None:
    stored = make_file()
    chunks = describe_chunks(pq.read_metadata(io.BytesIO(stored)).row_group(0), range(3))
    for column, value in ((0, -5), (0, 10**15), (1, 10**15), (1, -1), (1, 2**62)):
        hostile = chunks.copy()
        hostile[1, column] = value
        assert find_damaged_chunk(stored, 0, hostile, needs_checksums=True) == 1
        assert find_damaged_chunk(stored, 0, hostile, needs_checksums=False) is None  # Arrow will say so
