import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from recmill.artifacts import InputError
from recmill.data.schema import Schema
from recmill.data.sources import synthetic_config
from recmill.data.sources.presets import recd, small, tiny
from recmill.data.sources.synthetic import generator
from recmill.data.sources.synthetic.blocks import BlockMaker
from recmill.data.sources.synthetic.config import schema_of
from recmill.data.sources.synthetic.generator import generate_log, stream_samples
from recmill.data.sources.synthetic.hidden_model import BestScores


def read_log(folder):
    return pa.concat_tables([pq.read_table(file) for file in sorted(folder.glob("*.parquet"))]).combine_chunks()


def all_samples(config):
    return pa.Table.from_batches(list(stream_samples(config, {}))).combine_chunks()


def by_session(table):
    return table.sort_by([("session_id", "ascending"), ("timestamp", "ascending")]).combine_chunks()


def is_neighbour(table):
    sessions = table["session_id"].to_numpy()
    return sessions[1:] == sessions[:-1]


def equals_previous(column):
    """Whether the list of a row equals that of the row before, compared list by list."""
    lists = column.to_pylist()
    return np.array([a == b for a, b in pairwise(lists)])


@pytest.fixture(scope="module")
def tiny_log(tmp_path_factory):
    out = tmp_path_factory.mktemp("log") / "tiny"
    generate_log(tiny(), out=out)
    return out


@pytest.fixture(scope="module")
def tiny_table(tiny_log):
    return read_log(tiny_log)


def test_log_has_the_columns_and_types_of_its_schema(tiny_log, tiny_table):
    schema = Schema.load(tiny_log)
    assert tiny_table.schema.equals(schema.arrow_schema())
    assert schema.info["num_samples"] == tiny_table.num_rows
    assert schema.info["base_rate"] == pytest.approx(pc.mean(tiny_table["label"]).as_py())
    for feature in schema.id_features:
        ids = pc.list_flatten(tiny_table[feature.name])
        assert 0 <= pc.min(ids).as_py() <= pc.max(ids).as_py() < feature.num_rows


def test_time_never_goes_back_across_files(tiny_table):
    assert (np.diff(tiny_table["timestamp"].to_numpy()) >= 0).all()


def test_session_and_timestamp_are_unique_together(tiny_table):
    keys = tiny_table.select(["session_id", "timestamp"]).group_by(["session_id", "timestamp"]).aggregate([])
    assert keys.num_rows == tiny_table.num_rows
    assert pc.count_distinct(tiny_table["session_id"]).as_py() == tiny().num_sessions


def test_sessions_interleave_in_time(tiny_table):
    assert is_neighbour(tiny_table).mean() < 0.05


def test_user_features_stay_with_the_asked_probability(tiny_table):
    table = by_session(tiny_table)
    inside = is_neighbour(table)
    for name in ("followed_pages", "recent_queries"):
        assert equals_previous(table[name])[inside].mean() == pytest.approx(0.9, abs=0.01)
    for name in ("account_age", "time_spent"):
        values = table[name].to_numpy()
        assert (values[1:] == values[:-1])[inside].mean() == pytest.approx(0.9, abs=0.01)
    assert equals_previous(table["user_segment"])[inside].all()


def test_features_of_a_group_change_together(tiny_table):
    table = by_session(tiny_table)
    ages, activity = table["account_age"].to_numpy(), table["activity"].to_numpy()
    inside = is_neighbour(table)
    changed = (ages[1:] != ages[:-1])[inside]
    assert (changed == (activity[1:] != activity[:-1])[inside]).all()
    lists_changed = ~equals_previous(table["followed_pages"])[inside]
    assert not (lists_changed & ~changed).any()


def test_histories_shift_by_one_and_take_in_the_item_before(tiny_table):
    table = by_session(tiny_table)
    histories = np.array(table["history"].to_pylist())
    items = pc.list_flatten(table["item"]).to_numpy()
    inside = is_neighbour(table)
    stays = (histories[1:] == histories[:-1]).all(axis=1)
    shifts = (histories[1:, :-1] == histories[:-1, 1:]).all(axis=1) & (histories[1:, -1] == items[:-1])
    assert (stays | shifts)[inside].all()
    assert shifts[inside].mean() == pytest.approx(0.5, abs=0.02)


def test_items_and_their_values_change_with_every_sample(tiny_table):
    table = by_session(tiny_table)
    values = table["price"].to_numpy()
    assert (values[1:] != values[:-1])[is_neighbour(table)].all()


def test_mean_list_length_is_the_asked_one(tiny_table):
    assert pc.mean(pc.list_value_length(tiny_table["followed_pages"])).as_py() == pytest.approx(6, abs=0.1)


