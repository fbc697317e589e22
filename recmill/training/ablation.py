"""What every switch buys: the same data trained with none, one, all but one and all of the optimisations.

    OUT/raw  OUT/data/<layout>  OUT/profiles/<layout>  OUT/plans/<switches>  OUT/allocations/<layout>     shared
    OUT/<variant>/               a run folder as the report reads it; train/ is the first repeat, repeats/2 the next
    OUT/ablation.json            the variants, their switches, the figures of all repeats and their medians

Variants run in turns, in both orders, so that a machine that slows down slows them all.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recmill.artifacts import (
    FORMAT_VERSION,
    AccessProfile,
    Dataset,
    InputError,
    ShardPlan,
    dump_json,
    explain_write_errors,
    is_remote,
    read_json,
    refuse_foreign_folder,
    write_text_atomically,
)
from recmill.data.cluster.sessions import cluster_sessions
from recmill.data.sources import make_raw_log
from recmill.planning.explain import predicted_bytes
from recmill.planning.planner import Topology, plan_shards
from recmill.profiling.access import profile_access
from recmill.progress import Progress, no_progress
from recmill.training.config import TrainConfig
from recmill.training.switches import ABLATION_FILE, SWITCHES
from recmill.training.trainer import Launcher, lay_out_hot, make_job, train
from recmill.tuning.allocation import DEFAULT_SECONDS, tune_ingest

__all__ = ["Ablation", "Variant", "figures_of", "predicted_of", "prepare_jobs", "run_ablation", "variants_of"]

FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A name for the page and the switches that are on."""

    name: str
    switches: frozenset[str]


