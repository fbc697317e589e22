"""Prepares a log with Spark: executors join, make the samples of whole users, and sort them by time.

They run the same function over users as DuckDB's engine (samples/blocks.py). Side tables are sent to every executor.
The driver writes the log from the sorted parts, which executors leave where it can read them.
"""

from __future__ import annotations

import os
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import ibis
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts import InputError, is_remote, join_path
from recmill.data.cluster.spark_engine import MIN_DRIVER_MEMORY_BYTES, missing_for_spark, spark_path, start_session
from recmill.data.inspection.reading import copy_table
from recmill.data.log import read_file
from recmill.data.preparation.engines.blocks import arrays_of
from recmill.data.preparation.engines.spark_text import name_of, read_csv, read_json
from recmill.data.preparation.queries.recipe import Recipe
from recmill.data.preparation.queries.tables import cast_of, sql_function
from recmill.data.preparation.samples.blocks import SamplePlan, list_columns, make_samples
from recmill.data.preparation.samples.summary import SessionStarts
from recmill.data.preparation.sources import SourceFiles
from recmill.progress import Progress

EVENTS_PER_PARTITION = 500_000
ROWS_PER_PARTITION = 500_000
UNREADABLE = ("CAST_INVALID_INPUT", "CANNOT_PARSE_TIMESTAMP", "DateTimeException", "NumberFormatException")
TIME_ZONE = "spark.sql.session.timeZone"
_unix_millis = sql_function("unix_millis", "timestamp", returns="int64")
_conv = sql_function("conv", "string", "int32", "int32", returns="string")


