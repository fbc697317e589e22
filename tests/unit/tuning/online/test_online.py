import sys
import threading
import time
from pathlib import Path

import pytest

from recmill.artifacts import InputError, WorkerAllocation
from recmill.artifacts.allocation import Throughput
from recmill.data.ingest import STAGES, IngestPipeline
from recmill.tuning.agent import Agent
from recmill.tuning.online.live import PipelineMeter, default_slots
from recmill.tuning.online.tuner import MAX_HISTORY, OnlineTuner

sys.path.append(str(Path(__file__).parents[1] / "data" / "ingest"))
from tests.unit.data.ingest.small_dataset import write_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("online") / "dataset", [[16] * 60])


def run(dataset, *, seconds, delay_s=0.0, during=None, **options):
    """Read batches for some seconds while a tuner works; gives the tuner and all labels."""
    labels, delays_s = [], {"read": delay_s}
    with (
        IngestPipeline(dataset, split="all", batch_size=16, epochs=10_000, delays_s=delays_s) as pipeline,
        OnlineTuner(pipeline, interval_s=0.1, **options) as tuner,
    ):
        began = time.monotonic()
        for batch in pipeline:
            labels += batch.label_B.tolist()
            if during:
                during(tuner, time.monotonic() - began)
            if time.monotonic() - began > seconds:
                break
        workers = pipeline.workers
    assert tuner.error is None
    return tuner, labels, workers


def test_slow_reads_get_workers_while_the_run_goes_on(dataset):
    tuner, labels, workers = run(dataset, seconds=3.0, delay_s=0.02, agent=Agent(), cores=2)
    history = tuner.history()
    assert workers["read"] >= 4
    assert history[0]["workers"] == dict.fromkeys(STAGES, 1)
    assert max(entry["rows_per_s"] for entry in history) > 2 * history[0]["rows_per_s"]
    assert set(history[0]) >= {"t", "workers", "rows_per_s", "stall", "event", "controller"}
    whole = len(labels) // 960 * 960
    for start in range(0, whole, 960):
        assert sorted(labels[start : start + 960]) == list(range(960)), "every row once an epoch"


def test_the_shipped_agent_tunes_a_pipeline(dataset):
    tuner, _, workers = run(dataset, seconds=2.0, delay_s=0.01, cores=2)
    assert sum(workers.values()) <= default_slots(2)
    assert {entry["controller"] for entry in tuner.history()} <= {"agent", "linear programme"}


def test_no_agent_is_asked_while_the_reader_never_waits(dataset):
    loaded = []

    class Watched(OnlineTuner):
        def _open_agent(self):
            loaded.append(self)
            return super()._open_agent()

    was_quick = None
    with IngestPipeline(dataset, split="all", batch_size=16, epochs=10_000) as pipeline:
        batches = iter(pipeline)
        next(batches)  # whatever the first one waits for, imports among it
        with Watched(pipeline, interval_s=0.2, cores=2) as tuner:
            began = time.monotonic()
            for _ in batches:
                elapsed_s = time.monotonic() - began
                if elapsed_s < 1.5:
                    time.sleep(0.02)  # far slower than ingestion
                elif was_quick is None:
                    was_quick = not loaded, pipeline.workers
                    pipeline.set_delays({"read": 0.02})  # now ingestion is the slower one
                history = tuner.history()
                if elapsed_s > 10 or (history and history[-1]["controller"] != "none"):
                    break
    assert was_quick == (True, dict.fromkeys(STAGES, 1))
    assert loaded == [tuner]
    assert history[0]["controller"] == "none"
    assert history[-1]["controller"] == "linear programme"  # the agent's own first answer


def test_events_are_noticed(dataset):
    done = set()

    def during(tuner, elapsed_s):
        if elapsed_s > 0.8 and "cores" not in done:
            done.add("cores")
            tuner.set_cores(1)
        if elapsed_s > 1.6 and "memory" not in done:
            done.add("memory")
            tuner.set_memory_limit(10 * 2**20)

    tuner, _, _ = run(dataset, seconds=2.6, during=during, agent=Agent(), cores=4)
    events = "; ".join(entry["event"] for entry in tuner.history() if entry["event"])
    assert "cores 4 to 1" in events
    assert "memory limit" in events


def test_an_allocation_is_the_start(dataset):
    with IngestPipeline(dataset, split="all", batch_size=16) as pipeline:
        one = Throughput(stages=dict.fromkeys(STAGES, 1), rows_per_s=1.0, memory_bytes=1)
        stages = {"read": 3, "decode": 2}
        OnlineTuner(pipeline, allocation=WorkerAllocation(**{**vars(one), "stages": stages}, baseline=one, agent=None))
        assert pipeline.workers == {"read": 3, "decode": 2, "transform": 1, "batch": 1}


def test_wrong_settings_are_one_sentence(dataset):
    pipeline = IngestPipeline(dataset, split="all", batch_size=16)
    with pytest.raises(InputError, match="interval_s is 0"):
        OnlineTuner(pipeline, interval_s=0)
    with pytest.raises(InputError, match="cores is 0"):
        OnlineTuner(pipeline).set_cores(0)
    with pytest.raises(InputError, match="too small"):
        OnlineTuner(pipeline).set_memory_limit(10)


def test_a_controller_that_fails_leaves_training_alone(dataset):
    class Failing(Agent):
        def decide(self, measured):
            raise RuntimeError("no idea")

    with (
        IngestPipeline(dataset, split="all", batch_size=16, epochs=200) as pipeline,
        OnlineTuner(pipeline, agent=Failing(), interval_s=0.05) as tuner,
    ):
        rows = 0
        for batch in pipeline:
            rows += len(batch)
            time.sleep(0.001)
            if tuner.error:
                break
    assert "no idea" in str(tuner.error)
    assert tuner.history()[-1]["event"] == "tuning stopped: no idea"
    assert rows


def test_the_history_of_a_long_run_stays_short(dataset):
    with IngestPipeline(dataset, split="all", batch_size=16) as pipeline:
        tuner = OnlineTuner(pipeline)
        for number in range(5 * MAX_HISTORY):
            tuner._note(None, event=str(number), controller="none")
    history = tuner.history()
    assert MAX_HISTORY / 2 <= len(history) <= MAX_HISTORY
    numbers = [int(entry["event"]) for entry in history]
    assert numbers == sorted(numbers)
    assert (numbers[0], numbers[-1]) == (0, 5 * MAX_HISTORY - 1)


def test_the_first_decision_does_not_wait_for_the_first_batch(dataset):
    """A batch of 16 rows needs row groups of all lanes; each takes 0.1 s to read, one after the other."""
    with IngestPipeline(dataset, split="all", batch_size=16, epochs=4, delays_s={"read": 0.1}) as pipeline:
        meter = PipelineMeter(pipeline)
        thread = threading.Thread(target=lambda: next(iter(pipeline)), daemon=True)
        thread.start()
        measured = None
        while measured is None and thread.is_alive():
            time.sleep(0.05)
            measured = meter.measure(cores=2, slots=16)
        thread.join()
    assert measured is not None
    assert measured.rows_per_s_B[0] == 0
    assert measured.stall_B[0] > 0.9
    assert (measured.seconds_BS > 0).all()
