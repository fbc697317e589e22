"""Plans on disk: every row in one tier, costs that a reader can recompute, moves that pay."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from recmill.artifacts import InputError, ShardPlan
from recmill.planning.planner import Topology, plan_shards
from recmill.planning.tiers.row_files import keep_slots
from tests.unit.planning.made_profiles import write_profile, zipf_counts

DIMS = {"items": 16, "tags": 8}
BATCH, SAMPLES = 4096, 20_000
TOPOLOGY = Topology(nodes=2, ranks_per_node=4, inter_node_bytes_per_s=1e7, intra_node_bytes_per_s=1e9)


def make_counts(seed):
    return {
        "items": zipf_counts(20_000, 1.2, 400_000, seed=seed),
        "tags": zipf_counts(3_000, 1.0, 60_000, seed=seed + 1),
    }


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiers")
    counts = make_counts(0)
    return write_profile(folder / "profile", counts, dims=DIMS, pooled=frozenset({"tags"}), num_samples=SAMPLES), counts


@pytest.fixture(scope="module")
def planned(profile, tmp_path_factory):
    out = tmp_path_factory.mktemp("planned") / "plan"
    return plan_shards(
        profile[0],
        out=out,
        topology=TOPOLOGY,
        memory_budget_bytes=260_000,
        batch_size=BATCH,
        merge="off",
    )


def rows_of(plan, table):
    found = pq.read_table(f"{plan.path}/rows/{table}.parquet").to_pydict()
    return {name: np.array(values) for name, values in found.items()}


def test_every_row_is_in_one_tier_at_one_slot(planned, profile):
    _, counts = profile
    for table, entry in planned.tables.items():
        rows = rows_of(planned, table)
        assert rows["row"].tolist() == list(range(len(counts[table])))
        for position, tier in enumerate(entry.tiers):
            inside = rows["tier"] == position
            assert inside.sum() == tier.num_rows
            assert sorted(rows["slot"][inside]) == list(range(tier.num_rows))
            by_slot = rows["row"][inside][np.argsort(rows["slot"][inside])]
            if tier.kind == "global":
                assert (np.diff(by_slot) > 0).all()
            else:
                assert (np.diff(counts[table][by_slot]) <= 0).all()


def test_rows_outside_the_global_tier_are_the_most_read(planned, profile):
    _, counts = profile
    entry = planned.tables["items"]
    kinds = np.array([tier.kind for tier in entry.tiers])
    assert "node" in kinds or "replicated" in kinds
    is_global = kinds[rows_of(planned, "items")["tier"]] == "global"
    assert counts["items"][~is_global].min() >= counts["items"][is_global].max()


def test_the_objective_follows_from_the_files_alone(planned, profile):
    """Seconds of a step, a row at a time, from rows/*.parquet and the counts: nothing of the solver's code."""
    _, counts = profile
    bytes_of = dict.fromkeys(("ids", "vectors", "gradients", "reduce", "exchange", "spread"), 0.0)
    intra = dict(bytes_of)
    latency = 0.0
    for table, entry in planned.tables.items():
        reads = counts[table] / SAMPLES * BATCH / 8
        p1, p2, p3 = (1 - np.exp(-reads * ranks) for ranks in (1, 4, 8))
        kinds = np.array([tier.kind for tier in entry.tiers])[rows_of(planned, table)["tier"]]
        vector = DIMS[table] * 4
        spread, node, copies = (kinds == kind for kind in ("global", "node", "replicated"))
        for phase, size in (("ids", 4), ("vectors", vector), ("gradients", vector)):
            bytes_of[phase] += size * p1[spread].sum() * 4 / 8
            intra[phase] += size * p1[spread].sum() * 3 / 8 + size * p1[node].sum() * 3 / 4
        named = [p * vector + np.minimum(4 * p, 1 / 8) for p in (p1, p2, p3)]
        bytes_of["exchange"] += named[1][node | copies].sum() / 4
        intra["reduce"] += named[0][copies].sum() * 3 / 4
        intra["spread"] += named[2][copies].sum() * 3 / 4
        # counts of lists to come: to 3 ranks of the node and 4 beyond
        bytes_of["ids"] += 8 * 4
        intra["ids"] += 8 * 3
        bytes_of["exchange"] += 16 if (node | copies).any() else 0
        intra["reduce"] += 24 if copies.any() else 0
        intra["spread"] += 24 if copies.any() else 0
        latency += 4 * 50e-6 + (3 * 50e-6 if (node | copies).any() else 0) + (4 * 20e-6 if copies.any() else 0)
    seconds = latency + sum(max(bytes_of[phase] / 1e7, intra[phase] / 1e9) for phase in bytes_of)
    assert planned.objective == pytest.approx(seconds, rel=1e-6)
    assert planned.prediction.bytes.inter_node == pytest.approx(8 * sum(bytes_of.values()), rel=1e-6)
    assert planned.bound <= planned.objective <= planned.bound * 1.01


@pytest.mark.parametrize(
    ("inter_bytes_per_s", "wire", "is_merged"),
    [(1e7, "float32", True), (1e7, "bfloat16", True), (1e9, "float32", False)],
)
def test_requests_are_merged_where_the_links_between_nodes_are_slow(
    profile, planned, tmp_path, inter_bytes_per_s, wire, is_merged
):
    request = {
        "topology": replace(TOPOLOGY, inter_node_bytes_per_s=inter_bytes_per_s),
        "memory_budget_bytes": 260_000,
        "batch_size": BATCH,
        "wire": wire,
    }
    plans = {
        merge: plan_shards(profile[0], out=tmp_path / merge, merge=merge, **request) for merge in ("auto", "on", "off")
    }
    auto, on, off = plans.values()
    assert (auto.merges_nodes, on.merges_nodes, off.merges_nodes) == (is_merged, True, False)
    assert auto.objective == min(on.objective, off.objective)
    assert auto.bound <= auto.objective <= auto.bound * 1.01
    assert auto.wire == wire
    # Row-wise with distinct ids stays what it is, whatever the plan does.
    assert on.prediction.row_wise_dedup == off.prediction.row_wise_dedup
    assert on.prediction.bytes.inter_node < off.prediction.bytes.inter_node * 1.001
    phases = set(on.prediction.phases)
    assert {"node_ids", "peer_ids", "node_vectors", "peer_vectors", "node_gradients", "peer_gradients"} <= phases
    assert "ids" not in phases
    assert "ids" in off.prediction.phases


def test_a_merged_plan_costs_what_its_rows_cost(profile, tmp_path):
    """With every row global: from the counts alone."""
    _, counts = profile
    tight = sum(-(-len(counts[table]) // 8) * (DIMS[table] * 4 + 4) for table in DIMS) + 8
    plan = plan_shards(
        profile[0], out=tmp_path / "plan", topology=TOPOLOGY, memory_budget_bytes=tight, batch_size=BATCH, merge="on"
    )
    inside, between, latency = np.zeros(3), np.zeros(3), 0.0
    for table, dim in DIMS.items():
        p1, p2 = (1 - np.exp(-counts[table] / SAMPLES * BATCH / 8 * ranks) for ranks in (1, 4))
        sizes = np.array([4, dim * 4, dim * 4])
        inside += sizes * p1.sum() * 3 / 4 + [8 * 3, 0, 0]
        between += sizes * p2.sum() / 8 + [8, 0, 0]
        latency += 4 * 20e-6 + 4 * 50e-6
    assert {tier.kind for entry in plan.tables.values() for tier in entry.tiers} == {"global"}
    assert plan.objective == pytest.approx(latency + inside.sum() / 1e9 + between.sum() / 1e7, rel=1e-6)


def test_memory_is_what_the_ranks_will_hold(planned, profile):
    _, counts = profile
    held = np.zeros(8)
    for table, entry in planned.tables.items():
        row = DIMS[table] * 4 + 4
        sizes = {tier.kind: tier.num_rows for tier in entry.tiers}
        for rank in range(8):
            held[rank] += row * len(range(rank, sizes.get("global", 0), 8))
            held[rank] += row * len(range(rank % 4, sizes.get("node", 0), 4)) + row * sizes.get("replicated", 0)
        moved = sizes.get("node", 0) + sizes.get("replicated", 0)
        held += (len(counts[table]) * 1.5 / 8 + 8 * moved) if moved else 0
    assert planned.rank_bytes == tuple(np.ceil(held).astype(int).tolist())
    assert held.max() <= 260_000


def test_all_ranks_together_never_send_more_than_row_wise_with_distinct_ids(profile, tmp_path):
    plan = plan_shards(
        profile[0],
        out=tmp_path / "plan",
        topology=TOPOLOGY,
        memory_budget_bytes=260_000,
        batch_size=BATCH,
        total_bytes_ratio=1.0,
    )
    sent, baseline = plan.prediction.bytes, plan.prediction.row_wise_dedup
    assert not plan.merges_nodes
    assert sent.total <= baseline.total
    assert sent.inter_node < baseline.inter_node
    assert plan.objective < baseline.seconds


def test_torchrec_takes_a_tier_plan(planned):
    torchrec_plan = ShardPlan.load(planned.path).to_torchrec()
    assert torchrec_plan.plan["embeddings.sequence"]["m_items"].sharding_type == "row_wise"
    sizes = [
        shard.shard_sizes[0] for shard in torchrec_plan.plan["embeddings.sequence"]["m_items"].sharding_spec.shards
    ]
    assert sum(sizes) == 20_000
    assert len(sizes) == 8
    assert torchrec_plan.plan["embeddings.pooled"]["m_tags"].sharding_type in ("table_wise", "row_wise")


def test_a_plan_says_why_in_numbers(planned):
    why = planned.tables["items"].why
    for words in ("20,000 rows of 16", "distinct", "row-wise without dedup", "all replicated", "The next row"):
        assert words in why


def test_one_rank_keeps_every_table_whole(profile, tmp_path):
    plan = plan_shards(profile[0], out=tmp_path / "plan", topology=Topology.local(1), memory_budget_bytes=1 << 24)
    assert {tier.kind for entry in plan.tables.values() for tier in entry.tiers} == {"table_wise"}
    assert plan.objective == plan.bound == 0


def test_a_refresh_moves_fewer_rows_than_a_plan_from_scratch(profile, planned, tmp_path):
    _, counts = profile
    drifted = {name: values.copy() for name, values in counts.items()}
    rng = np.random.default_rng(5)
    # chance alone changes most counts a little; a few hundred rows become hot
    for name, values in drifted.items():
        drifted[name] = rng.poisson(values)
    drifted["items"][rng.choice(20_000, 200, replace=False)] += 300
    newer = write_profile(tmp_path / "profile", drifted, dims=DIMS, pooled=frozenset({"tags"}), num_samples=SAMPLES)
    fresh = plan_shards(
        newer,
        out=tmp_path / "fresh",
        topology=TOPOLOGY,
        memory_budget_bytes=260_000,
        batch_size=BATCH,
        total_bytes_ratio=None,
        merge="off",
        previous=planned,
        previous_steps=100,
    )
    refresh = fresh.refresh
    assert 0 < refresh.moved_rows < refresh.from_scratch.moved_rows
    assert refresh.moved_bytes < refresh.from_scratch.moved_bytes
    assert refresh.seconds <= refresh.from_scratch.seconds * 1.05
    for table in DIMS:
        assert len(set(rows_of(fresh, table)["row"])) == len(counts[table])
        for kind in ("replicated", "node"):
            old, new = (_by_slot(plan, table, kind) for plan in (planned, fresh))
            stayed = [row for slot, row in enumerate(old) if slot < len(new) and row in set(new.tolist())]
            assert all(new[list(old).index(row)] == row for row in stayed)


def _by_slot(plan, table, kind):
    kinds = [tier.kind for tier in plan.tables[table].tiers]
    rows = rows_of(plan, table)
    inside = rows["tier"] == (kinds.index(kind) if kind in kinds else -1)
    return rows["row"][inside][np.argsort(rows["slot"][inside])]


def test_an_unchanged_profile_moves_nothing(profile, planned, tmp_path):
    again = plan_shards(
        profile[0],
        out=tmp_path / "again",
        topology=TOPOLOGY,
        memory_budget_bytes=260_000,
        batch_size=BATCH,
        total_bytes_ratio=None,
        merge="off",
        previous=planned.path,
    )
    assert again.refresh.moved_rows <= 5
    assert again.prediction.seconds == pytest.approx(planned.prediction.seconds, rel=1e-3)


def test_rows_that_stay_keep_their_slot_and_gaps_are_filled():
    kept = keep_slots(np.array([7, 8, 1, 2]), np.array([1, 5, 2, 9, 8]))
    assert kept[0] == 1
    assert kept[2] == 2
    assert sorted(kept.tolist()) == [1, 2, 7, 8]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory_budget_bytes": 0}, "memory_budget_bytes is 0, expected a whole number of 1 or more"),
        ({"memory_budget_bytes": 1000}, "B too little; largest: items 1,360,000 B, tags 108,000 B"),
        (
            {"memory_budget_bytes": 209_750, "topology": {"ranks_per_node": 7}},
            "the first rank needs 209,788 B .* 38 B too little; largest: items",
        ),
        ({"batch_size": -4}, "batch_size is -4"),
        ({"strategy": "magic"}, "strategy is 'magic', expected one of tiers, torchrec"),
        ({"total_bytes_ratio": float("nan")}, "total_bytes_ratio is nan"),
        ({"previous_steps": 0}, "previous_steps is 0"),
        ({"topology": {"inter_node_bytes_per_s": 0}}, "inter_node_bytes_per_s is 0, expected a number above 0"),
        ({"topology": {"intra_node_bytes_per_s": float("nan")}}, "intra_node_bytes_per_s is nan"),
        ({"topology": {"inter_node_latency_s": -1.0}}, "inter_node_latency_s is -1.0"),
        ({"topology": {"nodes": 10**6, "ranks_per_node": 8}}, "8,000,000 ranks, expected at most 65,536"),
        ({"topology": {"collectives": {"gossip": {}}}}, "expected a mapping of all_to_all, all_gather, all_reduce"),
        ({"hot_budget_bytes": -1}, "budget_bytes is -1"),
        ({"compress": "tiny"}, "compress is 'tiny'"),
    ],
)
def test_absurd_requests_get_one_clear_sentence(profile, tmp_path, changes, words):
    request = {"topology": {"nodes": 2, "ranks_per_node": 4}, "memory_budget_bytes": 260_000, **changes}
    with pytest.raises(InputError, match=words) as error:
        plan_shards(profile[0], out=tmp_path / "plan", **{**request, "topology": Topology(**request["topology"])})
    assert "\n" not in str(error.value)
    assert not (tmp_path / "plan").exists()


def test_a_profile_without_counts_or_with_foreign_tables_is_refused(profile, tmp_path):
    counts = {"items": profile[1]["items"][:100]}
    broken = write_profile(tmp_path / "broken", counts, dims=DIMS, pooled=frozenset(), num_samples=SAMPLES)
    (tmp_path / "broken" / "counts" / "items.parquet").unlink()
    with pytest.raises(InputError, match="has no counts for this table"):
        plan_shards(broken, out=tmp_path / "plan", topology=TOPOLOGY, memory_budget_bytes=10**6)
    empty = write_profile(tmp_path / "empty", counts, dims=DIMS, pooled=frozenset(), num_samples=1)
    with pytest.raises(InputError, match="counts no samples"):
        plan_shards(replace(empty, num_samples=0), out=tmp_path / "plan", topology=TOPOLOGY, memory_budget_bytes=10**6)
    foreign = replace(empty, tables={"x": empty.tables["items"]})
    with pytest.raises(InputError, match="knows nothing of table"):
        plan_shards(foreign, out=tmp_path / "plan", topology=TOPOLOGY, memory_budget_bytes=10**6)


def test_an_older_plan_for_other_ranks_is_refused(profile, planned, tmp_path):
    with pytest.raises(InputError, match="made for 2 nodes with 4 ranks, the new plan is for 1 with 2"):
        plan_shards(
            profile[0],
            out=tmp_path / "plan",
            topology=Topology.local(2),
            memory_budget_bytes=10**6,
            previous=planned,
        )
