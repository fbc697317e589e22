"""The hot set serves whole samples within its budget, says how surely, and knows when it does not pay."""

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recmill.artifacts import AccessProfile, Dataset, InputError, record_json, write_folder
from recmill.artifacts.topology import Topology
from recmill.data.schema import Feature, Schema
from recmill.planning.hot.cost import EXCHANGE_OVERHEAD_S, EXCHANGE_S_PER_ID
from recmill.planning.hot.depths import choose_depths, served
from recmill.planning.hot.selection import choose_hot_set, share_interval
from recmill.planning.hot.size import estimate_hot_rows
from recmill.planning.planner import plan_shards
from recmill.planning.tiers.row_files import write_slots
from recmill.profiling.access import profile_access
from recmill.profiling.samples import load_samples

NETWORK = Topology(nodes=2, ranks_per_node=1, inter_node_bytes_per_s=125e6)


def zipf_ids(rng: np.random.Generator, exponent: float, num_rows: int, size: int) -> np.ndarray:
    weights = np.arange(1, num_rows + 1) ** -exponent
    return rng.permutation(num_rows)[rng.choice(num_rows, size=size, p=weights / weights.sum())]


def zipf_dataset(
    out: Path, exponent: float, *, num_rows: int = 20_000, num_samples: int = 30_000, samples_per_session: int = 1
) -> Dataset:
    """Four tables of single ids and a small one, in the session layout."""
    features = [Feature(name=f"t{n}", kind="sparse", num_rows=num_rows, dim=16) for n in range(4)]
    schema = Schema(features=(*features, Feature(name="small", kind="sparse", num_rows=50, dim=16)))
    rng = np.random.default_rng(0)
    columns = {
        "session_id": pa.array(np.arange(num_samples) // samples_per_session),
        "timestamp": pa.array(np.arange(num_samples)),
        "label": pa.array(np.zeros(num_samples, np.float32)),
    }
    offsets = pa.array(np.arange(num_samples + 1), pa.int32())
    for feature in schema.features:
        ids = zipf_ids(rng, exponent, feature.num_rows, num_samples)
        columns[feature.name] = pa.ListArray.from_arrays(offsets, pa.array(ids))
    with write_folder(out, manifest_name=Dataset.manifest_name) as folder:
        pq.write_table(pa.table(columns), folder / "part-00000.parquet", row_group_size=4096)
        groups = [min(4096, num_samples - start) for start in range(0, num_samples, 4096)]
        part = {
            "file": "part-00000.parquet",
            "split": "train",
            "num_rows": num_samples,
            "num_sessions": num_samples // samples_per_session,
            "bytes": (folder / "part-00000.parquet").stat().st_size,
            "row_group_rows": groups,
        }
        schema.save(folder)
        body = {"layout": "session", "num_rows": num_samples, "num_sessions": part["num_sessions"], "source": {}}
        Dataset.of_json({**body, "parts": [part]}).seal(folder)
    return Dataset.load(out)


@pytest.fixture(scope="module")
def skewed(tmp_path_factory) -> AccessProfile:
    folder = tmp_path_factory.mktemp("skewed")
    zipf_dataset(folder / "data", 1.2)
    return profile_access(folder / "data", out=folder / "profile")


def test_a_profile_keeps_whole_sessions_with_the_rows_they_read(tmp_path):
    data = zipf_dataset(tmp_path / "data", 1.2, num_samples=30_000, samples_per_session=3)
    profile = profile_access(data, out=tmp_path / "profile")
    tables = Schema.load(data.path).tables
    sessions, rows = load_samples(profile, tables)
    assert 10_000 <= len(sessions) <= 20_000
    names, counts = np.unique(sessions, return_counts=True)
    # row groups of 4096 samples cut one session in two
    assert (counts == 3).mean() > 0.99
    stored = pq.read_table(Path(data.path) / "part-00000.parquet", columns=["session_id", "t1"]).to_pandas()
    session = int(names[len(names) // 2])
    expected = sorted(ids[0] for ids in stored[stored.session_id == session].t1)
    assert sorted(rows["t1"].values[sessions == session].tolist()) == expected


def test_the_hot_set_fits_its_budget_and_serves_the_share_it_states(skewed):
    choice = choose_hot_set(skewed, budget_bytes=1_000_000, topology=NETWORK)
    chosen = choice.hot_set
    assert 900_000 < chosen.bytes <= 1_000_000
    sessions, rows = load_samples(skewed, Schema.load(skewed.path).tables)
    is_hot = np.ones(len(sessions), bool)
    for name, own in rows.items():
        is_hot &= np.isin(own.values, choice.rows[name])
    assert chosen.sample_share == pytest.approx(is_hot.mean(), abs=0.02)
    assert chosen.interval[0] <= is_hot.mean() <= chosen.interval[1]
    assert chosen.access_share > chosen.sample_share
    assert chosen.session_share == pytest.approx(chosen.sample_share)  # one sample a session
    assert chosen.size.low <= sum(len(own) for own in choice.rows.values()) <= chosen.size.high


def test_small_tables_are_hot_as_a_whole_and_slots_fall_with_the_count(skewed):
    chosen = choose_hot_set(skewed, budget_bytes=400_000, topology=NETWORK)
    assert sorted(chosen.rows["small"].tolist()) == list(range(50))
    assert chosen.hot_set.tables["small"].is_whole
    counts = pq.read_table(Path(skewed.path) / "counts" / "t0.parquet")
    num_hot = chosen.hot_set.tables["t0"].num_rows
    assert chosen.rows["t0"].tolist() == counts.column("row").to_pylist()[:num_hot]
    assert chosen.hot_set.tables["t0"].lowest_count == counts.column("count").to_pylist()[num_hot - 1]


def test_a_larger_budget_serves_more_samples(skewed):
    shares = [
        choose_hot_set(skewed, budget_bytes=budget, topology=NETWORK).hot_set.sample_share
        for budget in (200_000, 800_000, 3_000_000)
    ]
    assert shares[0] < shares[1] < shares[2]


def test_hot_batches_are_judged_against_the_plan_of_cold_ones(skewed, tmp_path):
    """Tiers make cold batches cheap, so hot ones gain less over them than over TorchRec's exchange."""
    options = {"topology": NETWORK, "memory_budget_bytes": 10**8, "hot_budget_bytes": 2_000_000}
    gains = {}
    for strategy in ("torchrec", "tiers"):
        plan = plan_shards(skewed, out=tmp_path / strategy, strategy=strategy, **options)
        gains[strategy] = plan.hot_set.expected_speed_up
    assert 0 < gains["tiers"] < gains["torchrec"]
    bytes_s = plan.prediction.seconds - plan.prediction.latency_seconds
    num_ids = 5 * 2048 / 2  # of one of two ranks
    cold_ms = 1e3 * (bytes_s + EXCHANGE_OVERHEAD_S + EXCHANGE_S_PER_ID * num_ids)
    assert f"instead of {cold_ms:.1f} ms" in plan.hot_set.reason


def test_strong_skew_pays_and_weak_skew_does_not(skewed, tmp_path):
    strong = choose_hot_set(skewed, budget_bytes=2_000_000, topology=NETWORK).hot_set
    assert strong.pays
    assert strong.expected_speed_up > 1.05
    flat = zipf_dataset(tmp_path / "flat", 0.6)
    profile = profile_access(flat, out=tmp_path / "profile")
    weak = choose_hot_set(profile, budget_bytes=500_000, topology=NETWORK).hot_set
    assert not weak.pays
    assert "of the samples read hot rows only" in weak.reason
    alone = choose_hot_set(skewed, budget_bytes=2_000_000, topology=Topology.local(1)).hot_set
    assert not alone.pays
    assert alone.reason == "one rank exchanges nothing"


def test_the_hot_set_is_written_as_rows_and_slots(skewed, tmp_path):
    chosen = choose_hot_set(skewed, budget_bytes=400_000)
    write_slots(tmp_path / "hot", chosen.rows)
    found = pq.read_table(tmp_path / "hot" / "t1.parquet").to_pydict()
    assert found["row"] == chosen.rows["t1"].tolist()
    assert found["slot"] == list(range(len(found["row"])))
    stated = record_json(chosen.hot_set)
    assert stated["tables"]["t1"]["num_rows"] == len(found["row"])
    assert {"budget_bytes", "pays", "reason", "sample_share", "access_share", "interval", "confidence"} <= set(stated)


def test_a_profile_without_samples_and_a_budget_of_nothing_are_refused(skewed, tmp_path):
    with pytest.raises(InputError, match="budget_bytes is 0"):
        choose_hot_set(skewed, budget_bytes=0)
    with write_folder(tmp_path / "old", manifest_name=AccessProfile.manifest_name) as folder:
        Schema.load(skewed.path).save(folder)
        (folder / "counts").mkdir()
        for path in (Path(skewed.path) / "counts").iterdir():
            (folder / "counts" / path.name).write_bytes(path.read_bytes())
        skewed.seal(folder)
    with pytest.raises(InputError, match=r"holds no samples.parquet; profile the dataset again"):
        choose_hot_set(tmp_path / "old", budget_bytes=1000)


def test_choosing_for_samples_beats_choosing_by_counts_alone():
    """Two tables are read together by one half of the samples; a third, read more often, spoils none of them."""
    rng = np.random.default_rng(1)
    deepest = np.stack([rng.integers(0, 100, 2000), rng.integers(0, 1000, 2000)], axis=1)
    counts = [np.sort(rng.integers(10, 1000, 100))[::-1].copy(), np.sort(rng.integers(1, 40, 1000))[::-1].copy()]
    depths = choose_depths(
        deepest,
        counts,
        row_bytes_T=np.array([10, 10]),
        whole_T=np.zeros(2, bool),
        num_rows_T=np.array([100, 1000]),
        budget_bytes=6_000,
    )
    best = max(served(deepest, np.array([first, 600 - first])).sum() for first in range(0, 101, 5))
    assert served(deepest, depths).sum() >= 0.97 * best


@given(
    ranks=st.lists(st.tuples(st.integers(-1, 5), st.integers(-1, 5)), min_size=1, max_size=12),
    budget=st.integers(0, 40),
)
@example(ranks=[(0, 0), (-1, 3), (-1, 3), (-1, 3)], budget=20)  # one cheap sample bars three that are alike
def test_depths_never_exceed_the_budget_and_come_near_the_best(ranks, budget):
    deepest = np.array(ranks)
    counts = [np.arange(6, 0, -1), np.arange(6, 0, -1)]
    sizes = np.array([2, 5])
    depths = choose_depths(
        deepest,
        counts,
        row_bytes_T=sizes,
        whole_T=np.zeros(2, bool),
        num_rows_T=np.array([6, 6]),
        budget_bytes=budget,
    )
    assert (depths * sizes).sum() <= budget
    best = max(
        served(deepest, np.array(own)).sum()
        for own in itertools.product(range(7), range(7))
        if (np.array(own) * sizes).sum() <= budget
    )
    assert served(deepest, depths).sum() >= 0.5 * best


@pytest.mark.parametrize(("share", "confidence"), [(0.3, 0.9), (0.02, 0.9), (0.0005, 0.9), (0.3, 0.99)])
def test_the_interval_of_the_hot_size_brackets_the_truth_at_its_stated_rate(share, confidence):
    num_rows, trials = 200_000, 300
    counts = np.zeros(num_rows, np.int64)
    counts[: int(share * num_rows)] = 9  # neighbours, as where ids are given by popularity
    hits = 0
    for trial in range(trials):
        found = estimate_hot_rows(counts, 5, confidence=confidence, seed=trial)
        hits += found.low <= share * num_rows <= found.high
    # four standard errors below the stated rate; not above what a useful interval would reach either
    assert hits / trials >= confidence - 4 * np.sqrt(confidence * (1 - confidence) / trials)
    if share >= 0.02 and confidence < 0.95:
        assert hits / trials < 0.99


def test_a_small_table_is_counted_exactly():
    found = estimate_hot_rows(np.array([5, 1, 7]), 5, confidence=0.99)
    assert (found.low, found.num_rows, found.high) == (2, 2, 2)


def test_the_interval_of_the_share_covers_when_sessions_are_alike():
    """Samples of a session are hot together, so counting them as independent would make the interval too narrow."""
    hits, trials, truth = 0, 200, 0.4
    for trial in range(trials):
        rng = np.random.default_rng(trial)
        sessions = np.repeat(np.arange(400), 5)
        is_hot = np.repeat(rng.random(400) < truth, 5)
        low, high = share_interval(sessions, is_hot, confidence=0.9, seed=trial)
        hits += low <= truth <= high
    assert 0.82 <= hits / trials <= 0.98
