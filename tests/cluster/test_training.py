"""Training in pods: two that train together, one that is killed and resumes, one with too little memory."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster.deployment import TestSite
from tests.cluster.kube import wait_until

# Enough steps that there is time to kill a pod between two checkpoints.
STEPS = 400
SETTINGS = (
    "batch_size=256",
    "bottom_layers=16",
    "top_layers=16",
    "epochs=1000",
    f"max_steps={STEPS}",
    "checkpoint_every=20",
    "eval_every=100000",
    "threads=1",
)
PORT = 29500


@pytest.fixture(scope="session")
def dataset(site: TestSite) -> str:
    """A small dataset on the runs' volume."""
    site.shell(
        "training-data",
        "mkdir -p /runs/training && cd /runs/training\n"
        "recmill generate --preset tiny --sessions 400 --seed 3 --out raw --json\n"
        "recmill cluster raw --eval-fraction 0.1 --out dataset --json",
    )
    return "/runs/training/dataset"


def train_command(data: str, out: str, *settings: str) -> str:
    flags = " ".join(f"--set {setting}" for setting in (*SETTINGS, *settings))
    return f"recmill train {data} --out {out} --json {flags}"


def result_of(site: TestSite, name: str, out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(site.shell(name, f"cat {out}/result.json"))
    return found


def losses(result: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in result["curve"]]


@pytest.fixture(scope="session")
def alone(site: TestSite, dataset: str) -> dict[str, Any]:
    """The same training in one pod, undisturbed."""
    site.shell("alone", train_command(dataset, "/runs/training/alone"))
    return result_of(site, "alone-result", "/runs/training/alone")


def test_two_pods_train_together_over_a_headless_service(site: TestSite, dataset: str, alone: dict[str, Any]) -> None:
    """What the TrainJob's runtime does: one pod per node, torchrun configured by PET_* variables."""
    name = "pair"
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": site.namespace},
        "spec": {
            "clusterIP": "None",
            "selector": {"recmill-test": name},
            "publishNotReadyAddresses": True,
            "ports": [{"name": "torch", "port": PORT, "protocol": "TCP"}],
        },
    }
    out = "/runs/training/pair"
    prepare = (
        "from recmill.training.config import TrainConfig, settings_from_flags\n"
        "from recmill.training.trainer import make_job\n"
        "from recmill.artifacts import dump_json\n"
        "from pathlib import Path\n"
        f"out = Path('{out}'); out.mkdir(parents=True, exist_ok=True)\n"
        f"config = TrainConfig.from_overrides(settings_from_flags({[*SETTINGS]!r}))\n"
        f"job = make_job('{dataset}', out=out, plan=None, allocation=None, nproc=2, config=config)\n"
        "(out / 'job.json').write_text(dump_json(job))\n"
    )
    site.shell("pair-job", f'python3 -c "{prepare}"')
    pods = [
        site.job(
            f"{name}-{rank}",
            {
                "image": site.image("trainer"),
                "command": ["python3", "-m", "recmill.training.agent", "--nproc-per-node", "1"],
                "args": [f"{out}/job.json"],
                "env": [
                    {"name": "PET_NNODES", "value": "2"},
                    {"name": "PET_NODE_RANK", "value": str(rank)},
                    {"name": "PET_MASTER_ADDR", "value": f"{name}-0.{name}"},
                    {"name": "PET_MASTER_PORT", "value": str(PORT)},
                    {"name": "OMP_NUM_THREADS", "value": "1"},
                ],
            },
            account="recmill-worker",
            labels={"app.kubernetes.io/component": "trainer", "recmill-test": name},
            pod={"hostname": f"{name}-{rank}", "subdomain": name},
        )
        for rank in range(2)
    ]
    site.cluster.apply(service, *pods, namespace=site.namespace)
    for rank in range(2):
        site.cluster.finish_job(f"{name}-{rank}", namespace=site.namespace, timeout_s=400)
    result = result_of(site, "pair-result", out)
    assert result["world_size"] == 2
    assert result["num_steps"] == STEPS
    # Sums over two pods round differently, and the difference grows tenfold every fifty steps on memorised rows.
    assert losses(result)[:100] == pytest.approx(losses(alone)[:100], rel=1e-4)
    assert sum(losses(result)[-50:]) == pytest.approx(sum(losses(alone)[-50:]), rel=0.1)


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