def test_accesses_follow_the_asked_zipf_exponent():
    table = all_samples(synthetic_config("tiny", sessions=6000, zipf=0.9))
    counts = np.sort(np.bincount(pc.list_flatten(table["item"]).to_numpy()))[::-1]
    slope, _ = np.polyfit(np.log(np.arange(1, 51)), np.log(counts[:50]), 1)
    assert slope == pytest.approx(-0.9, abs=0.05)


@settings(max_examples=8, deadline=None)
@given(
    sessions=st.integers(1, 60),
    mean=st.sampled_from([1.0, 1.5, 4.0, 16.5]),
    stay_prob=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**40),
)
def test_any_setting_gives_a_log_that_keeps_its_promises(sessions, mean, stay_prob, seed):
    config = synthetic_config("tiny", sessions=sessions, samples_per_session=mean, stay_prob=stay_prob, seed=seed)
    table = all_samples(config)
    assert (np.diff(table["timestamp"].to_numpy()) >= 0).all()
    assert pc.count_distinct(table["session_id"]).as_py() == sessions
    assert table.group_by(["session_id", "timestamp"]).aggregate([]).num_rows == table.num_rows
    assert set(table["label"].to_pylist()) <= {0.0, 1.0}
    ordered = by_session(table)
    if stay_prob == 1 and ordered.num_rows > 1:
        assert equals_previous(ordered["followed_pages"])[is_neighbour(ordered)].all()
    if mean == 1:
        assert table.num_rows == sessions


def test_how_much_waits_in_memory_does_not_change_the_log(monkeypatch):
    config = replace(tiny(), num_sessions=6000)  # several blocks
    expected = all_samples(config)
    for share, rows_per_batch in ((0.0, generator.ROWS_PER_BATCH), (1e9, 1000)):
        monkeypatch.setattr(generator, "MIN_WAITING_SHARE", share)
        monkeypatch.setattr(generator, "ROWS_PER_BATCH", rows_per_batch)
        assert all_samples(config).equals(expected)


def test_streaming_gives_what_sorting_everything_would():
    config = replace(tiny(), num_sessions=4500)
    maker, whole = BlockMaker(config), []
    while not maker.is_done:
        block, _ = maker.next_block()
        whole.append(block.to_arrow(np.arange(block.num_samples), maker.arrow_schema))
    assert len(whole) > 1
    table = pa.Table.from_batches(whole).sort_by([("timestamp", "ascending"), ("session_id", "ascending")])
    assert all_samples(config).equals(table.combine_chunks())


def test_waiting_samples_stay_few_in_a_long_log():
    config = synthetic_config("tiny", sessions=40_000, samples_per_session=4.0)
    first_delivery = None
    maker_progress = []
    for _ in stream_samples(config, {}, progress=lambda what, done, total: maker_progress.append(done)):
        first_delivery = first_delivery or maker_progress[-1]
    assert first_delivery < 0.5 * config.num_sessions


def test_same_seed_same_log_other_seed_other_log():
    config = replace(tiny(), num_sessions=200)
    assert all_samples(config).equals(all_samples(config))
    assert not all_samples(config).equals(all_samples(replace(config, seed=1)))


def test_best_auc_is_reached_by_the_true_probabilities_and_by_nothing_shuffled():
    maker, logits, labels, scores = BlockMaker(tiny()), [], [], BestScores()
    while not maker.is_done:
        block, block_logits = maker.next_block()
        scores.add(block_logits["label"], block.samples["label"])
        logits.append(block_logits["label"])
        labels.append(block.samples["label"])
    true, drawn = np.concatenate(logits), np.concatenate(labels)
    assert scores.auc == pytest.approx(roc_auc_score(drawn, true), abs=1e-4)
    assert 0.8 < scores.auc < 0.9
    assert roc_auc_score(drawn, np.random.default_rng(0).permutation(true)) == pytest.approx(0.5, abs=0.01)
    noisy = true + np.random.default_rng(1).standard_normal(len(true))
    assert roc_auc_score(drawn, noisy) < scores.auc - 0.02


def test_counting_labels_of_popular_items_already_beats_chance(tiny_table):
    items, labels = pc.list_flatten(tiny_table["item"]).to_numpy(), tiny_table["label"].to_numpy()
    cut = len(items) * 9 // 10
    shown = np.bincount(items[:cut], minlength=5000)
    clicked = np.bincount(items[:cut], weights=labels[:cut], minlength=5000)
    rate = (clicked + 5 * labels[:cut].mean()) / (shown + 5)
    assert roc_auc_score(labels[cut:], rate[items[cut:]]) > 0.55


