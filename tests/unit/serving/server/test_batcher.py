"""Concurrent calls share batches within the latency budget, and a full queue refuses calls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from recmill.serving.batch import RequestBatch
from recmill.serving.server.batcher import Batcher, CostModel
from recmill.serving.server.errors import Overloaded, Stopping


def call(*prices: float) -> RequestBatch:
    """One request whose candidates have these prices."""
    return RequestBatch(
        counts_R=np.array([len(prices)]),
        dense_user_RF=np.zeros((1, 0), np.float32),
        dense_candidate_NF=np.array(prices, np.float32).reshape(-1, 1),
    )


class Scorer:
    """Scores a price with itself; while it is held, batches wait. Remembers how many candidates each batch had."""

    def __init__(self, *, is_held: bool = False) -> None:
        self.sizes: list[int] = []
        self.gate = threading.Event()
        if not is_held:
            self.gate.set()

    def score(self, batch: RequestBatch) -> np.ndarray:
        self.sizes.append(batch.num_candidates)
        assert self.gate.wait(10)
        if (batch.dense_candidate_NF < 0).any():
            raise ValueError("a negative price")
        return batch.dense_candidate_NF[:, 0]


async def answers(batcher: Batcher, scorer: Scorer, calls: Sequence[RequestBatch]) -> list[list[float]]:
    tasks = [asyncio.create_task(batcher.submit(entry, scorer.score)) for entry in calls]
    await asyncio.sleep(0.05)
    scorer.gate.set()
    return [scores.tolist() for scores in await asyncio.gather(*tasks)]


def test_calls_that_wait_share_a_batch_and_get_their_own_scores() -> None:
    async def run() -> None:
        scorer, batcher = Scorer(is_held=True), Batcher(latency_budget_s=10, max_queue=10)
        first = asyncio.create_task(batcher.submit(call(9), scorer.score))
        await asyncio.sleep(0.02)  # it is being scored
        found = await answers(batcher, scorer, [call(1, 2), call(3), call(), call(4, 5, 6)])
        assert found == [[1, 2], [3], [], [4, 5, 6]]
        assert (await first).tolist() == [9]
        assert scorer.sizes == [1, 6]
        await batcher.close()

    asyncio.run(run())


def test_a_budget_of_zero_scores_every_call_alone() -> None:
    async def run() -> None:
        scorer, batcher = Scorer(is_held=True), Batcher(latency_budget_s=0, max_queue=10)
        found = await answers(batcher, scorer, [call(1, 2), call(3), call(4)])
        assert found == [[1, 2], [3], [4]]
        assert scorer.sizes == [2, 1, 1]
        await batcher.close()

    asyncio.run(run())


def test_a_batch_is_not_larger_than_the_budget_allows() -> None:
    async def run() -> None:
        scorer, batcher = Scorer(is_held=True), Batcher(latency_budget_s=1.0, max_queue=100)
        for size in (10, 50):
            batcher.costs.learn(size, size / 100)  # 100 candidates per second
        batcher.costs.learn(20, 0.2)
        calls = [call(*range(20)) for _ in range(8)]
        await answers(batcher, scorer, calls)
        assert scorer.sizes[0] in (80, 100)  # 0.8 to 1 s of the budget
        assert max(scorer.sizes) <= 100
        await batcher.close()

    asyncio.run(run())


def test_calls_for_different_models_are_never_joined() -> None:
    async def run() -> None:
        old, new, batcher = Scorer(is_held=True), Scorer(), Batcher(latency_budget_s=10, max_queue=10)
        first = [asyncio.create_task(batcher.submit(call(1), old.score)) for _ in range(2)]
        await asyncio.sleep(0)
        second = asyncio.create_task(batcher.submit(call(2), new.score))
        await asyncio.sleep(0.02)
        old.gate.set()
        await asyncio.gather(*first, second)
        assert old.sizes == [2]
        assert new.sizes == [1]
        await batcher.close()

    asyncio.run(run())


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async def run() -> None:
        scorer, batcher = Scorer(is_held=True), Batcher(latency_budget_s=0, max_queue=2)
        batcher.costs.learn(1, 2.4)
        tasks = [asyncio.create_task(batcher.submit(call(1), scorer.score))]
        await asyncio.sleep(0.02)
        tasks += [asyncio.create_task(batcher.submit(call(1), scorer.score)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 calls are waiting") as found:
            await batcher.submit(call(1), scorer.score)
        assert found.value.retry_after_s == 5  # two calls of 2.4 seconds
        assert found.value.status == 429
        scorer.gate.set()
        assert len(await asyncio.gather(*tasks)) == 3
        await batcher.close()

    asyncio.run(run())


def test_closing_answers_what_waits_and_refuses_the_rest() -> None:
    async def run() -> None:
        scorer, batcher = Scorer(is_held=True), Batcher(latency_budget_s=0, max_queue=10)
        tasks = [asyncio.create_task(batcher.submit(call(number), scorer.score)) for number in range(3)]
        await asyncio.sleep(0.02)
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0.02)
        with pytest.raises(Stopping):
            await batcher.submit(call(1), scorer.score)
        scorer.gate.set()
        assert [scores.tolist() for scores in await asyncio.gather(*tasks)] == [[0], [1], [2]]
        await closing

    asyncio.run(run())


def test_a_failed_batch_tells_its_callers_and_the_next_one_is_scored() -> None:
    async def run() -> None:
        scorer, batcher = Scorer(), Batcher(latency_budget_s=1, max_queue=10)
        with pytest.raises(ValueError, match="negative"):
            await batcher.submit(call(-1), scorer.score)
        assert (await batcher.submit(call(2), scorer.score)).tolist() == [2]
        await batcher.close()

    asyncio.run(run())


def test_calls_whose_caller_has_gone_are_not_scored() -> None:
    async def run() -> None:
        scorer, batcher = Scorer(is_held=True), Batcher(latency_budget_s=0, max_queue=10)
        first = asyncio.create_task(batcher.submit(call(1), scorer.score))
        await asyncio.sleep(0.02)
        gone = asyncio.create_task(batcher.submit(call(2, 2), scorer.score))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        scorer.gate.set()
        await first
        await batcher.close()
        assert scorer.sizes == [1]

    asyncio.run(run())


def test_costs_are_overhead_and_slope() -> None:
    costs = CostModel()
    assert costs.seconds(100) == 0
    costs.learn(10, 0.1)
    assert costs.seconds(20) == pytest.approx(0.2)
    for size in (10, 100, 1000):
        costs.learn(size, 0.05 + size * 0.001)
    for _ in range(400):
        costs.learn(200, 0.05 + 200 * 0.001)
        costs.learn(400, 0.05 + 400 * 0.001)
    assert costs.seconds(300) == pytest.approx(0.35, rel=0.01)


def test_an_idle_scorer_starts_at_once() -> None:
    async def run() -> float:
        scorer, batcher = Scorer(), Batcher(latency_budget_s=5, max_queue=10)
        began_s = time.monotonic()
        await batcher.submit(call(1), scorer.score)
        await batcher.close()
        return time.monotonic() - began_s

    assert asyncio.run(run()) < 1