def variants_of(switches: Sequence[str] = tuple(SWITCHES), *, leave_one_out: bool = True) -> list[Variant]:
    """Baseline, each switch alone, all but each, all."""
    unknown = sorted(set(switches) - set(SWITCHES))
    if unknown:
        raise InputError(f"unknown switch {unknown[0]!r}; known are {', '.join(SWITCHES)}")
    everything = frozenset(switches)
    found = [Variant(name="baseline", switches=frozenset())]
    found += [Variant(name=f"+{switch}", switches=frozenset({switch})) for switch in switches]
    if leave_one_out and len(switches) > 2:
        found += [Variant(name=f"all-{switch}", switches=everything - {switch}) for switch in switches]
    if len(switches) > 1:
        found.append(Variant(name="all", switches=everything))
    return found


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What is compared, on what data and machine."""

    preset: str
    data: str | None = None
    data_settings: Mapping[str, str] | None = None
    config: TrainConfig = field(default_factory=TrainConfig)
    nproc: int = 1
    topology: Topology | None = None
    memory_budget_bytes: int = 2**30
    hot_budget_bytes: int = 2**24
    compress: str = "auto"
    eval_fraction: float = 0.1
    eval_sessions: str = "last"  # or "random": `cluster_sessions`
    tune_seconds: float = DEFAULT_SECONDS
    repeats: int = 1
    switches: tuple[str, ...] = tuple(SWITCHES)
    leave_one_out: bool = True

    def to_json(self) -> dict[str, Any]:
        return {
            "preset": self.preset,
            "data": self.data,
            "data_settings": dict(self.data_settings or {}),
            "config": self.config.to_json(),
            "nproc": self.nproc,
            "memory_budget_bytes": self.memory_budget_bytes,
            "hot_budget_bytes": self.hot_budget_bytes,
            "compress": self.compress,
            "eval_fraction": self.eval_fraction,
            "eval_sessions": self.eval_sessions,
            "tune_seconds": self.tune_seconds,
            "repeats": self.repeats,
            "switches": list(self.switches),
        }


def run_ablation(
    ablation: Ablation, *, out: str | Path, launcher: Launcher | None = None, progress: Progress = no_progress
) -> dict[str, Any]:
    """Train every variant and give the content of OUT/ablation.json. The same call again takes up where it stopped."""
    if is_remote(out):
        raise InputError(f"--out {out}: the comparison trains here and wants a local folder")
    folder = Path(out).absolute()
    refuse_foreign_folder(folder, ABLATION_FILE)
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    _refuse_other_settings(folder, ablation)
    write_text_atomically(folder / ABLATION_FILE, dump_json(_manifest(ablation, [])))
    shared = _Shared(folder=folder, ablation=ablation, progress=progress)
    variants = variants_of(ablation.switches, leave_one_out=ablation.leave_one_out)
    figures: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in variants}
    done = 0
    for repeat in range(ablation.repeats):
        for variant in variants if repeat % 2 == 0 else variants[::-1]:
            progress("variants trained", done, len(variants) * ablation.repeats)
            figures[variant.name].append(shared.train(variant, repeat, launcher))
            done += 1
    progress("variants trained", done, len(variants) * ablation.repeats)
    result = _manifest(ablation, [_summary(variant, figures[variant.name]) for variant in variants])
    write_text_atomically(folder / ABLATION_FILE, dump_json(result))
    return result


def _manifest(ablation: Ablation, variants: list[dict[str, Any]]) -> dict[str, Any]:
    settings = ablation.to_json()
    return {"format_version": FORMAT_VERSION, "kind": "ablation", "settings": settings, "variants": variants}


def _refuse_other_settings(folder: Path, ablation: Ablation) -> None:
    if (folder / ABLATION_FILE).exists():
        before, now = read_json(folder / ABLATION_FILE)["settings"], ablation.to_json()
        differing = [key for key in now if before.get(key) != now[key] and key not in ("repeats", "switches")]
        if differing:
            raise InputError(
                f"{folder}: holds a comparison with other settings ({', '.join(differing)}); give another --out"
            )


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """What the variants share, made when the first of them needs it."""

    folder: Path
    ablation: Ablation
    progress: Progress

    def _raw(self) -> Path:
        target = self.folder / "raw"
        if (target / "schema.json").exists():
            return target
        made = make_raw_log(
            self.ablation.preset,
            out=target,
            data=self.ablation.data,
            overrides=self.ablation.data_settings or {},
            progress=self.progress,
        )
        return Path(made)

    def dataset(self, layout: str) -> Dataset:
        target = self.folder / "data" / layout
        if (target / Dataset.manifest_name).exists():
            return Dataset.load(target)
        return cluster_sessions(
            self._raw(),
            out=target,
            layout=layout,
            eval_fraction=self.ablation.eval_fraction,
            eval_sessions=self.ablation.eval_sessions,
            progress=self.progress,
        )

    def profile(self, switches: frozenset[str]) -> AccessProfile:
        """How often rows are read in the order in which the variant reads them: sessions together, or by time."""
        layout = "session" if "dedup" in switches else "time"
        target = self.folder / "profiles" / layout
        if (target / AccessProfile.manifest_name).exists():
            return AccessProfile.load(target)
        return profile_access(self.dataset(layout), out=target, progress=self.progress)

    def plan(self, switches: frozenset[str]) -> ShardPlan:
        chosen = sorted(switches & {"dedup", "tiers", "hot", "shared"})
        target = self.folder / "plans" / ("-".join(chosen) or "torchrec")
        if (target / ShardPlan.manifest_name).exists():
            return ShardPlan.load(target)
        return plan_shards(
            self.profile(switches),
            out=target,
            topology=self.ablation.topology or Topology.local(self.ablation.nproc),
            memory_budget_bytes=self.ablation.memory_budget_bytes,
            hot_budget_bytes=self.ablation.hot_budget_bytes if "hot" in switches else None,
            compress=self.ablation.compress if "shared" in switches else None,
            strategy="tiers" if "tiers" in switches else "torchrec",
            batch_size=self.ablation.config.batch_size,
            progress=self.progress,
        )

    def allocation(self, dataset: Dataset, layout: str) -> Path:
        target = self.folder / "allocations" / layout
        if not (target / "allocation.json").exists():
            batch_size, seconds = self.ablation.config.batch_size, self.ablation.tune_seconds
            tune_ingest(dataset, out=target, batch_size=batch_size, seconds=seconds, progress=self.progress)
        return target

    def inputs(self, variant: Variant) -> _Inputs:
        """What a variant trains with, made now if no other variant has needed it."""
        layout = "deduplicated" if "dedup" in variant.switches else "time"
        dataset = self.dataset(layout)
        return _Inputs(
            dataset=dataset,
            plan=self.plan(variant.switches),
            allocation=self.allocation(dataset, layout) if "tuned" in variant.switches else None,
            config=_config_of(self.ablation.config, variant),
        )

    def train(self, variant: Variant, repeat: int, launcher: Launcher | None) -> dict[str, Any]:
        """Train one repeat of a variant and give its figures."""
        made, run = self.inputs(variant), self.folder / variant.name
        plan, allocation = made.plan.path, made.allocation
        profile = self.profile(variant.switches).path
        _link_parts(run, dataset=made.dataset.path, profile=profile, plan=plan, allocation=allocation)
        started = time.time()
        result = train(
            made.dataset.path,
            out=run / "train" if repeat == 0 else run / "repeats" / str(repeat + 1),
            plan=plan,
            allocation=allocation,
            nproc=self.ablation.nproc,
            config=made.config,
            launcher=launcher,
            progress=self.progress,
        )
        record = {"name": variant.name, "preset": self.ablation.preset, "started_at": started}
        body = {"format_version": FORMAT_VERSION, "kind": "run", **record, "seconds": result["seconds"]}
        write_text_atomically(run / "run.json", dump_json(body))
        return figures_of(result, made.dataset) | predicted_of(made.plan, result)


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    dataset: Dataset
    plan: ShardPlan
    allocation: Path | None
    config: TrainConfig


def prepare_jobs(
    ablation: Ablation,
    *,
    out: str | Path,
    names: Sequence[str] | None = None,
    progress: Progress = no_progress,
) -> list[tuple[Variant, dict[str, Any]]]:
    """The variants (those named, or all) as jobs that ranks of one process group can train in turn: worker.open_run."""
    folder = Path(out).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    shared = _Shared(folder=folder, ablation=ablation, progress=progress)
    jobs = []
    for variant in variants_of(ablation.switches, leave_one_out=ablation.leave_one_out):
        if names is not None and variant.name not in names:
            continue
        made, run = shared.inputs(variant), folder / variant.name
        run.mkdir(exist_ok=True)
        job = make_job(
            made.dataset.path,
            out=run,
            plan=made.plan.path,
            allocation=made.allocation,
            nproc=ablation.nproc,
            config=made.config,
        )
        jobs.append((variant, lay_out_hot(job, run, made.config, progress)))
    return jobs


def _config_of(config: TrainConfig, variant: Variant) -> TrainConfig:
    def state(switch: str) -> str:
        return "auto" if switch in variant.switches else "false"

    return replace(
        config,
        dedup=state("dedup"),
        tiers=state("tiers"),
        hot_batches=state("hot"),
        sharing=state("shared"),
        tune="online" if "tuned" in variant.switches else "fixed",
    )


def _link_parts(run: Path, **parts: str | Path | None) -> None:
    """Make the shared artifacts appear in the run folder, where the report looks for them."""
    run.mkdir(parents=True, exist_ok=True)
    for name, target in parts.items():
        link = run / name
        if target is not None and not link.exists():
            link.symlink_to(os.path.relpath(target, run))


def figures_of(result: Mapping[str, Any], dataset: Dataset) -> dict[str, Any]:
    """The figures that variants are compared by, of one training."""
    usage = result["usage"]
    num_samples = max(usage["num_samples"], 1)
    consumer = result["ingest"].get("consumer", {})
    stall = consumer.get("stall_seconds", 0.0) / consumer["seconds"] if consumer.get("seconds") else None
    return {
        "samples_per_s": result["samples_per_s"],
        "auc": result["metrics"]["auc"],
        "log_loss": result["metrics"]["log_loss"],
        "seconds": result["seconds"],
        "peak_memory_bytes": result["peak_memory_bytes"],
        "data_bytes": dataset.data_bytes,
        "wire_bytes_per_sample": usage["wire_bytes"] / num_samples,
        "cpu_seconds_per_million": usage["cpu_seconds"] / num_samples * 1e6,
        "stall_share": stall,
        "evaluations": [[entry["seconds"], entry["auc"]] for entry in result["evaluations"]],
    }


def predicted_of(plan: ShardPlan, result: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes a step that the plan predicts, those of the dense gradients added; None where hot batches change them."""
    is_other = bool(result["hot"]) or bool(plan.body.get("shared"))
    ranks = result["world_size"]
    # A ring all-reduce has every one of W ranks send 2 (W - 1) / W times the gradients.
    dense = 2 * (ranks - 1) * result["model"]["num_dense_parameters"] * FLOAT_BYTES
    usage = result["usage"]
    return {
        "predicted_bytes_per_step": None if is_other else predicted_bytes(plan.body) + dense,
        "measured_bytes_per_step": usage["wire_bytes"] / max(usage["num_steps"], 1),
    }


def _summary(variant: Variant, repeats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = [name for name in repeats[0] if name != "evaluations"]
    known = {name: [entry[name] for entry in repeats if entry[name] is not None] for name in names}
    return {
        "name": variant.name,
        "switches": sorted(variant.switches),
        "repeats": [dict(entry) for entry in repeats],
        "median": {name: statistics.median(values) if values else None for name, values in known.items()},
        "spread": {name: [min(values), max(values)] if values else None for name, values in known.items()},
    }
