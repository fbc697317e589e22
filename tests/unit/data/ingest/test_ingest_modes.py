"""Batches without an order, from another process, and of stages that hold the GIL."""

import random
import re
import threading
import time
from copy import copy

import numpy as np
import pytest
import torch
from small_dataset import make_table, write_dataset

from recmill.artifacts import Dataset, InputError
from recmill.data.ingest import STAGES, IngestPipeline
from recmill.data.ingest.clock import Clock
from recmill.data.ingest.stages import PlainReader
from recmill.data.ingest.transport import pack, shared_folder, unpack
from recmill.data.ingest.work import RowGroupWork, is_gil_bound
from recmill.data.schema import Schema
from recmill.tuning.simulation.stage_times import delayed_reader

GROUPS = [[40, 31, 7], [64, 1, 52, 33], [90]]
NUM_ROWS = sum(map(sum, GROUPS))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    folder = tmp_path_factory.mktemp("modes") / "dataset"
    return write_dataset(folder, [*GROUPS, [20]], splits=["train", "train", "train", "test"])


def content(batch) -> tuple[bytes, ...]:
    """Every byte of a batch."""
    tensors = (batch.dense_BF, batch.label_B, batch.ids.values(), batch.ids.lengths())
    return tuple(tensor.numpy().tobytes() for tensor in tensors)


class HastyReader(PlainReader):
    """Row groups take different times, so that they overtake one another."""

    def decode(self, group, raw):
        time.sleep(0.004 * (group.index % 3))
        return super().decode(group, raw)


class LateReader(PlainReader):
    """After the first row groups each takes longer."""

    num_read = 0

    def transform(self, group, table):
        self.num_read += 1
        time.sleep(0.002 * self.num_read)
        return super().transform(group, table)


@pytest.mark.parametrize("seed", range(5))
def test_without_an_order_every_batch_comes_once(dataset, seed):
    rng = random.Random(seed)
    options = {"batch_size": rng.choice([7, 16, 50]), "epochs": 3, "seed": seed}
    workers = {stage: rng.randint(1, 4) for stage in STAGES}
    reader = HastyReader(dataset, Schema.load(dataset.path))
    expected = [content(batch) for batch in IngestPipeline(dataset, **options)]
    with IngestPipeline(dataset, **options, workers=workers, is_ordered=False, reader=reader) as pipeline:
        found = [content(batch) for batch in pipeline]
        assert pipeline.position == len(pipeline)
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("stop", [1, 5, 17])
def test_without_an_order_a_stopped_run_goes_on_with_the_batches_that_are_left(dataset, stop):
    options = {"batch_size": 20, "epochs": 2, "seed": 4}
    reader = HastyReader(dataset, Schema.load(dataset.path))
    found = []
    with IngestPipeline(
        dataset, **options, workers=dict.fromkeys(STAGES, 3), is_ordered=False, reader=reader
    ) as pipeline:
        for batch in pipeline:
            found.append(content(batch))
            if len(found) == stop:
                break
        state = pipeline.state_dict()
    resumed = IngestPipeline(dataset, **options)  # with an order: what was handed out ahead is left out
    resumed.load_state_dict(state)
    found += [content(batch) for batch in resumed]
    assert sorted(found) == sorted(content(batch) for batch in IngestPipeline(dataset, **options))
    assert resumed.state_dict()["epoch"] == 2


@pytest.mark.parametrize("is_ordered", [True, False])
def test_row_groups_of_batches_handed_out_before_may_come_late(dataset, is_ordered):
    """The batch that is left ends before the row groups of the others, which nobody needs, are read."""
    options = {"batch_size": 20, "epochs": 2, "seed": 4}
    expected = [content(batch) for batch in IngestPipeline(dataset, **options)]
    with IngestPipeline(dataset, **options, workers=dict.fromkeys(STAGES, 4), is_ordered=is_ordered) as pipeline:
        per_epoch = pipeline.batches_per_epoch
        for left in range(per_epoch):
            state = IngestPipeline(dataset, **options).state_dict()
            state["ahead"] = [number for number in range(per_epoch) if number > left]
            state["batch"] = left
            pipeline.load_state_dict(state)
            pipeline._reader = LateReader(dataset, Schema.load(dataset.path))
            found = [content(batch) for batch in pipeline]
            assert sorted(found) == sorted([expected[left], *expected[per_epoch:]])


def test_ranks_need_an_order(dataset):
    with pytest.raises(InputError, match="2 ranks would mix different batches"):
        IngestPipeline(dataset, batch_size=20, world_size=2, is_ordered=False)


@pytest.mark.parametrize("storm", range(20))
def test_a_storm_that_is_interrupted_gives_the_same_bytes(dataset, storm):
    rng = random.Random(100 + storm)
    options = {"batch_size": rng.choice([5, 17, 64]), "epochs": 2, "seed": storm}
    expected = [content(batch) for batch in IngestPipeline(dataset, **options)]
    found, state = [], None
    while len(found) < len(expected):
        with IngestPipeline(dataset, **options, prefetch=rng.randint(1, 4)) as pipeline:
            if state:
                pipeline.load_state_dict(state)
            stop = rng.randint(len(found) + 1, len(expected))
            for batch in pipeline:
                found.append(content(batch))
                pipeline.set_workers({stage: rng.randint(1, 5) for stage in STAGES if rng.random() < 0.6})
                if len(found) == stop:
                    break
            state = pipeline.state_dict()
    assert found == expected


