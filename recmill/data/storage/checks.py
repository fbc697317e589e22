"""Damage in Parquet files: footers against their hashes in dataset.json, pages against their checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts import InputError

END_BYTES = 8  # the footer's length and "PAR1"


def hash_footer(path: str) -> str:
    """The hash of a Parquet file's footer."""
    with fsspec.open(path, "rb") as file:
        return _hash(_read_footer(file))


def read_footer(path: str, footer_sha256: str | None) -> pq.FileMetaData:
    """A part's metadata; an InputError names a file whose footer is damaged."""
    try:
        with fsspec.open(path, "rb") as file:
            footer = _read_footer(file)
        if footer_sha256 is not None and _hash(footer) != footer_sha256:
            raise InputError(f"{path}: its footer is not what dataset.json recorded")
        return pq.read_metadata(pa.BufferReader(footer))
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read as Parquet ({first_line(error)})") from error


def check_part(
    path: str, footer_sha256: str | None, *, columns: Sequence[str], row_groups: Sequence[int] | None = None
) -> None:
    """Check what a reader is going to read; nothing if the part was written without checksums (then its hash was)."""
    if footer_sha256 is None:
        return
    metadata = read_footer(path, footer_sha256)
    names = [metadata.schema.column(leaf).path.split(".")[0] for leaf in range(metadata.num_columns)]
    leaves = [leaf for leaf, name in enumerate(names) if name in columns]
    groups = range(metadata.num_row_groups) if row_groups is None else row_groups
    _check_pages(path, metadata, groups, leaves, needs_checksums=True)


def check_own_pages(path: str) -> None:
    """Compare the pages of a Parquet file from anywhere with their checksums, where pages have one."""
    metadata = read_footer(path, None)
    groups, leaves = range(metadata.num_row_groups), range(metadata.num_columns)
    _check_pages(path, metadata, groups, leaves, needs_checksums=False)


def _check_pages(
    path: str, metadata: pq.FileMetaData, groups: Sequence[int], leaves: Sequence[int], *, needs_checksums: bool
) -> None:
    from kernels.check_pages import check_row_group, describe_chunks  # not loaded by whoever only writes

    place = path
    try:
        with fsspec.open(path, "rb") as file:
            for index in groups:
                place = f"{path}, row group {index}"
                for leaf in leaves:
                    begin, size, *_ = describe_chunks(metadata.row_group(index), [leaf])[0].tolist()
                    file.seek(begin)
                    check_row_group(file.read(size), begin, metadata, index, [leaf], needs_checksums=needs_checksums)
    except OSError as error:
        raise InputError(f"{place}: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _read_footer(file: Any) -> bytes:
    """The footer and what follows it; less if the file is too short."""
    num_bytes = file.seek(0, 2)
    file.seek(max(0, num_bytes - END_BYTES))
    length = int.from_bytes(file.read(4), "little")
    file.seek(max(0, num_bytes - END_BYTES - length))
    return bytes(file.read(length + END_BYTES))


def _hash(footer: bytes) -> str:
    return "sha256:" + hashlib.sha256(footer).hexdigest()
