"""What each switch buys: the same data trained with none, one, all but one and all of the optimisations.

    OUT/raw  OUT/data/<layout>  OUT/profiles/<layout>  OUT/plans/<switches>  OUT/allocations/<layout>     shared
    OUT/<variant>/               a run folder as the report reads it; train/ is the first repeat, repeats/2 the second
    OUT/ablation.json            the variants, their switches, the figures of all repeats and their medians

Variants are trained in turns, in alternating order, so that a machine that slows down affects all of them. The first
turn gives each variant processes of its own. Further turns, each with another seed, share the processes of one launch:
starting them takes longer than a short training.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from recmill.artifacts import (
    FORMAT_VERSION,
    AccessProfile,
    Dataset,
    InputError,
    ShardPlan,
    dump_record,
    explain_write_errors,
    is_remote,
    read_checked_json,
    refuse_foreign_folder,
    write_text_atomically,
)
from recmill.data.cluster.sessions import cluster_sessions
from recmill.data.sources import make_raw_log
from recmill.planning.planner import Topology, plan_shards
from recmill.profiling.access import profile_access
from recmill.progress import Progress, no_progress
from recmill.training.config import TrainConfig
from recmill.training.preload import preloaded_ranks
from recmill.training.processes import REPEATS, threads_of
from recmill.training.switches import ABLATION_FILE, Switch, SwitchChoice, ablation_variants
from recmill.training.trainer import launch_torchrun, lay_out_hot, make_job, train
from recmill.tuning.allocation import DEFAULT_SECONDS, tune_ingest

__all__ = ["Ablation", "SharedInputs", "figures_of", "predicted_of", "run_ablation"]

FLOAT_BYTES = 4
TRAINED = "trained "  # progress of a comparison: followed by the variant and its figures
WITHIN = ("train step", "evaluate ")  # progress inside a training
REPEAT_SECONDS = 180.0  # of training, for the repeats that nobody asked for
MAX_REPEATS = 9
PLANNED = {Switch.DEDUP, Switch.TIERS, Switch.HOT_BATCHES, Switch.SHARING}  # switches that a plan depends on


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What is compared, on what data and machine."""

    preset: str
    data: str | None = None
    data_settings: Mapping[str, str] = field(default_factory=dict)
    config: TrainConfig = field(default_factory=TrainConfig)
    nproc: int = 1
    topology: Topology | None = None
    memory_budget_bytes: int = 2**30
    hot_budget_bytes: int = 2**24
    compress: str = "auto"
    eval_fraction: float = 0.1
    eval_sessions: str = "last"  # or "random": `cluster_sessions`
    tune_seconds: float = DEFAULT_SECONDS
    repeats: int = 0  # trainings per variant; 0: those that fit into REPEAT_SECONDS, at most MAX_REPEATS
    switches: tuple[str, ...] = tuple(Switch)
    leave_one_out: bool = True

    def variants(self) -> list[SwitchChoice]:
        return ablation_variants(self.switches, leave_one_out=self.leave_one_out)

    def to_json(self) -> dict[str, Any]:
        own = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        del own["topology"], own["leave_one_out"]
        data_settings, switches = dict(self.data_settings), list(self.switches)
        return {**own, "data_settings": data_settings, "config": self.config.to_json(), "switches": switches}


def run_ablation(ablation: Ablation, *, out: str | Path, progress: Progress = no_progress) -> dict[str, Any]:
    """Train every variant and return the content of OUT/ablation.json. The same call again resumes."""
    if is_remote(out):
        raise InputError(f"--out {out}: the comparison trains on this machine and needs a local folder")
    folder = Path(out).absolute()
    refuse_foreign_folder(folder, ABLATION_FILE)
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    _refuse_other_settings(folder, ablation)
    write_text_atomically(folder / ABLATION_FILE, dump_record(_manifest(ablation, [])))
    inputs = SharedInputs(folder=folder, ablation=ablation, progress=progress)
    variants = ablation.variants()
    figures: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in variants}
    with preloaded_ranks(threads_of(ablation.config.threads, ablation.nproc)):
        for done, variant in enumerate(variants, start=1):
            figures[variant.name].append(_train(inputs, variant))
            _tell(progress, variant, figures[variant.name][0], done, len(variants) * (ablation.repeats or 1))
        seconds = sum(first["seconds"] for first, *_ in figures.values())
        repeats = ablation.repeats or 1 + min(MAX_REPEATS - 1, int(REPEAT_SECONDS / max(seconds, 1e-9)))
        for variant, entry in _train_again(inputs, variants, repeats):
            figures[variant.name].append(entry)
    result = _manifest(ablation, [_summary(variant, figures[variant.name]) for variant in variants])
    write_text_atomically(folder / ABLATION_FILE, dump_record(result))
    return result


