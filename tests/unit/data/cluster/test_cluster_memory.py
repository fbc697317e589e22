"""The memory limit of clustering bounds how far the whole process grows, and one that cannot be kept is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recmill.artifacts import InputError
from recmill.data.cluster import cluster_sessions
from recmill.data.schema import Feature, Schema
from tests.raw_logs import random_log, write_log

# A fresh process, as the command line starts one: what other tests loaded or freed must not count.
SCRIPT = """
import json, sys
from pathlib import Path
from recmill.data.cluster import cluster_sessions
from recmill.data.memory_plan import MemoryPlan

plans, plan = [], MemoryPlan.of
MemoryPlan.of = lambda *args, **kwargs: plans.append(plan(*args, **kwargs)) or plans[-1]

def resident(name):
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

raw, out, layout, limit = sys.argv[1:]
before = resident("VmRSS")
dataset = cluster_sessions(raw, out=out, layout=layout, memory_limit_bytes=int(limit), eval_fraction=0.1)
found = {"grown": resident("VmHWM") - before, "num_rows": dataset.num_rows, "num_plans": len(set(plans))}
print(json.dumps(found))
"""
NUM_LISTS, LENGTH, ROWS_PER_GROUP = 8, 100, 16_384


@pytest.fixture(scope="module")
def wide_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """65,536 rows of 6.5 kB, 420 MB in memory, whose lists repeat in sessions of 16 rows that are far apart in time."""
    folder = tmp_path_factory.mktemp("wide")
    names = [f"ids_{number}" for number in range(NUM_LISTS)]
    schema = Schema(features=tuple(Feature(name=name, kind="sparse", num_rows=4_096, dim=4) for name in names))
    schema.save(folder)
    rng = np.random.default_rng(0)
    lists = rng.integers(0, 4_096, (4_096, LENGTH))
    offsets = pa.array(np.arange(0, LENGTH * ROWS_PER_GROUP + 1, LENGTH, dtype=np.int32))
    with pq.ParquetWriter(folder / "log.parquet", schema.arrow_schema(), compression="zstd") as writer:
        for group in range(4):
            session = rng.permutation(ROWS_PER_GROUP) % 4_096
            columns = {"session_id": session, "timestamp": group * ROWS_PER_GROUP + np.arange(ROWS_PER_GROUP)}
            columns["label"] = (session % 2).astype(np.float32)
            ids = [pa.array(lists[(session + number) % 4_096].reshape(-1)) for number in range(NUM_LISTS)]
            columns |= {n: pa.ListArray.from_arrays(offsets, own) for n, own in zip(names, ids, strict=True)}
            writer.write_table(pa.table(columns, schema=schema.arrow_schema()))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "limit"), [("time", 250_000_000), ("session", 250_000_000), ("deduplicated", 450_000_000)]
)
def test_the_process_grows_by_no_more_than_the_limit(wide_log: Path, tmp_path: Path, layout: str, limit: int) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("resident memory is read from /proc")
    arguments = [str(wide_log), str(tmp_path / "out"), layout, str(limit)]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["num_rows"] == 4 * ROWS_PER_GROUP
    assert found["num_plans"] == 1  # what reading the log has loaded meanwhile is not free
    assert found["grown"] <= limit


@pytest.mark.parametrize("layout", ["time", "session", "deduplicated"])
def test_a_limit_that_cannot_be_kept_is_refused_with_the_least_that_can(tmp_path: Path, layout: str) -> None:
    raw = write_log(tmp_path / "raw", random_log(200))
    with pytest.raises(InputError, match=rf"{layout}.*expected at least [\d,]+; raise --memory-limit") as error:
        cluster_sessions(raw, out=tmp_path / "out", layout=layout, memory_limit_bytes=30_000_000)
    least = int(str(error.value).split("at least ")[1].split(";")[0].replace(",", ""))
    assert 30_000_000 < least < 500_000_000
    assert cluster_sessions(raw, out=tmp_path / "out", layout=layout, memory_limit_bytes=least).num_rows == 200
