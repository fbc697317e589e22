import threading

from small_dataset import SCHEMA, write_dataset

from recmill.data.ingest.clock import Taken
from recmill.data.ingest.crew import Crew
from recmill.data.ingest.stages import PlainReader
from recmill.data.ingest.statistics import StageCounter
from recmill.data.ingest.work import RowGroupWork, never_waits


def test_a_task_is_followed_up_by_the_thread_that_did_it():
    lock, todo, done = threading.RLock(), [(item, 0) for item in range(20)], []
    is_over = threading.Event()

    def do(task):
        done.append((*task, threading.get_ident()))
        if len(done) == 60:
            is_over.set()
        return (task[0], task[1] + 1) if task[1] < 2 else None

    crew = Crew(
        lock, take=lambda: todo.pop() if todo else None, has_task=lambda: bool(todo), do=do, is_over=is_over.is_set
    )
    crew.resize(4)
    assert is_over.wait(10)
    with lock:
        crew.wake_all()
    crew.join()
    assert sorted((item, step) for item, step, _ in done) == [(item, step) for item in range(20) for step in range(3)]
    assert len({(item, thread) for item, _, thread in done}) == 20


class OwnTransform(PlainReader):
    def transform(self, group, table):
        return super().transform(group, table)


def test_only_stages_that_wait_or_are_the_users_own_are_probed_for_the_gil(tmp_path):
    dataset = write_dataset(tmp_path / "dataset", [[4]])
    busy = Taken(seconds=0.02, cpu_seconds=0.02, queued_seconds=0.0)
    waiting = Taken(seconds=0.04, cpu_seconds=0.02, queued_seconds=0.0)
    short = Taken(seconds=0.004, cpu_seconds=0.001, queued_seconds=0.0)
    ours, theirs = (RowGroupWork(kind(dataset, SCHEMA)) for kind in (PlainReader, OwnTransform))
    assert [ours._is_suspect("transform", taken) for taken in (busy, waiting, short)] == [False, True, False]
    assert [theirs._is_suspect("transform", taken) for taken in (busy, waiting, short)] == [True, True, False]
    assert not theirs._is_suspect("decode", busy)


def test_a_stage_that_computes_has_no_more_in_hand_than_cores_and_one_that_waits_all_its_workers():
    computing, waiting = StageCounter(workers=8, core_share=1.0), StageCounter(workers=8)
    assert (computing.most_at_once(2), waiting.most_at_once(2)) == (2, 8)
    for _ in range(40):
        waiting.add(rows=1, num_bytes=1, taken=Taken(seconds=1.0, cpu_seconds=0.01, queued_seconds=0.0))
        computing.add(rows=1, num_bytes=1, taken=Taken(seconds=4.0, cpu_seconds=1.0, queued_seconds=3.0))
    assert (computing.most_at_once(2), waiting.most_at_once(2)) == (2, 8)
    for _ in range(40):  # storage that has become slower
        computing.add(rows=1, num_bytes=1, taken=Taken(seconds=2.0, cpu_seconds=1.0, queued_seconds=0.0))
    assert computing.most_at_once(2) == 4
    assert computing.most_at_once(32) == 8


def test_reading_and_stages_of_others_may_wait(tmp_path):
    class Own(PlainReader):
        def transform(self, group, table):
            return super().transform(group, table)

    dataset = write_dataset(tmp_path / "dataset", [[4]])
    known = {stage: never_waits(Own(dataset, SCHEMA), stage) for stage in ("read", "decode", "transform", "batch")}
    assert known == {"read": False, "decode": True, "transform": False, "batch": True}
