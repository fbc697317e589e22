"""Clusters a log with Spark: every executor sorts and writes its own range of sessions.

The executors need recmill installed, and see the output through a shared folder or, for a URL, through fsspec.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import ibis
import pyarrow as pa

from recmill.artifacts import InputError, is_remote, join_path
from recmill.data.cluster.query import ClusterPlan, log_rows, write_sorted
from recmill.data.storage.options import SORT_KEYS
from recmill.data.storage.writer import SPLIT_COLUMN, PartFormat
from recmill.progress import no_progress

MIN_DRIVER_MEMORY_BYTES = 512 * 2**20  # Spark does not start with less than about 450 MiB


def missing_for_spark() -> str | None:
    """Why Spark cannot run here, or None."""
    try:
        import pyspark  # noqa: F401
    except ImportError:
        return "pyspark is not installed (pip install 'recmill[spark]')"
    if "SPARK_REMOTE" in os.environ or shutil.which("java") or os.environ.get("JAVA_HOME"):
        return None
    return "no Java was found (install Java 17 or newer, or set JAVA_HOME)"


def start_session(settings: Mapping[str, str]) -> Any:
    """The active Spark session, or a new one, with these settings."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("recmill")
    for name, value in {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", **settings}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    if "SPARK_REMOTE" not in os.environ:
        session.sparkContext.setLogLevel("ERROR")
    return session


class SparkEngine:
    """Runs `ClusterEngine` on the active Spark session; without one it starts its own and stops it at the end."""

    def __init__(self, plan: ClusterPlan) -> None:
        if reason := missing_for_spark():
            raise InputError(f"engine 'spark' cannot run: {reason}; or use engine 'duckdb'")
        if plan.log.path.startswith("memory://"):
            raise InputError(f"{plan.log.path}: Spark cannot read the memory of this process; use engine 'duckdb'")
        from pyspark.sql import SparkSession

        warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)
        self.plan = plan
        self.views: list[str] = []
        active = SparkSession.getActiveSession()
        self.is_own = active is None
        self.spark = active or self._start()
        self.connection = ibis.pyspark.connect(self.spark)
        self.rows = log_rows(plan.log, self._open_files)

    def _start(self) -> Any:
        """Our own session; the user's Spark settings (spark.master, SPARK_REMOTE) decide where it runs."""
        # Workers default to the first `python3` on the path; on this machine it must be the one that has recmill.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        memory_bytes = max(self.plan.memory_limit_bytes, MIN_DRIVER_MEMORY_BYTES)
        return start_session(
            {"spark.driver.memory": f"{memory_bytes // 2**20}m", "spark.local.dir": str(self.plan.spill_folder)}
        )

    def _open_files(self, paths: Sequence[str]) -> Any:
        view = f"recmill_log_{uuid.uuid4().hex[:8]}"
        self.spark.read.parquet(*map(spark_path, paths)).createOrReplaceTempView(view)
        self.views.append(view)
        return self.connection.table(view)

    def fetch_row(self, query: Any) -> tuple[Any, ...]:
        return tuple(self.spark.sql(self.connection.compile(query)).first())

    def fetch_table(self, query: Any, schema: pa.Schema) -> pa.Table:
        return self.spark.sql(self.connection.compile(query)).toArrow().select(schema.names).cast(schema)

    def write_parts(self, query: Any, *, split_names: Sequence[str], form: PartFormat) -> list[dict[str, Any]]:
        plan = self.plan
        # Executors must reach it: the folder itself if it is shared or local, else a place beside the remote output.
        staging = f"{plan.out.rstrip('/')}.{uuid.uuid4().hex[:8]}.tmp" if is_remote(plan.out) else str(plan.folder)
        split = [SPLIT_COLUMN] if SPLIT_COLUMN in query.columns else []
        keys = [*split, *SORT_KEYS[plan.layout]]
        num_partitions = -(-plan.log.num_rows // plan.rows_per_part)
        rows = self.spark.sql(self.connection.compile(query))
        # Ranges are taken over whole sessions (or timestamps), so that no partition divides one.
        rows = rows.repartitionByRange(num_partitions, *keys[: len(split) + 1]).sortWithinPartitions(*keys)
        try:
            written = rows.mapInArrow(
                _partition_writer(plan, staging, split_names, form), "partition long, parts string"
            )
            reports = sorted((row.partition, json.loads(row.parts)) for row in written.collect())
            return self._collect_parts([part for _, parts in reports for part in parts], staging)
        finally:
            if is_remote(staging):
                filesystem, root = fsspec.core.url_to_fs(staging)
                if filesystem.exists(root):
                    filesystem.rm(root, recursive=True)

    def _collect_parts(self, parts: list[dict[str, Any]], staging: str) -> list[dict[str, Any]]:
        """Number the parts in order and remove files that failed attempts of tasks left behind."""
        for number, part in enumerate(parts):
            name = f"part-{number:05d}.parquet"
            target = self.plan.folder / name
            if is_remote(staging):
                filesystem, root = fsspec.core.url_to_fs(staging)
                filesystem.get_file(join_path(root, part["file"]), str(target))
            else:
                source = Path(staging) / part["file"]
                if not source.exists():
                    raise InputError(
                        f"{self.plan.out}: Spark's executors wrote parts that are not visible here; share the folder"
                    )
                source.rename(target)
            part["file"] = name
        for left in self.plan.folder.glob("task-*.parquet"):
            left.unlink()
        return parts

    def close(self) -> None:
        for view in self.views:
            self.spark.catalog.dropTempView(view)
        if self.is_own:
            self.spark.stop()


def spark_path(path: str) -> str:
    """The path as Hadoop names it, with pattern characters escaped."""
    for character in "\\[]{}*?":
        path = path.replace(character, "\\" + character)
    if path.startswith("s3://"):
        return "s3a://" + path.removeprefix("s3://")
    return path if is_remote(path) else f"file://{path}"


def _partition_writer(
    plan: ClusterPlan, staging: str, split_names: Sequence[str], form: PartFormat
) -> Callable[..., Iterator[pa.RecordBatch]]:
    """A function for the executors: writes the sorted rows of a partition and returns its parts."""
    plan = replace(plan, progress=no_progress)  # the caller's may not be pickled

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        partition = TaskContext.get().partitionId()
        prefix = f"task-{partition:05d}-{uuid.uuid4().hex[:8]}"  # attempts of one task must not share a file
        parts = write_sorted(batches, plan, form, split_names, folder=staging, prefix=prefix)
        yield pa.RecordBatch.from_pydict({"partition": [partition], "parts": [json.dumps(parts)]})

    return write
