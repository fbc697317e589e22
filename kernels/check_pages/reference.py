"""The definition of correct, page by page in Python."""

from __future__ import annotations

import zlib
from typing import Any

RUNS = 3  # how Parquet encodes levels
DATA_PAGE, DICTIONARY_PAGE = 0, 2
TRUE, FALSE, BYTE, INT64, DOUBLE, BINARY, STRUCT = 1, 2, 3, 6, 7, 8, 12


def is_intact(data: bytes, *, num_values: int, encodings: int) -> bool:
    """Whether every page of a column chunk has the checksum its header says, and headers agree with the footer."""
    reader, found = _Thrift(data), 0
    try:
        while reader.at < len(data):
            header = reader.struct()
            kind, size = header[1], header[3]
            page = header[{DATA_PAGE: 5, DICTIONARY_PAGE: 7}[kind]]
            levels = (page.get(3, RUNS), page.get(4, RUNS)) if kind == DATA_PAGE else (RUNS, RUNS)
            body = reader.take(size)
            if header[4] & 0xFFFFFFFF != zlib.crc32(body) or levels != (RUNS, RUNS) or header[2] < 0:
                return False
            if page[1] < 0 or page[2] < 0 or not encodings >> page[2] & 1:
                return False
            found += page[1] if kind == DATA_PAGE else 0
    except (LookupError, TypeError, AttributeError):  # no header, or one without an entry
        return False
    return found == num_values


class _Thrift:
    """Thrift's compact protocol, as far as page headers use it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if not 0 <= size <= len(self.data) - self.at:
            raise LookupError
        self.at += size
        return self.data[self.at - size : self.at]

    def varint(self) -> int:
        value = 0
        for shift in range(0, 64, 7):
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise LookupError

    def zigzag(self) -> int:
        value = self.varint()
        return value >> 1 ^ -(value & 1)

    def struct(self) -> dict[int, Any]:
        found: dict[int, Any] = {}
        field = 0
        while head := self.take(1)[0]:
            field = field + (head >> 4) if head >> 4 else self.zigzag()
            found[field] = self.value(head & 15)
        return found

    def value(self, kind: int) -> Any:
        if kind in (TRUE, FALSE):
            return kind == TRUE
        if kind == STRUCT:
            return self.struct()
        if kind in (BYTE, DOUBLE):
            return self.take(1 if kind == BYTE else 8)
        if kind == BINARY:
            return self.take(self.varint())
        if BYTE < kind <= INT64:
            return self.zigzag()
        raise LookupError
