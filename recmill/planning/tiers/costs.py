"""What a row costs under every placement: bytes that a rank sends per step, by phase and network level.

Ids are deduplicated before they are sent, so a row costs a rank at most one id, one vector and one gradient per step.
With n expected reads of a row by a rank, reads being independent, the row is touched

    by a rank   p1 = 1 - exp(-n)        by a node   p2 = 1 - exp(-n R)       by any rank   p3 = 1 - exp(-n W)

    phase       sends                                 global          node             replicated
    ids         the distinct ids to their owners      p1 (W-1)/W      p1 (R-1)/R
    vectors     the rows back                         p1 (W-1)/W      p1 (R-1)/R
    gradients   their gradients to the owners         p1 (W-1)/W      p1 (R-1)/R
    reduce      gradients to one rank of the node                                      p1 (R-1)/R
    exchange    sums of a node to the other nodes                     x (N-1)/R        x (N-1)/R
    spread      the sums to all ranks of the node                                      p3 (R-1)/R

If the requests of a node are merged before they cross to another one, two exchanges replace each of the first three:

    node_*      ids, vectors, gradients in the node   p1 (R-1)/R      p1 (R-1)/R
    peer_*      the same between nodes, distinct      p2 (N-1)/(N R)
                ids and sums of a node

where x is p2 if every node sends its sums to all others, or (p2 + p3) / N if each node adds up a share of the rows;
the ranks choose the smaller one. In the last three phases a row is identified by 4 bytes, or by one bit of a bitmap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from recmill.artifacts.plan import FeatureDedup
from recmill.artifacts.topology import LEVELS, Topology
from recmill.data.schema import Schema, Table
from recmill.planning.tiers.reads import TableReads

# C = classes of rows, P = lanes (a phase on a level)
KINDS = ("replicated", "node", "global")
WEIGHT_BYTES = 4
VALUE_BYTES = {"float32": 4, "bfloat16": 2}  # of a weight or gradient in a message
STATE_BYTES_PER_ROW = 4  # row-wise Adagrad keeps one float per row
ID_BYTES = 4  # an id that ranks send: the position of the row on its owner
TORCHREC_ID_BYTES = 8
LENGTH_BYTES = 4  # of one list in a TorchRec message
COUNT_BYTES = 8  # the length of a message, sent to every other rank before it
BITMAP_BYTES = 1 / 8
REMAP_BITS_PER_ROW = 1.5  # one bit says whether a row is global; the rank index adds half a bit on average
REMAP_BYTES_PER_MOVED_ROW = 8


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One exchange of a step; it ends for all of its ranks when the slowest has its bytes."""

    name: str
    ring: str  # participants: all ranks (world), the ranks of a node (node), or one of each node (peers)
    num_counts: int  # messages that only announce the length of the next ones
    num_messages: int  # messages, counts included: each pays the latency
    is_all_to_all: bool = True  # looks rows up; False: synchronises copies
    is_overlapped: bool = False  # runs in parallel with the computation until the next lookup


def _lookup(prefix: str, ring: str) -> tuple[Phase, Phase, Phase]:
    return (
        Phase(name=f"{prefix}ids", ring=ring, num_counts=1, num_messages=2),
        Phase(name=f"{prefix}vectors", ring=ring, num_counts=0, num_messages=1),
        Phase(name=f"{prefix}gradients", ring=ring, num_counts=0, num_messages=1, is_overlapped=True),
    )


