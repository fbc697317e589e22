"""Does alternating hot and cold batches cost accuracy on real clicks? AUC against random order, globo.

    python benchmarks/fae_order.py [--quick] [--json PATH|-] [--seed K]

auc_difference_globo      mean AUC after an epoch of scheduled hot and cold turns, less that of random order
auc_random_orders_globo   the same for a second random order: the effect of noise alone
auc_finest_turns_globo    the same for the shortest turns, with the most swaps: is it the length of turns that costs?

Both orders start from the same weights. Row groups have 256 rows in both, because an epoch permutes row groups: ten
times larger ones mix less and cost 0.02 of AUC in any order. The full form has nine seeds; in the quick form,
with three and a quarter of the users, noise is up to 0.003.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fae_data import Workload, make_globo
from fae_training import auc_after_epoch
from harness import Options, fresh_processes, parse_options, plain_value, say, warn_if_busy
from parts import Found, Parts
from session_logs import why_no_globo

from recmill.artifacts.topology import Topology

SEEDS = {"tiny": 2, "quick": 3, "full": 9}
ROWS_PER_GROUP = 256
# The best of a few for random order; rows that no sample reads stay near 0 and do not disturb held-out samples.
SETTINGS = {"table_lr": 0.1, "table_init_scale": 0.001}

Aucs = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a run."""

    one_in: int  # users
    budget_bytes: int  # makes more than half of the samples hot: with all of them hot both orders would be the same
    batch_size: int


SIZES = {
    "tiny": Sizes(one_in=2_000, budget_bytes=40_000, batch_size=128),
    "quick": Sizes(one_in=32, budget_bytes=700_000, batch_size=512),
    "full": Sizes(one_in=8, budget_bytes=2_000_000, batch_size=2048),
}


def measure_aucs(
    pool: ProcessPoolExecutor,
    workload: Workload,
    settings: Mapping[str, Any],
    *,
    seeds: int,
    parts: Parts,
    has_control: bool = True,
) -> Aucs:
    """AUC after an epoch in hot and cold turns, as scheduled and the finest, in random order and in another one as a
    control; one core per run.
    """
    sides = ("ours", "random", *(["other", "finest"] if has_control else []))
    runs = {f"AUC {workload.name}, {side}, seed {seed}": (side, seed) for seed in range(seeds) for side in sides}
    started = {
        name: pool.submit(
            auc_after_epoch,
            str(workload.data.path),
            str(workload.plan.path),
            str(workload.laid_out.path) if side in ("ours", "finest") else None,
            {**settings, "seed": seed},
            order=seeds if side == "other" else 0,
            is_finest=side == "finest",
        )
        for name, (side, seed) in runs.items()
        if name not in parts
    }
    found: Aucs = {side: [] for side in sides}
    for name, (side, _) in runs.items():
        if name in started:
            parts.keep(name, started[name].result())
        found[side].append(parts[name])
    for name, side in (("difference", "ours"), ("control", "other"), ("finest_difference", "finest")):
        if side in found:
            found[name] = [auc - random for auc, random in zip(found[side], found["random"], strict=True)]
    return found


def describe_aucs(found: Mapping[str, Aucs]) -> str:
    return ", ".join(
        f"{name}: {_mean(own['ours']):.4f} against {_mean(own['random']):.4f}, differences "
        f"{min(own['difference']):+.4f} to {max(own['difference']):+.4f}"
        for name, own in found.items()
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def measure_globo(pool: ProcessPoolExecutor, options: Options, folder: Path, parts: Parts) -> Found:
    sizes, seeds = SIZES[options.size], SEEDS[options.size]
    workload = make_globo(
        folder,
        sizes.one_in,
        budget_bytes=sizes.budget_bytes,
        topology=Topology.local(2),
        batch_size=sizes.batch_size,
        seed=options.seed,
        rows_per_group=ROWS_PER_GROUP,
    )
    share = workload.laid_out.hot.sample_share
    say(f"train {4 * seeds} epochs; {share:.0%} of the samples are hot")
    aucs = measure_aucs(pool, workload, {**SETTINGS, "batch_size": sizes.batch_size}, seeds=seeds, parts=parts)
    found = {"globo": aucs}
    note = f"{seeds} seeds, {share:.0%} of the samples hot; {describe_aucs(found)}"
    control = f"a second random order less the first, {min(aucs['control']):+.4f} to {max(aucs['control']):+.4f}"
    metrics = {
        "auc_difference_globo": plain_value(aucs["difference"], unit="AUC", note=note),
        "auc_random_orders_globo": plain_value(aucs["control"], unit="AUC", note=control),
        "auc_finest_turns_globo": plain_value(aucs["finest_difference"], unit="AUC", note="turns of one cold batch"),
    }
    return Found(metrics=metrics, extra={"series": {"auc": found}})


def main() -> None:
    options = parse_options(__doc__ or "", quick="one user in 32 instead of 8; under 60 s")
    warn_if_busy()
    parts = Parts(options)
    if (reason := why_no_globo()) is not None:
        names = ("auc_difference_globo", "auc_random_orders_globo", "auc_finest_turns_globo")
        parts.skipped |= dict.fromkeys(names, reason)
    else:
        with (
            tempfile.TemporaryDirectory(prefix="recmill-order-") as scratch,
            fresh_processes(os.cpu_count() or 1) as processes,
        ):
            parts.measure("globo", lambda: measure_globo(next(processes), options, Path(scratch), parts))
    parts.finish()


if __name__ == "__main__":
    main()
