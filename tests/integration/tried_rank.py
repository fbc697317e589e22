"""One of two ranks that measure a switch differently. A module of its own: spawned processes import it by name."""

from __future__ import annotations

from multiprocessing.queues import Queue

import torch.distributed as dist

from recmill.training.rank.trial import _compare
from recmill.training.switches import Switch


class Timed:
    """A side of a comparison whose blocks take that long."""

    num_steps = 2

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def block(self, num_steps: int) -> float:
        assert num_steps == self.num_steps
        return self.seconds


def compare_on(rank: int, store: str, found: Queue[tuple[int, bool]]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    old, new = (Timed(2.0), Timed(1.0)) if rank == 0 else (Timed(1.0), Timed(2.0))
    verdict = _compare(Switch.DEDUP, old, new, limit_s=5.0)  # type: ignore[arg-type]
    found.put((rank, verdict.is_on))
    dist.destroy_process_group()
