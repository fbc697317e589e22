import numpy as np
import pytest

from recmill.artifacts.topology import Topology
from recmill.planning.tiers.costs import KINDS, NUM_LANES, PHASES, Routing, lane, phase_latency, row_bytes, row_memory

TWO_BY_FOUR = Topology(nodes=2, ranks_per_node=4)


def test_a_row_that_everyone_reads_costs_what_the_table_in_the_docs_says():
    # 2 nodes of 4 ranks, 16 floats: 64 bytes of vector, 4 of an id
    hot = np.array([100.0])
    spread = row_bytes("global", hot, 16, TWO_BY_FOUR)[:, 0]
    assert spread[lane("ids", "intra")] == pytest.approx(4 * 3 / 8)
    assert spread[lane("vectors", "inter")] == spread[lane("gradients", "inter")] == pytest.approx(64 * 4 / 8)
    node = row_bytes("node", hot, 16, TWO_BY_FOUR)[:, 0]
    assert node[lane("vectors", "intra")] == pytest.approx(64 * 3 / 4)
    assert node[lane("vectors", "inter")] == 0
    assert node[lane("exchange", "inter")] == pytest.approx((64 + 1 / 8) / 4)
    copies = row_bytes("replicated", hot, 16, TWO_BY_FOUR)[:, 0]
    assert copies[lane("ids", "intra")] == copies[lane("vectors", "intra")] == 0
    assert copies[lane("reduce", "intra")] == copies[lane("spread", "intra")] == pytest.approx((64 + 1 / 8) * 3 / 4)


def test_a_row_that_nobody_reads_costs_almost_nothing():
    for kind in KINDS:
        assert row_bytes(kind, np.zeros(1), 16, TWO_BY_FOUR).sum() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_costs_are_the_mean_of_simulated_steps(kind):
    """Draw who reads a row, send the messages one by one, count the bytes of rank 0."""
    rng = np.random.default_rng(0)
    world, per_node, dim, reads, steps = 8, 4, 16, 0.7, 40_000
    touched = rng.poisson(reads, (steps, world)) > 0
    owner = rng.integers(0, world, steps)  # of a global row; a stripe of a node is owner % 4
    sent = np.zeros(NUM_LANES)
    of_node = touched.reshape(steps, 2, per_node).any(axis=2)
    stripe = owner % per_node
    if kind == "global":
        for level, is_there in (("intra", owner // per_node == 0), ("inter", owner // per_node == 1)):
            asks = (touched[:, 0] & is_there & (owner != 0)).mean()
            sent[lane("ids", level)], sent[lane("gradients", level)] = 4 * asks, dim * 4 * asks
            others = touched[:, :4] if level == "intra" else touched[:, 4:]
            serves = others.sum(axis=1) - (touched[:, 0] if level == "intra" else 0)
            sent[lane("vectors", level)] = dim * 4 * (serves * (owner == 0)).mean()
    else:
        asks = (touched[:, 0] & (stripe != 0)).mean()
        named = dim * 4 + 1 / 8 / (1 - np.exp(-reads))
        if kind == "node":
            sent[lane("ids", "intra")], sent[lane("gradients", "intra")] = 4 * asks, dim * 4 * asks
            serves = touched[:, 1:4].sum(axis=1) * (stripe == 0)
            sent[lane("vectors", "intra")] = dim * 4 * serves.mean()
        else:
            sent[lane("reduce", "intra")] = named * asks
            spread = 3 * (touched.any(axis=1) & (stripe == 0)).mean()
            sent[lane("spread", "intra")] = dim * 4 * spread + 3 / 4 / 8
        exchanged = (of_node[:, 0] & (stripe == 0)).mean()
        sent[lane("exchange", "inter")] = dim * 4 * exchanged + 1 / 4 / 8
    model = row_bytes(kind, np.array([reads]), dim, TWO_BY_FOUR)[:, 0]
    np.testing.assert_allclose(model, sent, rtol=0.05)


def test_costs_of_merged_requests_are_the_mean_of_simulated_steps():
    rng = np.random.default_rng(0)
    per_node, dim, reads, steps = 4, 16, 0.7, 40_000
    touched = rng.poisson(reads, (steps, 8)) > 0
    owner = rng.integers(0, 8, steps)
    of_node = touched.reshape(steps, 2, per_node).any(axis=2)
    sent = np.zeros(NUM_LANES)
    asks = (touched[:, 0] & (owner % per_node != 0)).mean()  # the agent in the owner's column
    sent[lane("node_ids", "intra")], sent[lane("node_gradients", "intra")] = 4 * asks, dim * 2 * asks
    sent[lane("node_vectors", "intra")] = dim * 2 * (touched[:, 1:4].sum(axis=1) * (owner % per_node == 0)).mean()
    crosses = (of_node[:, 0] & (owner == per_node)).mean()  # rank 0 is an agent for rank 4
    sent[lane("peer_ids", "inter")], sent[lane("peer_gradients", "inter")] = 4 * crosses, dim * 2 * crosses
    sent[lane("peer_vectors", "inter")] = dim * 2 * (of_node[:, 1] & (owner == 0)).mean()
    routing = Routing(merges_nodes=True, value_bytes=2)
    model = row_bytes("global", np.array([reads]), dim, TWO_BY_FOUR, routing)[:, 0]
    np.testing.assert_allclose(model, sent, rtol=0.05)


def test_many_nodes_add_up_shares_instead_of_sending_everything_to_everyone():
    topology = Topology(nodes=16, ranks_per_node=8)
    exchanged = row_bytes("node", np.array([50.0]), 16, topology)[lane("exchange", "inter"), 0]
    assert exchanged == pytest.approx(2 * (64 + 1 / 8) * 15 / 16 / 8)


def test_memory_counts_copies_state_and_the_remap():
    held = 16 * 4 + 4
    assert row_memory("global", 16, TWO_BY_FOUR) == held / 8
    assert row_memory("node", 16, TWO_BY_FOUR) == held / 4 + 8
    assert row_memory("replicated", 16, TWO_BY_FOUR) == held + 8


def test_phases_that_have_nobody_to_talk_to_take_no_time():
    by_name = {phase.name: phase for phase in PHASES}
    assert phase_latency(by_name["exchange"], Topology.local(4)) == 0
    assert phase_latency(by_name["reduce"], Topology(nodes=4, ranks_per_node=1)) == 0
    assert phase_latency(by_name["ids"], Topology.local(1)) == 0
    assert phase_latency(by_name["ids"], TWO_BY_FOUR) == pytest.approx(2 * 50e-6)
