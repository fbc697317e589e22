"""Loss curves of every preset and switch are those recorded in tests/golden/losses."""

import copy

import pytest

from tests.integration.golden_cases import Inputs, cases
from tests.integration.golden_losses import (
    GOLDEN,
    LOSS_TOLERANCE,
    RECORD,
    differences,
    read_golden,
    run_case,
    this_machine,
    train_cases,
)

pytestmark = pytest.mark.timeout(900)  # one fixture trains all cases; a busy machine takes minutes
CASES = {case.name: case for case in cases()}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def results(inputs):
    return train_cases(list(CASES.values()), inputs)


def check(name, runs):
    golden = read_golden(name)
    is_exact = golden["recorded_with"] == this_machine()
    found = differences(golden, runs, is_exact=is_exact)
    assert not found, (
        f"{name}: {len(found)} numbers are not as recorded "
        f"({'bit for bit' if is_exact else 'within the tolerance'}); the first: {found[0]}. "
        f"If the change is meant, record again: {RECORD} --case {name}"
    )


@pytest.mark.parametrize("name", CASES)
def test_losses_and_metrics_are_as_recorded(results, inputs, name):
    if CASES[name].data in inputs.missing:
        pytest.skip(inputs.missing[CASES[name].data])
    check(name, results[name])


def test_torchrun_gives_what_ranks_that_train_in_turn_give(results, inputs, tmp_path):
    case = CASES["all"]
    assert run_case(case, inputs.of(case, 2), tmp_path / "out", 2) == results["all"][2]


def test_every_recording_belongs_to_a_case():
    assert {path.stem for path in GOLDEN.glob("*")} == set(CASES)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("key", ["losses", "auc", "log_loss", "evaluations_auc", "hot_batches"])
def test_one_changed_number_is_noticed(key, is_exact):
    golden = read_golden("hot")
    runs = {int(nproc): run for nproc, run in golden["processes"].items()}
    assert differences(golden, runs, is_exact=is_exact) == []
    changed = copy.deepcopy(runs)
    step = 1e-15 if is_exact else 0.01
    if key == "hot_batches":
        changed[2][key] += 1
    elif isinstance(changed[2][key], list):
        changed[2][key][-1] += step
    else:
        changed[2][key] += step
    (found,) = differences(golden, changed, is_exact=is_exact)
    assert found.startswith(f"2 processes: {key}")


def test_rounding_passes_on_another_processor_only():
    golden = read_golden("none")
    runs = {int(nproc): copy.deepcopy(run) for nproc, run in golden["processes"].items()}
    runs[1]["losses"][0] *= 1 + LOSS_TOLERANCE / 2
    assert differences(golden, runs, is_exact=False) == []
    assert len(differences(golden, runs, is_exact=True)) == 1


def test_a_shorter_curve_and_a_missing_run_are_noticed():
    golden = read_golden("none")
    runs = {int(nproc): copy.deepcopy(run) for nproc, run in golden["processes"].items()}
    runs[1]["losses"].pop()
    assert differences(golden, runs, is_exact=False)[0].startswith("1 processes: ")
    assert differences(golden, {1: runs[1]}, is_exact=False) == ["recorded for 1, 2 processes, trained with 1"]
