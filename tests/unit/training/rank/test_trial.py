"""A trial keeps what pays and leaves no trace; its verdicts are remembered for the same run and for equal ones."""

import json
import math
import time
from dataclasses import replace
from itertools import islice

import pytest
import torch
import torch.distributed as dist

from recmill.artifacts import Dataset, InputError, ShardPlan, dump_record
from recmill.data.cluster import cluster_sessions
from recmill.data.ingest.reader import RowGroupReader
from recmill.data.sources.presets import tiny
from recmill.data.sources.synthetic.generator import generate_log
from recmill.planning.planner import Topology, plan_shards
from recmill.profiling.access import profile_access
from recmill.training.config import TrainConfig
from recmill.training.decisions import decisions_of
from recmill.training.rank import trial
from recmill.training.rank.loop import TrainingRun
from recmill.training.rank.trial import MAX_PAIRS, MIN_PAIRS, add_verdict, judge, read_batches
from recmill.training.rank.worker import open_run
from recmill.training.switches import LOOKAHEAD, Switch
from recmill.training.trainer import make_job
from recmill.training.verdicts import VERDICTS_FILE, Verdict, Verdicts, remember, remembered

CONFIG = TrainConfig(
    batch_size=64, max_steps=24, eval_batch_size=512, bottom_layers=(16,), top_layers=(16,), threads=1, epochs=1
)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trial")
    raw = generate_log(replace(tiny(), num_sessions=150, zipf=1.3), out=folder / "raw")
    data = cluster_sessions(raw, out=folder / "data", layout="deduplicated", eval_fraction=0.2)
    profile = profile_access(data, out=folder / "profile")
    plan_shards(profile, out=folder / "plan", topology=Topology.local(1), memory_budget_bytes=2**24, batch_size=64)
    return folder


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def job_of(work, out, config=CONFIG):
    out.mkdir(exist_ok=True)
    return make_job(work / "data", out=out, plan=work / "plan", allocation=None, nproc=1, config=config)


def slow_down(monkeypatch, is_slow):
    """Make every step of the runs that `is_slow` selects take 50 ms longer."""
    step = TrainingRun.train_step

    def slower(run, batch, is_hot):
        step(run, batch, is_hot)
        time.sleep(0.05 if is_slow(run) else 0.0)

    monkeypatch.setattr(TrainingRun, "train_step", slower)


def test_a_clear_gain_turns_a_switch_on_and_a_clear_loss_turns_it_off():
    gain = judge(Switch.DEDUP, [0.3, 0.31, 0.29, 0.3, 0.32, 0.28], is_over=False)
    assert gain.is_on
    assert gain.ratio == pytest.approx(math.exp(0.3), abs=0.02)
    assert 1 < gain.low < gain.ratio < gain.high
    loss = judge(Switch.DEDUP, [-0.3, -0.31, -0.29, -0.3, -0.32, -0.28], is_over=False)
    assert not loss.is_on
    assert loss.reason.endswith(", slower")
    noise = judge(Switch.DEDUP, [0.3, -0.31, 0.29, -0.3, 0.32, -0.2], is_over=True)
    assert not noise.is_on
    assert noise.reason.endswith(", no certain gain")


def test_an_early_look_must_show_more_than_the_last_one():
    logs = [0.1, 0.02, 0.18, 0.06, 0.14, 0.1]
    assert judge(Switch.TIERS, logs, is_over=False) is None
    assert judge(Switch.TIERS, logs, is_over=True).is_on


