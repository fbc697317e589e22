"""A trial of the switches on "auto": which of them make steps faster, measured on the ranks and data that train.

    plain                     all switches on "auto" off
    plain    against +tiers           the winner of each comparison meets the next switch
    winner   against +hot batches
    winner   against +lookahead       the other way to spare exchanges; instead of hot batches
    winner   against +dedup           last: whether it pays depends on how rows are exchanged

Both sides train the first batches of the run in turns, A B B A, on models of their own that are dropped afterwards. The
run then starts from fresh weights, its first batch and a new random state, as if those switches had been set by hand.
A switch stays on only if the whole interval of its measured ratio lies above 1.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist

from recmill.artifacts import Dataset, ShardPlan, join_path
from recmill.data.ikjt.batch import Batch
from recmill.data.ingest import IngestPipeline
from recmill.data.ingest.memory import available_memory_bytes
from recmill.model.stores.collectives import broadcast_json
from recmill.training.checkpoint import newest_checkpoint
from recmill.training.config import TrainConfig
from recmill.training.processes import return_freed_memory
from recmill.training.rank.feed import planned_steps
from recmill.training.rank.loop import TrainingRun
from recmill.training.switches import LOOKAHEAD, Switch, looks_ahead, placed, wants_hot_batches
from recmill.training.verdicts import Verdict, Verdicts, remember, remembered

MIN_STEPS = 20  # of a run; a shorter one is over before a trial is
MIN_SECONDS, MAX_SECONDS = 10.0, 60.0  # of all comparisons together, without building models
SHARE = 0.05  # of the expected run
MIN_PAIRS, MAX_PAIRS = 6, 48
BLOCK_STEPS = 2
WARM_UP_STEPS = 3  # the first steps of a model allocate
NUM_BATCHES = 8  # read before the measurement, and trained over and over
MAX_BATCH_BYTES = 2**27  # of them together
INTERVAL = 2.5  # standard errors on each side of the median
MEDIAN_ERROR = 1.2533 * 1.4826  # standard error of a median, in mean absolute deviations over the root of the count
MEMORY_SHARE = 0.5  # of the free memory, for the tables of two models
READING_SHARE = 0.5  # of a step: with less reading than that, other worker counts cannot make training faster

OpenRun = Callable[[TrainConfig], TrainingRun]
Offer = tuple[Switch, str]  # a switch and the setting that turns it on


def decide_switches(
    job: Mapping[str, Any], *, config: TrainConfig, plan: ShardPlan, dataset: Dataset, open_run: OpenRun
) -> Verdicts:
    """The verdicts for a job: remembered, or found by a trial. All ranks call it together and receive the same.

    `open_run` builds this rank's part of the run as another config would train it.
    """
    verdicts = None
    if dist.get_rank() == 0:
        verdicts = remembered(job, num_ranks=dist.get_world_size())
        if verdicts is None and newest_checkpoint(join_path(job["out"], "checkpoints")) is not None:
            verdicts = Verdicts(obstacle="the run began without a trial")
    known = broadcast_json(verdicts and verdicts.to_json())
    verdicts = known and Verdicts.from_json(known)
    if verdicts is None:
        offers = _offers(job, config, plan)
        obstacle = _obstacle(config, plan, dataset, offers)
        verdicts = Verdicts(obstacle=obstacle) if obstacle else _try_switches(config, offers, open_run)
    if dist.get_rank() == 0:
        remember(job, verdicts, num_ranks=dist.get_world_size())
    return verdicts


def _offers(job: Mapping[str, Any], config: TrainConfig, plan: ShardPlan) -> list[Offer]:
    """The switches on "auto" that have something to turn on, in the order of their comparisons."""
    has_hot = bool(job.get("hot_data")) and wants_hot_batches(plan, config)
    found: dict[Offer, bool] = {
        (Switch.TIERS, "auto"): bool(placed(plan, "tiered")),
        (Switch.HOT_BATCHES, "auto"): has_hot,
        # Where rows that repeat are worth keeping, either way may be the faster one.
        (Switch.HOT_BATCHES, LOOKAHEAD): has_hot and dist.get_world_size() > 1 and not torch.cuda.is_available(),
        (Switch.DEDUP, "auto"): True,  # the first batch shows whether anything repeats
        (Switch.TUNING, "auto"): bool(job["allocation"]),
    }
    return [offer for offer, is_offered in found.items() if is_offered and getattr(config, offer[0]) == "auto"]


def _obstacle(config: TrainConfig, plan: ShardPlan, dataset: Dataset, offers: Sequence[Offer]) -> str:
    """Why there is no trial, or "". Ranks may differ in free memory: rank 0 decides."""
    num_steps, table_bytes = planned_steps(dataset, config), max(plan.rank_bytes, default=0)
    obstacle = ""
    if not config.trial:
        obstacle = "trial=false"
    elif not offers:
        obstacle = "no switch is on auto"
    elif num_steps < MIN_STEPS:
        obstacle = f"the run has {num_steps} steps, a trial needs {MIN_STEPS}"
    elif config.table_memory_bytes or 2 * table_bytes > MEMORY_SHARE * available_memory_bytes():
        obstacle = "the tables of two models do not fit into memory"
    return str(broadcast_json(obstacle))


def _try_switches(config: TrainConfig, offers: Sequence[Offer], open_run: OpenRun) -> Verdicts:
    started, found, obstacle = time.perf_counter(), list[Verdict](), ""
    side = _Side.of(open_run, _set(config, [switch for switch, _ in offers], "false"))
    step_s, num_steps = float(broadcast_json(side.warm_up())), side.run.num_steps
    limit_s = min(MAX_SECONDS, max(MIN_SECONDS, SHARE * num_steps * step_s))
    compared = [offer for offer in offers if offer[0] != Switch.TUNING]
    if _least_steps(compared, config) * step_s > limit_s:  # windows are the longest blocks
        compared = [offer for offer in compared if offer[1] != LOOKAHEAD]
    if _least_steps(compared, config) * step_s > limit_s:
        obstacle = f"with {step_s:.2f} s per step, a trial would take too long for a run of {num_steps} steps"
    else:
        side, found = _tournament(side, compared, open_run, limit_s)
        found += [_judge_tuning(side)] if (Switch.TUNING, "auto") in offers else []
    side.close()
    del side
    gc.collect()
    return_freed_memory()
    return Verdicts(found=tuple(found), seconds=time.perf_counter() - started, obstacle=obstacle)


def _least_steps(compared: Sequence[Offer], config: TrainConfig) -> int:
    """The fewest steps that all comparisons take."""
    blocks = [config.lookahead_batches if setting == LOOKAHEAD else BLOCK_STEPS for _, setting in compared]
    return 2 * MIN_PAIRS * sum(blocks)


def _tournament(
    side: _Side, compared: Sequence[Offer], open_run: OpenRun, limit_s: float
) -> tuple[_Side, list[Verdict]]:
    """The winner of all comparisons, and their verdicts. At most two models exist at a time."""
    found: list[Verdict] = []
    for place, (switch, setting) in enumerate(compared):
        other = _Side.of(open_run, _set(side.config, [switch], setting))
        if switch == Switch.DEDUP and other.run.dedup == side.run.dedup:  # nothing repeats
            other.close()
            continue
        other.warm_up()
        began = time.perf_counter()
        verdict = _compare(switch, side, other, limit_s=limit_s / (len(compared) - place))
        limit_s -= time.perf_counter() - began
        if verdict.is_on:
            side, other = other, side
        found = add_verdict(found, verdict, setting)
        other.close()
        del other
        gc.collect()
    return side, found


def add_verdict(found: Sequence[Verdict], verdict: Verdict, setting: str) -> list[Verdict]:
    """The verdicts with one more. Looking ahead replaces hot batches only if it beats them."""
    if setting != LOOKAHEAD:
        return [*found, verdict]
    others = [own for own in found if own.switch != verdict.switch]
    if verdict.is_on:
        return [*others, replace(verdict, setting=setting, reason=f"looking ahead instead {verdict.reason}")]
    return [*found] if len(others) < len(found) else [*found, verdict]


def _set(config: TrainConfig, switches: Sequence[Switch], state: str) -> TrainConfig:
    return TrainConfig.from_json({**config.to_json(), **dict.fromkeys(switches, state)})


@dataclass(kw_only=True)
class _Side:
    """One side of a comparison: a run with its own model, and batches of each kind that wait in memory."""

    config: TrainConfig
    run: TrainingRun
    batches: Mapping[bool, Iterator[Batch]]  # hot or not -> endless
    shares: dict[bool, float]  # of the steps of an epoch
    reading_s: float  # CPU seconds of ingestion per step
    num_steps: int = BLOCK_STEPS  # of a block: a window with lookahead
    compute_s: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, open_run: OpenRun, config: TrainConfig) -> _Side:
        run = open_run(config)
        run.sharded.module.train()
        batches, reading_s = {}, 0.0
        total = run.ingest.batches_per_epoch
        shares = {is_hot: stream.batches_per_epoch / total for is_hot, stream in run.ingest.streams.items()}
        is_ahead, num_steps = looks_ahead(config), BLOCK_STEPS
        # Two windows in turns: rows of one window would never leave.
        wanted = 2 * config.lookahead_batches if is_ahead else NUM_BATCHES
        for is_hot, stream in run.ingest.streams.items():
            read, seconds = read_batches(stream, wanted)
            batches[is_hot] = cycle(read)
            reading_s += shares[is_hot] * seconds
            if is_ahead:  # ranks may have read different numbers, and must take the same steps
                num_steps = int(broadcast_json(max(1, len(read) // 2)))
        return cls(config=config, run=run, batches=batches, shares=shares, reading_s=reading_s, num_steps=num_steps)

    def warm_up(self) -> float:
        """Train the first steps, and return the seconds of one."""
        for is_hot in self.batches:
            self._steps(is_hot, WARM_UP_STEPS)
        return self.block(self.num_steps)

    def block(self, num_steps: int) -> float:
        """Seconds per step, over the kinds of batches as an epoch mixes them, with reading and swaps."""
        compute_s = 0.0
        for is_hot, share in self.shares.items():
            began = time.perf_counter()
            (self.run.sharded.enter_hot if is_hot else self.run.sharded.leave_hot)()
            swap_s = time.perf_counter() - began
            compute_s += share * self._steps(is_hot, num_steps) / num_steps
            if schedule := self.run.ingest.schedule:
                compute_s += swap_s * schedule.num_turns / self.run.ingest.batches_per_epoch
        self.compute_s.append(compute_s)
        return compute_s + self.reading_s if _is_crowded() else max(compute_s, self.reading_s)

    def _steps(self, is_hot: bool, count: int) -> float:
        began, coming = time.perf_counter(), list(islice(self.batches[is_hot], count))
        if looks_ahead(self.config):
            for batch in coming:
                self.run.prefetch(batch)
        for batch in coming:
            self.run.train_step(batch, is_hot)
        if self.run.device.type == "cuda":
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - began
        self.run.forget_steps()
        return elapsed

    def close(self) -> None:
        self.run.ingest.close()
        self.run.sharded.close()


def read_batches(stream: IngestPipeline, wanted: int = NUM_BATCHES) -> tuple[list[Batch], float]:
    """The first batches of a stream, and the CPU seconds that all stages of ingestion spend on one.

    They are read twice, for the first reading loads libraries and takes memory that later ones find: the side that is
    built first would count it against itself in every step.
    """
    start = stream.state_dict()
    _first_batches(stream, wanted)
    stream.load_state_dict(start)
    batches = _first_batches(stream, wanted)
    stages = [entry for entry in stream.stats().values() if isinstance(entry, dict) and entry.get("rows")]
    per_row_s = sum(entry["cpu_seconds"] / entry["rows"] for entry in stages if "cpu_seconds" in entry)
    return batches, per_row_s * statistics.fmean(map(len, batches))


def _first_batches(stream: IngestPipeline, wanted: int) -> list[Batch]:
    batches, num_bytes, source = [], 0, iter(stream)
    for batch in source:
        batches.append(batch)
        num_bytes += batch.size_in_bytes()
        if len(batches) == wanted or num_bytes > MAX_BATCH_BYTES:
            break
    source.close()  # type: ignore[attr-defined]  # a generator: ends the workers
    return batches


def _is_crowded() -> bool:
    """Whether the ranks' own threads keep all cores of this machine busy, so that reading takes time from them."""
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return num_local * torch.get_num_threads() >= (os.cpu_count() or 1)


