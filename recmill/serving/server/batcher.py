"""Concurrent calls share a batch: as many as the latency budget of the oldest one allows.

One thread scores. While it works, calls wait in a bounded queue; when it is free, it takes the oldest call and those
behind it as long as the batch is expected to be ready within the budget of the oldest. No call ever waits for company:
an idle scorer starts at once.

    arrivals   a b c            d e          budget
    scorer     [a]  [b c]       [d e]        ends of batches <= arrival of their oldest + budget, if the load allows it
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from recmill.serving.batch import RequestBatch
from recmill.serving.server.errors import Overloaded, Stopping

Scores = npt.NDArray[np.float32]
Score = Callable[[RequestBatch], Scores]
MAX_BATCH_CANDIDATES = 20_000  # beyond this a batch gains nothing and takes memory
FORGETTING = 0.98  # weight of what was known when a new batch was measured
MAX_RETRY_S = 60


@dataclass
class CostModel:
    """Seconds of a batch as overhead + slope * candidates: least squares over batches, older ones count less."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def learn(self, num_candidates: int, seconds: float) -> None:
        n = float(num_candidates)
        for name, value in (("weight", 1.0), ("x", n), ("y", seconds), ("xx", n * n), ("xy", n * seconds)):
            setattr(self, name, getattr(self, name) * FORGETTING + value)

    def seconds(self, num_candidates: int) -> float:
        """What a batch of that size is expected to take; 0 if nothing is known yet."""
        if not self.weight:
            return 0.0
        spread = self.weight * self.xx - self.x * self.x
        slope = (self.weight * self.xy - self.x * self.y) / spread if spread > 1e-9 * self.weight * self.xx else 0.0
        if slope <= 0:  # one size of batch only, or noise: proportional to candidates, which errs on the slow side
            return self.y / max(self.x, 1.0) * num_candidates
        overhead = max((self.y - slope * self.x) / self.weight, 0.0)
        return overhead + slope * num_candidates


@dataclass(eq=False)
class WaitingCall:
    """A call in the queue, and the model that it was read for."""

    batch: RequestBatch
    score: Score
    arrived_s: float
    answer: asyncio.Future[Scores]


@dataclass
class BatcherEvents:
    """What a batcher tells about its work; metrics listen."""

    scored: Callable[[int, int, float], None] = lambda num_calls, num_candidates, seconds: None
    queued: Callable[[int], None] = lambda num_calls: None


@dataclass
class Batcher:
    """`await submit(batch, model.score)` gives the scores of a call's candidates, in their order."""

    latency_budget_s: float  # 0: every call is a batch of its own
    max_queue: int
    events: BatcherEvents = field(default_factory=BatcherEvents)
    costs: CostModel = field(default_factory=CostModel)
    _queue: deque[WaitingCall] = field(default_factory=deque)
    _task: asyncio.Task[None] | None = None
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="score")

    async def submit(self, batch: RequestBatch, score: Score) -> Scores:
        if self._is_closed:
            raise Stopping("the server is stopping")
        if len(self._queue) >= self.max_queue:
            raise Overloaded(
                f"the server is busy: {len(self._queue):,} calls are waiting, as many as are allowed",
                retry_after_s=self._retry_after_s(),
            )
        call = WaitingCall(batch, score, time.monotonic(), asyncio.get_running_loop().create_future())
        self._queue.append(call)
        self.events.queued(len(self._queue))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        return await call.answer

    async def close(self) -> None:
        """Answer what waits, then stop."""
        self._is_closed = True
        if self._task is not None:
            with suppress(asyncio.CancelledError):
                await self._task
        self._thread.shutdown(wait=True)

    def _retry_after_s(self) -> int:
        waiting = sum(call.batch.num_candidates for call in self._queue)
        return min(max(1, math.ceil(self.costs.seconds(waiting))), MAX_RETRY_S)

    async def _work(self) -> None:
        while self._queue:
            await asyncio.sleep(0)  # calls that were read in the same turn of the loop join
            calls = self._take()
            if calls:
                await self._answer(calls)

    def _take(self) -> list[WaitingCall]:
        """The calls of the next batch: for one model, within the budget of the oldest."""
        taken: list[WaitingCall] = []
        num_candidates = 0
        while self._queue:
            call = self._queue[0]
            if call.answer.done():  # its caller has gone
                self._queue.popleft()
                continue
            together = num_candidates + call.batch.num_candidates
            if taken and not self._may_join(call, taken[0], together):
                break
            taken.append(self._queue.popleft())
            num_candidates = together
        self.events.queued(len(self._queue))
        return taken

    def _may_join(self, call: WaitingCall, oldest: WaitingCall, num_candidates: int) -> bool:
        if self.latency_budget_s <= 0 or call.score != oldest.score or num_candidates > MAX_BATCH_CANDIDATES:
            return False
        left_s = oldest.arrived_s + self.latency_budget_s - time.monotonic()
        # A queue that is late already is cleared fastest in batches that take as long as the budget.
        return self.costs.seconds(num_candidates) <= max(left_s, self.latency_budget_s / 2)

    async def _answer(self, calls: list[WaitingCall]) -> None:
        batch = RequestBatch.join([call.batch for call in calls])
        loop, began_s = asyncio.get_running_loop(), time.monotonic()
        try:
            scores = await loop.run_in_executor(self._thread, calls[0].score, batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, each caller is told
            for call in calls:
                if not call.answer.done():
                    call.answer.set_exception(error)
            return
        seconds = time.monotonic() - began_s
        self.costs.learn(batch.num_candidates, seconds)
        self.events.scored(len(calls), batch.num_candidates, seconds)
        begin = 0
        for call in calls:
            end = begin + call.batch.num_candidates
            if not call.answer.done():
                call.answer.set_result(scores[begin:end])
            begin = end
