from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill.artifacts import Dataset, InputError
from recmill.data.dataset import read_table
from recmill.data.ikjt import InverseKeyedJaggedTensor
from recmill.data.ikjt.batch import assemble_batch
from recmill.data.ingest import STAGES, IngestPipeline, split_groups
from recmill.data.ingest.reader import RowGroupReader
from recmill.data.schema import Schema
from tests.unit.data.ingest.repeating_dataset import SCHEMA, write_layout, write_log

LAYOUTS = ("time", "session", "deduplicated")
GROUPS = [["likes", "visits"], ["history"]]

dedup_groups = st.sampled_from(
    [GROUPS, [], [["likes"]], [["visits", "likes"]], [["history", "likes", "item", "visits"]], [["item"], ["history"]]]
)
worker_counts = st.fixed_dictionaries({stage: st.integers(1, 3) for stage in STAGES})


@pytest.fixture(scope="module")
def datasets(tmp_path_factory) -> dict[str, Dataset]:
    folder = tmp_path_factory.mktemp("layouts")
    raw = write_log(folder / "raw")
    return {layout: write_layout(raw, folder / layout, layout) for layout in LAYOUTS}


def assert_same(plain, deduplicated) -> None:
    """The batches hold the same samples bit for bit."""
    assert isinstance(deduplicated.ids, InverseKeyedJaggedTensor)
    assert torch.equal(plain.dense_BF, deduplicated.dense_BF)
    assert torch.equal(plain.label_B, deduplicated.label_B)
    assert plain.num_global == deduplicated.num_global
    expanded = deduplicated.ids.to_kjt()
    assert expanded.keys() == plain.ids.keys()
    assert expanded.stride() == plain.ids.stride()
    assert torch.equal(expanded.values(), plain.ids.values())
    assert expanded.lengths().dtype == plain.ids.lengths().dtype
    assert torch.equal(expanded.lengths(), plain.ids.lengths())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dedup", [None, GROUPS])
def test_the_kernel_that_decodes_pages_gives_the_batches_of_arrow(datasets, layout, dedup):
    found = []
    for decodes_pages in (True, False):
        with IngestPipeline(datasets[layout], batch_size=64, dedup=dedup, decodes_pages=decodes_pages) as pipeline:
            assert pipeline._reader.part(pipeline._groups[0].file)._decoder._is_reference is not decodes_pages
            found.append([(batch.dense_BF, batch.label_B, *_id_tensors(batch.ids)) for batch in pipeline])
    for ours, arrows in zip(*found, strict=True):
        assert all(
            torch.equal(mine, other) and mine.dtype == other.dtype for mine, other in zip(ours, arrows, strict=True)
        )


def _id_tensors(ids) -> list[torch.Tensor]:
    plain = ids.to_kjt() if isinstance(ids, InverseKeyedJaggedTensor) else ids
    return [plain.values(), plain.lengths()]


@settings(max_examples=30, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    groups=dedup_groups,
    windows=st.sampled_from([[], ["history"], ["likes", "item"]]),
    workers=worker_counts,
    batch_size=st.integers(2, 150),
    ranks=st.sampled_from([(0, 1), (0, 2), (1, 2)]),
    seed=st.integers(0, 9),
    resumed_at=st.integers(0, 3),
    session_limit=st.sampled_from([0, 0, 1, 3]),
)
def test_deduplicated_batches_expand_to_the_plain_ones(
    datasets, layout, groups, windows, workers, batch_size, ranks, seed, resumed_at, session_limit
):
    options = {"batch_size": batch_size, "rank": ranks[0], "world_size": ranks[1], "seed": seed, "epochs": 2}
    options["session_limit"] = session_limit
    plain = list(IngestPipeline(datasets["time" if layout == "time" else "session"], **options))
    pipeline = IngestPipeline(datasets[layout], **options, workers=workers, dedup=groups, windows=windows)
    pipeline.load_state_dict(IngestPipeline(datasets[layout], **options).state_dict() | {"batch": resumed_at})
    batches = list(pipeline)
    assert len(batches) == max(0, len(plain) - resumed_at)
    for before, after in zip(plain[resumed_at:], batches, strict=True):
        assert_same(before, after)


