"""Delta and Iceberg tables, written by their own packages: the rows of one version, however it came about."""

from __future__ import annotations

import importlib.util
import json
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recmill.artifacts import InputError, is_remote
from recmill.data.inspection.document import write_document
from recmill.data.inspection.files import find_tables
from recmill.data.inspection.proposal import propose_log
from recmill.data.inspection.reading import connect, scan
from recmill.data.inspection.snapshots import FSSPEC
from recmill.data.preparation.prepared_log import prepare_log
from tests.event_logs import BASE_MS
from tests.object_store import s3_bucket

deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed (extra tables)")
pytest.importorskip("pyiceberg", reason="pyiceberg is not installed (extra tables)")

FIRST = pa.table({"user": ["a", "b", "c"], "item": pa.array([1, 2, 3], pa.int32()), "price": [0.5, 1.5, 2.5]})
SECOND = pa.table({"user": ["d", "e"], "item": pa.array([4, 5], pa.int32()), "price": [3.5, None]})


def rows_of(path: str | Path, columns: str = "*", **options) -> list[tuple]:
    """All rows of the table, sorted, as DuckDB reads them."""
    (found,) = find_tables([str(path)])
    found.options.update(options)
    with closing(connect()) as connection:
        expression = scan(connection, found, found.files)
        assert scan(connection, found, found.files) == expression  # opened once
        for _ in range(2):  # and read as often as needed
            rows = connection.execute(f"SELECT {columns} FROM {expression}").fetchall()
            assert connection.execute(f"SELECT count(*) FROM {expression}").fetchall() == [(len(rows),)]
    return sorted(rows)


def iceberg_table(path: str | Path, data: pa.Table = FIRST, *, partition: str = "", **properties: str):
    from pyiceberg.catalog.memory import InMemoryCatalog

    catalog = InMemoryCatalog("test", **(FSSPEC if is_remote(path) else {}))
    catalog.create_namespace("shop")
    table = catalog.create_table("shop.events", data.schema, location=str(path), properties=properties)
    if partition:
        with table.update_spec() as change:
            change.add_identity(partition)
    table.append(data)
    return table


def test_only_the_current_version_of_a_delta_table_is_read(tmp_path):
    path = tmp_path / "events"
    deltalake.write_deltalake(path, FIRST)
    deltalake.write_deltalake(path, SECOND, mode="append")
    deltalake.DeltaTable(path).delete("item = 2")
    deltalake.DeltaTable(path).update({"price": "9.0"}, predicate="item = 4")
    assert len(list(path.glob("*.parquet"))) > len(deltalake.DeltaTable(path).file_uris())
    assert rows_of(path) == [("a", 1, 0.5), ("c", 3, 2.5), ("d", 4, 9.0), ("e", 5, None)]
    assert rows_of(path, version=0) == [("a", 1, 0.5), ("b", 2, 1.5), ("c", 3, 2.5)]
    deltalake.write_deltalake(path, SECOND, mode="overwrite")
    assert rows_of(path) == [("d", 4, 3.5), ("e", 5, None)]


def test_partitions_and_new_columns_of_a_delta_table_are_read(tmp_path):
    path = tmp_path / "events"
    deltalake.write_deltalake(path, FIRST, partition_by=["user"])  # the files do not hold the column
    more = SECOND.append_column("brand", pa.array(["x y", "ü"]))
    deltalake.write_deltalake(path, more, mode="append", schema_mode="merge", partition_by=["user"])
    assert rows_of(path, "user, item, price, brand") == [
        ("a", 1, 0.5, None),
        ("b", 2, 1.5, None),
        ("c", 3, 2.5, None),
        ("d", 4, 3.5, "x y"),
        ("e", 5, None, "ü"),
    ]


def test_rows_that_a_delta_table_marks_as_deleted_are_left_out(tmp_path):
    """Deletion vectors: the files stay, a bitmap says which of their rows are gone."""
    path = tmp_path / "events"
    deltalake.write_deltalake(path, FIRST, configuration={"delta.enableDeletionVectors": "true"})
    add_deletion_vector(path, deleted=[1])
    assert rows_of(path) == [("a", 1, 0.5), ("c", 3, 2.5)]


def add_deletion_vector(path: Path, *, deleted: list[int]) -> None:
    """Commit what Spark's DELETE writes: the file again, with an inline bitmap of the rows that are gone."""
    import base64
    import struct

    from pyroaring import BitMap

    log = path / "_delta_log"
    (first,) = [
        json.loads(line) for line in (log / f"{0:020d}.json").read_text().splitlines() if line.startswith('{"add"')
    ]
    bitmap = BitMap(deleted).serialize()
    payload = struct.pack("<I", 1681511377) + struct.pack("<Q", 1) + struct.pack("<I", 0) + bitmap
    payload += b"\0" * (-len(payload) % 4)
    vector = {
        "storageType": "i",
        "pathOrInlineDv": base64.b85encode(payload).decode().translate(Z85),
        "sizeInBytes": len(payload),
        "cardinality": len(deleted),
    }
    add = {**first["add"], "deletionVector": vector, "dataChange": True}
    remove = {"path": add["path"], "deletionTimestamp": BASE_MS, "dataChange": True}
    lines = [json.dumps({"remove": remove}), json.dumps({"add": add})]
    (log / f"{1:020d}.json").write_text("\n".join(lines) + "\n")


