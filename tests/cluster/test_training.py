"""Training in a pod: one that is killed and resumes, one with too little memory. Several nodes: test_trainjob.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.deployment import TestSite
from tests.cluster.kube import wait_until
from tests.cluster.trainings import STEPS, losses, result_of, train_command


def test_a_killed_pod_resumes_and_ends_at_the_same_loss(site: TestSite, dataset: str, alone: dict[str, Any]) -> None:
    out, name = "/runs/training/killed", "killed"
    container = {
        "image": site.image("trainer"),
        "command": ["/bin/sh", "-ec", train_command(dataset, out)],
    }
    site.cluster.apply(site.job(name, container, retries=2), namespace=site.namespace)

    def first_checkpoint() -> str:
        pods = site.cluster.pods(f"job-name={name}", namespace=site.namespace)
        running = [pod["metadata"]["name"] for pod in pods if pod["status"]["phase"] == "Running"]
        if not running:
            return ""
        look = site.cluster.run(
            "exec", running[0], "--namespace", site.namespace, "--", "ls", f"{out}/checkpoints", check=False
        )
        return running[0] if "step-" in look.stdout else ""

    pod = wait_until(first_checkpoint, timeout_s=200, what="the first checkpoint", every_s=0.2)
    site.cluster.run("delete", "pod", pod, "--namespace", site.namespace, "--grace-period=0", "--force", "--wait=true")
    site.cluster.finish_job(name, namespace=site.namespace, timeout_s=400)
    result = result_of(site, "killed-result", out)
    assert result["num_steps"] == STEPS
    assert losses(result)[-1] == losses(alone)[-1]
    assert result["metrics"]["log_loss"] == alone["metrics"]["log_loss"]


def test_too_little_memory_is_reported_and_nothing_hangs(site: TestSite, dataset: str) -> None:
    """Either the kernel kills the step (Kubernetes reports OOMKilled) or one of its ranks (the step reports it)."""
    out, name = "/runs/training/narrow", "narrow"
    script = (
        "from components.memory import explain_memory_limit\n"
        "from recmill.training.trainer import train\n"
        "from recmill.training.config import TrainConfig\n"
        "with explain_memory_limit():\n"
        f"    train('{dataset}', out='{out}', config=TrainConfig(threads=1))\n"
    )
    container = {
        "image": site.image("trainer"),
        "command": ["python3", "-c", script],
        "resources": {"limits": {"memory": "300Mi", "cpu": "2"}, "requests": {"memory": "100Mi", "cpu": "100m"}},
    }
    site.cluster.apply(site.job(name, container), namespace=site.namespace)
    with pytest.raises(AssertionError) as failed:
        site.cluster.finish_job(name, namespace=site.namespace, timeout_s=200)
    said = str(failed.value)
    assert "failed" in said
    assert "OOMKilled" in said or "killed at the pod's memory limit of 300 MiB" in said, said