def _compare(switch: Switch, old: _Side, new: _Side, *, limit_s: float) -> Verdict:
    """Train both sides in turns until the interval of their ratio is on one side of 1, or time is up."""
    began, logs = time.perf_counter(), list[float]()
    num_steps = max(old.num_steps, new.num_steps)
    while True:
        sides = (old, new) if len(logs) % 2 == 0 else (new, old)
        seconds = {id(side): side.block(num_steps) for side in sides}
        logs.append(math.log(seconds[id(old)] / seconds[id(new)]))
        is_over = len(logs) == MAX_PAIRS or time.perf_counter() - began > limit_s
        # From this rank's clock; rank 0's counts.
        verdict = judge(switch, logs, is_over=is_over, block_steps=num_steps)
        if (told := broadcast_json(verdict and vars(verdict))) is not None:
            return Verdict(**{**told, "switch": switch})


def judge(switch: Switch, logs: Sequence[float], *, is_over: bool, block_steps: int = BLOCK_STEPS) -> Verdict | None:
    """The verdict on log ratios of paired blocks, or None to measure more pairs."""
    if len(logs) < MIN_PAIRS:
        return None
    middle = statistics.median(logs)
    deviation = statistics.median(abs(value - middle) for value in logs)
    error = INTERVAL * MEDIAN_ERROR * deviation / math.sqrt(len(logs))
    if not is_over:  # every look may be misled: the earlier it is, the more it must show (O'Brien and Fleming's bounds)
        error *= math.sqrt(MAX_PAIRS / len(logs))
    if not is_over and middle - error <= 0 <= middle + error:
        return None
    is_on = middle - error > 0
    ratio, low, high = map(math.exp, (middle, middle - error, middle + error))
    steps = f"{len(logs) * block_steps} steps each way"
    outcome = "" if is_on else ", slower" if high < 1 else ", no certain gain"
    reason = f"measured {ratio:.2f}x over {steps} ({low:.2f} to {high:.2f}){outcome}"
    return Verdict(switch=switch, is_on=is_on, reason=reason, ratio=ratio, low=low, high=high)


def _judge_tuning(side: _Side) -> Verdict:
    share = float(broadcast_json(side.reading_s / max(statistics.median(side.compute_s), 1e-9)))
    is_on = share >= READING_SHARE
    reason = f"reading a batch takes {share:.0%} of the time that training it takes" + (
        "" if is_on else ", so that other worker counts would not make training faster"
    )
    return Verdict(switch=Switch.TUNING, is_on=is_on, reason=reason)
