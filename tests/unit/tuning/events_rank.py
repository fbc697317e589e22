"""A training run of one rank during which its surroundings change: `events_rank.py DATA OUT true|false`.

The trainer becomes slower, then the storage, then the process loses cores, then the machine has less memory left.
Writes OUT/events.json: the losses of all steps, what the tuner noted, workers and memory limit before each change.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recmill.data.ingest import IngestPipeline
from recmill.data.ingest.memory import available_memory_bytes
from recmill.training.config import TrainConfig
from recmill.training.rank import loop
from recmill.training.rank.worker import open_run
from recmill.tuning.online import tuner as online

STEPS_PER_PHASE = 80
PAUSE_S = 0.01  # of a step, so that the trainer is what the run waits for at first
CONFIG = TrainConfig(batch_size=64, epochs=20, bottom_layers=(8,), top_layers=(8,), threads=1, eval_every=10_000)


def main(data: str, out: Path, tuning: str) -> None:
    torch.set_num_threads(1)
    out.mkdir(parents=True)
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=0, world_size=1)
    loop.OnlineTuner = partial(online.OnlineTuner, interval_s=0.2)  # a look every 2 s would take a minute
    config = {**CONFIG.to_json(), "tuning": tuning, "max_steps": 5 * STEPS_PER_PHASE}
    job: dict[str, Any] = {
        "data": data,
        "plan": None,
        "allocation": None,
        "out": str(out),
        "inputs": {},
        "config": config,
    }
    run = open_run(job, torch.device("cpu"))
    (pipeline,) = run.ingest.pipelines
    phases: list[dict[str, Any]] = []
    take_step, pause_s = run.train_step, [PAUSE_S]

    def slower_trainer() -> None:
        pause_s[0] = 4 * PAUSE_S

    def slower_storage() -> None:
        pause_s[0] = PAUSE_S
        pipeline.set_delays({"read": 0.08})

    events: list[Callable[[], None]] = [slower_trainer, slower_storage, fewer_cores, partial(less_memory, pipeline)]

    def step(*batch: Any) -> None:
        take_step(*batch)
        time.sleep(pause_s[0])
        if run.state.step % STEPS_PER_PHASE == 0:
            phases.append({"workers": pipeline.workers, "limit_bytes": pipeline.memory_limit_bytes})
            if events:
                events.pop(0)()

    run.train_step = step  # type: ignore[method-assign]
    result = run.train()
    losses = [point["loss"] for point in run.curve.entries]
    found = {"losses": losses, "tuning": result["tuning"], "phases": phases, "least_bytes": pipeline.least_bytes}
    (out / "events.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def fewer_cores() -> None:
    """One core for all threads, as a smaller quota would have it."""
    core = min(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


def less_memory(pipeline: IngestPipeline) -> None:
    """The machine has as much left as ingestion just needs, and a little."""
    left_bytes = min(available_memory_bytes(), 2 * pipeline.least_bytes)
    online.available_memory_bytes = lambda: left_bytes  # type: ignore[assignment]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
