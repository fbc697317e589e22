"""A model fed with distinct rows gives what it gives when fed with every sample."""

import numpy as np
import pytest
import torch
from torchrec import KeyedJaggedTensor

from recmill.data.ikjt import InverseKeyedJaggedTensor
from recmill.data.schema import Feature, Schema
from recmill.model.encoders.windows import SequenceWindows
from recmill.model.ranking_model import RankingModel
from recmill.model.settings import RankerConfig

SCHEMA = Schema(
    features=(
        Feature(name="age", kind="dense"),
        Feature(name="likes", kind="sparse", num_rows=30, dim=8, group="user", pooling="mean"),
        Feature(name="tags", kind="sparse", num_rows=30, dim=8, group="user"),
        Feature(name="city", kind="sparse", num_rows=9, dim=4),
        Feature(name="item", kind="sparse", table="items", num_rows=40, dim=8),
        Feature(name="seen", kind="sequence", table="items", num_rows=40, dim=8, shift=True),
    )
)
GROUPS = [["likes", "tags"], ["city"], ["seen"]]
DEDUPLICATED = frozenset({"likes", "tags", "city", "seen"})
NUMBERS = frozenset({"age"})
ENCODERS = ["mean", "attention", "transformer", "standard_transformer", "din", "hstu"]


def session_batch(num_sessions: int = 12, seed: int = 0) -> KeyedJaggedTensor:
    """Sessions of 1 to 5 samples: user features stay, the history shifts by one, the item changes."""
    rng = np.random.default_rng(seed)
    columns: dict[str, list[list[int]]] = {feature.name: [] for feature in SCHEMA.id_features}
    for _ in range(num_sessions):
        likes, tags = rng.integers(0, 30, rng.integers(0, 4)).tolist(), rng.integers(0, 30, 2).tolist()
        city, seen = [int(rng.integers(0, 9))], rng.integers(0, 40, rng.integers(0, 6)).tolist()
        for _ in range(rng.integers(1, 6)):
            item = int(rng.integers(0, 40))
            for name, row in (("likes", likes), ("tags", tags), ("city", city), ("item", [item]), ("seen", seen)):
                columns[name].append(list(row))
            seen = [*seen, item][-6:]
    lists = [row for name in columns for row in columns[name]]
    return KeyedJaggedTensor(
        keys=list(columns),
        values=torch.tensor([i for row in lists for i in row]),
        lengths=torch.tensor([len(row) for row in lists], dtype=torch.int32),
    )