DIRECT_PHASES = _lookup("", "world")
NODE_PHASES, PEER_PHASES = _lookup("node_", "node"), _lookup("peer_", "peers")  # of merged requests
COPY_PHASES = (
    Phase(name="reduce", ring="node", num_counts=1, num_messages=2, is_all_to_all=False, is_overlapped=True),
    Phase(name="exchange", ring="peers", num_counts=2, num_messages=3, is_all_to_all=False, is_overlapped=True),
    Phase(name="spread", ring="node", num_counts=1, num_messages=2, is_all_to_all=False, is_overlapped=True),
)
TIER_PHASES = (*DIRECT_PHASES, *NODE_PHASES, *PEER_PHASES, *COPY_PHASES)
WHOLE_PHASES = (  # of tables that TorchRec keeps whole
    Phase(name="whole_ids", ring="world", num_counts=1, num_messages=3),
    Phase(name="whole_vectors", ring="world", num_counts=0, num_messages=1),
    Phase(name="whole_gradients", ring="world", num_counts=0, num_messages=1),
)
PHASES = (*TIER_PHASES, *WHOLE_PHASES)
PHASE_NAMES = tuple(phase.name for phase in PHASES)
NUM_LANES = len(PHASES) * len(LEVELS)
COLLECTIVE = "all_to_all"  # every phase is an all-to-all of torch.distributed, over its ring


def lane(phase: str, level: str) -> int:
    return PHASE_NAMES.index(phase) * len(LEVELS) + LEVELS.index(level)


_REDUCE, _EXCHANGE, _SPREAD = ([lane(phase.name, level) for level in LEVELS] for phase in COPY_PHASES)


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How rows and gradients travel: `merges_nodes`, and the bytes of one value in a message."""

    merges_nodes: bool = False
    value_bytes: int = WEIGHT_BYTES

    @property
    def lookup_phases(self) -> tuple[Phase, ...]:
        return (*NODE_PHASES, *PEER_PHASES) if self.merges_nodes else DIRECT_PHASES


DIRECT = Routing()


def row_bytes(kind: str, reads_C: np.ndarray, dim: int, topology: Topology, routing: Routing = DIRECT) -> np.ndarray:
    """[P, C] bytes that a rank sends (and receives) in a step for one row of each class."""
    nodes, per_node, world = topology.nodes, topology.ranks_per_node, topology.world_size
    vector = dim * routing.value_bytes
    by_rank, by_node, by_any = (-np.expm1(-reads_C * ranks) for ranks in (1, per_node, world))
    sent = np.zeros((NUM_LANES, len(reads_C)))
    inside = (per_node - 1) / per_node

    def look_up(phases: tuple[Phase, ...], level: str, share_C: np.ndarray) -> None:
        for phase, size in zip(phases, (ID_BYTES, vector, vector), strict=True):
            sent[lane(phase.name, level)] += share_C * size

    if kind == "global" and routing.merges_nodes:
        look_up(NODE_PHASES, "intra", inside * by_rank)
        look_up(PEER_PHASES, "inter", (nodes - 1) / world * by_node)
    elif kind == "global":
        look_up(DIRECT_PHASES, "intra", (per_node - 1) / world * by_rank)
        look_up(DIRECT_PHASES, "inter", (world - per_node) / world * by_rank)
    elif kind == "node":
        look_up(NODE_PHASES if routing.merges_nodes else DIRECT_PHASES, "intra", inside * by_rank)
    else:
        sent[_REDUCE[0]] = inside * _named(by_rank, vector)
        sent[_SPREAD[0]] = inside * _named(by_any, vector)
    if kind != "global" and nodes > 1:
        everything = _named(by_node, vector)
        a_share = (everything + _named(by_any, vector)) / nodes
        sent[_EXCHANGE[1]] = (nodes - 1) / per_node * np.minimum(everything, a_share)
    return sent


def _named(touched_C: np.ndarray, vector_bytes: int) -> np.ndarray:
    """Bytes of the touched rows' vectors and of their ids or bitmap."""
    named: np.ndarray = touched_C * vector_bytes + np.minimum(touched_C * ID_BYTES, BITMAP_BYTES)
    return named


def held_bytes(dim: int) -> int:
    """Bytes of one copy of a row: weights and optimiser state."""
    return dim * WEIGHT_BYTES + STATE_BYTES_PER_ROW


def row_memory(kind: str, dim: int, topology: Topology) -> float:
    """Bytes per rank for one row: its share of weights, optimiser state and lookup index."""
    held = held_bytes(dim)
    if kind == "global":
        return held / topology.world_size
    return held / (topology.ranks_per_node if kind == "node" else 1) + REMAP_BYTES_PER_MOVED_ROW


