"""What pipelines ask of a cluster: a default run fits one small node that Kubeflow runs on too."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from components.placement import StepPlacement
from pipelines.commands import compile_pipeline
from pipelines.requests import PipelineRequests, StepRequest

# A node with 2 cores and 8 GiB, less what Kubeflow Pipelines, MLflow and PostgreSQL request there.
FREE = StepRequest(cpus=1.6, memory_bytes=6 * 2**30)


def compiled(folder: Path, *flags: str) -> Path:
    outcome = CliRunner().invoke(compile_pipeline, ["--out", str(folder), *flags])
    assert outcome.exit_code == 0, outcome.exception
    (path,) = folder.glob("*.yaml")
    return path


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize(
    "flags",
    [
        ["--pipeline", "train"],
        ["--pipeline", "train", "--data", "log.yaml"],  # with prepare_log
        ["--pipeline", "partitions"],
        ["--pipeline", "ablations"],
    ],
)
def test_a_default_run_fits_a_node_with_two_cores(tmp_path: Path, flags: list[str], num_nodes: int) -> None:
    asked = PipelineRequests.load(compiled(tmp_path, *flags), num_nodes=num_nodes)
    assert asked.peak.cpus <= FREE.cpus, asked.describe()
    assert asked.peak.memory_bytes <= FREE.memory_bytes, asked.describe()


@pytest.mark.parametrize("kind", ["train", "partitions", "ablations"])
def test_two_processes_per_pod_request_more_memory_and_fit_too(tmp_path: Path, kind: str) -> None:
    one, two = (
        PipelineRequests.load(compiled(tmp_path / nproc, "--pipeline", kind, "--nproc", nproc)) for nproc in "12"
    )
    trainer = StepRequest(cpus=0.25, memory_bytes=1.5 * 2**30)
    assert two.largest == trainer
    assert one.peak.memory_bytes <= two.peak.memory_bytes <= FREE.memory_bytes
    assert two.peak.cpus <= FREE.cpus


def test_a_request_never_exceeds_the_limit() -> None:
    step = StepPlacement(memory="4Gi", memory_request="3Gi", process_memory_request="512Mi")
    asked = [step.resources(nproc)["requests"]["memory"] for nproc in (1, 2, 3, 8)]
    assert asked == ["3Gi", "3584Mi", "4096Mi", "4096Mi"]


def test_steps_side_by_side_are_added_and_steps_in_a_row_are_not(tmp_path: Path) -> None:
    def task(component: str, *after: str) -> dict[str, object]:
        return {"componentRef": {"name": f"comp-{component}"}, "dependentTasks": list(after)}

    names = ("a", "b", "c")
    spec = {
        "root": {"dag": {"tasks": {"a": task("a"), "b": task("b", "a"), "c": task("c", "a")}}},
        "components": {f"comp-{name}": {"executorLabel": f"exec-{name}"} for name in names},
        "deploymentSpec": {
            "executors": {
                f"exec-{name}": {
                    "container": {"resources": {"resourceCpuRequest": cpu, "resourceMemoryRequest": memory}}
                }
                for name, cpu, memory in (("a", "2", "1Gi"), ("b", "1", "1Gi"), ("c", "500m", "2Gi"))
            }
        },
    }
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump(spec))
    asked = PipelineRequests.load(path)
    assert asked.largest_step == "c"
    assert asked.peak == StepRequest(cpus=2, memory_bytes=3 * 2**30)


def test_compiling_says_what_the_pipeline_asks_for(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(compile_pipeline, ["--out", str(tmp_path), "--profile", "gpu"])
    assert "the largest step, train_baseline, asks for 4 CPU, 16 GiB, 1 GPU;" in outcome.output
