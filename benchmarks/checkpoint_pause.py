"""How long training stands still for a checkpoint: written beside training from a copy, against written at once.

    python benchmarks/checkpoint_pause.py [--quick] [--json PATH|-] [--seed K]

Both train the same steps on the preset small with a table of many rows and save every few steps to a local disk; the
files are the same. A pause is everything between two steps that saving adds, without waiting for the save before.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from harness import Metric, compare, finish, in_turns, parse_options, say, warn_if_busy

from recmill.data.cluster import cluster_sessions
from recmill.data.sources.raw_log import make_raw_log
from recmill.training.config import TrainConfig
from recmill.training.trainer import train

SESSIONS = {"tiny": 200, "quick": 10_000, "full": 50_000}
PAIRS = {"tiny": 2, "quick": 3, "full": 9}
EVERY = {"tiny": 2, "quick": 10, "full": 20}  # steps
NUM_SAVES = 5


def measure(folder: Path, size: str, seed: int) -> dict[str, Metric]:
    make_raw_log("small", out=folder / "raw", overrides={"sessions": SESSIONS[size], "seed": seed})
    data = cluster_sessions(folder / "raw", out=folder / "data", layout="deduplicated", eval_fraction=0.1).path
    pauses: dict[str, list[float]] = {"true": [], "false": []}
    waits: list[float] = []

    def run(mode: str) -> float:
        out = folder / "run"
        config = TrainConfig(
            checkpoint_async=mode,
            checkpoint_every=EVERY[size],
            max_steps=EVERY[size] * NUM_SAVES,
            hot_batches="false",
            tuning="false",
            epochs=20,
            trial=False,
            seed=seed,
        )
        saving = train(data, out=out, config=config)["saving"]
        shutil.rmtree(out)
        # The last save, of the finished model, is always written at once: the longest pause of "true" may be its.
        pauses[mode].append(saving["pause_seconds"] / saving["num_saves"])
        if mode == "true":
            waits.append(saving["wait_seconds"] / saving["num_saves"])
            say(f"copies of {saving['copied_bytes'] / 2**20:.0f} MiB")
        return pauses[mode][-1]

    at_once, beside = in_turns(lambda: run("false"), lambda: run("true"), repeats=PAIRS[size], warm_ups=0)
    say(f"pause per save: at once {at_once[-1]:.3f} s, beside training {beside[-1]:.3f} s")
    note = "mean pause per save, 1 process, local disk; baseline: checkpoint_async=false; the last save is at once"
    wait = {"baseline": None, "ours": sum(waits) / len(waits), "ratio": None, "spread": None, "unit": "s"}
    return {
        "checkpoint_pause": compare(at_once, beside, unit="s", note=note, less_is_better=True),
        "checkpoint_wait": {**wait, "note": "wait for the save before, mean per save"},
    }


def main() -> None:
    options = parse_options(__doc__, quick="a fifth of the rows, 3 pairs instead of 9")
    warn_if_busy()
    with tempfile.TemporaryDirectory() as scratch:
        finish(options, measure(Path(scratch), options.size, options.seed))


if __name__ == "__main__":
    main()