def _manifest(ablation: Ablation, variants: list[dict[str, Any]]) -> dict[str, Any]:
    settings = ablation.to_json()
    return {"format_version": FORMAT_VERSION, "kind": "ablation", "settings": settings, "variants": variants}


def _refuse_other_settings(folder: Path, ablation: Ablation) -> None:
    if (folder / ABLATION_FILE).exists():
        before, now = read_checked_json(folder / ABLATION_FILE)["settings"], ablation.to_json()
        differing = [key for key in now if before.get(key) != now[key] and key not in ("repeats", "switches")]
        if differing:
            raise InputError(
                f"{folder}: holds a comparison with other settings ({', '.join(differing)}); give another --out"
            )


@dataclass(frozen=True, kw_only=True)
class SharedInputs:
    """What variants are trained with and share, each made when the first variant needs it."""

    folder: Path
    ablation: Ablation
    progress: Progress

    def raw(self) -> Path:
        target = self.folder / "raw"
        if (target / "schema.json").exists():
            return target
        own = self.ablation
        overrides = own.data_settings
        return Path(make_raw_log(own.preset, out=target, data=own.data, overrides=overrides, progress=self.progress))

    def dataset(self, variant: SwitchChoice) -> Dataset:
        return self._dataset("deduplicated" if Switch.DEDUP in variant.switches else "time")

    def _dataset(self, layout: str) -> Dataset:
        target = self.folder / "data" / layout
        if (target / Dataset.manifest_name).exists():
            return Dataset.load(target)
        return cluster_sessions(
            self.raw(),
            out=target,
            layout=layout,
            eval_fraction=self.ablation.eval_fraction,
            eval_sessions=self.ablation.eval_sessions,
            progress=self.progress,
        )

    def profile(self, variant: SwitchChoice) -> AccessProfile:
        """How often rows are read in the order in which the variant reads them: sessions together, or by time."""
        layout = "session" if Switch.DEDUP in variant.switches else "time"
        target = self.folder / "profiles" / layout
        if (target / AccessProfile.manifest_name).exists():
            return AccessProfile.load(target)
        return profile_access(self._dataset(layout), out=target, progress=self.progress)

    def plan(self, variant: SwitchChoice) -> ShardPlan:
        on = variant.switches
        target = self.folder / "plans" / ("-".join(sorted(on & PLANNED)) or "torchrec")
        if (target / ShardPlan.manifest_name).exists():
            return ShardPlan.load(target)
        return plan_shards(
            self.profile(variant),
            out=target,
            topology=self.ablation.topology or Topology.local(self.ablation.nproc),
            memory_budget_bytes=self.ablation.memory_budget_bytes,
            hot_budget_bytes=self.ablation.hot_budget_bytes if Switch.HOT_BATCHES in on else None,
            compress=self.ablation.compress if Switch.SHARING in on else None,
            strategy="tiers" if Switch.TIERS in on else "torchrec",
            batch_size=self.ablation.config.batch_size,
            progress=self.progress,
        )

    def allocation(self, variant: SwitchChoice) -> str | None:
        if Switch.TUNING not in variant.switches:
            return None
        dataset = self.dataset(variant)
        target = self.folder / "allocations" / dataset.layout
        if not (target / "allocation.json").exists():
            batch_size, seconds = self.ablation.config.batch_size, self.ablation.tune_seconds
            tune_ingest(dataset, out=target, batch_size=batch_size, seconds=seconds, progress=self.progress)
        return str(target)

    def config(self, variant: SwitchChoice) -> TrainConfig:
        return TrainConfig.from_overrides(variant.settings(), base=self.ablation.config)


def _train(inputs: SharedInputs, variant: SwitchChoice) -> dict[str, Any]:
    """Train a variant for the first time and return its figures."""
    run, started = inputs.folder / variant.name, time.time()
    dataset, plan, allocation = inputs.dataset(variant), inputs.plan(variant), inputs.allocation(variant)
    parts = {"dataset": dataset.path, "profile": inputs.profile(variant).path, "plan": plan.path}
    _link_parts(run, parts | ({"allocation": allocation} if allocation else {}))
    result = train(
        dataset.path,
        out=run / "train",
        plan=plan.path,
        allocation=allocation,
        nproc=inputs.ablation.nproc,
        config=inputs.config(variant),
        progress=inputs.progress,
    )
    record = {"name": variant.name, "preset": inputs.ablation.preset, "started_at": started}
    body = {"format_version": FORMAT_VERSION, "kind": "run", **record, "seconds": result["seconds"]}
    write_text_atomically(run / "run.json", dump_record(body))
    return figures_of(result, dataset) | predicted_of(plan, result)