def test_noise_is_measured_longer_and_then_left_off():
    logs = [0.2, -0.2, 0.1, -0.1, 0.3, -0.2]
    assert judge(Switch.TIERS, logs, is_over=False) is None
    assert not judge(Switch.TIERS, logs * (MAX_PAIRS // MIN_PAIRS), is_over=True).is_on


def test_one_disturbed_pair_does_not_hide_a_gain():
    assert judge(Switch.DEDUP, [0.3, 0.31, 0.29, -2.0, 0.3, 0.32, 0.28], is_over=False).is_on


def test_looking_ahead_replaces_hot_batches_only_if_it_beats_them():
    hot = Verdict(switch=Switch.HOT_BATCHES, is_on=True, reason="measured 1.50x", ratio=1.5)
    tiers = Verdict(switch=Switch.TIERS, is_on=False, reason="measured 0.90x", ratio=0.9)
    lost, won = (replace(hot, is_on=is_on, reason="measured") for is_on in (False, True))
    assert add_verdict([tiers], hot, "auto") == [tiers, hot]
    assert add_verdict([tiers, hot], lost, LOOKAHEAD) == [tiers, hot]
    assert add_verdict([tiers], lost, LOOKAHEAD) == [tiers, lost]
    found = add_verdict([tiers, replace(hot, is_on=False)], won, LOOKAHEAD)
    verdicts = Verdicts.from_json(json.loads(json.dumps(Verdicts(found=tuple(found)).to_json())))
    assert [own.switch for own in verdicts.found] == [Switch.TIERS, Switch.HOT_BATCHES]
    settled = verdicts.settle(CONFIG)
    assert (settled.tiers, settled.hot_batches, settled.dedup) == ("false", "lookahead", "auto")
    assert Verdicts(found=(hot,)).settle(CONFIG).hot_batches == "auto"


def test_a_switch_that_costs_is_left_off_and_one_that_pays_is_on(work, alone, tmp_path, monkeypatch):
    for name, is_slow, expected in (
        ("costs", lambda run: bool(run.dedup.groups), False),
        ("pays", lambda run: not run.dedup.groups, True),
    ):
        with monkeypatch.context() as patch:
            slow_down(patch, is_slow)
            run = open_run(
                job_of(work, tmp_path / name, replace(CONFIG, session_limit=4 if expected else 3)), torch.device("cpu")
            )
        verdict = run.verdicts.of(Switch.DEDUP)
        assert verdict.is_on is expected
        assert (verdict.ratio > 1) is expected
        assert bool(run.dedup.groups) is expected
        assert (run.config.dedup, run.settings.dedup) == ("auto" if expected else "false", "auto")
        entry = decisions_of(
            run.settings, run.plan, run.dataset, deduplicated=run.dedup.features, is_tuned=False, verdicts=run.verdicts
        )[0]
        assert (entry["is_on"], entry["source"], entry["ratio"]) == (expected, "trial", verdict.ratio)
        run.ingest.close()


def test_what_only_the_first_reading_takes_counts_against_no_side(work, alone, tmp_path, monkeypatch):
    transform, seen = RowGroupReader.transform, set()

    def loads_a_library_first(reader, group, table):
        if not seen:
            seen.add("loaded")
            began = time.thread_time()
            while time.thread_time() - began < 0.2:
                pass
        return transform(reader, group, table)

    run = open_run(job_of(work, tmp_path / "run", replace(CONFIG, trial=False)), torch.device("cpu"))
    stream = run.ingest.streams[False]
    monkeypatch.setattr(RowGroupReader, "transform", loads_a_library_first)
    before = stream.state_dict()
    batches, seconds = read_batches(stream, 4)
    assert seen
    assert seconds < 0.02  # 0.2 s over the rows of the row groups read would be far more
    stream.load_state_dict(before)
    for batch, again in zip(batches, islice(stream, 4), strict=True):
        assert torch.equal(batch.label_BT, again.label_BT)  # the first batches of the run
    run.ingest.close()


def test_a_run_after_a_trial_is_the_run_with_those_switches_set_by_hand(work, alone, tmp_path, monkeypatch):
    for name, is_slow in (("off", lambda run: bool(run.dedup.groups)), ("on", lambda run: not run.dedup.groups)):
        monkeypatch.setattr("recmill.training.verdicts._cache_file", lambda job, num_ranks: None)
        with monkeypatch.context() as patch:
            slow_down(patch, is_slow)
            tried = open_run(job_of(work, tmp_path / name, replace(CONFIG, dropout=0.1)), torch.device("cpu"))
        by_hand = replace(CONFIG, dropout=0.1, trial=False, dedup="auto" if name == "on" else "false")
        alike = open_run(job_of(work, tmp_path / f"hand-{name}", by_hand), torch.device("cpu"))
        assert tried.verdicts.seconds > 0
        assert alike.verdicts.seconds == 0
        # The random state is the process's own: set it as the builders left it.
        torch.manual_seed(7)
        first = tried.train()
        torch.manual_seed(7)
        second = alike.train()
        assert first["curve"][-1]["loss"] == second["curve"][-1]["loss"]
        assert [entry["loss"] for entry in first["curve"]] == [entry["loss"] for entry in second["curve"]]
        assert first["metrics"] == second["metrics"]
        assert first["usage"]["num_steps"] == second["usage"]["num_steps"] == CONFIG.max_steps


def test_building_a_run_after_a_trial_leaves_the_random_state_as_without_one(work, alone, tmp_path):
    states = []
    for name, settings in (("tried", {}), ("plain", {"trial": False})):
        run = open_run(job_of(work, tmp_path / name, replace(CONFIG, session_limit=5, **settings)), torch.device("cpu"))
        states.append(torch.get_rng_state())
        run.ingest.close()
    assert torch.equal(*states)


def test_a_short_run_and_a_refused_trial_follow_the_plan(work, alone, tmp_path):
    for name, config in (("short", replace(CONFIG, max_steps=5)), ("refused", replace(CONFIG, trial=False))):
        run = open_run(job_of(work, tmp_path / name, config), torch.device("cpu"))
        assert run.verdicts.found == ()
        assert run.verdicts.obstacle
        assert run.dedup.groups
        run.ingest.close()


def test_verdicts_are_remembered_for_equal_runs_and_forgotten_for_others(work, tmp_path):
    job = job_of(work, tmp_path / "first", replace(CONFIG, session_limit=7))
    own = Verdict(switch=Switch.DEDUP, is_on=False, reason="measured 0.80x", ratio=0.8, low=0.7, high=0.9)
    remember(job, Verdicts(found=(own,), seconds=2.0), num_ranks=1)
    (tmp_path / "second").mkdir()
    equal = {**job, "out": str(tmp_path / "second")}
    assert remembered(equal, num_ranks=1) == Verdicts(found=(own,), seconds=0.0)
    assert remembered({**equal, "config": {**job["config"], "seed": 9, "epochs": 3}}, num_ranks=1) is not None
    for other in (
        {**equal, "config": {**job["config"], "batch_size": 128}},
        {**equal, "config": {**job["config"], "model": "dcn"}},
        {**equal, "inputs": {**job["inputs"], "plan": "another"}},
        {**equal, "inputs": {**job["inputs"], "dataset": "another"}},
        {**equal, "plan": None},
    ):
        assert remembered(other, num_ranks=1) is None
    assert remembered(equal, num_ranks=2) is None


def test_a_resumed_run_decides_as_it_did_before_even_on_other_ranks(work, tmp_path):
    job = {**job_of(work, tmp_path / "run"), "plan": None}
    verdicts = Verdicts(
        found=(Verdict(switch=Switch.TIERS, is_on=True, reason="measured 1.20x", ratio=1.2),), seconds=1.5
    )
    remember(job, verdicts, num_ranks=1)
    assert json.loads((tmp_path / "run" / VERDICTS_FILE).read_text())["kind"] == "verdicts"
    assert remembered(job, num_ranks=4) == verdicts


def test_a_run_that_began_without_verdicts_is_not_tried_when_it_resumes(work, alone, tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "newest_checkpoint", lambda folder: folder)  # as an older version left it
    job = job_of(work, tmp_path / "old", replace(CONFIG, session_limit=6))
    run = {"config": CONFIG, "plan": ShardPlan.load(work / "plan"), "dataset": Dataset.load(work / "data")}
    verdicts = trial.decide_switches(job, **run, open_run=lambda config: pytest.fail("no run is built"))
    assert (verdicts.found, verdicts.obstacle) == ((), "the run began without a trial")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"found": 7}, "found is 7, expected a list"),
        ({"found": [{"switch": "speed", "is_on": True, "reason": ""}]}, "'speed', expected one of dedup, tiers"),
        ({"seconds": "x"}, "seconds is 'x', expected a finite number"),
    ],
)
def test_made_up_verdicts_are_refused_with_their_file(changes, sentence, tmp_path):
    (tmp_path / "verdicts.json").write_text(dump_record({**Verdicts().to_json(), **changes}))
    with pytest.raises(InputError, match=rf"verdicts\.json: .*{sentence}"):
        Verdicts.load(tmp_path / "verdicts.json")
