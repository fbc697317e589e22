"""The process that torchrun starts on every rank: `torchrun ... -m recmill.training.rank.worker JOB.json`."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recmill.artifacts import (
    Dataset,
    InputError,
    ShardPlan,
    WorkerAllocation,
    dump_json,
    join_path,
    read_json,
    write_text_atomically,
)
from recmill.artifacts.places.stores import remove_folder
from recmill.data.schema import Schema
from recmill.planning.planner import Topology, default_plan
from recmill.planning.torchrec_plan import without_tiers
from recmill.progress import Progress, seconds_since_start
from recmill.training.config import TrainConfig
from recmill.training.processes import (
    REPEATS,
    die_with_parent,
    frozen_objects,
    keep_freed_memory,
    own_cores,
    print_progress,
    threads_of,
)
from recmill.training.rank.carry_over import carry_over
from recmill.training.rank.dedup import choose_dedup_together
from recmill.training.rank.loop import TrainingRun, disk_folder
from recmill.training.rank.sharding import shard_model
from recmill.training.rank.trial import decide_switches
from recmill.training.serving import export_checkpoint
from recmill.training.switches import wants_hot_batches
from recmill.training.verdicts import Verdicts


def main(job_path: str, report: Progress = print_progress) -> None:
    """Run one rank; a failure is reported in the job's folder, where the launcher looks for it."""
    die_with_parent()
    keep_freed_memory()
    job = read_json(job_path)
    startup_seconds = _seconds_since_launch(job)
    rank = int(os.environ["RANK"])
    try:
        run_rank(job, startup_seconds, report)
        if rank == 0 and job.get("export"):
            export_checkpoint(join_path(job["out"], "checkpoint"), out=job["export"], for_mlflow=False)
    except BaseException as error:
        kind = "input" if isinstance(error, InputError) else "crash"
        failure = {"rank": rank, "kind": kind, "message": str(error), "traceback": traceback.format_exc()}
        write_text_atomically(Path(job_path).parent / f"error-{rank}.json", dump_json(failure))
        raise


def _seconds_since_launch(job: dict[str, Any]) -> float:
    """Since the launcher on this machine called torchrun; in a pod whose command torchrun is, since it started."""
    if "launched_at" in job:
        return time.monotonic() - float(job["launched_at"])
    return seconds_since_start(os.getppid() or None)


def run_rank(job: dict[str, Any], startup_seconds: float = 0.0, report: Progress = print_progress) -> None:
    config = TrainConfig.from_json(job["config"])
    device = _device()
    # Launchers set the variable; a torchrun started by hand may not.
    threads = os.environ.get("OMP_NUM_THREADS") or threads_of(config.threads, int(os.environ["LOCAL_WORLD_SIZE"]))
    torch.set_num_threads(int(threads))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=config.timeout_s))
    try:
        with own_cores(threads=int(threads)) if config.pin_cores else nullcontext():
            if "repeats" in job:
                _train_repeats(job["repeats"], device, report)
                return
            run = open_run(job, device, report)
            run.meter.startup_seconds = startup_seconds
            with frozen_objects():
                run.train()
    finally:
        dist.destroy_process_group()


def _train_repeats(jobs: list[dict[str, Any]], device: torch.device, report: Progress) -> None:
    """Train jobs one after the other; of each only the result is wanted, not the checkpoint."""
    for done, job in enumerate(jobs):
        if dist.get_rank() == 0:
            report(REPEATS, done, len(jobs))
        run = open_run(job, device, report)
        with frozen_objects():
            run.train()
        run.sharded.close()
        del run
        gc.collect()
        if dist.get_rank() == 0:
            remove_folder(join_path(job["out"], "checkpoint"))
    if dist.get_rank() == 0:
        report(REPEATS, len(jobs), len(jobs))


def open_run(job: dict[str, Any], device: torch.device, report: Progress = print_progress) -> TrainingRun:
    """This rank's part of a job, resumed if it has begun; all ranks of the process group call it together.

    A trial decides first which switches on "auto" pay, unless that is known.
    """
    config, dataset = TrainConfig.from_json(job["config"]), Dataset.load(job["data"])
    schema = Schema.load(dataset.path)
    topology = Topology.local(dist.get_world_size())
    plan = ShardPlan.load(job["plan"]) if job["plan"] else default_plan(schema, topology)
    build = partial(_build_run, job, device, report, dataset, schema, plan)
    verdicts = decide_switches(job, config=config, plan=plan, dataset=dataset, open_run=build)
    run = build(verdicts.settle(config), verdicts)
    if not run.resume() and job.get("start_from"):
        carry_over(job["start_from"], run.sharded, data=dataset.path)
    return run


def _build_run(
    job: dict[str, Any],
    device: torch.device,
    report: Progress,
    dataset: Dataset,
    schema: Schema,
    plan: ShardPlan,
    config: TrainConfig,
    verdicts: Verdicts | None = None,
) -> TrainingRun:
    """The run that `config` describes, from its first step on; equal however often and after whatever it is built."""
    if config.tiers == "false":
        plan = without_tiers(plan, schema, batch_size=config.batch_size)
    dedup = choose_dedup_together(dataset, schema, config, plan)
    sharded = shard_model(schema, config, plan, device, dedup=dedup, disk_folder=disk_folder(job["out"]))
    # Dropout draws differ between ranks, as samples do.
    torch.manual_seed(config.seed * 1_000_003 + dist.get_rank())
    has_hot_data = job.get("hot_data") and wants_hot_batches(plan, config)
    return TrainingRun(
        sharded=sharded,
        dataset=dataset,
        hot_dataset=Dataset.load(job["hot_data"]) if has_hot_data else None,
        schema=schema,
        config=config,
        settings=TrainConfig.from_json(job["config"]),
        verdicts=verdicts or Verdicts(),
        out=job["out"],
        owner=job.get("owner", ""),
        device=device,
        dedup=dedup,
        plan=plan,
        allocation=WorkerAllocation.load(job["allocation"]) if job["allocation"] else None,
        inputs=job["inputs"],
        report=report,
    )


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


if __name__ == "__main__":
    main(sys.argv[1])