def run(config: RankerConfig, ids, deduplicated, optimiser_steps: int = 3, repeated_ids=frozenset()):
    """Logits of the first step and all weights after some SGD steps."""
    torch.manual_seed(0)
    model = RankingModel(
        SCHEMA, config, deduplicated=deduplicated, repeated_ids=repeated_ids, table_device=torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(1)
    for _, weight in sorted(model.embeddings.table_weights().items()):
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    num_samples = ids.stride()
    dense = torch.linspace(-1, 1, num_samples).mul(4).round()[:, None]  # nine distinct rows
    label = (torch.arange(num_samples) % 3 == 0).float()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    first = None
    for _ in range(optimiser_steps):
        logits = model(dense, ids)
        first = logits.detach().clone() if first is None else first
        optimiser.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(logits, label).backward()
        optimiser.step()
    weights = {**model.embeddings.table_weights(), **dict(model.ranker.state_dict())}
    return first, {name: value.detach() for name, value in weights.items()}


@pytest.mark.parametrize("name", ["dlrm", "dcn"])
@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("windows", [(), ("seen",)], ids=["lists", "windows"])
@pytest.mark.parametrize("numbers", [frozenset(), NUMBERS], ids=["all numbers", "distinct numbers"])
def test_distinct_rows_give_the_same_logits_and_weights(name, encoder, windows, numbers):
    config = RankerConfig(model=name, sequence_encoder=encoder, max_sequence_length=4)
    kjt = session_batch()
    ikjt = InverseKeyedJaggedTensor.from_kjt(kjt, groups=GROUPS, windows=windows, min_factor=1.0)
    assert ikjt.dedup_factor("tags") > 1.5
    assert (ikjt.windows("seen") is not None) == bool(windows)
    plain_logits, plain_weights = run(config, kjt, frozenset())
    logits, weights = run(config, ikjt, DEDUPLICATED | numbers)
    torch.testing.assert_close(logits, plain_logits, rtol=1e-5, atol=1e-6)
    for key, value in plain_weights.items():
        torch.testing.assert_close(
            weights[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("names", [{"seen"}, {"item"}, {"item", "seen"}])
@pytest.mark.parametrize("kind", ["plain", "lists", "windows"])
def test_ids_looked_up_once_give_the_same_logits_and_weights(kind, names, encoder):
    config = RankerConfig(sequence_encoder=encoder, max_sequence_length=4)
    ids = kjt = session_batch()
    if kind != "plain":
        windows = ("seen",) if kind == "windows" else ()
        ids = InverseKeyedJaggedTensor.from_kjt(kjt, groups=GROUPS, windows=windows, min_factor=1.0)
    deduplicated = frozenset() if kind == "plain" else DEDUPLICATED
    plain_logits, plain_weights = run(config, kjt, frozenset())
    logits, weights = run(config, ids, deduplicated, repeated_ids=frozenset(names))
    torch.testing.assert_close(logits, plain_logits, rtol=1e-5, atol=1e-6)
    for key, value in plain_weights.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6)


def test_a_table_is_asked_for_each_repeated_id_once():
    model = RankingModel(SCHEMA, RankerConfig(), repeated_ids=frozenset({"seen"}), table_device=torch.device("cpu"))
    asked = []
    model.embeddings.sequence.register_forward_pre_hook(lambda _, inputs: asked.append(inputs[0]))
    ids = session_batch()
    model(torch.zeros(ids.stride(), 1), ids)
    sent, given = asked[0].to_dict(), ids.to_dict()
    assert sent["seen"].values().tolist() == sorted(set(given["seen"].values().tolist()))
    assert sent["item"].values().tolist() == given["item"].values().tolist()


@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_batch_of_empty_histories_has_no_ids_to_look_up_once(encoder):
    ids = KeyedJaggedTensor(
        keys=["likes", "tags", "city", "item", "seen"],
        values=torch.tensor([1, 2, 3, 4, 5, 6]),
        lengths=torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 0, 0]),
    )
    config = RankerConfig(sequence_encoder=encoder)
    found = run(config, ids, frozenset(), repeated_ids=frozenset({"item", "seen"}))[0]
    torch.testing.assert_close(found, run(config, ids, frozenset())[0])


def test_bottom_layers_see_each_distinct_row_of_numbers_once():
    model = RankingModel(SCHEMA, RankerConfig(), deduplicated=NUMBERS, table_device=torch.device("cpu"))
    seen = []
    model.ranker.bottom.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    ids = session_batch()
    dense = (torch.arange(ids.stride()) % 4).float()[:, None]
    model(dense, ids)
    assert seen[0].tolist() == [[0.0], [1.0], [2.0], [3.0]]


def test_a_batch_without_repetition_runs_through_the_deduplicating_model():
    kjt = session_batch()
    ikjt = InverseKeyedJaggedTensor.from_kjt(kjt, groups=GROUPS, min_factor=100.0)
    assert all(ikjt.is_plain(g) for g in range(len(ikjt.groups)))
    config = RankerConfig()
    torch.testing.assert_close(run(config, ikjt, DEDUPLICATED)[0], run(config, kjt, frozenset())[0])


def test_a_plain_batch_runs_through_the_deduplicating_model():
    config = RankerConfig()
    torch.testing.assert_close(
        run(config, session_batch(), DEDUPLICATED)[0], run(config, session_batch(), frozenset())[0]
    )


def test_a_deduplicated_feature_the_model_was_not_built_for_is_refused():
    ikjt = InverseKeyedJaggedTensor.from_kjt(session_batch(), groups=GROUPS, min_factor=1.0)
    with pytest.raises(ValueError, match="arrives deduplicated"):
        run(RankerConfig(), ikjt, frozenset({"seen"}))


def test_windows_are_cut_from_the_end_when_too_long():
    buffer = torch.arange(6.0)[:, None]
    windows = SequenceWindows(rows_ND=buffer, starts_U=torch.tensor([0, 2, 5]), lengths_U=torch.tensor([4, 3, 0]))
    kept = windows.last(3)
    assert kept.lengths_U.tolist() == [3, 3, 0]
    assert kept.starts_U.tolist()[:2] == [1, 2]
    assert kept.take(buffer, num_rows=6).flatten().tolist() == [1, 2, 3, 2, 3, 4]