def _train_again(
    inputs: SharedInputs, variants: Sequence[SwitchChoice], repeats: int
) -> list[tuple[SwitchChoice, dict[str, Any]]]:
    """The figures of the second and later repeats, turn by turn; those that are finished are not trained again."""
    jobs, turns, waiting = [], [], []
    for repeat in range(2, repeats + 1):
        for variant in variants if repeat % 2 else variants[::-1]:
            run, config = inputs.folder / variant.name, inputs.config(variant)
            config, out = replace(config, seed=config.seed + repeat - 1), run / "repeats" / str(repeat)
            dataset, plan = inputs.dataset(variant), inputs.plan(variant)
            turns.append((variant, dataset, plan, out / "result.json"))
            if turns[-1][-1].exists():
                continue
            waiting.append(turns[-1])
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
            parts = {"plan": plan.path, "allocation": inputs.allocation(variant)}
            job = make_job(dataset.path, out=out, nproc=inputs.ablation.nproc, config=config, **parts)
            jobs.append(lay_out_hot(job, run / "train", config, inputs.progress))
    finished = len(variants) + len(turns) - len(jobs)  # the first turn, and repeats of an interrupted comparison

    def show(what: str, done: int, total: int) -> None:
        if what != REPEATS:
            inputs.progress(what, done, total)
        elif done:
            variant, _, _, path = waiting[done - 1]
            result = read_checked_json(path)
            numbers = {"samples_per_s": result["samples_per_s"], "auc": result["metrics"]["auc"]}
            _tell(inputs.progress, variant, numbers, finished + done, len(variants) + len(turns))

    if jobs:
        together = {"config": jobs[0]["config"], "repeats": jobs}
        launch_torchrun(together, inputs.folder, inputs.ablation.nproc, port=0, progress=show)
    found = []
    for variant, dataset, plan, path in turns:
        result = read_checked_json(path)
        # Memory is that of processes which have trained other variants.
        found.append((variant, figures_of(result, dataset) | predicted_of(plan, result) | {"peak_memory_bytes": None}))
    return found


def _tell(progress: Progress, variant: SwitchChoice, figures: Mapping[str, Any], done: int, total: int) -> None:
    auc = "" if figures["auc"] is None else f", AUC {figures['auc']:.4f}"
    progress(f"{TRAINED}{variant.name}, {figures['samples_per_s']:,.0f} samples/s{auc}", done, total)


def _link_parts(run: Path, parts: Mapping[str, str]) -> None:
    """Make the shared artifacts appear in the run folder, where the report looks for them."""
    run.mkdir(parents=True, exist_ok=True)
    for name, target in parts.items():
        if not (run / name).exists():
            (run / name).symlink_to(os.path.relpath(target, run))


def figures_of(result: Mapping[str, Any], dataset: Dataset) -> dict[str, Any]:
    """The figures of one training that variants are compared by."""
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
    """Bytes per step: what the plan predicts plus the dense gradients (None with hot batches), and what was sent."""
    is_other = bool(result["hot"]) or plan.shared is not None
    ranks = result["world_size"]
    # A ring all-reduce has every one of W ranks send 2 (W - 1) / W times the gradients.
    dense = 2 * (ranks - 1) * result["model"]["num_dense_parameters"] * FLOAT_BYTES
    usage = result["usage"]
    return {
        "predicted_bytes_per_step": None if is_other else plan.predicted_bytes + dense,
        "measured_bytes_per_step": usage["wire_bytes"] / max(usage["num_steps"], 1),
    }


def _summary(variant: SwitchChoice, repeats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = [name for name in repeats[0] if name != "evaluations"]
    known = {name: [entry[name] for entry in repeats if entry[name] is not None] for name in names}
    return {
        "name": variant.name,
        "switches": sorted(variant.switches),
        "repeats": [dict(entry) for entry in repeats],
        "median": {name: statistics.median(values) if values else None for name, values in known.items()},
        "spread": {name: [min(values), max(values)] if values else None for name, values in known.items()},
    }
