"""The manifests on a real API server: they apply, become ready, and grant no unnecessary rights."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.cluster.deployment import TestSite
from tests.cluster.kube import Cluster

ROOT = Path(__file__).parents[2]
OVERLAYS = sorted(path.name for path in (ROOT / "manifests/overlays").iterdir())

# Rights of the runner's account in its namespace. Everything else is denied.
MAY = (
    {("trainjobs.trainer.kubeflow.org", verb) for verb in ("create", "get", "list", "watch", "delete")}
    | {("pods", verb) for verb in ("create", "get", "list", "watch", "delete", "deletecollection")}
    | {("pods/log", "get"), ("events", "list")}
)
RESOURCES = (
    "trainjobs.trainer.kubeflow.org",
    "pods",
    "pods/log",
    "pods/exec",
    "events",
    "secrets",
    "configmaps",
    "services",
    "serviceaccounts",
    "serviceaccounts/token",
    "persistentvolumeclaims",
    "deployments.apps",
    "jobs.batch",
    "roles.rbac.authorization.k8s.io",
    "rolebindings.rbac.authorization.k8s.io",
    "nodes",
    "namespaces",
)
VERBS = ("create", "get", "list", "watch", "update", "patch", "delete", "deletecollection")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_is_accepted_by_the_server(cluster: Cluster, overlay: str) -> None:
    """NetworkPolicies, quotas and all: the server validates each object as if it were applied."""
    objects = [entry for entry in yaml.safe_load_all(cluster.render(ROOT / "manifests/overlays" / overlay)) if entry]
    for entry in objects:
        if "namespace" in entry["metadata"]:
            entry["metadata"]["namespace"] = "default"  # a dry run creates no namespace
    said = cluster.apply(*objects, flags=("--dry-run=server", "--force-conflicts"))
    assert said.count("serverside-applied") == len(objects)


def test_mlflow_and_its_database_are_ready_without_root(site: TestSite) -> None:
    for name in ("mlflow", "postgres"):
        (pod,) = site.cluster.pods(f"app.kubernetes.io/name={name}", namespace=site.namespace)
        (status,) = pod["status"]["containerStatuses"]
        assert status["ready"], status
        user = site.cluster.run("exec", pod["metadata"]["name"], "--namespace", site.namespace, "--", "id", "-u").stdout
        assert int(user) > 0
        touched = site.cluster.run(
            "exec", pod["metadata"]["name"], "--namespace", site.namespace, "--", "touch", "/etc/x", check=False
        )
        assert "Read-only file system" in touched.stderr


def test_the_runner_has_the_rights_it_needs_and_no_others(site: TestSite) -> None:
    account = f"system:serviceaccount:{site.namespace}:recmill-runner"
    allowed = can_i(site, account)
    assert allowed == MAY


@pytest.mark.parametrize("name", ["recmill-worker", "mlflow", "postgres"])
def test_the_other_accounts_have_no_rights(site: TestSite, name: str) -> None:
    assert can_i(site, f"system:serviceaccount:{site.namespace}:{name}") == set()


def test_the_runner_has_no_rights_in_another_namespace(site: TestSite) -> None:
    account = f"system:serviceaccount:{site.namespace}:recmill-runner"
    assert can_i(site, account, namespace="default") == set()


def can_i(site: TestSite, account: str, namespace: str | None = None) -> set[tuple[str, str]]:
    """Rights of an account, queried one by one like `kubectl auth can-i`."""
    from kubernetes import client, config

    config.load_kube_config()
    reviews = client.AuthorizationV1Api()
    allowed = set()
    for resource in RESOURCES:
        name, _, group = resource.partition(".")
        kind, _, subresource = name.partition("/")
        for verb in VERBS:
            review = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {
                    "user": account,
                    "groups": [
                        "system:serviceaccounts",
                        f"system:serviceaccounts:{site.namespace}",
                        "system:authenticated",
                    ],
                    "resourceAttributes": {
                        "namespace": namespace or site.namespace,
                        "verb": verb,
                        "resource": kind,
                        "subresource": subresource,
                        "group": group,
                    },
                },
            }
            if reviews.create_subject_access_review(review).status.allowed:
                allowed.add((resource, verb))
    return allowed


def test_the_namespace_enforces_the_restricted_standard(site: TestSite) -> None:
    """So every other test shows that our pods meet it."""
    job = site.job("rooted", {"image": site.image("data"), "command": ["true"]})
    job["spec"]["template"]["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "rooted"}, "spec": job["spec"]["template"]["spec"]}
    with pytest.raises(AssertionError, match='violates PodSecurity "restricted'):
        site.cluster.apply(pod, namespace=site.namespace, flags=("--dry-run=server",))


def test_mlflow_requires_a_login(site: TestSite) -> None:
    script = (
        "import urllib.request, urllib.error\n"
        "try:\n"
        "    urllib.request.urlopen('http://mlflow:5000/api/2.0/mlflow/experiments/get?experiment_id=0')\n"
        "except urllib.error.HTTPError as error:\n"
        "    print('status', error.code)\n"
    )
    assert "status 401" in site.shell("no-login", f'python3 -c "{script}"')


def test_images_pass_the_doctor_on_a_read_only_root(site: TestSite) -> None:
    for image in ("data", "trainer"):
        said = site.shell(f"doctor-{image}", f"recmill doctor --image {image}", image=image)
        assert "everything required is installed" in said