class SparkQueries:
    """Runs queries on the active Spark session; without one it starts its own and stops it at the end."""

    def __init__(self, scratch: Path, *, memory_limit_bytes: int, out: str) -> None:
        if reason := missing_for_spark():
            raise InputError(f"engine 'spark' cannot run: {reason}; or use engine 'duckdb'")
        from pyspark.sql import SparkSession

        warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)
        active = SparkSession.getActiveSession()
        self.is_own = active is None
        if active is None:
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
            memory_bytes = max(memory_limit_bytes, MIN_DRIVER_MEMORY_BYTES)
            active = start_session(
                {"spark.driver.memory": f"{memory_bytes // 2**20}m", "spark.local.dir": str(scratch)}
            )
        self.spark = active
        self.time_zone = self.spark.conf.get(TIME_ZONE)
        self.spark.conf.set(TIME_ZONE, "UTC")
        self.connection = ibis.pyspark.connect(self.spark)
        # Executors must reach it: a local or shared folder, else a place beside the remote output.
        self.staging = f"{out.rstrip('/')}.{uuid.uuid4().hex[:8]}.tmp" if is_remote(out) else str(scratch / "sorted")
        self._views: list[str] = []
        self._kept: list[Any] = []

    def open(self, source: SourceFiles) -> Any:
        from pyspark.errors import PySparkException

        if source.path.startswith("memory://"):
            raise InputError(f"{source.path}: Spark cannot read the memory of this process; use engine 'duckdb'")
        try:
            frame = self._read(source)
            frame = frame.selectExpr(*(own for field in frame.schema for own in _flat([field.name], field.dataType)))
            frame = frame.selectExpr(*(_cast(name, cast_of(kind)) for name, kind in frame.dtypes))
            if source.is_text:
                frame = self._persist(frame)
            return self._view(frame)
        except PySparkException as error:
            raise InputError(f"{source.path}: cannot be read as {source.format} ({_first_line(error)})") from None

    def _read(self, source: SourceFiles) -> Any:
        read, paths = self.spark.read, [spark_path(file) for file in source.files]
        if source.format == "parquet":
            return read.option("mergeSchema", "true").parquet(*paths)
        if source.format == "jsonl":
            return read_json(self.spark, source, paths)
        if source.format == "csv":
            return read_csv(self.spark, source, paths)
        return self._read_table(source)

    def _read_table(self, source: SourceFiles) -> Any:
        """A Delta or Iceberg table: with Spark's package for it, or a copy that this process makes."""
        from py4j.protocol import Py4JJavaError
        from pyspark.errors import PySparkException

        version = source.options.get("version")
        named = {"delta": "versionAsOf", "iceberg": "snapshot-id"}[source.format]
        options = {} if version is None else {named: str(version)}
        try:
            return self.spark.read.format(source.format).options(**options).load(spark_path(source.path))
        except (PySparkException, Py4JJavaError) as error:
            if "DATA_SOURCE_NOT_FOUND" not in str(error):
                raise
        path = join_path(self.staging, f"{uuid.uuid4().hex[:8]}.parquet")
        copy_table(source, path)
        return self.spark.read.parquet(spark_path(path))

    def _persist(self, frame: Any) -> Any:
        self._kept.append(frame.persist())
        return self._kept[-1]

    def _view(self, frame: Any) -> Any:
        self._views.append(f"recmill_{uuid.uuid4().hex[:8]}")
        frame.createOrReplaceTempView(self._views[-1])
        return self.connection.table(self._views[-1])

    def milliseconds(self, column: Any) -> Any:
        return _unix_millis(column)

    def hex_number(self, column: Any) -> Any:
        return _conv(column, ibis.literal(16, "int32"), ibis.literal(10, "int32")).cast("int64")

    def fetch(self, query: Any) -> pa.Table:
        with _explained():
            return self._frame(query).toArrow()

    def keep(self, query: Any) -> Any:
        return self._view(self._persist(self._frame(query)))

    def _frame(self, query: Any) -> Any:
        return self.spark.sql(self.connection.compile(query))

    def make_rows(self, recipe: Recipe, starts: SessionStarts, progress: Progress) -> Iterator[pa.RecordBatch]:
        """The rows of the log in time order; the start of every session goes to `starts`."""
        from pyspark.sql import functions
        from pyspark.sql.pandas.types import from_arrow_schema

        num_partitions = -(-recipe.events.num_events // EVENTS_PER_PARTITION)
        events = self._frame(recipe.query).repartitionByRange(num_partitions, "user")
        events = events.sortWithinPartitions("user", "time")
        schema = from_arrow_schema(recipe.plan.schema.arrow_schema())
        rows = self._persist(events.mapInArrow(_sample_maker(recipe.plan), schema))
        with _explained():
            begun = rows.groupBy("session_id").agg(
                functions.min("timestamp").alias("start"), functions.count("*").alias("n")
            )
            found = begun.toArrow()
            starts.add_times(found["start"].to_numpy(), sum(found["n"].to_pylist()))
            progress("make samples", recipe.events.num_events, recipe.events.num_events)
            num_parts = max(1, -(-starts.num_samples // ROWS_PER_PARTITION))
            ordered = rows.repartitionByRange(num_parts, "timestamp").sortWithinPartitions("timestamp", "session_id")
            filesystem, root = fsspec.core.url_to_fs(self.staging)
            filesystem.makedirs(root, exist_ok=True)
            written = ordered.mapInArrow(_part_writer(self.staging), "partition long, file string").collect()
        done = 0
        for part in sorted(written):
            path = join_path(self.staging, part.file)
            if not filesystem.exists(join_path(root, part.file)):
                raise InputError(
                    f"{self.staging}: Spark's executors wrote parts that are not visible here; share the folder"
                )
            for batch in read_file(path):
                yield batch
                done += batch.num_rows
                progress("write the log", done, starts.num_samples)

    def close(self) -> None:
        for frame in self._kept:
            frame.unpersist()
        for view in self._views:
            self.spark.catalog.dropTempView(view)
        if is_remote(self.staging):
            filesystem, root = fsspec.core.url_to_fs(self.staging)
            if filesystem.exists(root):
                filesystem.rm(root, recursive=True)
        self.spark.conf.set(TIME_ZONE, self.time_zone)
        if self.is_own:
            self.spark.stop()


def _sample_maker(plan: SamplePlan) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function for the executors: the samples of a partition, which holds whole users in order."""

    def make(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = [batch for batch in batches if batch.num_rows]
        if found:
            samples = make_samples(arrays_of(pa.Table.from_batches(found)), plan)
            windows = {name: (samples.starts[name], samples.lengths[name]) for name in plan.windows}
            yield list_columns(samples.columns, windows, samples.histories, plan)

    return make


def _part_writer(staging: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function for the executors: writes the sorted rows of a partition to a file."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        partition = TaskContext.get().partitionId()
        name = f"part-{partition:05d}-{uuid.uuid4().hex[:8]}.parquet"  # attempts of one task must not share a file
        writer = None
        with fsspec.open(join_path(staging, name), "wb") as file:
            for batch in batches:
                writer = writer or pq.ParquetWriter(file, batch.schema, compression="zstd")
                writer.write_batch(batch)
            if writer is not None:
                writer.close()
        if writer is not None:
            yield pa.RecordBatch.from_pydict({"partition": [partition], "file": [name]})

    return write


def _cast(column: str, kind: str | None) -> str:
    name = name_of(column)
    return f"CAST({name} AS {'string' if kind == 'varchar' else kind}) AS {name}" if kind else name


def _flat(path: list[str], kind: Any) -> Iterator[str]:
    """Spark's expressions of a column, or of the fields of a record as columns of their own: user.id."""
    if kind.typeName() != "struct":
        yield f"{'.'.join(name_of(own) for own in path)} AS {name_of('.'.join(path))}"
        return
    for field in kind:
        yield from _flat([*path, field.name], field.dataType)


@contextmanager
def _explained() -> Iterator[None]:
    """Values that Spark cannot convert are the user's error."""
    from pyspark.errors import PySparkException

    try:
        yield
    except PySparkException as error:
        if any(kind in str(error) for kind in UNREADABLE):
            raise InputError(f"a value cannot be converted ({_first_line(error)})") from None
        raise


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