Z85 = str.maketrans(
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~",
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#",
)


def test_only_the_current_snapshot_of_an_iceberg_table_is_read(tmp_path):
    table = iceberg_table(tmp_path)
    before = table.current_snapshot().snapshot_id
    table.append(SECOND)
    table.delete("item = 2")
    assert rows_of(tmp_path) == [("a", 1, 0.5), ("c", 3, 2.5), ("d", 4, 3.5), ("e", 5, None)]
    assert rows_of(tmp_path, version=before) == [("a", 1, 0.5), ("b", 2, 1.5), ("c", 3, 2.5)]
    table.overwrite(SECOND)
    assert rows_of(tmp_path) == [("d", 4, 3.5), ("e", 5, None)]
    assert len(list((tmp_path / "data").rglob("*.parquet"))) > 2


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["", "user"])
def test_an_iceberg_table_whose_columns_changed_is_read(tmp_path, partition):
    from pyiceberg.types import LongType, StringType

    table = iceberg_table(tmp_path, partition=partition)
    with table.update_schema() as change:
        change.add_column("brand", StringType())
    names = ["user", "item", "price", "brand"]
    more = SECOND.append_column("brand", pa.array(["x", "y"]))
    table.append(more)
    added = [("a", 1, 0.5, None), ("b", 2, 1.5, None), ("c", 3, 2.5, None), ("d", 4, 3.5, "x"), ("e", 5, None, "y")]
    assert rows_of(tmp_path) == added
    with table.update_schema() as change:
        change.rename_column("price", "cost")
        change.update_column("item", LongType())
        change.delete_column("brand")
    with table.update_schema() as change:
        change.add_column("brand", StringType())  # another column of the same name: the old values are gone
    more = pa.table({"user": ["f"], "item": pa.array([2**40]), "cost": [4.5], "brand": ["z"]})
    table.append(more)
    assert table.schema().column_names == [names[0], names[1], "cost", "brand"]
    assert rows_of(tmp_path) == [(*row[:3], None) for row in added] + [("f", 2**40, 4.5, "z")]


def test_rows_in_delete_files_of_an_iceberg_table_are_left_out(tmp_path):
    table = iceberg_table(tmp_path, **{"format-version": "2"})
    add_position_deletes(table, positions=[0, 2])
    assert rows_of(tmp_path) == [("b", 2, 1.5)]


def add_position_deletes(table, *, positions: list[int]) -> None:
    """Commit what Spark and Flink write with merge-on-read: a file that lists rows of the table's only file."""
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent, ManifestWriterV2
    from pyiceberg.typedef import Record

    class DeletesWriter(ManifestWriterV2):
        def content(self):
            return ManifestContent.DELETES

        @property
        def _meta(self):
            return {**super()._meta, "content": "deletes"}

    (task,) = table.scan().plan_files()
    path = f"{table.location()}/data/deletes.parquet"
    columns = {"file_path": [task.file.file_path] * len(positions), "pos": pa.array(positions, pa.int64())}
    pq.write_table(pa.table(columns), path)
    counts = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts", "lower_bounds", "upper_bounds")
    file = DataFile.from_args(
        content=DataFileContent.POSITION_DELETES,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=len(positions),
        file_size_in_bytes=Path(path).stat().st_size,
        **{name: {} for name in counts},
    )
    file.spec_id = table.spec().spec_id
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as append:
        append.new_manifest_writer = lambda spec: DeletesWriter(
            spec, table.schema(), append.new_manifest_output(), append.snapshot_id, "deflate"
        )
        append.append_data_file(file)


EVENTS = pa.table(
    {
        "user_id": [f"u{i % 9}" for i in range(300)],
        "item_id": [f"i{i * 7 % 31}" for i in range(300)],
        "timestamp": pa.array([(BASE_MS + i * 60_000) * 1_000 for i in range(300)], pa.timestamp("us", "UTC")),
        "clicked": [i % 3 == 0 for i in range(300)],
    }
)
ITEMS = pa.table({"item_id": [f"i{i}" for i in range(31)], "price": [float(i) for i in range(31)]})


def write_shop(folder: Path) -> Path:
    """Events in a Delta table of three versions, items in an Iceberg table; returns the proposed log.yaml."""
    path = folder / "events"
    deltalake.write_deltalake(path, EVENTS.slice(0, 100))
    deltalake.write_deltalake(path, EVENTS, mode="append")
    deltalake.write_deltalake(path, EVENTS, mode="overwrite")
    iceberg_table(folder / "items", ITEMS)
    yaml = folder.parent / "log.yaml"
    yaml.write_text(write_document(propose_log([str(folder)]), out=yaml))
    return yaml


