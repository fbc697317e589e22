"""The local runner on a pipeline of one small step: what is followed, what is kept, how failures surface."""

import builtins
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from kfp import dsl

from pipelines.local import Follow, StepFailed, run_locally
from recmill.artifacts import InputError, read_json


@dsl.component(base_image="recmill/trainer:0", install_kfp_package=False)
def one_step(workdir: str, behaviour: str, output: dsl.Output[dsl.Dataset]):
    """A step that does as it is told."""
    import os
    import time

    from components.outputs import publish
    from recmill.artifacts import InputError
    from recmill.tracking import step_run

    if behaviour == "import":
        import no_such_module  # noqa: F401
    with step_run("one_step", workdir=workdir) as step:
        print("noise")
        step.progress("work", 1, 2)
        if behaviour == "input":
            raise InputError("log.parquet: column 'label' is missing")
        if behaviour == "crash":
            raise KeyError("lost")
        if behaviour == "die":
            os._exit(9)
        if behaviour == "sleep":
            time.sleep(120)
        publish(output, {"path": behaviour, "content_hash": os.environ["KFP_RUN_ID"]})


@dsl.component(base_image="recmill/trainer:0", install_kfp_package=False)
def read_step(workdir: str, dataset: dsl.Input[dsl.Dataset]):
    """A step that says what it was handed."""
    from components.outputs import path_of
    from recmill.tracking import step_run

    inputs = {"path": path_of(dataset), "content_hash": dataset.metadata["content_hash"]}
    with step_run("read_step", workdir=workdir, inputs=inputs):
        pass


@dsl.pipeline(name="two-steps")
def two_steps(workdir: str, behaviour: str):
    made = one_step(workdir=workdir, behaviour=behaviour)
    read_step(workdir=workdir, dataset=made.outputs["output"])


def run_two_steps(folder: Path, behaviour: str, follow: Follow | None = None) -> list[tuple[str, str]]:
    heard: list[tuple[str, str]] = []
    run_locally(
        two_steps,
        {"workdir": str(folder / "run"), "behaviour": behaviour},
        steps=("one_step", "read_step"),
        log_path=folder / "run.log",
        environment={"KFP_RUN_ID": "id-7", "RECMILL_TRACKING": "off"},
        follow=follow or (lambda step, text: heard.append((step, text))),
    )
    return heard


def test_what_a_step_says_is_followed_and_its_noise_goes_to_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    heard = run_two_steps(tmp_path, "well")
    assert heard[:2] == [("one_step", "started"), ("one_step", "work: 1 of 2 (50%)")]
    assert [step for step, text in heard if text.startswith("done in")] == ["one_step", "read_step"]
    log = (tmp_path / "run.log").read_text(encoding="utf-8")
    assert "noise" in log
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_a_reference_travels_from_step_to_step_with_any_text_in_it(tmp_path: Path) -> None:
    odd = '/data/it\'s "here" $HOME {x} ü'
    run_two_steps(tmp_path, odd)
    record = read_json(tmp_path / "run" / "steps" / "read_step.json")
    assert record["inputs"] == {"path": odd, "content_hash": "id-7"}


def test_wrong_input_inside_a_step_is_wrong_input_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^log.parquet: column 'label' is missing$"):
        run_two_steps(tmp_path, "input")
    assert not (tmp_path / "run" / "steps" / "read_step.json").exists()


@pytest.mark.parametrize(
    ("behaviour", "says"),
    [
        ("crash", "step one_step failed: KeyError: 'lost'"),
        ("die", "step one_step failed: it was killed or exited without a message"),
        ("import", "step one_step failed: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_crash_names_the_step_and_the_reason(tmp_path: Path, behaviour: str, says: str) -> None:
    with pytest.raises(StepFailed) as failure:
        run_two_steps(tmp_path, behaviour)
    assert str(failure.value) == says


def test_nothing_of_the_runner_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kfp.local.config import LocalExecutionConfig

    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.delenv("KFP_RUN_ID", raising=False)
    before = builtins.print
    run_two_steps(tmp_path, "well")
    assert builtins.print is before
    assert LocalExecutionConfig.instance is None
    assert "KFP_RUN_ID" not in os.environ
    assert list(scratch.iterdir()) == []


def test_a_terminated_run_takes_its_steps_with_it(tmp_path: Path) -> None:
    def terminate_once_it_works(step: str, text: str) -> None:
        if text.startswith("work"):
            os.kill(os.getpid(), signal.SIGTERM)

    begin, before = time.monotonic(), set(psutil.Process().children(recursive=True))
    with pytest.raises(KeyboardInterrupt):
        run_two_steps(tmp_path, "sleep", follow=terminate_once_it_works)
    assert time.monotonic() - begin < 60
    assert set(psutil.Process().children(recursive=True)) <= before


@dsl.component(base_image="recmill/trainer:0", install_kfp_package=False)
def name_folder(workdir: str) -> str:
    """A task whose output tasks of a loop take."""
    return f"{workdir}/loop"


@dsl.component(base_image="recmill/trainer:0", install_kfp_package=False)
def loop_step(workdir: str, subfolder: str):
    """A step of a loop."""
    from recmill.tracking import step_run

    with step_run("loop_step", workdir=workdir, subfolder=subfolder):
        pass


@dsl.pipeline(name="loop")
def looped(workdir: str, names: list):
    folder = name_folder(workdir=workdir).output
    with dsl.ParallelFor(names, name="names", parallelism=1) as item:
        loop_step(workdir=folder, subfolder=item.__getattr__("name"))


def test_tasks_of_a_loop_get_outputs_of_tasks_outside_of_it(tmp_path: Path) -> None:
    run_locally(
        looped,
        {"workdir": str(tmp_path), "names": [{"name": "a"}, {"name": "b"}]},
        steps=("loop_step",),
        log_path=tmp_path / "run.log",
        environment={"RECMILL_TRACKING": "off"},
        follow=lambda step, text: None,
    )
    assert {path.parent.parent.name for path in (tmp_path / "loop").glob("*/steps/loop_step.json")} == {"a", "b"}
