"""What ranks are started with: short spinning while threads wait, unless the user has said how they wait."""

import gc
import os
import subprocess
import sys

import pytest

from recmill.training.processes import frozen_objects, num_sharing, own_cores, rank_environment


def test_threads_of_ranks_spin_for_a_while_and_then_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MIMALLOC_PURGE_DELAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SOME_OTHER", "kept")
    found = rank_environment()
    assert found["OMP_WAIT_POLICY"] == "PASSIVE"
    assert 0 < int(found["GOMP_SPINCOUNT"]) < 100_000
    assert found["SOME_OTHER"] == "kept"


@pytest.mark.parametrize(("name", "value"), [("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "7")])
def test_a_way_of_waiting_that_the_user_chose_is_left_alone(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(known, raising=False)
    monkeypatch.setenv(name, value)
    found = rank_environment()
    assert {known: found.get(known) for known in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")} == {
        "OMP_WAIT_POLICY": None,
        "GOMP_SPINCOUNT": None,
        name: value,
    }


def test_pages_are_kept_as_long_as_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMALLOC_PURGE_DELAY", "1")
    assert rank_environment()["MIMALLOC_PURGE_DELAY"] == "1"


@pytest.mark.skipif(sys.platform != "linux", reason="the C library's settings are glibc's")
@pytest.mark.parametrize(("settings", "keeps"), [({}, True), ({"MALLOC_MMAP_MAX_": "65536"}, False)])
def test_ranks_keep_large_blocks_that_they_free_unless_told_otherwise(settings: dict[str, str], keeps: bool) -> None:
    code = """
import ctypes, resource
from recmill.training.processes import keep_freed_memory
keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for turn in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(ctypes.c_size_t(100 << 20))
    ctypes.memset(block, 1, 100 << 20)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=others | settings, capture_output=True, text=True, check=True
    )
    num_faults = int(done.stdout)
    assert num_faults < 100 if keeps else num_faults > 10_000


def test_objects_that_exist_are_left_alone_while_a_rank_trains() -> None:
    before = gc.get_freeze_count()
    kept = [[] for _ in range(10)]
    with frozen_objects():
        assert gc.get_freeze_count() >= before + len(kept)
        with pytest.raises(ZeroDivisionError), frozen_objects():
            raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


def cores_in_a_launch(monkeypatch, *, threads: int, quota: int, num_local: int = 2) -> tuple[set[int], int]:
    """The cores of rank 1 and the number of processes that share them, on a machine with the cores 0, 1, 2 and 5."""
    held = {0, 1, 2, 5}

    def move(pid: int, cores: list[int]) -> None:
        assert pid == 0
        held.clear()
        held.update(cores)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(held))
    monkeypatch.setattr(os, "sched_setaffinity", move)
    monkeypatch.setattr("recmill.tuning.cores.available_cores", lambda: quota)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_local))
    monkeypatch.setenv("LOCAL_RANK", str(num_local - 1))
    with own_cores(threads=threads):
        found = set(held), num_sharing()
    assert held == {0, 1, 2, 5}
    assert num_sharing() == num_local
    return found


def test_each_rank_keeps_to_its_share_of_the_cores(monkeypatch) -> None:
    assert cores_in_a_launch(monkeypatch, threads=2, quota=4) == ({2, 5}, 1)


@pytest.mark.parametrize(("threads", "quota", "num_local"), [(3, 4, 2), (2, 3, 2), (1, 4, 5), (1, 4, 1)])
def test_ranks_share_cores_that_are_too_few_or_limited_by_a_quota(monkeypatch, threads, quota, num_local) -> None:
    found = cores_in_a_launch(monkeypatch, threads=threads, quota=quota, num_local=num_local)
    assert found == ({0, 1, 2, 5}, num_local)
