"""Communication time per step on more ranks than this machine can run: the planner's bytes at the measured speed.

    seconds = messages * per message + bytes over the slowest node's link / its speed
              + bytes of a rank inside its node before and after that, if requests are merged / their speed

Speed and cost of a message are fitted to the runs on 2 x 4 ranks, all workloads and sides together.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flexshard_workloads import Workload, write_profile
from scipy.optimize import nnls

from recmill.planning.planner import Topology, plan_shards
from recmill.planning.tiers.costs import ID_BYTES, PHASES, TORCHREC_ID_BYTES

SHAPES = ((16, 8), (128, 8))
TORCHREC_MESSAGES = 5  # splits, lengths, ids, vectors, gradients


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Seconds per message and per byte on a node's and a rank's link, and how well they fit the measurements."""

    seconds_per_message: float
    seconds_per_byte: float
    hop_seconds_per_byte: float
    median_error: float


def calibrate(cases: Mapping[str, Mapping[str, Any]], *, nodes: int) -> Calibration:
    """Least squares without negative costs. Table-wise is excluded: its bytes are unevenly distributed."""
    rows, seconds = [], []
    for sides in cases.values():
        for name, side in sides.items():
            if name != "table_wise":
                inter = side.inter_node / nodes or side.total * (nodes - 1) / nodes / nodes
                rows.append([side.messages, inter, side.hop_bytes])
                seconds.append(statistics.median(side.comm_seconds))
    matrix, target = np.array(rows), np.array(seconds)
    scale = np.maximum(matrix.max(axis=0), 1e-12)
    scaled, _ = nnls(matrix / scale / target[:, None], np.ones(len(target)))
    found = scaled / scale
    errors = np.abs(matrix @ found / target - 1)
    return Calibration(
        seconds_per_message=float(found[0]),
        seconds_per_byte=float(found[1]),
        hop_seconds_per_byte=float(found[2]),
        median_error=float(np.median(errors)),
    )


def simulate(workloads: Sequence[Workload], calibration: Calibration, folder: Path) -> dict[str, Any]:
    """Seconds and bytes per step of TorchRec row-wise, row-wise + id dedup and tiers, per workload and shape."""
    shapes: dict[str, Any] = {}
    lines = [
        f"simulated, {calibration.seconds_per_message * 1e3:.2g} ms a message and "
        f"{1 / calibration.seconds_per_byte * 8e-6 if calibration.seconds_per_byte else 0:.0f} Mbit/s between nodes "
        f"(median error on the measured runs {calibration.median_error:.0%}):"
    ]
    for nodes, per_node in SHAPES:
        for workload in workloads:
            name = f"{nodes}x{per_node} {workload.name}"
            shapes[name] = _simulate_one(workload, nodes, per_node, calibration, folder / name.replace(" ", "-"))
            own = shapes[name]
            lines.append(
                f"{name:16} all-to-all {own['all_to_all_ratio']:6.2f}x less, total against dedup "
                f"{own['total_vs_dedup']:.3f}x, communication {own['row_wise_seconds']:8.3f} s -> "
                f"{own['tiers_seconds']:7.3f} s ({own['row_wise_seconds'] / own['tiers_seconds']:.1f}x; dedup "
                f"{own['row_wise_seconds'] / own['dedup_seconds']:.1f}x), against dedup "
                f"{own['dedup_seconds'] / own['tiers_seconds']:.2f}x"
            )
    return {"calibration": asdict(calibration), "shapes": shapes, "table": lines}


def _simulate_one(
    workload: Workload, nodes: int, per_node: int, calibration: Calibration, folder: Path
) -> dict[str, float]:
    world = nodes * per_node
    topology = Topology(
        nodes=nodes,
        ranks_per_node=per_node,
        inter_node_bytes_per_s=1 / max(calibration.seconds_per_byte, 1e-12) / per_node,
        intra_node_bytes_per_s=1 / max(calibration.hop_seconds_per_byte, 1e-10),
        intra_node_latency_s=calibration.seconds_per_message,
        inter_node_latency_s=calibration.seconds_per_message,
    )
    held = sum(-(-table.num_rows // world) * (workload.dim + 1) * 4 for table in workload.tables)
    folder.mkdir()
    plan = plan_shards(
        write_profile(workload, folder / "profile"),
        out=folder / "plan",
        topology=topology,
        # On that many ranks a share of these tables is tiny; the budget is that of 8 ranks.
        memory_budget_bytes=max(held, sum(table.num_rows for table in workload.tables) * (workload.dim + 1) // 2),
        batch_size=workload.samples_per_rank * world,
    )
    prediction = plan.prediction
    assert prediction is not None
    ids = sum(
        workload.counts[table.name].sum() / workload.num_profiled * workload.samples_per_rank
        for table in workload.tables
    )
    row_bytes = ids * (8 + 2 * 4 * workload.dim) * (world - 1)
    # The plan records dedup with TorchRec's ids of 8 bytes; here they are as wide as ours.
    narrower = (ID_BYTES + 2 * 4 * workload.dim) / (TORCHREC_ID_BYTES + 2 * 4 * workload.dim)
    inter = {
        "row_wise": row_bytes * (world - per_node) / (world - 1),
        "dedup": prediction.row_wise_dedup.inter_node * narrower,
        "tiers": prediction.bytes.inter_node,
    }
    messages = {
        "row_wise": TORCHREC_MESSAGES,
        "dedup": 4,
        "tiers": sum(phase.num_messages for phase in PHASES if phase.name in prediction.phases),
    }
    hop = sum(own.intra_node_bytes for own in prediction.phases.values()) if plan.merges_nodes else 0.0
    seconds = {
        f"{side}_seconds": messages[side] * calibration.seconds_per_message
        + inter[side] / nodes * calibration.seconds_per_byte
        + (hop * calibration.hop_seconds_per_byte if side == "tiers" else 0.0)
        for side in inter
    }
    return {
        **seconds,
        "all_to_all_ratio": row_bytes / prediction.bytes.all_to_all,
        "total_vs_dedup": prediction.row_wise_dedup.total * narrower / prediction.bytes.total,
        "inter_node_vs_dedup": inter["dedup"] / inter["tiers"],
    }
