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
import importlib
import os
import sys
from collections.abc import Sequence

from recmill.training.processes import paused_collections

WORKER = "recmill.training.rank.worker"
SWITCH = "RECMILL_FORKED_RANKS"  # environment variable; "off": torchrun starts an interpreter per rank


def forks_ranks() -> bool:
    return os.environ.get(SWITCH) != "off"


def main(arguments: Sequence[str], *, worker: str = WORKER) -> None:
    """Run the ranks of this node, each the module `worker`, to their end; raises or exits as torchrun does."""
    *options, job_path = arguments
    path = load_worker(worker) if forks_ranks() else ""
    with paused_collections():
        from torch.distributed import run

    how = ["--start-method", "fork", "--run-path", path] if path else ["-m", worker]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # ranks inherit it
    run.main([*options, *how, job_path])


def load_worker(worker: str = WORKER) -> str:
    """Import what ranks import and return the path of their script; "" where ranks cannot be forked: on GPUs."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # or the check starts CUDA, which no fork survives
    with paused_collections():
        import torch

        if torch.cuda.is_available():
            return ""
        path = importlib.import_module(worker).__file__
    gc.freeze()  # or the first collection of every rank copies the pages of all objects
    assert path is not None
    return path


if __name__ == "__main__":
    main(sys.argv[1:])
