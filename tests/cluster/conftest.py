"""A real cluster: any that KUBECONFIG names. All tests are skipped, with the reason, if none answers.

Images are built and loaded once (prepare.sh; RECMILL_TEST_TAG=TAG uses existing images). All objects live
in one namespace that is deleted at the end, unless RECMILL_TEST_KEEP=1.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.deployment import TestSite, deploy
from tests.cluster.kube import Cluster, find_kubectl

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STARTED = time.monotonic()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"tests/cluster took {time.monotonic() - STARTED:.0f} s of wall time")


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG names no cluster")
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
