"""Interrupted runs, row groups wider than their footer says, delays, and what the consumer waits for."""

import random
import re
import threading
import time

import pytest

from recmill.artifacts import Dataset, InputError
from recmill.data.ikjt.batch import RowBlock
from recmill.data.ingest import STAGES, IngestPipeline
from tests.unit.data.ingest.small_dataset import write_dataset

GROUPS = [[40, 31, 7], [64, 1, 52, 33], [90]]
NUM_ROWS = sum(map(sum, GROUPS))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    folder = tmp_path_factory.mktemp("runner") / "dataset"
    return write_dataset(folder, [*GROUPS, [20]], splits=["train", "train", "train", "test"])


def content(batch) -> tuple[bytes, ...]:
    """Every byte of a batch."""
    tensors = (batch.dense_BF, batch.label_B, batch.ids.values(), batch.ids.lengths())
    return tuple(tensor.numpy().tobytes() for tensor in tensors)


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


def test_row_groups_that_overtake_one_another_give_the_same_bytes(dataset):
    options = {"batch_size": 16, "epochs": 3, "seed": 1}
    expected = [content(batch) for batch in IngestPipeline(dataset, **options)]
    with IngestPipeline(dataset, **options, workers=dict.fromkeys(STAGES, 4)) as pipeline:
        decode = pipeline._reader.decode

        def hasty(group, raw):
            time.sleep(0.004 * (group.index % 3))
            return decode(group, raw)

        pipeline._reader.decode = hasty
        assert [content(batch) for batch in pipeline] == expected


class Wide(RowBlock):
    """A row group that takes more memory than its footer promises."""

    @property
    def nbytes(self):
        return 50 * super().nbytes


def test_row_groups_wider_than_their_footer_are_charged_for_it(dataset):
    def widened(pipeline):
        transform = pipeline._reader.transform
        pipeline._reader.transform = lambda group, table: Wide(**vars(transform(group, table)))
        return pipeline

    with widened(IngestPipeline(dataset, batch_size=16, memory_limit_bytes=50 * 2**20)) as pipeline:
        assert sum(map(len, pipeline)) == NUM_ROWS
        assert pipeline.stats()["memory"]["expansion"] > 5
    with pytest.raises(InputError, match="too small") as refusal:
        IngestPipeline(dataset, batch_size=16, memory_limit_bytes=1)
    least = int(re.search(r"take ([\d,]+) bytes", str(refusal.value))[1].replace(",", ""))
    with pytest.raises(InputError, match="times what its footer says"):
        list(widened(IngestPipeline(dataset, batch_size=16, memory_limit_bytes=least)))


def test_no_limit_exceeds_what_the_machine_has_left(dataset):
    pipeline = IngestPipeline(dataset, batch_size=16, memory_limit_bytes=2**60)
    assert pipeline.memory_limit_bytes < 2**50


def test_the_consumer_is_seen_to_wait_while_it_waits(dataset):
    with IngestPipeline(dataset, split="all", batch_size=16, delays_s={"read": 0.4}) as pipeline:
        thread = threading.Thread(target=lambda: next(iter(pipeline)), daemon=True)
        thread.start()
        time.sleep(0.25)
        consumer = pipeline.stats()["consumer"]
        thread.join()
    assert consumer["rows"] == 0
    assert 0.1 < consumer["stall_seconds"] <= consumer["seconds"]


def test_delays_count_as_time_of_their_stage_and_may_change_while_it_runs(dataset):
    with IngestPipeline(dataset, batch_size=16, delays_s={"transform": 0.01}) as pipeline:
        batches = iter(pipeline)
        next(batches)
        pipeline.set_delays({"transform": 0.0})
        num_rows = 16 + sum(map(len, batches))
    transform = pipeline.stats()["transform"]
    assert num_rows == NUM_ROWS
    assert transform["seconds"] - transform["cpu_seconds"] > 0.01
    with pytest.raises(InputError, match="unknown ingest stage 'wait'"):
        IngestPipeline(dataset, batch_size=16, delays_s={"wait": 1.0})
