import gc
import random
import shutil
import threading
from dataclasses import replace

import fsspec
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill.artifacts import Dataset, InputError, join_path
from recmill.data.ingest import STAGES, IngestPipeline
from recmill.data.ingest.order import MAX_PARTS, num_lanes_for, permute_groups, permute_runs
from tests.unit.data.ingest.small_dataset import SCHEMA, make_table, write_dataset

GROUPS = [[40, 31, 7], [64, 1, 52, 33], [90]]
NUM_ROWS = sum(map(sum, GROUPS))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    folder = tmp_path_factory.mktemp("ingest") / "dataset"
    return write_dataset(folder, [*GROUPS, [20]], splits=["train", "train", "train", "test"])


def expected_rows(*, batch_size: int, rank: int = 0, world_size: int = 1, seed: int = 0, epochs: int = 1):
    """The rows of every batch, found the slow and obvious way: list the stream, cut lanes, take runs."""
    sizes = [size for part in GROUPS for size in part]
    starts = [sum(sizes[:group]) for group in range(len(sizes))]
    num_lanes = num_lanes_for(world_size)
    edges = [lane * batch_size // num_lanes for lane in range(num_lanes + 1)]
    batches = []
    for epoch in range(epochs):
        order = permute_groups(len(sizes), seed=seed, epoch=epoch)
        stream = [row for group in order for row in range(starts[group], starts[group] + sizes[group])]
        lanes = [
            stream[edges[lane] * NUM_ROWS // batch_size : edges[lane + 1] * NUM_ROWS // batch_size]
            for lane in range(num_lanes)
        ]
        for batch in range(-(-NUM_ROWS // batch_size)):
            rows = []
            for lane in range(rank * num_lanes // world_size, (rank + 1) * num_lanes // world_size):
                quota = edges[lane + 1] - edges[lane]
                begins = [at for at, row in enumerate(lanes[lane]) if row in starts and at]
                runs = permute_runs(
                    [0, *begins, len(lanes[lane])], quota, num_parts=MAX_PARTS, seed=(seed, epoch, lane)
                )
                rows += lanes[lane][runs[batch] * quota : (runs[batch] + 1) * quota] if batch < len(runs) else []
            batches.append(rows)
    return batches


def rows_of(batch) -> list[int]:
    """The rows of a batch, after checking that every column belongs to them."""
    rows = [int(label) for label in batch.label_B.tolist()]
    assert batch.dense_BF.tolist() == [[row * 0.5, -row] for row in rows]
    if rows:
        features = batch.ids.to_dict()
        assert [ids.tolist() for ids in features["item"].to_dense()] == [[row] for row in rows]
        assert [ids.tolist() for ids in features["history"].to_dense()] == [[row] * (row % 4) for row in rows]
    return rows


def join_ranks(ranks: list[list[list[int]]]) -> list[list[int]]:
    """The global batches, from the batches of every rank."""
    return [[row for share in shares for row in share] for shares in zip(*ranks, strict=True)]


def ingest_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ingest-")]


worker_counts = st.fixed_dictionaries({stage: st.integers(1, 4) for stage in STAGES})


@settings(max_examples=25, deadline=None)
@given(
    workers=worker_counts,
    batch_size=st.integers(1, 120),
    seed=st.integers(0, 99),
    epochs=st.integers(1, 3),
    prefetch=st.integers(1, 5),
)
def test_batches_are_those_of_the_obvious_loop(dataset, workers, batch_size, seed, epochs, prefetch):
    pipeline = IngestPipeline(
        dataset, batch_size=batch_size, seed=seed, epochs=epochs, workers=workers, prefetch=prefetch
    )
    assert [rows_of(batch) for batch in pipeline] == expected_rows(batch_size=batch_size, seed=seed, epochs=epochs)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_ranks_share_every_batch(dataset, world_size):
    ranks = [
        list(IngestPipeline(dataset, batch_size=50, rank=rank, world_size=world_size, seed=1))
        for rank in range(world_size)
    ]
    for rank, batches in enumerate(ranks):
        assert list(map(rows_of, batches)) == expected_rows(batch_size=50, rank=rank, world_size=world_size, seed=1)
    for shares in zip(*ranks, strict=True):
        assert {share.num_global for share in shares} == {sum(map(len, shares))}


@pytest.mark.parametrize("storm", range(20))
def test_a_storm_of_resizing_changes_no_batch(dataset, storm):
    rng = random.Random(storm)
    batch_size, epochs = rng.choice([3, 17, 64]), 3
    pipeline = IngestPipeline(dataset, batch_size=batch_size, epochs=epochs, seed=storm, prefetch=rng.randint(1, 4))
    found = []
    for batch in pipeline:
        found.append(rows_of(batch))
        pipeline.set_workers({stage: rng.randint(1, 5) for stage in STAGES if rng.random() < 0.7})
    assert found == expected_rows(batch_size=batch_size, seed=storm, epochs=epochs)
    assert not ingest_threads()


@settings(max_examples=30, deadline=None)
@given(worlds=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])), stop=st.integers(0, 33))
def test_a_stopped_run_resumes_exactly_at_another_number_of_ranks(dataset, worlds, stop):
    def run(world_size, num_batches, states):
        found, saved = [], []
        for rank in range(world_size):
            with IngestPipeline(dataset, batch_size=20, rank=rank, world_size=world_size, seed=3, epochs=2) as pipeline:
                if states:
                    pipeline.load_state_dict(states[0])
                batches = iter(pipeline)
                found.append([rows_of(next(batches)) for _ in range(num_batches - pipeline.position)])
                saved.append(pipeline.state_dict())
        assert all(state == saved[0] for state in saved), "the position is the same on every rank"
        return join_ranks(found), saved

    expected = expected_rows(batch_size=20, seed=3, epochs=2)
    first, states = run(worlds[0], min(stop, len(expected)), None)
    rest, _ = run(worlds[1], len(expected), states)
    assert first + rest == expected


def test_lanes_of_an_odd_number_of_ranks_carry_over(dataset):
    pipeline = IngestPipeline(dataset, batch_size=18, rank=1, world_size=3)
    next(iter(pipeline))
    alone = IngestPipeline(dataset, batch_size=18)
    alone.load_state_dict(pipeline.state_dict())
    expected = join_ranks([expected_rows(batch_size=18, rank=rank, world_size=3) for rank in range(3)])
    assert list(map(rows_of, alone)) == expected[1:]
    with pytest.raises(InputError, match="9 lanes, which cannot be divided among 2 ranks"):
        IngestPipeline(dataset, batch_size=18, world_size=2).load_state_dict(pipeline.state_dict())


def test_resuming_reads_no_row_group_that_is_done(dataset):
    pipeline = IngestPipeline(dataset, batch_size=16, shuffle=False)
    pipeline.load_state_dict({**pipeline.state_dict(), "batch": pipeline.batches_per_epoch - 1})
    assert len(list(pipeline)) == 1
    assert pipeline.stats()["read"]["items"] <= 8  # at most one a lane


def test_a_position_of_another_run_is_refused(dataset):
    state = IngestPipeline(dataset, batch_size=16, seed=1).state_dict()
    with pytest.raises(InputError, match="has seed 1, this run has 2"):
        IngestPipeline(dataset, batch_size=16, seed=2).load_state_dict(state)
    with pytest.raises(InputError, match="has batch_size 16, this run has 8"):
        IngestPipeline(dataset, batch_size=8, seed=1).load_state_dict(state)


def test_leaving_the_loop_ends_the_workers_and_a_new_loop_goes_on(dataset):
    pipeline = IngestPipeline(dataset, batch_size=25)
    found = []
    for batch in pipeline:
        found.append(rows_of(batch))
        if len(found) == 4:
            break
    del batch
    gc.collect()
    assert not ingest_threads()
    assert found + [rows_of(batch) for batch in pipeline] == expected_rows(batch_size=25)
    assert list(pipeline) == []


def test_a_forgotten_iterator_ends_its_workers(dataset):
    batches = iter(IngestPipeline(dataset, batch_size=25))
    next(batches)
    assert ingest_threads()
    del batches
    gc.collect()
    assert not ingest_threads()


def test_closing_stops_an_iteration_under_way(dataset):
    with IngestPipeline(dataset, batch_size=10) as pipeline:
        batches = iter(pipeline)
        next(batches)
    assert not ingest_threads()
    with pytest.raises(RuntimeError, match="closed while it was read"):
        next(batches)


def test_shrinking_drains_to_the_new_number_of_threads(dataset):
    pipeline = IngestPipeline(dataset, batch_size=5, epochs=2, workers=dict.fromkeys(STAGES, 4))
    batches = iter(pipeline)
    next(batches)
    assert len(ingest_threads()) == 16
    pipeline.set_workers(dict.fromkeys(STAGES, 1))
    rest = [rows_of(batch) for batch in batches]
    assert len(rest) == len(pipeline) - 1
    assert pipeline.stats()["decode"]["workers"] == 1


def test_stats_count_every_row_once_a_stage(dataset):
    pipeline = IngestPipeline(dataset, batch_size=32, workers={"decode": 2})
    assert sum(map(len, pipeline)) == NUM_ROWS
    stats = pipeline.stats()
    assert set(stats) == {*STAGES, "consumer", "memory"}
    assert stats["read"]["rows"] == stats["decode"]["rows"] == stats["transform"]["rows"] == NUM_ROWS
    assert stats["batch"]["rows"] == stats["consumer"]["rows"] == NUM_ROWS
    assert stats["decode"]["workers"] == 2
    for stage in STAGES:
        assert stats[stage]["seconds"] > 0
        assert stats[stage]["bytes"] > 0
        assert 0 <= stats[stage]["busy_share"] <= 1
        assert 0 <= stats[stage]["queue_fill"] <= 1
    assert 0 < stats["consumer"]["stall_seconds"] <= stats["consumer"]["seconds"]
    assert stats["memory"]["bytes"] == 0, "everything was given back"
    assert 0 < stats["memory"]["peak_bytes"] <= stats["memory"]["limit_bytes"]


def test_a_batch_larger_than_the_data_is_the_whole_epoch(dataset):
    (batch,) = IngestPipeline(dataset, batch_size=10_000)
    assert sorted(rows_of(batch)) == list(range(NUM_ROWS))


def test_without_shuffling_all_epochs_are_equal(dataset):
    found = [rows_of(batch) for batch in IngestPipeline(dataset, batch_size=100, shuffle=False, epochs=2)]
    assert found[: len(found) // 2] == found[len(found) // 2 :]


def test_one_row_on_two_ranks_is_refused(tmp_path):
    dataset = write_dataset(tmp_path, [[1], [3]], splits=["train", "test"])
    with pytest.raises(InputError, match="split 'train' of 1 rows cannot be divided among 2 ranks"):
        IngestPipeline(dataset, batch_size=8, world_size=2)
    assert [rows_of(batch) for batch in IngestPipeline(dataset, batch_size=8)] == [[0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, expected at least 1"),
        ({"batch_size": 8, "epochs": 0}, "epochs is 0"),
        ({"batch_size": 8, "rank": 2, "world_size": 2}, "rank is 2, expected 0 to 1"),
        ({"batch_size": 2, "world_size": 4}, "a batch of 2 rows cannot be divided among 4 ranks"),
        ({"batch_size": 8, "seed": -1}, "seed is -1"),
        ({"batch_size": 8, "split": "valid"}, "no split 'valid'"),
        ({"batch_size": 8, "workers": {"decode": 0}}, "'decode': received 0 workers, expected at least 1"),
        ({"batch_size": 8, "workers": {"dance": 1}}, "unknown ingest stage 'dance', expected one of read, decode"),
    ],
)
def test_wrong_options_are_one_sentence(dataset, options, message):
    with pytest.raises(InputError, match=message):
        IngestPipeline(dataset, **options)


def spoil(dataset: Dataset, folder, change) -> Dataset:
    """A copy of the dataset in which `change` was applied to the middle part and the manifest knows nothing of it."""
    shutil.copytree(dataset.path, folder)
    change(folder / "part-00001.parquet")
    return replace(dataset, path=str(folder), content_hash="", inputs={}, files=())


def test_damaged_pages_reach_the_consumer_with_file_and_row_group(dataset, tmp_path):
    def damage(path):
        chunk = pq.read_metadata(path).row_group(2).column(4)
        data = bytearray(path.read_bytes())
        start = chunk.dictionary_page_offset or chunk.data_page_offset
        data[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
        path.write_bytes(data)

    pipeline = IngestPipeline(spoil(dataset, tmp_path / "copy", damage), batch_size=16)
    with pytest.raises(InputError, match=r"part-00001.parquet, row group 2: cannot be decoded"):
        list(pipeline)
    assert not ingest_threads()


def test_an_id_outside_its_table_reaches_the_consumer_with_file_and_row_group(dataset, tmp_path):
    def damage(path):
        sizes = GROUPS[1]
        with pq.ParquetWriter(path, SCHEMA.arrow_schema()) as writer:
            for size in sizes:
                table = make_table(1_000_000 - 10 if size == 33 else 0, size)
                writer.write_table(table, row_group_size=size)

    pipeline = IngestPipeline(spoil(dataset, tmp_path / "copy", damage), batch_size=16)
    with pytest.raises(InputError, match=r"part-00001.parquet, row group 3: column 'item', row 10: id 1000000"):
        list(pipeline)


def test_a_truncated_file_is_refused_before_anything_starts(dataset, tmp_path):
    broken = spoil(dataset, tmp_path / "copy", lambda path: path.write_bytes(path.read_bytes()[:-100]))
    with pytest.raises(InputError, match=r"part-00001.parquet: cannot be read as Parquet"):
        IngestPipeline(broken, batch_size=16)


def test_a_missing_column_is_refused_before_anything_starts(dataset, tmp_path):
    def drop(path):
        pq.write_table(pq.read_table(path).drop_columns(["history"]), path)

    with pytest.raises(InputError, match=r"part-00001.parquet: column 'history' is missing; it has session_id"):
        IngestPipeline(spoil(dataset, tmp_path / "copy", drop), batch_size=16)


def test_other_row_groups_than_the_manifest_says_are_refused(dataset, tmp_path):
    def regroup(path):
        pq.write_table(pq.read_table(path), path, row_group_size=50)

    with pytest.raises(InputError, match=r"part-00001.parquet, row group 0: has 50 rows, dataset.json says 64"):
        IngestPipeline(spoil(dataset, tmp_path / "copy", regroup), batch_size=16)


def test_remote_datasets_read_like_local_ones(dataset):
    url = "memory://ingest-test/dataset"
    fsspec.filesystem("memory").put(dataset.path, url, recursive=True)
    try:
        remote = IngestPipeline(Dataset.load(join_path(url, "")), batch_size=30, workers={"read": 3})
        assert [rows_of(batch) for batch in remote] == expected_rows(batch_size=30)
    finally:
        fsspec.filesystem("memory").rm("ingest-test", recursive=True)


def test_batches_own_their_memory(dataset):
    batches = list(IngestPipeline(dataset, batch_size=30))
    for batch in batches:
        batch.dense_BF.zero_()
        batch.ids.values().zero_()
    again = [rows_of(batch) for batch in IngestPipeline(dataset, batch_size=30)]
    assert again == expected_rows(batch_size=30)
    assert all(torch.equal(batch.dense_BF, torch.zeros_like(batch.dense_BF)) for batch in batches)