@pytest.mark.parametrize("dedup", [None, GROUPS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_carry_the_session_of_each_sample_only_if_told_to(datasets, layout, dedup):
    dense = SCHEMA.dense[0].name
    rows = read_table(datasets[layout], columns=["session_id", "label", dense])
    options = {"batch_size": 64, "shuffle": False, "dedup": dedup, "split": "all"}
    batches = list(IngestPipeline(datasets[layout], **options, keeps_sessions=True))
    found = [
        torch.cat(part).tolist()
        for part in zip(*((b.session_B, b.label_B, b.dense_BF[:, 0]) for b in batches), strict=True)
    ]
    stored = [rows[name].to_pylist() for name in rows.column_names]
    assert sorted(zip(*found, strict=True)) == sorted(zip(*stored, strict=True))
    assert all(batch.session_B is None for batch in IngestPipeline(datasets[layout], **options))


def _rows(batches) -> list[tuple[float, float]]:
    """Something that identifies each sample."""
    return [row for batch in batches for row in zip(batch.dense_BF[:, 0].tolist(), batch.label_B.tolist(), strict=True)]


@pytest.mark.parametrize("layout", ["session", "deduplicated"])
def test_a_session_limit_spreads_sessions_over_batches_and_keeps_every_row(datasets, layout):
    options = {"batch_size": 64, "dedup": GROUPS}
    whole = list(IngestPipeline(datasets[layout], **options))
    pieces = list(IngestPipeline(datasets[layout], **options, session_limit=2))
    assert sorted(_rows(pieces)) == sorted(_rows(whole))
    assert pieces[0].ids.dedup_factor("likes") < whole[0].ids.dedup_factor("likes")
    alone = list(IngestPipeline(datasets[layout], **options, session_limit=2))
    halves = [list(IngestPipeline(datasets[layout], **options, session_limit=2, rank=r, world_size=2)) for r in (0, 1)]
    for batch, *shares in zip(alone, *halves, strict=True):
        assert _rows([batch]) == _rows(shares)


def test_time_ordered_data_ignores_the_session_limit(datasets):
    plain, limited = (list(IngestPipeline(datasets["time"], batch_size=64, session_limit=n)) for n in (0, 2))
    assert _rows(plain) == _rows(limited)


def test_a_position_is_valid_for_its_session_limit_only(datasets):
    saved = IngestPipeline(datasets["session"], batch_size=64).state_dict()
    del saved["session_limit"]  # as versions without the limit saved it
    IngestPipeline(datasets["session"], batch_size=64).load_state_dict(saved)
    with pytest.raises(InputError, match="session_limit 0, this run has 2"):
        IngestPipeline(datasets["session"], batch_size=64, session_limit=2).load_state_dict(saved)


def test_a_batch_holds_the_lists_of_a_session_once(datasets):
    batch = next(iter(IngestPipeline(datasets["session"], batch_size=64, shuffle=False, dedup=GROUPS)))
    assert batch.ids.groups == [["likes", "visits"], ["history"], ["item"]]
    assert batch.ids.dedup_factor("likes") > 1.5
    assert batch.ids.is_plain(batch.ids.group_of("item"))
    plain = next(iter(IngestPipeline(datasets["session"], batch_size=64, shuffle=False)))
    assert batch.size_in_bytes() < plain.size_in_bytes()


def test_histories_become_windows(datasets):
    options = {"batch_size": 64, "shuffle": False, "dedup": GROUPS}
    lists = next(iter(IngestPipeline(datasets["session"], **options)))
    windows = next(iter(IngestPipeline(datasets["session"], **options, windows=["history"])))
    assert lists.ids.windows("history") is None
    assert windows.ids.windows("history") is not None
    assert windows.ids.dedup_factor("history") > 1.5 * lists.ids.dedup_factor("history")


def test_a_group_without_repeats_has_no_inverse(datasets):
    batch = next(iter(IngestPipeline(datasets["time"], batch_size=8, shuffle=False, dedup=[["history", "item"]])))
    assert batch.ids.is_plain(batch.ids.group_of("item"))


def test_a_deduplicated_batch_moves_as_a_whole(datasets):
    batch = next(iter(IngestPipeline(datasets["session"], batch_size=64, dedup=GROUPS)))
    assert_same(next(iter(IngestPipeline(datasets["session"], batch_size=64))), batch.to("cpu"))


def test_a_batch_without_rows_has_the_same_groups():
    batch = assemble_batch([], SCHEMA, num_global=3, dedup=GROUPS)
    assert batch.ids.groups == [["likes", "visits"], ["history"], ["item"]]
    assert (len(batch), batch.ids.stride(), batch.num_global) == (0, 0, 3)
    assert batch.ids.to_kjt().values().tolist() == []


def test_what_a_batch_is_charged_is_never_less_than_it_takes(datasets):
    for layout, dataset in datasets.items():
        for windows in ([], ["history"]):
            schema = Schema.load(dataset.path)
            reader = RowGroupReader(dataset, schema, dedup=GROUPS, windows=windows)
            group = split_groups(dataset, "all")[0]
            block = reader.transform(group, reader.decode(group, reader.read(group)))
            assert block.nbytes <= reader.charges([group])[0].settled_bytes, layout
            for start in range(0, len(block), 7):
                for stop in range(start + 1, len(block) + 1, 5):
                    taken = reader.assemble([(block, start, stop)], num_global=1).size_in_bytes()
                    assert taken <= block.batch_bytes(start, stop)


@pytest.mark.parametrize("groups", [[["likes", "age"]], [["likes"], ["likes"]], [[]], [["nobody"]]])
def test_groups_that_make_no_sense_are_refused(datasets, groups):
    with pytest.raises(InputError):
        IngestPipeline(datasets["session"], batch_size=8, dedup=groups)


HASHED = {"op": "hash_to_range", "num_rows": 20}
STEPS = {
    "age": ({"op": "log"}, {"op": "clip", "max": 0.5}),
    "likes": ({"op": "first_x", "n": 3}, HASHED),
    "visits": ({"op": "ngram", "n": 2, "num_rows": 50},),
    "history": (HASHED, {"op": "truncate", "n": 4}),
}


def with_transforms(folder: Path, layout: str, steps: Mapping[str, tuple[dict, ...]]) -> Dataset:
    """The same rows, with a schema that transforms them."""
    features = tuple(replace(feature, transforms=steps.get(feature.name, ())) for feature in SCHEMA.features)
    raw = write_log(folder / "changed", schema=replace(SCHEMA, features=features))
    return write_layout(raw, folder / layout, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transforms_give_the_same_whether_repeats_are_stored_once_or_not(datasets, tmp_path, layout):
    changed = with_transforms(tmp_path, layout, STEPS)
    options = {"batch_size": 70, "shuffle": False}
    raw = list(IngestPipeline(datasets[layout], **options))
    plain = list(IngestPipeline(changed, **options))
    for before, after in zip(raw, plain, strict=True):
        lists, expected = after.ids.to_dict(), before.ids.to_dict()
        assert torch.equal(lists["item"].values(), expected["item"].values())
        assert torch.equal(lists["history"].lengths(), expected["history"].lengths().clamp(max=4))
        assert torch.equal(lists["likes"].lengths(), expected["likes"].lengths().clamp(max=3))
        assert int(lists["likes"].values().max()) < 20
        assert float(after.dense_BF.max()) <= 0.5
    for windows in ([], ["history"]):
        deduplicated = IngestPipeline(changed, **options, dedup=GROUPS, windows=windows)
        for before, after in zip(plain, deduplicated, strict=True):
            assert_same(before, after)


def test_an_id_that_leaves_the_table_after_its_transforms_is_named(tmp_path):
    changed = with_transforms(tmp_path, "session", {"item": ({"op": "clip", "min": 2_000},)})
    with pytest.raises(InputError, match=r"row group 0: column 'item', row 0: id 2000 lies outside \[0, 1000\) after"):
        list(IngestPipeline(changed, batch_size=10, shuffle=False, dedup=GROUPS))


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_deduplicated_layout_reads_as_the_session_layout(datasets, world_size):
    for rank in range(world_size):
        options = {"batch_size": 60, "rank": rank, "world_size": world_size, "seed": 3}
        from_rows = IngestPipeline(datasets["session"], **options)
        from_records = IngestPipeline(datasets["deduplicated"], **options)
        for before, after in zip(from_rows, from_records, strict=True):
            assert torch.equal(before.ids.values(), after.ids.values())
            assert torch.equal(before.ids.lengths(), after.ids.lengths())
            assert before.ids.length_per_key() == after.ids.length_per_key()
            assert torch.equal(before.dense_BF, after.dense_BF)
            assert torch.equal(before.label_B, after.label_B)