def test_parcels_carry_tensors_tables_and_nothing(tmp_path):
    folder = shared_folder()
    with folder:
        table, tensor = make_table(0, 50), torch.arange(6.0).reshape(2, 3)
        found = unpack(pack({"table": table, "tensor": tensor, "empty": np.empty(0), "text": "x"}, folder.name))
        assert found["table"].equals(table)
        assert torch.equal(found["tensor"], tensor)
        found["tensor"].zero_()
        assert found["empty"].shape == (0,)
        assert unpack(pack("nothing to share", folder.name)) == "nothing to share"


def test_another_process_gives_the_same_batches_and_its_errors(dataset):
    options = {"batch_size": 30, "epochs": 2, "seed": 2}
    expected = [content(batch) for batch in IngestPipeline(dataset, **options)]
    with IngestPipeline(dataset, **options, in_process=False) as pipeline:
        batches = iter(pipeline)
        found = [content(next(batches)) for _ in range(4)]
        pipeline.set_workers({"decode": 3})
        assert pipeline.stats()["decode"]["workers"] == 3
        found += [content(batch) for batch in batches]
    assert found == expected
    stats = pipeline.stats()
    assert stats["consumer"]["rows"] == 2 * NUM_ROWS
    assert stats["memory"]["peak_bytes"] <= stats["memory"]["limit_bytes"]


def count_in_python(num_steps: int = 400_000) -> int:
    total = 0
    for number in range(num_steps):
        total += number * number
    return total


class PythonReader(PlainReader):
    """A transformation that holds the GIL."""

    def transform(self, group, table):
        count_in_python()
        return super().transform(group, table)


def test_the_gil_is_told_from_a_busy_machine():
    clock = Clock()
    count_in_python()
    bound = clock.lap()
    matrix = np.random.default_rng(0).random(2_000_000)
    np.sort(matrix)
    free = clock.lap()
    assert any(is_gil_bound(count_in_python, alone=bound) for _ in range(3))
    assert not all(is_gil_bound(lambda: np.sort(matrix), alone=free) for _ in range(3))


def test_a_probe_that_sees_nothing_is_repeated_ever_more_rarely(dataset, monkeypatch):
    reader = PythonReader(dataset, Schema.load(dataset.path))
    group = IngestPipeline(dataset, batch_size=16)._groups[0]
    table = reader.decode(group, reader.read(group))
    answers, moved = iter([False, True, False, True, True]), []
    work = RowGroupWork(reader)
    monkeypatch.setattr("recmill.data.ingest.work.is_gil_bound", lambda *_, **__: next(answers))
    monkeypatch.setattr(work, "_move", moved.append)
    num_left = []
    for _ in range(20):
        work.do("transform", group, table, workers=2)
        num_left.append(len(list(copy(answers))))
    assert num_left == [4, 4, 3, 2, 2, 2, 2, 1, 0, *[0] * 11]  # probed at the items 1, 3, 4, 8 and 9
    assert moved == ["transform"]


def test_a_stage_that_holds_the_gil_moves_to_processes_and_gives_the_same(dataset):
    reader = PythonReader(dataset, Schema.load(dataset.path))
    group = IngestPipeline(dataset, batch_size=16)._groups[0]
    table = reader.decode(group, reader.read(group))
    expected = reader.transform(group, table)
    work = RowGroupWork(reader)
    try:
        deadline = time.monotonic() + 100
        while "transform" not in work.in_processes and time.monotonic() < deadline:
            work.do("transform", group, table, workers=2)
        assert work.in_processes == {"transform"}
        found, taken = work.do("transform", group, table, workers=2)
        assert np.array_equal(found.dense_RF, expected.dense_RF)
        assert all(np.array_equal(mine, other) for mine, other in zip(found.values, expected.values, strict=True))
        assert taken.cpu_seconds > 0
    finally:
        work.close()


class WideReader(PlainReader):
    """Row groups that take more memory than their footers let expect."""

    def transform(self, group, table):
        block = super().transform(group, table)
        return _Wide(**vars(block))


def _make_wide():
    from recmill.data.ikjt.batch import RowBlock

    class Wide(RowBlock):
        @property
        def nbytes(self):
            return 50 * super().nbytes

    return Wide


_Wide = _make_wide()


def test_row_groups_wider_than_their_footer_are_charged_for_it(dataset):
    options = {"batch_size": 16, "reader": WideReader(dataset, Schema.load(dataset.path))}
    with IngestPipeline(dataset, **options, memory_limit_bytes=50 * 2**20) as pipeline:
        assert sum(map(len, pipeline)) == NUM_ROWS
        assert pipeline.stats()["memory"]["expansion"] > 5
    with pytest.raises(InputError, match="too small") as refusal:
        IngestPipeline(dataset, **options, memory_limit_bytes=1)
    least = int(re.search(r"take ([\d,]+) bytes", str(refusal.value))[1].replace(",", ""))
    with pytest.raises(InputError, match="times what its footer says"):
        list(IngestPipeline(dataset, **options, memory_limit_bytes=least))


def test_no_limit_passes_what_the_machine_has_left(dataset):
    pipeline = IngestPipeline(dataset, batch_size=16, memory_limit_bytes=2**60)
    assert pipeline.memory_limit_bytes < 2**50
    with pytest.raises(InputError, match="memory limit of 1 bytes is too small"):
        IngestPipeline(dataset, batch_size=16, trainer_reserve_bytes=2**60)


def test_a_consumer_is_seen_to_wait_while_it_waits(dataset):
    reader = delayed_reader(dataset, 0.4)
    with IngestPipeline(dataset, split="all", batch_size=16, reader=reader) as pipeline:
        thread = threading.Thread(target=lambda: next(iter(pipeline)), daemon=True)
        thread.start()
        time.sleep(0.25)
        consumer = pipeline.stats()["consumer"]
        thread.join()
    assert consumer["rows"] == 0
    assert 0.1 < consumer["stall_seconds"] <= consumer["seconds"]
