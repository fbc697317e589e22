"""What the FlexShard benchmark found on the sides it compares, and the metrics made of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import Metric, compare, compare_counts, plain_count, say

NODES, RANKS_PER_NODE = 2, 4
WORLD = NODES * RANKS_PER_NODE
SIDES = ("row_wise", "table_wise", "dedup", "tiers", "dedup_bf16", "tiers_bf16")
A2A = ("ids", "vectors", "gradients")


@dataclass(frozen=True, kw_only=True)
class Side:
    """Measurements of one side over all ranks: bytes of one step, seconds of several."""

    all_to_all: float
    sync: float
    total: float
    inter_node: float
    largest_rank: float
    payload: float
    ids: float
    comm_seconds: list[float]
    step_seconds: list[float]
    messages: float
    merged: bool = False  # requests of a node are merged: bytes inside nodes are sent before and after those between

    @property
    def hop_bytes(self) -> float:
        """Bytes of a rank inside its node that no exchange between nodes hides."""
        return (self.total - self.inter_node) / WORLD if self.merged else 0.0

    @classmethod
    def of(cls, ranks: Sequence[Sequence[Mapping[str, Any]]], *, merged: bool) -> Side:
        """Combine all ranks' steps; the first step gives the bytes, the others the times."""
        first = [steps[0] for steps in ranks]
        payload = sum(step["sent"] for step in first)
        phases = [step.get("phases", {}) for step in first]
        lookups = sum(count for own in phases for name, count in own.items() if name.split("/")[0] in A2A)
        share = lookups / payload if any(phases) and payload else 1.0
        if "interface" in first[0]:
            sent = [step["interface"]["sent"] for step in first]
            nodes = [first[node * RANKS_PER_NODE]["interface"]["node_sent"] for node in range(NODES)]
        else:
            sent, nodes = [step["sent"] for step in first], [0]
        timed = [steps[1:] or steps for steps in ranks]
        return cls(
            all_to_all=share * sum(sent),
            sync=(1 - share) * sum(sent),
            total=float(sum(sent)),
            inter_node=float(sum(nodes)),
            largest_rank=float(max(sent)),
            payload=float(payload),
            ids=float(sum(count for own in phases for name, count in own.items() if name.startswith("ids"))),
            comm_seconds=[
                max(own) for own in zip(*([s["comm_seconds"] for s in steps] for steps in timed), strict=True)
            ],
            step_seconds=[max(steps[0]["step_seconds"] for steps in ranks)],
            messages=first[0]["messages"],
            merged=merged,
        )


def case_metrics(name: str, sides: Mapping[str, Side], bound: float) -> dict[str, Metric]:
    """The metrics of one workload against row-wise + id dedup, and against TorchRec row-wise as shipped."""
    base, dedup, ours = sides["row_wise"], sides["dedup"], sides["tiers"]
    metrics = {
        f"total_bytes_{name}": compare_counts(
            dedup.total,
            ours.total,
            unit="bytes/step",
            note=f"row-wise + id dedup, ids as wide as ours; {dedup.all_to_all / ours.all_to_all:.2f}x in the "
            f"all-to-all, {dedup.largest_rank / ours.largest_rank:.2f}x at the largest rank",
        ),
        f"comm_time_{name}_vs_dedup": _compare_seconds(
            dedup,
            ours,
            note=f"row-wise + id dedup, ids as wide as ours; bound {bound:.2f}x: distinct rows of all ranks over those "
            "of all nodes",
        ),
        f"comm_time_{name}_bf16_vs_dedup": _compare_seconds(
            sides["dedup_bf16"], sides["tiers_bf16"], note="row-wise + id dedup, both sides with bfloat16 on the wire"
        ),
        f"alltoall_bytes_{name}": compare_counts(
            base.all_to_all,
            ours.all_to_all,
            unit="bytes/step",
            note=f"TorchRec row-wise as shipped; {base.total / ours.total:.2f}x in total, "
            f"{_ratio(base.inter_node, ours.inter_node)} between nodes",
        ),
        f"comm_time_{name}": _compare_seconds(
            base,
            ours,
            note="TorchRec row-wise as shipped; "
            f"table-wise takes {statistics.median(sides['table_wise'].comm_seconds):.3g} s",
        ),
    }
    if ours.inter_node:
        metrics[f"inter_node_bytes_{name}"] = compare_counts(
            dedup.inter_node, ours.inter_node, unit="bytes/step", note="row-wise + id dedup, ids as wide as ours"
        )
    return metrics


def _compare_seconds(theirs: Side, ours: Side, *, note: str) -> Metric:
    return compare(theirs.comm_seconds, ours.comm_seconds, unit="s/step", less_is_better=True, note=note)


def _ratio(baseline: float, ours: float) -> str:
    return f"{baseline / ours:.2f}x" if ours else "not counted"


def prediction_error(predicted: Mapping[str, float], measured: Mapping[str, float]) -> Metric:
    """Relative error of the plans' bytes against the interfaces: the worst workload; the note has all."""
    errors = {name: abs(predicted[name] / total - 1) for name, total in measured.items()}
    note = "predicted total bytes of a step against measured; " + ", ".join(f"{n} {e:.1%}" for n, e in errors.items())
    return plain_count(max(errors.values()), unit="share", note=note)


def print_bytes(cases: Mapping[str, Mapping[str, Side]]) -> None:
    say("bytes of a step over all ranks, and seconds:")
    say(
        f"{'':20}{'all-to-all':>13}{'sync':>12}{'total':>13}{'inter-node':>13}{'largest':>12}{'comm s':>9}{'step s':>9}"
    )
    for name, sides in cases.items():
        for side, own in sides.items():
            numbers = (own.all_to_all, own.sync, own.total, own.inter_node, own.largest_rank)
            widths = (13, 12, 13, 13, 12)
            line = "".join(f"{value:{width},.0f}" for value, width in zip(numbers, widths, strict=True))
            times = statistics.median(own.comm_seconds), statistics.median(own.step_seconds)
            say(f"{name + ' ' + side:20}{line}{times[0]:9.3f}{times[1]:9.3f}")
