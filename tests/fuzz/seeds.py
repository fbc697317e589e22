"""Writes tests/fuzz/corpus: small column chunks as Arrow writes them, from which the fuzzers of pages start.

python tests/fuzz/seeds.py
"""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

CORPUS = Path(__file__).parent / "corpus"
KINDS = {pa.int64(): 0, pa.int32(): 1, pa.float32(): 1, pa.int16(): 2, pa.int8(): 3, pa.bool_(): 4}
LISTS = [[1, 2, 3], [], [2, 3], [2, 3], [7], [], [9, 9, 9, 9]]


def write_chunk(values: pa.Array, **options: Any) -> tuple[bytes, Any]:
    """(the bytes of the only column chunk, its metadata)"""
    buffer = io.BytesIO()
    pq.write_table(pa.table({"x": values}), buffer, write_page_checksum=True, **options)
    chunk = pq.ParquetFile(buffer).metadata.row_group(0).column(0)
    begin = chunk.dictionary_page_offset or chunk.data_page_offset
    return buffer.getvalue()[begin : begin + chunk.total_compressed_size], chunk


def main() -> None:
    flat = [pa.array([5, 6, 5, 7, 5] * 4, kind) for kind in (pa.int64(), pa.int32(), pa.int16(), pa.int8())]
    flat += [pa.array([0.5, 1.5] * 9, pa.float32()), pa.array([True, False, True] * 7)]
    columns = [*flat, pa.array(LISTS, pa.list_(pa.int64())), pa.array(LISTS, pa.list_(pa.int32()))]
    encodings: list[dict[str, Any]] = [
        {"compression": "none"},
        {"compression": "zstd"},
        {"compression": "none", "use_dictionary": False},
        {"compression": "none", "use_dictionary": False, "column_encoding": "DELTA_BINARY_PACKED"},
        {"compression": "none", "use_dictionary": False, "column_encoding": "BYTE_STREAM_SPLIT"},
    ]
    for folder in ("decode_pages", "check_pages"):
        (CORPUS / folder).mkdir(parents=True, exist_ok=True)
    for number, values in enumerate(columns):
        is_list = pa.types.is_list(values.type)
        kind = KINDS[values.type.value_type if is_list else values.type]
        for way, options in enumerate(encodings):
            try:
                data, chunk = write_chunk(values, **options)
            except (OSError, pa.ArrowException):  # an encoding that this type does not have
                continue
            flags = is_list | (options["compression"] == "zstd") << 1 | (3 if is_list else 1) << 2 | is_list << 4
            head = struct.pack("<BBH", kind, flags, chunk.num_values) + (
                struct.pack("<H", len(values)) if is_list else b""
            )
            (CORPUS / "decode_pages" / f"{number}-{way}").write_bytes(head + data)
            if way < 2:
                head = struct.pack("<BBBBBq", 1, 0, 0, 1, chunk.num_values, -1)
                (CORPUS / "check_pages" / f"{number}-{way}").write_bytes(head + data)


if __name__ == "__main__":
    main()
