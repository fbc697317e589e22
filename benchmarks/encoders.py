"""What training each distinct list once gains with every sequence encoder: CPU time of training steps.

    python benchmarks/encoders.py [--quick] [--json PATH|-] [--seed K]

Baseline: the same model and the same rows as plain KeyedJaggedTensors. Ours: `dedup=true`. Steps are those of the
training loop on batches that are already read: lookups, encoders, interaction, backward, optimisers. One thread and CPU
time instead of elapsed time, so that other work on the machine hardly matters; both sides take turns in one process.
"""

from __future__ import annotations

import os

from recmill.training.processes import rank_environment

os.environ.update(rank_environment() | {"OMP_NUM_THREADS": "1"})  # before any library reads it

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from harness import Metric, compare, finish, in_turns, parse_options, say
from recd_measures import quieten
from session_logs import Layouts, Logs, why_no_globo
from torchrec import KeyedJaggedTensor
from training_rate import Trainer, check_same_losses, one_rank

from recmill.data.ikjt.batch import Batch
from recmill.training.config import TrainConfig

ENCODERS = ("mean", "attention", "transformer", "standard_transformer", "hstu", "din")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    recd_rows: int
    globo_users: int  # one in this many users
    batch_size: int
    num_batches: int
    repeats: int


SIZES = {
    "tiny": Sizes(recd_rows=300, globo_users=20_000, batch_size=128, num_batches=1, repeats=1),
    "quick": Sizes(recd_rows=8_400, globo_users=200, batch_size=2048, num_batches=1, repeats=3),
    "full": Sizes(recd_rows=18_000, globo_users=100, batch_size=2048, num_batches=3, repeats=9),
}


@contextmanager
def sides(layouts: Layouts, encoder: str, sizes: Sizes, seed: int) -> Iterator[tuple[Trainer, Trainer, list[Batch]]]:
    """A plain trainer, a deduplicating one with the same weights, and batches with distinct lists."""
    config = TrainConfig(sequence_encoder=encoder, batch_size=sizes.batch_size, seed=seed, max_sequence_length=64)
    plain = Trainer(layouts.deduplicated, replace(config, dedup="false"))
    ours = Trainer(layouts.deduplicated, replace(config, dedup="true"))
    with ours.open() as found:
        batches = [batch for _, batch in zip(range(sizes.num_batches), found, strict=False)]
    yield plain, ours, batches


def measure(layouts: Layouts, encoder: str, sizes: Sizes, seed: int) -> Metric:
    with sides(layouts, encoder, sizes, seed) as (plain, ours, batches):
        difference = check_same_losses(plain, ours, num_steps=2)
        every_sample = [
            replace(b, ids=b.ids if isinstance(b.ids, KeyedJaggedTensor) else b.ids.to_kjt()) for b in batches
        ]

        def milliseconds(trainer: Trainer, own: list[Batch]) -> Callable[[], float]:
            def run() -> float:
                started = time.process_time()
                for batch in own:
                    trainer.step(batch)
                return 1e3 * (time.process_time() - started) / len(own)

            return run

        measured = in_turns(
            milliseconds(plain, every_sample), milliseconds(ours, batches), repeats=sizes.repeats, warm_ups=1
        )
    note = f"batches of {sizes.batch_size}, losses on the same rows differ by {difference:.0e}"
    return compare(*measured, unit="ms CPU/step", note=note, less_is_better=True)


def main() -> None:
    options = parse_options(__doc__ or "", quick="one batch per turn, fewer turns")
    sizes = SIZES[options.size]
    quieten()
    torch.set_num_threads(1)
    metrics: dict[str, Metric] = {}
    skipped: dict[str, str] = {}
    reason = why_no_globo()
    with tempfile.TemporaryDirectory() as folder, one_rank():
        logs = Logs(Path(folder), options.seed, widest_globo=sizes.globo_users)
        measured = {"recd": lambda: logs.recd(sizes.recd_rows), "globo": lambda: logs.globo(sizes.globo_users)}
        for name, log in measured.items():
            for encoder in ENCODERS:
                metric = f"{encoder}_{name}"
                if name == "globo" and reason:
                    skipped[metric] = reason
                    continue
                say(metric)
                metrics[metric] = measure(log(), encoder, sizes, options.seed)
    finish(options, metrics, skipped=skipped)


if __name__ == "__main__":
    main()
