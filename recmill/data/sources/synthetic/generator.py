"""Synthetic session logs: realistic traffic whose best reachable AUC is known.

The parts of a log and the settings that control them:

    sessions   start as a Poisson process; sizes are a capped log-normal with the mean `samples_per_session`
    samples    follow each other after log-normal gaps, so that sessions interleave in time as in real traffic
    user       groups of lists and dense values that change together; they stay from sample to sample with `stay_prob`
    history    the user's last items; shifts by one with `shift_prob`, taking in the item of the sample before
    item       one id per feature and dense values, new for every sample
    ids        Zipf with exponent `zipf` in every table
    labels     drawn from hidden logistic models of all of these; each after the first needs the one before to be 1

Memory is bounded for logs of any length: sessions are made in blocks, and samples later than the start of the newest
session wait in a form that stores every repeated list once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from recmill.data.sources.log_writer import write_log
from recmill.data.sources.synthetic.blocks import BlockMaker, SampleBlock
from recmill.data.sources.synthetic.config import SyntheticConfig, schema_of
from recmill.data.sources.synthetic.hidden_model import BestScores
from recmill.progress import Progress, no_progress

MIN_WAITING_SHARE = 0.5  # neither number changes the output
ROWS_PER_BATCH = 16_384


def generate_log(config: SyntheticConfig, *, out: str | Path, progress: Progress = no_progress) -> str | Path:
    """A raw log at `out`: `log-*.parquet` in time order and `schema.json`, whose info has the best reachable AUC."""
    scores = {name: BestScores() for name in config.labels}

    def info() -> dict[str, object]:
        settings = ("num_sessions", "samples_per_session", "zipf", "stay_prob", "shift_prob", "seed")
        best, *later = (
            {"best_auc": own.auc, "best_log_loss": own.log_loss, "base_rate": own.base_rate} for own in scores.values()
        )
        labels = {"labels": dict(zip(config.labels[1:], later, strict=True))} if later else {}
        return best | labels | {name: getattr(config, name) for name in settings}

    return write_log(out, schema_of(config), stream_samples(config, scores, progress=progress), info=info)


def stream_samples(
    config: SyntheticConfig, scores: Mapping[str, BestScores], *, progress: Progress = no_progress
) -> Iterator[pa.RecordBatch]:
    """The samples of the whole log in time order.

    A new session starts no earlier than the newest one, so every sample before that moment is final. New blocks are
    merged with the waiting samples only when they add up to MIN_WAITING_SHARE of them: each sample then moves a few
    times, and at most 1 + MIN_WAITING_SHARE times the samples of open sessions are in memory.
    """
    maker = BlockMaker(config)
    waiting: SampleBlock | None = None
    fresh: list[SampleBlock] = []
    while not maker.is_done or fresh:
        if not maker.is_done:
            block, logits = maker.next_block()
            fresh.append(block)
            for name, own in scores.items():
                own.add(logits[name], block.samples[name])
            progress("generate sessions", maker.num_made, config.num_sessions)
        num_waiting = waiting.num_samples if waiting is not None else 0
        if not maker.is_done and sum(b.num_samples for b in fresh) < MIN_WAITING_SHARE * num_waiting:
            continue
        merged = SampleBlock.concat([*([waiting] if waiting is not None else []), *fresh])
        fresh = []
        is_final = merged.samples["timestamp"] < (np.iinfo(np.int64).max if maker.is_done else maker.last_start_ms)
        final = np.flatnonzero(is_final)
        order = final[np.lexsort((merged.samples["session_id"][final], merged.samples["timestamp"][final]))]
        for start in range(0, len(order), ROWS_PER_BATCH):
            yield merged.to_arrow(order[start : start + ROWS_PER_BATCH], maker.arrow_schema)
        waiting = merged.select(np.flatnonzero(~is_final))
