"""What tuned ingestion gains (InTune): against other loaders, against fixed workers, against an oracle.

    python benchmarks/intune.py [--quick] [--json PATH|-] [--seed K]

(a) local Parquet, CPU-bound: our pipeline with the workers that `tune` finds, against the best other loader with
the best worker count tried, same rows (checked by hash), same work; once all decode with Arrow, once with our kernel.
Skipped unless Grain, torchdata and SPDL are installed. (b) reads that take 50 ms: tuned at run time, against one worker
per stage and, where tensorflow is installed, against tf.data's AUTOTUNE. (c) two stages of 0.17 and 0.21 s on 126
slots: tuned from one worker per stage, against hand-set workers. (d) events during a run. (e) the simulator, calibrated
on (a), at 32, 64 and 128 cores over nine seeds: `sim_oracle_share` is the agent's share of the oracle's rows,
`sim_vs_lp` the agent against the linear programme solved again every interval, `sim_vs_bounded` against the programme
that the agent corrects, `sim_oom` out-of-memory kills (baseline: AUTOTUNE-like without the guard).
Missing peers are listed under `skipped` with the prefix "peer: ".
"""

from __future__ import annotations

import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# As in `recmill train`, for all loaders: pages of one run are reused by the next instead of being faulted in again.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "10000")

import torch
from harness import (
    Options,
    compare,
    in_turns,
    parse_options,
    plain_count,
    plain_value,
    say,
    warn_if_busy,
)
from intune_calibration import POINTS, Calibration, calibrate
from intune_controllers import Controller, TunedByAgent, baselines
from intune_data import hash_rows, write_dataset
from intune_live import epoch_rate, hash_of, late_reads, live_events, two_stages
from intune_peers import Loader, autotuned_rate, has_autotune, installed_peers
from intune_simulation import describe, make_exam, sit
from parts import Found, Parts

from recmill.artifacts import Dataset, InputError, read_json, read_record, record_json
from recmill.tuning.agent import Agent
from recmill.tuning.allocation import tune_ingest
from recmill.tuning.cores import available_cores
from recmill.tuning.simulation.stage_times import measure_stages

