"""What ranks are started with: short spinning while threads wait, unless the user has said how they wait."""

import pytest

from recmill.training.processes import rank_environment


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
