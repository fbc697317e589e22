import threading

from recmill.data.ingest.crew import Crew
from recmill.data.ingest.statistics import ActiveItems, StageCounter, Taken


def test_a_task_is_followed_up_by_the_thread_that_did_it():
    lock, todo, done = threading.RLock(), [(item, 0) for item in range(20)], []
    is_over = threading.Event()

    def perform(task):
        return (*task, threading.get_ident())

    def finish(task, result):
        done.append(result)
        if len(done) == 60:
            is_over.set()
        return (task[0], task[1] + 1) if task[1] < 2 else None

    crew = Crew(
        lock,
        take=lambda: todo.pop() if todo else None,
        has_task=lambda: bool(todo),
        perform=perform,
        finish=finish,
        is_over=is_over.is_set,
    )
    crew.resize(4)
    assert is_over.wait(10)
    with lock:
        crew.wake_all()
    crew.join()
    assert sorted((item, step) for item, step, _ in done) == [(item, step) for item in range(20) for step in range(3)]
    assert len({(item, thread) for item, _, thread in done}) == 20


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


def test_all_stages_together_start_no_more_items_than_the_cores_can_run():
    counters = {"read": StageCounter(workers=8, core_share=0.05)} | {
        stage: StageCounter(workers=8, core_share=1.0) for stage in ("decode", "transform")
    }
    active = ActiveItems(counters, cores=2)
    for stage in ("decode", "transform"):
        assert active.has_room(stage)
        active.add(stage, 1)
    assert not active.has_room("decode")
    assert not active.has_room("transform")
    for _ in range(8):
        assert active.has_room("read")  # it waits for storage, not for a core
        active.add("read", 1)
    assert not active.has_room("read")
    active.add("transform", -1)
    assert active.has_room("decode")