NUM_SEEDS = 9
CORES = (32, 64, 128)
# Measured on a quiet machine; used, with a note, if other work spoils the calibration of a run.
STORED_CALIBRATION = Path(__file__).with_name("intune_calibration.json")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a run."""

    groups: int  # row groups of 8,192 rows
    epochs: int  # per run; threads start and queues fill once per run, for ours and the peers
    turns: int
    pairs: int  # of (b) and (c)
    worlds: int  # per seed, a multiple of 48: every kind of world with every event and number of cores
    late_s: float
    two_stage_epochs: int
    phase_s: float
    tune_s: float
    calibrate_s: float  # first try


SIZES = {
    "tiny": Sizes(
        groups=3,
        epochs=1,
        turns=1,
        pairs=1,
        worlds=48,
        late_s=2,
        two_stage_epochs=1,
        phase_s=0.5,
        tune_s=1.4,
        calibrate_s=0.6,
    ),
    "quick": Sizes(
        groups=16,
        epochs=4,
        turns=2,
        pairs=1,
        worlds=96,
        late_s=6,
        two_stage_epochs=14,
        phase_s=0.8,
        tune_s=5.6,
        calibrate_s=2.4,
    ),
    "full": Sizes(
        groups=48,
        epochs=4,
        turns=9,
        pairs=9,
        worlds=480,
        late_s=24,
        two_stage_epochs=60,
        phase_s=6,
        tune_s=14,
        calibrate_s=6,
    ),
}
BATCH_SIZE = 4096
NEEDED_PEERS = ("Grain", "torchdata nodes", "SPDL")
DECODERS = {"Arrow's decoder": False, "our decoder": True}
CROWDED = "ours, 8 workers per stage"
SAME_DECODER = {"Arrow's decoder": "local_vs_peers_arrow", "our decoder": "local_vs_peers_pages"}


def main() -> None:
    options = parse_options(__doc__ or "", quick="fewer rows, worlds and seconds: under 90 s on 2 cores")
    warnings.filterwarnings("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    torch.set_num_threads(1)
    warn_if_busy()
    sizes = SIZES[options.size]
    parts = Parts(options)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        say("write the Parquet that every loader reads")
        local = write_dataset(folder / "local", num_groups=sizes.groups, rows_per_group=8_192, seed=options.seed)
        small = write_dataset(folder / "small", num_groups=128, rows_per_group=512, seed=options.seed, num_lists=4)
        # Almost no work: the stages of (c) sleep.
        idle = write_dataset(
            folder / "idle", num_groups=128, rows_per_group=8, seed=options.seed, num_dense=1, num_lists=1
        )
        agent = Agent()
        for decoder in DECODERS:  # a part each: together they take longer than a quiet machine is to be had for
            parts.measure(f"local Parquet, {decoder}", partial(against_peers, local, folder, sizes, decoder))
        parts.measure("late reads", lambda: against_late_reads(small, agent, sizes))
        parts.measure("two slow stages", lambda: against_preset(idle, agent, sizes))
        parts.measure("events", lambda: during_events(small, agent, sizes))
        parts.measure("simulation", lambda: in_simulation(local, agent, sizes, options))
    parts.finish()


def against_peers(dataset: Dataset, folder: Path, sizes: Sizes, decoder: str) -> Found:
    """Every loader with one decoder; with ours also our pipeline with too many workers."""
    say("(a) tune our pipeline")
    out = folder / f"allocation {decoder}"
    allocation = tune_ingest(dataset, out=out, batch_size=BATCH_SIZE, memory_limit_bytes=2**31, seconds=sizes.tune_s)
    peers, missing = installed_peers()
    workers, decodes_pages = allocation.stages, DECODERS[decoder]
    expected = hash_of(dataset, batch_size=BATCH_SIZE, workers=workers)
    sides: dict[str, Callable[[], float]] = {"ours": partial(our_rate, dataset, workers, sizes, decodes_pages)}
    equal = {}
    for name, (loader, counts) in peers.items():
        for count in counts:
            own = f"{name} ({count})"
            equal[own] = hash_rows(loader(dataset, BATCH_SIZE, count, 1, decodes_pages)) == expected
            sides[own] = partial(peer_rate, loader, dataset, count, sizes, decodes_pages)
    if decodes_pages:
        crowded = dict.fromkeys(workers, 8)
        equal[CROWDED] = hash_of(dataset, batch_size=BATCH_SIZE, workers=crowded) == expected
        sides[CROWDED] = partial(our_rate, dataset, crowded, sizes, decodes_pages)
    say(f"(a) {len(sides)} loaders with {decoder}, {sizes.turns} turns")
    rates = dict(zip(sides, in_turns(*sides.values(), repeats=sizes.turns), strict=True))
    found = {name: statistics.median(own) for name, own in rates.items()}
    counts_text = "/".join(str(own) for own in workers.values())
    best = max((name for name in rates if name not in ("ours", CROWDED)), key=found.__getitem__)
    note = (
        f"best of {len(peers)} loaders: {best}; not installed: {', '.join(missing) or 'none'}; row hashes equal: "
        f"{all(equal.values())}; ours with {counts_text} workers ({', '.join(workers)})"
    )
    metrics = {SAME_DECODER[decoder]: compare(rates[best], rates["ours"], unit="rows/s", note=note)}
    skipped = {f"peer: {name}": reason for name, reason in missing.items()}
    if needed := [name for name in NEEDED_PEERS if name in missing]:  # without them the best of the others is no rival
        skipped |= dict.fromkeys(metrics, f"not installed: {', '.join(needed)}")
        metrics = {}
    if decodes_pages:
        note = f"tuned: {counts_text} workers"
        metrics["crowded_vs_tuned"] = compare(rates["ours"], rates[CROWDED], unit="rows/s", note=note)
    details = {
        "rows_per_s": found,
        "hashes_equal": equal,
        "workers": workers,
        "cpu_seconds_a_million_rows": 1e6 * allocation.cpu_seconds / max(1, allocation.num_rows),
    }
    return Found(metrics=metrics, skipped=skipped, extra={"details": {f"local, {decoder}": details}})


def our_rate(dataset: Dataset, workers: Mapping[str, int], sizes: Sizes, decodes_pages: bool) -> float:
    return epoch_rate(dataset, workers, batch_size=BATCH_SIZE, epochs=sizes.epochs, decodes_pages=decodes_pages)


def peer_rate(loader: Loader, dataset: Dataset, count: int, sizes: Sizes, decodes_pages: bool) -> float:
    """Rows per second of another loader over the same epochs."""
    began = time.perf_counter()
    num_rows = sum(map(len, loader(dataset, BATCH_SIZE, count, sizes.epochs, decodes_pages)))
    return num_rows / (time.perf_counter() - began)


def against_late_reads(dataset: Dataset, agent: Agent, sizes: Sizes) -> Found:
    runs = []
    for turn in range(sizes.pairs):
        say(f"(b) reads that take 50 ms, turn {turn + 1} of {sizes.pairs}")
        shape = {"delay_s": 0.05, "seconds": sizes.late_s, "interval_s": min(0.5, sizes.late_s / 20)}
        runs.append(late_reads(dataset, agent, **shape))
    found = runs[0]
    reached = found["seconds_to_10x"]
    when = "10x not reached" if reached is None else f"10x after {reached:.1f} s"
    note = f"{when}; workers at the end: {found['history'][-1]['workers'] if found['history'] else 'none'}"
    sides = [[run[name] for run in runs] for name in ("one_worker", "tuned")]
    metrics = {"latency_speedup": compare(*sides, unit="rows/s", note=note)}
    if has_autotune():
        autotuned = [autotuned_rate(dataset, delay_s=0.05, seconds=sizes.late_s) for _ in runs]
        metrics["latency_vs_autotune"] = compare(
            autotuned, sides[1], unit="rows/s", note="tf.data with AUTOTUNE, the same sleep before each read"
        )
        skipped = {}
    else:
        skipped = {"latency_vs_autotune": "tensorflow is not installed (pip install 'recmill[peers]')"}
    return Found(metrics=metrics, skipped=skipped, extra={"details": {"late_reads": found}})


def against_preset(dataset: Dataset, agent: Agent, sizes: Sizes) -> Found:
    settings = {"epochs": sizes.two_stage_epochs, "slots": 126, "interval_s": 0.25}
    seconds: list[list[float]] = [[], []]
    for turn in range(sizes.pairs):
        say(f"(c) two stages of 0.17 and 0.21 s on 126 slots, turn {turn + 1} of {sizes.pairs}")
        preset = two_stages(dataset, None, **settings)
        tuned = two_stages(dataset, agent, **settings)
        assert preset["rows"] == tuned["rows"]
        for side, run in zip(seconds, (preset, tuned), strict=True):
            side.append(run["seconds"])
    items = 128 * sizes.two_stage_epochs
    note = f"{items} row groups; hand-set {preset['workers']}, tuned from one worker per stage to {tuned['workers']}"
    metric = compare(*seconds, unit="s", less_is_better=True, note=note)
    details = {"two_stages": {"preset": preset, "tuned": tuned}}
    return Found(metrics={"two_stage_vs_preset": metric}, extra={"details": details})


def during_events(dataset: Dataset, agent: Agent, sizes: Sizes) -> Found:
    say("(d) events during a run")
    found = live_events(dataset, agent, phase_s=sizes.phase_s, interval_s=sizes.phase_s / 10)
    return Found(extra={"details": {"events": found}})


SIMULATED = ("sim_oracle_share", "sim_after_event", "sim_vs_lp", "sim_vs_bounded", "sim_vs_even", "sim_oom")


def calibrated(dataset: Dataset, sizes: Sizes) -> Calibration:
    """The simulator, calibrated on (a) in up to three tries: other work can spoil one, and it is then rejected."""
    error: InputError | None = None
    for attempt in range(3):
        say(f"(e) calibrate the simulator, try {attempt + 1}")
        found = calibrate(
            dataset,
            measure_stages(dataset, batch_size=BATCH_SIZE),
            cores=available_cores(),
            batch_size=BATCH_SIZE,
            memory_limit_bytes=2 * 2**30,
            measure_s=(1 + attempt) * sizes.calibrate_s / len(POINTS),
        )
        try:
            found.check()
        except InputError as refused:
            error = refused
        else:
            return found
    assert error is not None
    raise error


def in_simulation(dataset: Dataset, agent: Agent, sizes: Sizes, options: Options) -> Found:
    refused = ""
    try:
        calibration = calibrated(dataset, sizes)
    except InputError as error:
        if not STORED_CALIBRATION.exists():
            return Found(skipped=dict.fromkeys(SIMULATED, str(error)))
        refused = f"; {error}: the calibration of {STORED_CALIBRATION.name} is used"
        calibration = read_record(Calibration, read_json(STORED_CALIBRATION), where=str(STORED_CALIBRATION))
        calibration.check()
    say(f"(e) simulate: held-out error {calibration.error:.1%}")
    seeds = [1000 * options.seed + seed for seed in range(NUM_SEEDS)]
    exam = make_exam(calibration, size=sizes.worlds, cores=CORES, seeds=seeds)
    controllers: list[Controller] = [*baselines(), TunedByAgent(agent)]
    found = {controller.name: describe(exam, sit(exam, controller)) for controller in controllers}
    ours, programme, bounded, even, unguarded = (
        found[name] for name in ("agent", "LP re-profiled", "bounded LP", "even split", "AUTOTUNE-like")
    )
    where = f"{NUM_SEEDS} seeds x {sizes.worlds} worlds at 32, 64 and 128 cores{refused}"
    kinds = ", ".join(f"{kind} {ours['by_kind'][kind] / programme['by_kind'][kind]:.3f}" for kind in ours["by_kind"])
    metrics = {
        "sim_oracle_share": plain_value(ours["seeds"], unit="of oracle", note=f"{where}; p10 {ours['p10']:.3f}"),
        "sim_after_event": plain_value(
            ours["after_seeds"],
            unit="of oracle",
            note=f"cores, storage, trainer or memory changed; LP {programme['after']:.3f}",
        ),
        "sim_vs_lp": compare(programme["seeds"], ours["seeds"], unit="oracle share", note=f"ratio by kind: {kinds}"),
        "sim_vs_bounded": compare(bounded["seeds"], ours["seeds"], unit="oracle share", note=where),
        "sim_vs_even": compare(even["seeds"], ours["seeds"], unit="oracle share", note=where),
        "sim_oom": {
            **plain_count(ours["ooms"], unit="kills", note=f"{where}; baseline: AUTOTUNE-like, no guard, no credits"),
            "baseline": unguarded["ooms"],
        },
    }
    details = {"simulation": {"calibration": record_json(calibration), "controllers": found}}
    return Found(metrics=metrics, extra={"details": details})


if __name__ == "__main__":
    main()
