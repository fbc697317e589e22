"""A plan made in a process of its own: what TorchRec's planner loads, half a gigabyte, does not stay in the step.

step: plan_apart()                         fork of a process that has loaded TorchRec, or a process of its own
writes the request to a file        ->     main(): plan_shards() writes the plan to OUT
reads the plan, raises its error    <-     leaves error.json beside the request
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recmill.artifacts import InputError, ShardPlan, dump_json, held_folder, read_json
from recmill.planning.planner import Topology, plan_shards
from recmill.progress import Progress
from recmill.training.preload import start_module
from recmill.training.processes import print_progress, rank_environment
from recmill.training.trainer import TrainingFailed, follow_output

ERROR = "error.json"


def plan_apart(
    profile: str, *, out: str, topology: Topology, threads: int, progress: Progress, **options: Any
) -> ShardPlan:
    """The same as `plan_shards`, whose `options` must have a JSON form; `threads` are those of the ranks, if here."""
    request = {"profile": profile, "out": out, "topology": asdict(topology), **options}
    with held_folder(purpose="plan") as scratch:
        path = scratch / "request.json"
        path.write_text(dump_json(request), encoding="utf-8")
        process = start_module(__name__, [str(path)], environment=rank_environment(threads), stderr=sys.stderr)
        follow_output(process, sys.stderr, progress)
        if (error := path.with_name(ERROR)).exists():
            raise InputError(read_json(error)["message"])
        if process.returncode:
            raise TrainingFailed(f"the process that planned ended with exit code {process.returncode}")
    return ShardPlan.load(out)


def main(arguments: Sequence[str]) -> None:
    path = Path(arguments[0])
    request = read_json(path)
    try:
        plan_shards(**request | {"topology": Topology(**request["topology"])}, progress=print_progress)
    except InputError as error:
        path.with_name(ERROR).write_text(dump_json({"message": str(error)}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
