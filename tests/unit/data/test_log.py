"""Raw logs are opened with their schema, and what is wrong with them is said in one sentence."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill.artifacts import InputError
from recmill.data.log import RawLog
from tests.raw_logs import LOG_SCHEMA, lists_of, random_log, write_log


def with_value(table: pa.Table, column: str, row: int, value: Any, kind: pa.DataType | None = None) -> pa.Table:
    values = table.column(column).to_pylist()
    values[row] = value
    changed = pa.array(values, kind or table.schema.field(column).type, from_pandas=False)
    return table.set_column(table.schema.get_field_index(column), column, changed)


def fault_of(folder: Path, table: pa.Table, **options: Any) -> str:
    with pytest.raises(InputError) as error:
        RawLog.open(write_log(folder, table, **options)).validate()
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_sound_log_opens_from_folder_file_and_url(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "raw", random_log(100), num_files=3)
    log = RawLog.open(folder)
    log.validate()
    assert (log.num_rows, len(log.files), log.schema) == (100, 3, LOG_SCHEMA)
    assert RawLog.open(folder / "log-1.parquet").num_rows == 33
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/raw-log-test", recursive=True)
    remote = RawLog.open("memory://raw-log-test")
    remote.validate()
    assert remote.content_hash == log.content_hash


def test_the_schema_may_lie_elsewhere(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "raw", random_log(10))
    (folder / "schema.json").rename(tmp_path / "my.schema")
    assert RawLog.open(folder, tmp_path / "my.schema").num_rows == 10
    with pytest.raises(InputError, match=r"schema\.json: no such file"):
        RawLog.open(folder)


def test_the_hash_follows_the_content(tmp_path: Path) -> None:
    first = RawLog.open(write_log(tmp_path / "a", random_log(50)))
    again = RawLog.open(write_log(tmp_path / "b", random_log(50)))
    other = RawLog.open(write_log(tmp_path / "c", random_log(50, seed=1)))
    assert first.content_hash == again.content_hash != other.content_hash


FAULTS = [
    ("label", math.nan, "label nan is not a number between 0 and 1"),
    ("label", math.inf, "label inf is not"),
    ("label", 1.5, "label 1.5 is not"),
    ("label", -0.25, "label -0.25 is not"),
    ("label", None, "is null, expected a number between 0 and 1"),
    ("age", math.nan, "nan is not a finite float32"),
    ("age", -math.inf, "-inf is not a finite float32"),
    ("age", None, "is null, expected a finite number"),
    ("tags", None, "is null, expected a list of ids"),
    ("tags", [3, None], "holds a null inside the list"),
    ("tags", [1, -4], "id -4 is negative, expected 0 <= id < 30"),
    ("tags", [30], "id 30 is out of range, expected 0 <= id < 30"),
    ("item", -1, "id -1 is negative, expected 0 <= id < 20"),
    ("item", 20, "id 20 is out of range"),
    ("item", None, "is null, expected an id"),
    ("history", [1, 2, 99], "id 99 is out of range"),
    ("session_id", None, "is null, expected a whole number"),
    ("timestamp", None, "is null, expected a whole number"),
]


@pytest.mark.parametrize(("column", "value", "message"), FAULTS)
def test_a_wrong_value_is_named_with_file_column_and_row(tmp_path: Path, column: str, value: Any, message: str) -> None:
    found = fault_of(tmp_path / "raw", with_value(random_log(60), column, 47, value), num_files=2)
    assert "log-1.parquet" in found
    assert f"column {column!r}, row 17 (counted from 0 in this file)" in found  # row 47 is row 17 of the second file
    assert message in found


@settings(max_examples=20, deadline=None)
@given(
    row=st.integers(0, 199),
    column=st.sampled_from(["tags", "history"]),
    place=st.integers(0, 2),
    batch_rows=st.sampled_from([7, 64, 1000]),
)
def test_the_row_of_a_bad_id_is_found_wherever_it_is(
    tmp_path_factory: pytest.TempPathFactory, row: int, column: str, place: int, batch_rows: int
) -> None:
    bad = [1, 2, 3]
    bad[place] = 1000
    table = with_value(random_log(200), column, row, bad)
    found = fault_of(tmp_path_factory.mktemp("log") / "raw", table, row_group_size=batch_rows)
    assert f"column {column!r}, row {row} " in found


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    assert "column 'tags' is missing" in fault_of(tmp_path / "a", random_log(5).drop_columns(["tags"]))
    renamed = random_log(5).rename_columns(["session_id", "timestamp", "label", "Age", "tags", "item", "history"])
    assert "did you mean 'Age'?" in fault_of(tmp_path / "b", renamed)


@pytest.mark.parametrize(
    ("value", "message"),
    [(math.nan, "label nan is not a number between 0 and 1"), (2.0, "label 2 is not"), (None, "is null, expected")],
)
def test_every_label_is_checked(tmp_path: Path, value: float | None, message: str) -> None:
    schema = replace(LOG_SCHEMA, labels=("label", "bought"))
    table = random_log(60)
    assert "column 'bought' is missing" in fault_of(tmp_path / "a", table, schema=schema)
    table = table.append_column("bought", table.column("label"))
    RawLog.open(write_log(tmp_path / "b", table, schema=schema)).validate()
    found = fault_of(tmp_path / "c", with_value(table, "bought", 7, value), schema=schema)
    assert "column 'bought', row 7 " in found
    assert message in found


def test_columns_that_differ_only_in_case_are_refused(tmp_path: Path) -> None:
    table = random_log(5)
    assert "differ only in case" in fault_of(tmp_path / "raw", table.append_column("AGE", table.column("age")))


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("label", pa.array(["yes"] * 5), "string, expected float32"),
        ("tags", pa.array([[0.5]] * 5), "list<element: double>, expected list<int64> or int64"),
        ("history", pa.array([1] * 5), "int64, expected list<int64>"),
        ("session_id", pa.array([1.0] * 5), "double, expected int64"),
        ("timestamp", pa.array([0] * 5, pa.timestamp("ms")), "expected int64 (milliseconds since 1970)"),
    ],
)
def test_a_wrong_type_is_named(tmp_path: Path, column: str, values: pa.Array, expected: str) -> None:
    table = random_log(5)
    table = table.set_column(table.schema.get_field_index(column), column, values)
    found = fault_of(tmp_path / "raw", table)
    assert f"column {column!r} is " in found
    assert expected in found


def test_narrow_and_wide_types_are_accepted(tmp_path: Path) -> None:
    table = random_log(40)
    types = {
        "session_id": pa.int32(),
        "timestamp": pa.uint64(),
        "label": pa.int8(),
        "age": pa.float64(),
        "tags": pa.large_list(pa.uint16()),
        "item": pa.uint8(),
        "history": pa.list_(pa.int32()),
    }
    for name, kind in types.items():
        table = table.set_column(table.schema.get_field_index(name), name, table.column(name).cast(kind))
    RawLog.open(write_log(tmp_path / "raw", table.append_column("extra", table.column("age")))).validate()


def test_an_unsigned_number_beyond_int64_is_refused(tmp_path: Path) -> None:
    table = random_log(4)
    large = pa.array(np.array([1, 2, 2**63, 4], np.uint64))
    assert f"{2**63} does not fit int64" in fault_of(tmp_path / "raw", table.set_column(0, "session_id", large))


def test_a_truncated_file_and_one_that_is_no_parquet_are_named(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "raw", random_log(50), num_files=2)
    victim = folder / "log-1.parquet"
    content = victim.read_bytes()
    for broken in (content[: len(content) // 2], content[:-3], b"", b"PAR1", b"not parquet at all"):
        victim.write_bytes(broken)
        with pytest.raises(InputError, match=r"log-1\.parquet: not a readable Parquet file"):
            RawLog.open(folder)


def test_damaged_pages_are_found_when_values_are_checked(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "raw", random_log(5000), compression="zstd")
    victim = folder / "log-0.parquet"
    content = bytearray(victim.read_bytes())
    first = pq.read_metadata(victim).row_group(0).column(0)
    middle = first.data_page_offset + 24
    content[middle : middle + 400] = bytes(400)
    victim.write_bytes(content)
    with pytest.raises(InputError, match=r"log-0\.parquet"):
        RawLog.open(folder).validate()


def test_an_empty_log_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the log is empty: 0 rows"):
        RawLog.open(write_log(tmp_path / "raw", random_log(5).slice(0, 0)))
    (tmp_path / "none").mkdir()
    LOG_SCHEMA.save(tmp_path / "none")
    with pytest.raises(InputError, match=r"holds no \*\.parquet"):
        RawLog.open(tmp_path / "none")
    with pytest.raises(InputError, match="no such file or folder"):
        RawLog.open(tmp_path / "nowhere")


def test_empty_lists_are_fine(tmp_path: Path) -> None:
    table = random_log(3).set_column(4, "tags", lists_of([[], [], []]))
    RawLog.open(write_log(tmp_path / "raw", table)).validate()
