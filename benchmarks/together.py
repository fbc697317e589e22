"""All five optimisations in one model against none of them, on two ranks with a slow network between them.

all_E_M              samples/s of all switches over the baseline; E is the sequence encoder, M the link in Mbit/s
time_to_auc_E_M      seconds to the lowest final AUC of the baseline's runs less 0.002, with the time to cluster,
                     profile, plan, tune and lay out the data before
time_to_auc10_E_M    the same with a tenth of the preparation: ten trainings share it
auc_difference_E     AUC of all switches less the baseline's, same seeds
best_single          the best single switch over the baseline (transformer, 100 Mbit/s)
prediction_error     bytes per step that the plan of +tiers predicts, dense gradients included, against the bytes on the
                     network during training (the same runs)
recd_five            samples/s of all switches over the baseline on the synthetic preset `recd`, 100 Mbit/s

All switches act: tables share parameters in a quarter of their bytes, and storage gives each reader READER_ROWS_PER_S,
which one reader per rank, as both sides start with, exceeds only on slow networks. Every variant trains from the files
on disk to the last optimiser step in real processes, each rank in its own network namespace; variants take turns,
forwards and backwards. Without namespaces, everything that depends on the network is skipped.

    python benchmarks/together.py [--quick] [--json PATH|-]
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness import Metric, Options, compare, parse_options, plain_value, say, warn_if_busy, without_network
from parts import Found, Parts
from shaped_network import run_on_nodes

from recmill.planning.planner import Topology
from recmill.progress import no_progress
from recmill.report.ablation import TOLERANCE, time_to_auc
from recmill.training.ablation import Ablation, SharedInputs
from recmill.training.config import TrainConfig
from recmill.training.trainer import lay_out_hot, make_job

NUM_RANKS = 2
TUNE_SECONDS = 3.0
READER_ROWS_PER_S = 4000.0  # one stream of a store that is far away; more readers get more
COMPRESS = "4"  # all tables in a quarter of their bytes
TRAININGS = 10  # that share a preparation
ENCODERS = ("attention", "transformer")
SPEEDS = (100, 1_000, 10_000)  # Mbit/s
TINY_CELLS = (("attention", 100), ("transformer", 10_000))
RANK_SCRIPT = Path(__file__).with_name("together_rank.py")
Turns = dict[str, list[dict[str, Any]]]  # variant -> figures of its trainings


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Data, model and network of one comparison."""

    preset: str
    data_settings: dict[str, str]
    config: TrainConfig
    inter_mbit: float
    repeats: int
    variants: tuple[str, ...] = ("baseline", "all")  # () for these and every single switch
    eval_sessions: str = "random"
    raw: Path | None = None  # the log, if another comparison has made it


def base_config(options: Options) -> TrainConfig:
    """No trial and whole sessions: what is measured is each switch, in a part of a long run."""
    return TrainConfig(
        batch_size=2048,
        eval_batch_size=8192,
        bottom_layers=(64,),
        top_layers=(128, 64),
        threads=1,
        seed=options.seed,
        trial=False,
        session_limit=0,
        max_steps={"tiny": 4, "quick": 0, "full": 0}[options.size],
    )


def globo(options: Options, encoder: str, mbit: float) -> Workload:
    """A sample of users, each with all clicks, random sessions held out.

    The last sessions are about articles younger than the training data: AUC is 0.51 to 0.58 there, and a better fit of
    the training data is worse (docs/log.md). `table_lr` and the small initial rows are those of fae_order.py.
    """
    config = replace(
        base_config(options),
        sequence_encoder=encoder,
        max_sequence_length=50,
        lr_schedule="linear",
        table_lr=0.1,
        table_init_scale=0.001,
        eval_every={"tiny": 2, "quick": 10, "full": 10}[options.size],
    )
    return Workload(
        preset="globo",
        data_settings={"one_in": {"tiny": "2000", "quick": "25", "full": "16"}[options.size]},
        config=config,
        inter_mbit=mbit,
        repeats={"tiny": 1, "quick": 2, "full": 9}[options.size],
    )


def recd(options: Options) -> Workload:
    return Workload(
        preset="recd",
        data_settings={"sessions": {"tiny": "40", "quick": "600", "full": "6000"}[options.size]},
        config=replace(base_config(options), batch_size=1024, max_sequence_length=64),
        inter_mbit=100.0,
        repeats={"tiny": 1, "quick": 1, "full": 9}[options.size],
        eval_sessions="last",
    )