def remap_bytes(num_rows: int) -> float:
    """Bytes per rank of the index that finds a row's tier, in a table that has more than its global tier."""
    return num_rows * REMAP_BITS_PER_ROW / 8


def whole_table_bytes(table: TableReads, topology: Topology) -> np.ndarray:
    """[P] bytes of a table kept whole at the rank that holds it.

    TorchRec sends every id, repeats included, and returns one vector per list if the table is pooled, else one per id.
    """
    others = ((topology.ranks_per_node - 1), (topology.world_size - topology.ranks_per_node))
    ids = table.ids_per_rank if table.bag_ids_per_rank is None else table.bag_ids_per_rank
    vector_bytes = (table.bags_per_rank if table.is_pooled else ids) * table.dim * WEIGHT_BYTES
    per_peer = {
        "whole_ids": ids * TORCHREC_ID_BYTES + table.bags_per_rank * LENGTH_BYTES,
        "whole_vectors": vector_bytes,
        "whole_gradients": vector_bytes,
    }
    owner = np.zeros(NUM_LANES)
    for phase, sent in per_peer.items():
        for level, count in zip(LEVELS, others, strict=True):
            owner[lane(phase, level)] = sent * count
    return owner


def torchrec_bytes(
    table: Table,
    schema: Schema,
    topology: Topology,
    batch_size: int,
    lengths: Mapping[str, float],
    deduplicated: Mapping[str, FeatureDedup],
) -> float:
    """Bytes per step over all ranks as TorchRec sends them: ids once, vectors forward and their gradients back."""
    lists = [(lengths.get(name, 1.0), deduplicated.get(name)) for name in table.features]
    ids = sum(length / (found.id_factor if found else 1.0) for length, found in lists) * batch_size
    bags = sum(1.0 / (found.factor if found else 1.0) for _, found in lists) * batch_size
    vectors = ids if table.name in schema.sequence_tables else bags
    away = (topology.world_size - 1) / topology.world_size
    return away * (ids * TORCHREC_ID_BYTES + 2 * vectors * table.dim * WEIGHT_BYTES)


def ring_peers(phase: Phase, topology: Topology) -> tuple[int, int]:
    """How many peers a rank has in a phase, inside its node and beyond."""
    inside, beyond = topology.ranks_per_node - 1, topology.world_size - topology.ranks_per_node
    return {"world": (inside, beyond), "node": (inside, 0), "peers": (0, topology.nodes - 1)}[phase.ring]


def phase_latency(phase: Phase, topology: Topology) -> float:
    """Seconds that a phase takes without any bytes; 0 without peers."""
    inside, beyond = ring_peers(phase, topology)
    if not inside and not beyond:
        return 0.0
    return phase.num_messages * topology.link(COLLECTIVE, "inter" if beyond else "intra").latency_s


def count_bytes(phase: Phase, topology: Topology) -> np.ndarray:
    """[P] bytes that a rank sends in a phase to announce lengths."""
    sent = np.zeros(NUM_LANES)
    for level, peers in zip(LEVELS, ring_peers(phase, topology), strict=True):
        sent[lane(phase.name, level)] = phase.num_counts * COUNT_BYTES * peers
    return sent


def lane_seconds_per_byte(topology: Topology) -> np.ndarray:
    """[P] seconds that a byte takes on every lane."""
    return np.array([1 / topology.link(COLLECTIVE, level).bytes_per_s for _ in PHASES for level in LEVELS])


def phase_seconds(lane_bytes: np.ndarray, seconds_per_byte: np.ndarray) -> dict[str, float]:
    """Seconds of every phase with these bytes at its largest rank, without latency; both levels work at once."""
    seconds = (lane_bytes * seconds_per_byte).reshape(len(PHASES), len(LEVELS)).max(axis=1)
    return dict(zip(PHASE_NAMES, seconds.tolist(), strict=True))
