import re
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recmill.artifacts import Dataset, InputError
from recmill.data.ingest import STAGES, IngestPipeline
from recmill.data.ingest.memory import MemoryGuard, available_memory_bytes, live_bytes_bound, peak_live_bytes
from recmill.data.ingest.order import Order
from recmill.data.ingest.parts import Charge, PartFile
from tests.unit.data.ingest.small_dataset import write_dataset

GROUPS = [[60, 40, 75, 20], [90, 10, 80, 65], [50, 50, 30, 100]]
NUM_ROWS = sum(map(sum, GROUPS))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    folder = tmp_path_factory.mktemp("memory") / "dataset"
    return write_dataset(folder, [*GROUPS, [20]], splits=["train", "train", "train", "test"])


def smallest_limit(dataset: Dataset, **options) -> int:
    """The limit that the refusal asks for."""
    with pytest.raises(InputError, match="memory limit of 1 bytes is too small") as refusal:
        IngestPipeline(dataset, memory_limit_bytes=1, **options)
    return int(re.search(r"take ([\d,]+) bytes", str(refusal.value))[1].replace(",", ""))


def rows_of_all(pipeline) -> list[int]:
    return [int(label) for batch in pipeline for label in batch.label_B.tolist()]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("batch_size", [8, 50, 700])
def test_the_smallest_limit_allowed_is_enough_and_is_held(dataset, workers, batch_size):
    limit = smallest_limit(dataset, batch_size=batch_size, epochs=4)
    options = {"batch_size": batch_size, "epochs": 4, "memory_limit_bytes": limit}
    with IngestPipeline(dataset, workers=dict.fromkeys(STAGES, workers), **options) as pipeline:
        found = rows_of_all(pipeline)
    assert len(found) == 4 * NUM_ROWS
    assert set(found) == set(range(NUM_ROWS))
    assert pipeline.stats()["memory"]["peak_bytes"] <= limit


def test_one_byte_less_than_the_smallest_limit_is_refused(dataset):
    limit = smallest_limit(dataset, batch_size=50)
    with pytest.raises(InputError, match="one batch of 50 rows and the row groups it is cut from"):
        IngestPipeline(dataset, batch_size=50, memory_limit_bytes=limit - 1)


def test_the_batches_do_not_depend_on_the_limit(dataset):
    limit = smallest_limit(dataset, batch_size=30)
    tight = IngestPipeline(dataset, batch_size=30, memory_limit_bytes=limit)
    ample = IngestPipeline(dataset, batch_size=30)
    assert rows_of_all(tight) == rows_of_all(ample)


def test_the_limit_may_be_cut_while_it_runs(dataset):
    limit = smallest_limit(dataset, batch_size=10, epochs=3)
    pipeline = IngestPipeline(dataset, batch_size=10, epochs=3, memory_limit_bytes=20 * limit)
    found = []
    for number, batch in enumerate(pipeline):
        found += batch.label_B.tolist()
        if number == 5:
            pipeline.set_memory_limit(limit)
    assert len(found) == 3 * NUM_ROWS
    assert pipeline.stats()["memory"]["limit_bytes"] == limit
    with pytest.raises(InputError, match="too small"):
        pipeline.set_memory_limit(10)


def items_read_before_the_second_batch(pipeline) -> int:
    """How far the workers get while the consumer holds on to the first batch."""
    batches = iter(pipeline)
    next(batches)
    seen, unchanged = -1, 0
    while unchanged < 10:
        time.sleep(0.02)
        stats = pipeline.stats()
        is_idle = stats["read"]["items"] == seen and stats["consumer"]["queue_fill"] == 1
        unchanged = unchanged + 1 if is_idle else 0
        seen = stats["read"]["items"]
    batches.close()
    return seen


def test_a_machine_short_of_memory_stops_the_reading_ahead_only(dataset):
    options = {"batch_size": 8, "shuffle": False, "prefetch": 1}
    short, ample = IngestPipeline(dataset, **options), IngestPipeline(dataset, **options)
    short._guard.reserve_bytes, ample._guard.reserve_bytes = 10**18, 0
    assert items_read_before_the_second_batch(short) < items_read_before_the_second_batch(ample)
    assert len(rows_of_all(short)) == NUM_ROWS - 8


@pytest.mark.parametrize(("mean_length", "num_columns"), [(1, 20), (20, 4), (150, 1)])
@pytest.mark.parametrize("num_ids", [1_000, 2**40])
def test_a_row_group_is_charged_for_all_that_arrow_allocates(tmp_path, mean_length, num_columns, num_ids):
    rng = np.random.default_rng(0)
    columns = {"label": pa.array(np.zeros(2_000, dtype=np.float32))}
    for number in range(num_columns):
        offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 2 * mean_length + 1, 2_000))]).astype(np.int32)
        ids = rng.integers(0, num_ids, offsets[-1])
        columns[f"ids{number}"] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))
    pq.write_table(pa.table(columns), tmp_path / "part.parquet", compression="zstd")
    part = PartFile(str(tmp_path / "part.parquet"), columns=list(columns))
    raw = part.read(0)
    usual = pa.default_memory_pool()
    counted = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(counted)
    try:
        num_rows = part.decode(0, raw).num_rows  # the table goes at once: it must not outlive its pool
    finally:
        pa.set_memory_pool(usual)
    assert num_rows == 2_000
    assert raw.nbytes + counted.max_memory() <= part.charge(0).admitted_bytes


def test_the_bound_holds_for_every_permutation():
    rng = np.random.default_rng(1)
    for _ in range(50):
        rows = tuple(int(size) for size in rng.integers(1, 60, rng.integers(1, 20)))
        charges = [Charge(admitted_bytes=int(size) * 12, settled_bytes=int(size) * 5) for size in rows]
        order = Order(group_rows=rows, batch_size=int(rng.integers(1, 90)), num_lanes=8, seed=int(rng.integers(99)))
        for epoch in range(4):
            assert peak_live_bytes(order.plan(epoch), charges) <= live_bytes_bound(order, charges)


def test_a_control_group_bounds_the_free_memory(tmp_path):
    unlimited = available_memory_bytes(tmp_path)
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path) > 10**6
    (tmp_path / "memory.max").write_text("1000000\n")
    assert available_memory_bytes(tmp_path) == 100_000
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 300000\n")
    assert available_memory_bytes(tmp_path) == 400_000
    assert unlimited > 10**6


def test_the_guard_compares_free_memory_with_the_reserve():
    assert MemoryGuard(reserve_bytes=10**18).is_short()
    assert not MemoryGuard(reserve_bytes=0).is_short()