def ablation_of(workload: Workload) -> Ablation:
    rate = workload.inter_mbit * 1e6 / 8
    return Ablation(
        preset=workload.preset,
        data=None,
        data_settings=workload.data_settings,
        config=workload.config,
        nproc=NUM_RANKS,
        topology=Topology(nodes=NUM_RANKS, ranks_per_node=1, inter_node_bytes_per_s=rate),
        memory_budget_bytes=1 << 30,
        hot_budget_bytes=4 << 20,
        compress=COMPRESS,
        leave_one_out=False,
        tune_seconds=TUNE_SECONDS,
        eval_sessions=workload.eval_sessions,
    )


def prepare(workload: Workload, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(a job per variant, the seconds that each took to prepare from the raw log on)."""
    ablation = ablation_of(workload)
    jobs, seconds = [], {}
    for variant in ablation.variants():
        if workload.variants and variant.name not in workload.variants:
            continue
        # A folder each: what two variants could share counts for both.
        inputs = SharedInputs(folder=(folder / variant.name).absolute(), ablation=ablation, progress=no_progress)
        inputs.folder.mkdir(parents=True, exist_ok=True)
        if workload.raw is not None:
            (inputs.folder / "raw").symlink_to(workload.raw)
        workload = replace(workload, raw=inputs.raw().absolute())
        began = time.perf_counter()
        run, config = inputs.folder / "run", inputs.config(variant)
        run.mkdir()
        parts = {"plan": inputs.plan(variant).path, "allocation": inputs.allocation(variant)}
        job = make_job(inputs.dataset(variant).path, out=run, nproc=ablation.nproc, config=config, **parts)
        described = {**lay_out_hot(job, run, config, no_progress), "name": variant.name}
        jobs.append({**described, "reader_rows_per_s": READER_ROWS_PER_S})
        seconds[variant.name] = time.perf_counter() - began
    return jobs, seconds


def measure(folder: Path, workload: Workload) -> tuple[Turns, dict[str, float], str]:
    """(measurements of every turn by variant, preparation seconds, why there are no network namespaces or "")."""
    say(f"{workload.preset}: prepare")
    jobs, seconds = prepare(workload, folder)
    path = folder / "jobs.json"
    path.write_text(json.dumps({"repeats": workload.repeats, "jobs": jobs}), encoding="utf-8")
    say(f"{workload.preset}: {len(jobs)} variants, {workload.repeats} turns, {workload.inter_mbit:g} Mbit/s")
    done = run_on_nodes(
        RANK_SCRIPT,
        [str(path)],
        nodes=NUM_RANKS,
        ranks_per_node=1,
        inter_mbit=workload.inter_mbit,
        env={"OMP_WAIT_POLICY": "PASSIVE", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"},
        silence_s=3600,  # one training
    )
    return done["results"][0], seconds, done["note"] or "no reason" if done["network"] != "namespaces" else ""


def found_of(
    metrics: dict[str, Metric], skipped: dict[str, str], name: str, turns: Turns, missing: str, **more: Any
) -> Found:
    """All but AUC differences depend on the network."""
    if missing:
        shaped = [metric for metric in metrics if not metric.startswith("auc_difference")]
        metrics, unshaped = without_network(metrics, shaped, kind="loopback", note=missing)
        skipped = skipped | unshaped
    return Found(metrics=metrics, skipped=skipped, extra={"variants": {name: {**turns, **more}}})


def against(baseline: list[dict[str, Any]], turns: list[dict[str, Any]], *, note: str) -> Metric:
    return compare(speeds(baseline), speeds(turns), unit="samples/s", note=note)


def speeds(turns: list[dict[str, Any]]) -> list[float]:
    return [turn["samples_per_s"] for turn in turns]


def measure_cell(options: Options, folder: Path, encoder: str, mbit: int, raw: Path) -> Found:
    """All switches against none: speed, AUC, and time to AUC with preparation."""
    workload = replace(globo(options, encoder, mbit), raw=raw if raw.exists() else None)
    turns, prepared, missing = measure(folder, workload)
    if not raw.exists():
        raw.symlink_to((folder / "baseline" / "raw").resolve())
    cell, baseline, everything = f"{encoder}_{mbit}", turns["baseline"], turns["all"]
    stalls = ", ".join(f"{name} waits for data {_percent(own)}" for name, own in turns.items())
    metrics = {f"all_{cell}": against(baseline, everything, note=f"{describe_switches(everything)}; {stalls}")}
    if mbit == SPEEDS[0] or options.tiny:
        differences = [ours["auc"] - theirs["auc"] for ours, theirs in zip(everything, baseline, strict=True)]
        medians = [statistics.median(turn["auc"] for turn in own) for own in (baseline, everything)]
        note = f"baseline {medians[0]:.4f}, all {medians[1]:.4f}"
        metrics[f"auc_difference_{encoder}"] = plain_value(differences, unit="AUC", note=note)
    target = min(turn["auc"] for turn in baseline) - TOLERANCE  # reached by every run of the baseline
    reached = {name: [time_to_auc(turn, target) for turn in turns[name]] for name in ("baseline", "all")}
    names = {f"time_to_auc_{cell}": 1, f"time_to_auc{TRAININGS}_{cell}": TRAININGS}
    if any(seconds is None for own in reached.values() for seconds in own):
        why = f"a run never reached {target:.4f}, the lowest AUC of the baseline's runs less {TOLERANCE:g}"
        return found_of(metrics, dict.fromkeys(names, why), cell, turns, missing, preparation_s=prepared)
    for name, share in names.items():
        sides = [[prepared[side] / share + seconds for seconds in own] for side, own in reached.items()]
        note = f"to {target:.4f}; preparation {prepared['baseline']:.1f} and {prepared['all']:.1f} s, shared by {share}"
        metrics[name] = compare(*sides, unit="s", less_is_better=True, note=note)
    return found_of(metrics, {}, cell, turns, missing, preparation_s=prepared)


def _percent(turns: list[dict[str, Any]]) -> str:
    shares = [turn["stall_share"] for turn in turns if turn["stall_share"] is not None]
    return f"{statistics.median(shares):.0%}" if shares else "?"


def describe_switches(turns: list[dict[str, Any]]) -> str:
    return "on: " + (", ".join(turns[0]["switches_on"]) or "none")


def measure_singles(options: Options, folder: Path) -> Found:
    workload = replace(globo(options, "transformer", SPEEDS[0]), variants=())
    workload = replace(workload, config=replace(workload.config, eval_every=0))  # only speeds are compared
    turns, _, missing = measure(folder, workload)
    singles = {name: own for name, own in turns.items() if name.startswith("+")}
    best = max(singles, key=lambda name: statistics.median(speeds(singles[name])))
    metrics = {
        "best_single": against(turns["baseline"], singles[best], note=best),
        "prediction_error": prediction_error(turns["+tiers"]),
    }
    return found_of(metrics, {}, "singles", turns, missing)


def measure_recd(options: Options, folder: Path) -> Found:
    turns, _, missing = measure(folder, recd(options))
    metrics = {"recd_five": against(turns["baseline"], turns["all"], note=describe_switches(turns["all"]))}
    return found_of(metrics, {}, "recd", turns, missing)


def prediction_error(turns: list[dict[str, Any]]) -> Metric:
    """Relative error of the plan's bytes per step against those on the wire."""
    predicted, measured = ([turn[f"{which}_bytes_per_step"] for turn in turns] for which in ("predicted", "measured"))
    errors = [abs(said - found) / found for said, found in zip(predicted, measured, strict=True)]
    note = f"predicted {predicted[0]:,.0f} B per step over all ranks with dense gradients; measured {measured[0]:,.0f}"
    return plain_value(errors, unit="share", note=note)


def metrics_of(cells: Sequence[tuple[str, int]]) -> list[str]:
    """All metrics that need globo."""
    prefixes = ("all", "time_to_auc", f"time_to_auc{TRAININGS}")
    names = [f"{prefix}_{encoder}_{mbit}" for encoder, mbit in cells for prefix in prefixes]
    return [*names, *(f"auc_difference_{encoder}" for encoder in ENCODERS), "best_single", "prediction_error"]


def main() -> None:
    options = parse_options(__doc__ or "", quick="one user of globo in 25, 600 sessions of recd, two turns")
    warn_if_busy()
    parts = Parts(options)
    cells = TINY_CELLS if options.tiny else tuple((encoder, mbit) for mbit in SPEEDS for encoder in ENCODERS)
    has_globo = Path(os.environ.get("RECMILL_DATA_DIR", ""), "globo", "clicks.parquet").is_file()
    with tempfile.TemporaryDirectory(prefix="recmill-together-") as scratch:
        folder = Path(scratch)
        if has_globo:
            for encoder, mbit in cells:
                name = f"{encoder}-{mbit}"
                run = partial(measure_cell, options, folder / name, encoder, mbit, folder / "raw")
                parts.measure(name, run)
            parts.measure("singles", lambda: measure_singles(options, folder / "singles"))
        else:
            why = "globo/clicks.parquet is not in RECMILL_DATA_DIR"
            parts.skipped |= dict.fromkeys(metrics_of(cells), why)
        parts.measure("recd", lambda: measure_recd(options, folder / "recd"))
    parts.finish()


if __name__ == "__main__":
    main()
