import numpy as np
import pytest

from recmill.artifacts import InputError
from recmill.artifacts.topology import COLLECTIVES, Topology
from recmill.planning.measure import SIZES_BYTES, fit_link, measure_topology


def test_a_fit_finds_latency_and_bandwidth():
    sizes = np.array(SIZES_BYTES, float)
    link = fit_link(sizes, 3e-4 + sizes / 2e8)
    assert link.latency_s == pytest.approx(3e-4)
    assert link.bytes_per_s == pytest.approx(2e8)


def test_a_fit_of_odd_times_is_still_a_link():
    sizes = np.array(SIZES_BYTES, float)
    convex = fit_link(sizes, (sizes / 1e8) ** 1.5)
    assert convex.latency_s == 0
    assert convex.bytes_per_s > 0
    falling = fit_link(sizes, 1 / sizes)
    assert falling.bytes_per_s > 0


def test_measuring_needs_the_nodes_of_the_topology():
    with pytest.raises(InputError, match="run `torchrun --nnodes 2"):
        measure_topology(Topology(nodes=2, ranks_per_node=2))
    assert measure_topology(Topology.local(1)) == Topology.local(1)


def test_two_ranks_time_their_collectives():
    measured = measure_topology(Topology.local(2))
    assert set(measured.collectives) == set(COLLECTIVES)
    for collective in COLLECTIVES:
        link = measured.link(collective, "intra")
        assert 0 <= link.latency_s < 1
        assert 1e5 < link.bytes_per_s < 1e12
    assert measured.world_size == 2
