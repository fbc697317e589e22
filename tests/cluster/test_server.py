"""The server's image as a real pod, from the component's own manifests; KServe's Python client asks it from another."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from recmill.serving.server.instances import instance_tensors
from recmill.serving.server.versions import load_version
from tests.cluster.kube import Cluster
from tests.unit.serving.server.served_models import write_served_model

ROOT = Path(__file__).parents[2]
COMPONENT = ROOT / "manifests/components/serving"
CLIENT = ROOT / "tests/integration/kserve_calls.py"
# The two requests of kserve_calls.py.
REQUESTS = {
    "instances": [
        {
            "user": {"age": 30, "seen": ["sku-3", "sku-4"]},
            "candidates": [{"price": 1, "item": "sku-1"}, {"price": 2, "item": "sku-2"}],
        },
        {"user": {"age": 40}, "candidates": [{"price": 3, "item": "sku-99"}]},
    ]
}


def objects_of(*names: str) -> list[dict[str, Any]]:
    return [entry for name in names for entry in yaml.safe_load_all((COMPONENT / name).read_text("utf-8")) if entry]


def model_as_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A ConfigMap with the model's files, and a volume that lays them out as the folder has them, on any cluster."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    data = {f"file{number}": base64.b64encode(path.read_bytes()).decode() for number, path in enumerate(files)}
    items = [{"key": f"file{n}", "path": path.relative_to(folder).as_posix()} for n, path in enumerate(files)]
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "model"}, "binaryData": data}
    return config, {"name": "runs", "configMap": {"name": "model", "items": items}}


def server_objects(volume: dict[str, Any], tag: str) -> list[dict[str, Any]]:
    """The component's objects with one pod, the tests' image and the model from a ConfigMap."""
    found = objects_of("account.yaml", "deployment.yaml", "network-policy.yaml", "autoscaler.yaml")
    found = [entry for entry in found if entry["kind"] != "HorizontalPodAutoscaler"]  # there may be no metrics server
    (deployment,) = (entry for entry in found if entry["kind"] == "Deployment")
    deployment["spec"]["replicas"] = 1
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    container["image"] = f"recmill/server:{tag}"
    container["resources"]["requests"] = {"cpu": "100m", "memory": "256Mi"}
    pod["volumes"] = [volume, *(entry for entry in pod["volumes"] if entry["name"] != "runs")]
    mount = next(entry for entry in container["volumeMounts"] if entry["name"] == "runs")
    mount["mountPath"] = "/runs/serving/recmill"
    return found


def client_job(tag: str) -> list[dict[str, Any]]:
    """A Job in the server's image, which has KServe's client, that asks the Service by its name."""
    script = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "client"}}
    script["data"] = {"kserve_calls.py": CLIENT.read_text("utf-8")}
    command = ["/opt/server/bin/python", "/client/kserve_calls.py", "http://recmill-server:8080", "recmill-server:8081"]
    pod = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": "main",
                "image": f"recmill/server:{tag}",
                "imagePullPolicy": "IfNotPresent",
                "command": command,
                "volumeMounts": [{"name": "client", "mountPath": "/client"}, {"name": "scratch", "mountPath": "/tmp"}],
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
            }
        ],
        "volumes": [{"name": "client", "configMap": {"name": "client"}}, {"name": "scratch", "emptyDir": {}}],
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "client"},
        "spec": {"backoffLimit": 0, "template": {"spec": pod}},
    }
    return [script, job]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("served") / "model", seed=4, vocabulary=True)


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, tag: str, model: Path) -> Iterator[str]:
    """A restricted namespace with a ready server."""
    name = f"recmill-server-{uuid.uuid4().hex[:6]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    try:
        config, volume = model_as_config(model)
        cluster.apply(config, *server_objects(volume, tag), namespace=name)
        rollout = ("rollout", "status", "deployment/recmill-server", "--namespace", name, "--timeout=300s")
        done = cluster.run(*rollout, check=False)
        said = cluster.run("logs", "deployment/recmill-server", "--namespace", name, check=False).stdout
        assert done.returncode == 0, done.stderr + said
        yield name
    finally:
        cluster.run("delete", "namespace", name, "--wait=false", check=False)


def test_kserves_client_gets_the_models_scores_from_the_pod(
    cluster: Cluster, namespace: str, tag: str, model: Path
) -> None:
    cluster.apply(*client_job(tag), namespace=namespace)
    cluster.finish_job("client", namespace=namespace, timeout_s=300)
    (pod,) = cluster.pods("job-name=client", namespace=namespace)
    found = json.loads(cluster.logs(pod["metadata"]["name"], namespace=namespace).strip().splitlines()[-1])
    version = load_version(model, max_candidates=9)
    scores = version.model.score(version.reader.read(instance_tensors(REQUESTS, version.signature))[0])
    for way in ("rest", "rest_binary", "grpc", "grpc_contents"):
        assert found[way]["scores"] == pytest.approx(scores.tolist(), abs=1e-6), way
    assert found["grpc"]["version"] == version.name
    assert found["ready"]
    assert found["grpc_model_ready"]


def test_the_server_is_not_root_and_cannot_write_its_root(cluster: Cluster, namespace: str) -> None:
    in_pod = ("exec", "deployment/recmill-server", "--namespace", namespace, "--")
    assert int(cluster.run(*in_pod, "id", "-u").stdout) == 10001
    assert "Read-only file system" in cluster.run(*in_pod, "touch", "/etc/x", check=False).stderr
    assert "Read-only file system" in cluster.run(*in_pod, "touch", "/runs/serving/recmill/x", check=False).stderr
    (pod,) = cluster.pods("app.kubernetes.io/name=recmill-server", namespace=namespace)
    mounts = [mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]]
    assert not [path for path in mounts if "serviceaccount" in path]  # no token
