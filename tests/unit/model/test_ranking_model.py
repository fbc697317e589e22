from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torchrec import JaggedTensor, KeyedJaggedTensor

from recmill.artifacts import InputError
from recmill.data.schema import Feature, Schema
from recmill.model.embeddings import initial_rows, pool_rows
from recmill.model.encoders.windows import SequenceWindows
from recmill.model.ranker import Ranker
from recmill.model.ranking_model import RankingModel
from recmill.model.servable import ServableModel, save_program
from recmill.model.settings import RankerConfig

SCHEMA = Schema(
    features=(
        Feature(name="age", kind="dense"),
        Feature(name="tags", kind="sparse", num_rows=10, dim=4, pooling="mean"),
        Feature(name="item", kind="sparse", table="items", num_rows=20, dim=8),
        Feature(name="seen", kind="sequence", table="items", num_rows=20, dim=8),
    )
)
TAGS = [[1, 2], [], [3]]
ITEM = [[4], [5], [6]]
SEEN = [[7, 8, 9], [], [4, 5]]


def model_of(config: RankerConfig) -> RankingModel:
    torch.manual_seed(0)
    return RankingModel(SCHEMA, config, table_device=torch.device("cpu")).eval()


def ids_of(*features: list[list[int]]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["tags", "item", "seen"],
        values=torch.tensor([i for lists in features for row in lists for i in row]),
        lengths=torch.tensor([len(row) for lists in features for row in lists], dtype=torch.int32),
    )


def padded(lists: list[list[int]]) -> torch.Tensor:
    width = max(len(row) for row in lists)
    return torch.tensor([row + [-1] * (width - len(row)) for row in lists])


@pytest.mark.parametrize("name", ["dlrm", "dcn"])
@pytest.mark.parametrize("encoder", ["mean", "attention", "transformer", "standard_transformer", "din", "hstu"])
def test_the_served_model_equals_the_trained_one(name, encoder):
    model = model_of(RankerConfig(model=name, sequence_encoder=encoder))
    dense = torch.randn(3, 1)
    trained = torch.sigmoid(model(dense, ids_of(TAGS, ITEM, SEEN)))
    served = ServableModel(model)(dense, [padded(TAGS), padded(ITEM), padded(SEEN)])
    torch.testing.assert_close(served, trained)


def test_a_full_disk_is_an_error_of_the_system_for_programs_too(tmp_path):
    """Torch's own writer ends the process when a write fails."""
    servable = ServableModel(model_of(RankerConfig()))
    program, inputs = servable.export(), servable.example_inputs()
    save_program(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(loaded(*inputs), servable(*inputs))
    with pytest.raises(OSError, match="No space left on device"):
        save_program(program, Path("/dev/full"))


@pytest.mark.parametrize("encoder", ["transformer", "standard_transformer", "din", "hstu"])
def test_the_exported_program_takes_any_batch_and_length_with_torch_operators_only(encoder):
    model = model_of(RankerConfig(sequence_encoder=encoder, max_sequence_length=8))
    servable = ServableModel(model)
    exported = servable.export()
    calls = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert {call.partition(".")[0] for call in calls} <= {"aten", "<built-in function getitem>"}, calls
    program = exported.module()
    for num_rows, length in ((1, 1), (5, 8)):
        dense = torch.randn(num_rows, 1)
        ids = [torch.randint(-1, 10, (num_rows, 3)).sort(1, descending=True).values, torch.ones(num_rows, 1).long()]
        ids.append(torch.randint(0, 20, (num_rows, length)))
        torch.testing.assert_close(program(dense, ids), servable(dense, ids))


def test_one_table_serves_sparse_and_sequence_features():
    model = model_of(RankerConfig())
    assert sorted(model.embeddings.table_weights()) == ["items", "tags"]
    found = model.embeddings(ids_of(TAGS, ITEM, SEEN))
    weight = model.embeddings.table_weights()["items"]
    torch.testing.assert_close(found.pooled["item"], weight[[4, 5, 6]])
    torch.testing.assert_close(found.sequences["seen"].rows_ND[:3], weight[[7, 8, 9]])
    assert found.sequences["seen"].lengths_U.tolist() == [3, 0, 2]


def test_a_long_sequence_keeps_its_last_elements():
    rows, lengths = torch.arange(6.0)[:, None], torch.tensor([4, 0, 2])
    windows = SequenceWindows.of_lists(rows, lengths, max_length=3)
    assert windows.lengths_U.tolist() == [3, 0, 2]
    assert windows.take(rows, num_rows=5).flatten().tolist() == [1, 2, 3, 4, 5]


def test_pool_rows_sums_and_averages():
    rows = JaggedTensor(values=torch.tensor([[1.0], [3.0], [5.0]]), lengths=torch.tensor([2, 0, 1]))
    assert pool_rows(rows, is_mean=False).tolist() == [[4.0], [0.0], [5.0]]
    assert pool_rows(rows, is_mean=True).tolist() == [[2.0], [0.0], [5.0]]


@pytest.mark.parametrize("lengths", [[1, 1, 1], [2, 0, 1]])
def test_as_many_rows_as_samples_are_their_own_sums_only_if_each_sample_has_one(lengths):
    values = torch.tensor([[1.0], [3.0], [5.0]])
    expected = [[1.0], [3.0], [5.0]] if lengths == [1, 1, 1] else [[4.0], [0.0], [5.0]]
    assert pool_rows(JaggedTensor(values=values, lengths=torch.tensor(lengths)), is_mean=False).tolist() == expected


def test_a_shard_draws_the_rows_it_would_have_in_the_whole_table():
    whole = initial_rows("t", start=0, stop=140_000, dim=4, scale=0.1, seed=3)
    part = initial_rows("t", start=65_000, stop=132_000, dim=4, scale=0.1, seed=3)
    assert torch.equal(part, whole[65_000:132_000])
    assert not torch.equal(initial_rows("u", start=0, stop=8, dim=4, scale=0.1, seed=3), whole[:8])
    assert whole.abs().max() <= 0.1


def test_a_width_the_heads_cannot_share_is_named():
    with pytest.raises(InputError, match="'seen': dim 8 is not a multiple of attention_heads=3"):
        Ranker(SCHEMA, replace(RankerConfig(), sequence_encoder="transformer", attention_heads=3))


def test_a_history_without_a_target_is_named_if_the_encoder_needs_one():
    schema = Schema(features=tuple(feature for feature in SCHEMA.features if feature.name != "item"))
    Ranker(schema, RankerConfig(sequence_encoder="hstu"))
    with pytest.raises(InputError, match="'seen': expected one sparse feature of table 'items' as its target"):
        Ranker(schema, RankerConfig(sequence_encoder="din"))


def test_a_schema_without_ids_is_refused():
    with pytest.raises(InputError, match="no sparse or sequence feature"):
        Ranker(Schema(features=(Feature(name="age", kind="dense"),)), RankerConfig())
