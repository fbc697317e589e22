"""A real cluster with Kubeflow Trainer: any that KUBECONFIG names. Without one all tests are skipped, with the reason.
`make test-cluster` starts one if it can (with-cluster.sh).

Images are built and loaded once (prepare.sh; RECMILL_TEST_TAG=TAG uses existing images). All objects live
in one namespace that is deleted at the end, unless RECMILL_TEST_KEEP=1.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.deployment import TestSite, deploy
from tests.cluster.kube import Cluster, find_kubectl
from tests.cluster.trainings import result_of, train_command

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STARTED = time.monotonic()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"tests/cluster took {time.monotonic() - STARTED:.0f} s of wall time")


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG names no cluster; make test-cluster starts one from RECMILL_CLUSTER_KIT")
    kubectl = find_kubectl(ROOT / "manifests/overlays/kind")
    if not kubectl:
        pytest.skip("no kubectl on the PATH can render manifests/overlays/kind; 1.27 or newer does")
    os.environ["KUBECTL"] = kubectl  # for prepare.sh
    found = Cluster(kubectl=kubectl)
    if not found.answers():
        pytest.skip(f"the cluster of KUBECONFIG={os.environ['KUBECONFIG']} does not answer")
    return found


@pytest.fixture(scope="session")
def tag(cluster: Cluster) -> str:
    """The tag of the images that the cluster's nodes have."""
    if given := os.environ.get("RECMILL_TEST_TAG"):
        return given
    built = subprocess.run([HERE / "prepare.sh"], check=False, text=True, stdout=subprocess.PIPE)
    if built.returncode:
        pytest.fail("tests/cluster/prepare.sh could not build and load the images; see above")
    return built.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="session")
def site(cluster: Cluster, tag: str) -> Iterator[TestSite]:
    """overlays/kind with MLflow and PostgreSQL running, in a separate namespace."""
    made = deploy(cluster, tag=tag, root=ROOT)
    try:
        yield made
    finally:
        if not os.environ.get("RECMILL_TEST_KEEP"):
            made.remove()


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


@pytest.fixture(scope="session")
def alone(site: TestSite, dataset: str) -> dict[str, Any]:
    """The same training in one pod, undisturbed."""
    site.shell("alone", train_command(dataset, "/runs/training/alone"))
    return result_of(site, "alone-result", "/runs/training/alone")
