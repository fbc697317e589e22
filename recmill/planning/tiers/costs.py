"""What a row costs under every placement: bytes a rank sends in a step, by phase and level of the network.

Ids are made distinct before they travel, so a row costs a rank at most one id, one vector and one gradient a step.
With n expected reads of a row by a rank, reads being independent, the row is touched

    by a rank   p1 = 1 - exp(-n)        by a node   p2 = 1 - exp(-n R)       by any rank   p3 = 1 - exp(-n W)

    phase       sends                                 global          node             replicated
    ids         the distinct ids to their owners      p1 (W-1)/W      p1 (R-1)/R
    vectors     the rows back                         p1 (W-1)/W      p1 (R-1)/R
    gradients   their gradients to the owners         p1 (W-1)/W      p1 (R-1)/R
    reduce      gradients to one rank of the node                                      p1 (R-1)/R
    exchange    sums of a node to the other nodes                     x (N-1)/R        x (N-1)/R
    spread      the sums to all ranks of the node                                      p3 (R-1)/R

where x is p2 if every node sends its sums to all others, or (p2 + p3) / N if each node adds up a share of the rows;
the ranks take what is less. In the last three phases a row is named by 4 bytes or, in a bitmap, by a bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recmill.artifacts.topology import LEVELS, Topology

# C = classes of rows, P = lanes (a phase on a level)
KINDS = ("replicated", "node", "global")
WEIGHT_BYTES = 4
STATE_BYTES_PER_ROW = 4  # row-wise Adagrad keeps one float a row
ID_BYTES = 4  # of an id between our ranks: a row's place on its owner
TORCHREC_ID_BYTES = 8
LENGTH_BYTES = 4  # of one list, as TorchRec sends it
COUNT_BYTES = 8  # before lists of unknown length travel, their length does, to every other rank
BITMAP_BYTES = 1 / 8
REMAP_BITS_PER_ROW = 1.5  # a bit says whether a row is global, half a bit on average the ranks beside the bitmap
REMAP_BYTES_PER_MOVED_ROW = 8


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One exchange of a step: its ranks enter it together, and leave when the slowest has its bytes."""

    name: str
    ring: str  # who takes part: all ranks (world), the ranks of a node (node), or one of each node (peers)
    num_counts: int  # messages that only say how long the next ones are
    num_messages: int  # messages, counts included: each pays the latency
    is_all_to_all: bool = True  # looks rows up; False: keeps copies equal
    is_overlapped: bool = False  # runs beside the computation until the next lookup


TIER_PHASES = (
    Phase(name="ids", ring="world", num_counts=1, num_messages=2),
    Phase(name="vectors", ring="world", num_counts=0, num_messages=1),
    Phase(name="gradients", ring="world", num_counts=0, num_messages=1, is_overlapped=True),
    Phase(name="reduce", ring="node", num_counts=1, num_messages=2, is_all_to_all=False, is_overlapped=True),
    Phase(name="exchange", ring="peers", num_counts=2, num_messages=3, is_all_to_all=False, is_overlapped=True),
    Phase(name="spread", ring="node", num_counts=1, num_messages=2, is_all_to_all=False, is_overlapped=True),
)
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


_IDS, _VECTORS, _GRADIENTS, _REDUCE, _EXCHANGE, _SPREAD = (
    [lane(phase.name, level) for level in LEVELS] for phase in TIER_PHASES
)


def row_bytes(kind: str, reads_C: np.ndarray, dim: int, topology: Topology) -> np.ndarray:
    """[P, C] bytes that a rank sends (and receives) in a step for one row of each class."""
    nodes, per_node, world = topology.nodes, topology.ranks_per_node, topology.world_size
    vector = dim * WEIGHT_BYTES
    by_rank, by_node, by_any = (-np.expm1(-reads_C * ranks) for ranks in (1, per_node, world))
    sent = np.zeros((NUM_LANES, len(reads_C)))
    if kind == "global":
        shares = ((per_node - 1) / world, (world - per_node) / world)
    else:
        shares = ((per_node - 1) / per_node, 0.0)
    if kind != "replicated":
        for level, share in enumerate(shares):
            sent[_IDS[level]] = share * by_rank * ID_BYTES
            sent[_VECTORS[level]] = sent[_GRADIENTS[level]] = share * by_rank * vector
    if kind == "replicated":
        sent[_REDUCE[0]] = shares[0] * _named(by_rank, vector)
        sent[_SPREAD[0]] = shares[0] * _named(by_any, vector)
    if kind != "global" and nodes > 1:
        everything = _named(by_node, vector)
        a_share = (everything + _named(by_any, vector)) / nodes
        sent[_EXCHANGE[1]] = (nodes - 1) / per_node * np.minimum(everything, a_share)
    return sent


def _named(touched_C: np.ndarray, vector_bytes: int) -> np.ndarray:
    """Bytes of the touched rows' vectors and of what says which rows they are."""
    named: np.ndarray = touched_C * vector_bytes + np.minimum(touched_C * ID_BYTES, BITMAP_BYTES)
    return named


def row_memory(kind: str, dim: int, topology: Topology) -> float:
    """Bytes a rank keeps for one row: its share of weights and optimiser state, and where to find it."""
    held = dim * WEIGHT_BYTES + STATE_BYTES_PER_ROW
    if kind == "global":
        return held / topology.world_size
    return held / (topology.ranks_per_node if kind == "node" else 1) + REMAP_BYTES_PER_MOVED_ROW


def remap_bytes(num_rows: int) -> float:
    """What finding the tier of a row costs every rank, in a table that has more than its global tier."""
    return num_rows * REMAP_BITS_PER_ROW / 8


def whole_table_bytes(
    ids_per_rank: float, bags_per_rank: float, dim: int, is_pooled: bool, topology: Topology
) -> tuple[np.ndarray, np.ndarray]:
    """[P] bytes of a table kept whole: on average over the ranks, and at the rank that holds it.

    TorchRec sends every id, repeats too; what comes back is one vector a list if the table is pooled, else one an id.
    """
    others = ((topology.ranks_per_node - 1), (topology.world_size - topology.ranks_per_node))
    vectors = bags_per_rank if is_pooled else ids_per_rank
    per_peer = {
        "whole_ids": ids_per_rank * TORCHREC_ID_BYTES + bags_per_rank * LENGTH_BYTES,
        "whole_vectors": vectors * dim * WEIGHT_BYTES,
        "whole_gradients": vectors * dim * WEIGHT_BYTES,
    }
    owner = np.zeros(NUM_LANES)
    for phase, sent in per_peer.items():
        for level, count in zip(LEVELS, others, strict=True):
            owner[lane(phase, level)] = sent * count
    return owner / topology.world_size, owner


def ring_peers(phase: Phase, topology: Topology) -> tuple[int, int]:
    """How many others a rank talks to in a phase, inside its node and beyond."""
    inside, beyond = topology.ranks_per_node - 1, topology.world_size - topology.ranks_per_node
    return {"world": (inside, beyond), "node": (inside, 0), "peers": (0, topology.nodes - 1)}[phase.ring]


def phase_latency(phase: Phase, topology: Topology) -> float:
    """Seconds that a phase takes without any bytes; 0 for one that has nobody to talk to."""
    inside, beyond = ring_peers(phase, topology)
    if not inside and not beyond:
        return 0.0
    return phase.num_messages * topology.link(COLLECTIVE, "inter" if beyond else "intra").latency_s


def count_bytes(phase: Phase, topology: Topology) -> np.ndarray:
    """[P] bytes that a rank sends in a phase only to say how long lists are."""
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