def samples_of(log: Path) -> pa.Table:
    return pa.concat_tables(pq.read_table(file) for file in sorted(log.glob("log-*.parquet")))


@pytest.mark.slow
def test_a_log_is_proposed_and_prepared_from_both_kinds_of_tables(tmp_path):
    """The same log as from Parquet files with these rows; of an older version if log.yaml names one."""
    yaml = write_shop(tmp_path / "shop")
    text = yaml.read_text()
    assert "format: delta" in text
    assert "{source: items, column: item_id}" in text
    prepare_log(yaml, out=tmp_path / "raw")
    (tmp_path / "files").mkdir()
    pq.write_table(EVENTS, tmp_path / "files/events.parquet")
    pq.write_table(ITEMS, tmp_path / "files/items.parquet")
    plain = text.replace("shop/events, format: delta", "files/events.parquet")
    plain = plain.replace("shop/items, format: iceberg", "files/items.parquet")
    assert plain.count("files/") == 2
    yaml.write_text(plain)
    prepare_log(yaml, out=tmp_path / "expected")
    assert samples_of(tmp_path / "raw") == samples_of(tmp_path / "expected")
    yaml.write_text(text.replace("format: delta", "version: 0"))  # the folder says that it is a Delta table
    prepare_log(yaml, out=tmp_path / "old")
    assert samples_of(tmp_path / "old").num_rows == 100
    yaml.write_text(text.replace("format: delta", "version: 7"))
    with pytest.raises(InputError, match="cannot be read as delta"):
        prepare_log(yaml, out=tmp_path / "none")
    yaml.write_text(text.replace("format: iceberg", "version: 7"))
    with pytest.raises(InputError, match=r"has no snapshot 7; it has \d+"):
        prepare_log(yaml, out=tmp_path / "none")
    yaml.write_text(plain.replace("files/items.parquet", "files/items.parquet, version: 7"))
    with pytest.raises(InputError, match=r"sources.items.version is for Delta and Iceberg tables"):
        prepare_log(yaml, out=tmp_path / "none")


@pytest.mark.slow
def test_remote_tables_are_read(tmp_path):
    with s3_bucket() as bucket:
        options = {"AWS_ALLOW_HTTP": "true"}
        deltalake.write_deltalake(f"{bucket}/delta", FIRST, storage_options=options)
        assert rows_of(f"{bucket}/delta") == [("a", 1, 0.5), ("b", 2, 1.5), ("c", 3, 2.5)]
        table = iceberg_table(f"{bucket}/iceberg")
        assert rows_of(f"{bucket}/iceberg") == [("a", 1, 0.5), ("b", 2, 1.5), ("c", 3, 2.5)]
        with table.update_schema() as change:
            change.rename_column("price", "cost")
        assert rows_of(f"{bucket}/iceberg", "user, cost") == [("a", 0.5), ("b", 1.5), ("c", 2.5)]


@pytest.mark.parametrize(
    ("kind", "called", "package"), [("delta", "a Delta", "deltalake"), ("iceberg", "an Iceberg", "pyiceberg")]
)
def test_a_missing_package_is_one_sentence_that_says_what_to_install(tmp_path, monkeypatch, kind, called, package):
    (tmp_path / "_delta_log" if kind == "delta" else tmp_path / "metadata").mkdir()
    (tmp_path / "metadata").mkdir(exist_ok=True)
    (tmp_path / "metadata/v1.metadata.json").write_text("{}")
    with pytest.raises(InputError, match=f"cannot be read as {kind}"):  # damaged
        rows_of(tmp_path)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else found(name, *rest)
    )
    with pytest.raises(InputError) as error:
        rows_of(tmp_path)
    assert f"is {called} table; install {package}, which reads it: pip install 'recmill[tables]'" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_the_current_metadata_of_an_iceberg_table_is_the_newest_or_what_the_hint_says(tmp_path):
    table = iceberg_table(tmp_path)
    table.append(SECOND)
    newest = sorted((tmp_path / "metadata").glob("*.metadata.json"))[-1]
    assert newest.name.startswith("00002-")
    older = sorted((tmp_path / "metadata").glob("*.metadata.json"))[-2]
    (tmp_path / "metadata/version-hint.text").write_text(older.name.removesuffix(".metadata.json"))
    assert len(rows_of(tmp_path)) == 3
    (tmp_path / "metadata/version-hint.text").unlink()
    (tmp_path / "metadata/00002-other.metadata.json").write_bytes(older.read_bytes())
    with pytest.raises(InputError, match=r"cannot tell which of 00002-.* is current; name the file"):
        rows_of(tmp_path)