def test_recd_has_the_shape_of_the_paper():
    schema, config = schema_of(recd()), recd()
    user_lists = [f for f in schema.sparse if f.name.startswith("user_list")]
    assert (len(user_lists), len(schema.sequence), len(schema.dense)) == (12, 2, 13)
    assert len([f for f in schema.sparse if f.name.startswith("item")]) == 6
    assert all(feature.shift for feature in schema.sequence)
    assert (config.samples_per_session, config.stay_prob, config.shift_prob) == (16.5, 0.9, 0.5)
    table = all_samples(replace(config, num_sessions=100))
    assert set(pc.list_value_length(table["history_0"]).to_pylist()) == {64}
    assert pc.mean(pc.list_value_length(table["user_list_3"])).as_py() == pytest.approx(20, abs=0.5)


def test_writing_is_not_slow(tmp_path):
    # 100,000 samples/s and more on an idle core; a shared one still reaches a tenth of it.
    config = replace(small(), num_sessions=3000)
    started_s = time.process_time()
    generate_log(config, out=tmp_path / "log")
    num_samples = Schema.load(tmp_path / "log").info["num_samples"]
    assert num_samples / (time.process_time() - started_s) > 10_000


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ({"sessions": 0}, "sessions is 0, expected at least 1"),
        ({"samples_per_session": 0.5}, "samples per session is 0.5, expected at least 1"),
        ({"zipf": -1.0}, "zipf is -1.0, expected between 0 and 10"),
        ({"stay_prob": 1.5}, "stay-prob is 1.5, expected between 0 and 1"),
        ({"seed": -1}, "seed is -1, expected at least 0"),
        ({"zipf": float("nan")}, "zipf is nan"),
    ],
)
def test_impossible_settings_are_refused_with_a_sentence(override, sentence):
    with pytest.raises(InputError, match=sentence):
        synthetic_config("tiny", **override)


def test_candidates_of_a_request_share_what_belongs_to_the_user(tmp_path):
    """User features and histories change only where a request begins; candidates of one follow 1 ms apart."""
    config = replace(synthetic_config("demo", sessions=300), samples_per_request=4.0)
    rows = pa.concat_tables(map(pq.read_table, sorted(generate_log(config, out=tmp_path / "raw").glob("*.parquet"))))
    rows = rows.sort_by([("session_id", "ascending"), ("timestamp", "ascending")])
    session, time_ms = rows["session_id"].to_numpy(), rows["timestamp"].to_numpy()
    follows = (np.diff(session) == 0) & (np.diff(time_ms) == 1)
    assert 3.0 < len(session) / (len(session) - follows.sum()) < 4.5  # sessions end requests early
    for name in ("liked_topics", "recent_queries", "history", "time_spent"):
        lists = rows[name].to_pylist()
        assert all(lists[row] == lists[row + 1] for row in np.flatnonzero(follows))
    assert pc.count_distinct(pc.list_flatten(rows["item"])).as_py() > 100


def test_later_labels_follow_earlier_ones_and_leave_them_as_they_were(tmp_path):
    config = replace(tiny(), num_sessions=1_000)
    several = replace(config, labels=("click", "purchase"))
    alone, both = all_samples(config), all_samples(several)
    assert both["click"].to_pylist() == alone["label"].to_pylist()
    assert both.drop_columns(["click", "purchase"]).equals(alone.drop_columns(["label"]))
    clicks, purchases = both["click"].to_numpy(), both["purchase"].to_numpy()
    assert (purchases <= clicks).all()
    assert 0.1 < purchases.sum() / clicks.sum() < 0.4
    generate_log(several, out=tmp_path / "log")
    schema = Schema.load(tmp_path / "log")
    assert schema.labels == ("click", "purchase")
    told = schema.info["labels"]["purchase"]
    assert told["base_rate"] == pytest.approx(purchases.mean())
    assert schema.info["best_auc"] < told["best_auc"] < 0.97


def test_the_best_auc_of_a_later_label_is_that_of_its_true_probabilities():
    maker, logits, labels = BlockMaker(replace(tiny(), labels=("a", "b"))), [], []
    while not maker.is_done:
        block, own = maker.next_block()
        logits.append(own["b"])
        labels.append(block.samples["b"])
    true, drawn = np.concatenate(logits).astype(np.float64), np.concatenate(labels)
    assert (1 / (1 + np.exp(-true))).mean() == pytest.approx(drawn.mean(), rel=0.03)
    assert roc_auc_score(drawn, true) > 0.85
