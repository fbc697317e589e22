"""torchrun whose ranks are forks of it: `python -m recmill.training.agent [torchrun's options] JOB.json`.

    torchrun -m worker     torch loads ──> rank 0: torch, TorchRec load ──> work
                                      └──> rank 1: torch, TorchRec load ──> work
    this agent             torch, TorchRec load ──> rank 0: work
                                               └──> rank 1: work

What a rank imports takes 3 seconds of CPU time; forks have it for nothing and share its memory. Everything else is
torchrun: this calls its main function with its own options for workers that are forked.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from recmill.training.processes import paused_collections

WORKER = "recmill.training.rank.worker"
SWITCH = "RECMILL_FORKED_RANKS"  # environment variable; "off": torchrun starts an interpreter per rank


def forks_ranks() -> bool:
    return os.environ.get(SWITCH) != "off"


def run_agent(arguments: Sequence[str]) -> None:
    """Run the ranks of this node to their end; raises or exits as torchrun does."""
    *options, job_path = arguments
    worker = load_worker() if forks_ranks() else ""
    with paused_collections():
        from torch.distributed import run

    how = ["--start-method", "fork", "--run-path", worker] if worker else ["-m", WORKER]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # ranks inherit it
    run.main([*options, *how, job_path])


def load_worker() -> str:
    """Import what ranks import and return the path of their script; "" where ranks cannot be forked: on GPUs."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # or the check starts CUDA, which no fork survives
    with paused_collections():
        import torch

        if torch.cuda.is_available():
            return ""
        from recmill.training.rank import worker
    gc.freeze()  # or the first collection of every rank copies the pages of all objects
    return worker.__file__


if __name__ == "__main__":
    run_agent(sys.argv[1:])
