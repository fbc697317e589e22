"""Clustering on Spark: the driver is a pod, executors are pods of the same image, all share the volume."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipelines.commands import compile_pipeline
from tests.cluster.deployment import TestSite
from tests.cluster.kube import wait_until
from tests.cluster.tasks import PipelineRun

MASTER = "k8s://https://kubernetes.default.svc"
PLACEMENT = "executors: 1\nsteps: {generate_data: {cpu: '1', memory: 1Gi}}"  # executors have the resources of the step


@pytest.fixture(scope="module")
def package(site: TestSite, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spark")
    (folder / "placement.yml").write_text(PLACEMENT)
    args = ["--out", str(folder), "--image-tag", site.tag, "--placement", str(folder / "placement.yml")]
    outcome = CliRunner().invoke(compile_pipeline, args)
    assert outcome.exit_code == 0, outcome.output
    return folder / "recmill.yaml"


def generate(site: TestSite, package: Path, engine: str, master: str = "") -> str:
    """Run the step with an engine; returns the path of its dataset."""
    arguments = {
        "workdir": f"/runs/{engine}",
        "settings": json.dumps({"data.sessions": 200, "engine": engine, "master": master}),
    }
    run = PipelineRun.load(package, site=site, run_id=engine, arguments=arguments)
    run.run("generate-data", timeout_s=400)
    return f"/runs/{engine}/dataset"


@pytest.fixture(scope="module")
def by_duckdb(site: TestSite, package: Path) -> str:
    return generate(site, package, "duckdb")


@contextmanager
def watch_executors(site: TestSite) -> Iterator[dict[str, dict[str, Any]]]:
    """Every executor seen meanwhile by name, in its last observed state."""
    seen: dict[str, dict[str, Any]] = {}
    done = threading.Event()

    def look() -> None:
        while not done.wait(1):
            found = site.cluster.pods("spark-role=executor", namespace=site.namespace)
            seen.update({pod["metadata"]["name"]: pod for pod in found})

    watching = threading.Thread(target=look)
    watching.start()
    try:
        yield seen
    finally:
        done.set()
        watching.join()


def assert_same_rows(site: TestSite, name: str, one: str, other: str) -> None:
    """All rows of both datasets, in their order."""
    script = (
        "from recmill.artifacts import Dataset\n"
        "from recmill.data.dataset import read_table\n"
        f"one, other = Dataset.load('{one}', verify=True), Dataset.load('{other}', verify=True)\n"
        "tables = [[read_table(data, split=split) for data in (one, other)] for split in one.splits]\n"
        "is_same = one.splits == other.splits and all(a.equals(b) for a, b in tables)\n"
        "print('SAME', is_same, sum(a.num_rows for a, _ in tables))"
    )
    said = site.shell(name, f'python3 -c "{script}"', image="data").strip().splitlines()[-1]
    label, is_same, count = said.split()
    assert (label, is_same) == ("SAME", "True")
    assert int(count) > 200


def test_executors_of_the_step_write_what_duckdb_writes(site: TestSite, package: Path, by_duckdb: str) -> None:
    with watch_executors(site) as executors:
        by_spark = generate(site, package, "spark", MASTER)
    assert_same_rows(site, "same-step", by_spark, by_duckdb)
    pod = next(iter(executors.values()))  # with a slow API server Spark may request a second one
    (container,) = pod["spec"]["containers"]
    assert container["image"] == site.image("data")
    assert container["resources"]["limits"] == {"cpu": "1", "memory": "1Gi"}
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    assert pod["spec"]["serviceAccountName"] == "recmill-worker"
    assert not pod["spec"]["automountServiceAccountToken"]
    assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "executor"
    (owner,) = pod["metadata"]["ownerReferences"]
    assert owner["name"].startswith("generate-data-spark")
    wait_until(
        lambda: not site.cluster.pods("spark-role=executor", namespace=site.namespace),
        timeout_s=60,  # they are deleted when the step ends, with a grace period of half a minute
        what="no executor is left",
    )


def run_on_executors(site: TestSite, name: str, arguments: list[str]) -> None:
    """Run a recmill command with --engine spark as in docs/kubernetes.md, with a pod as the driver."""
    settings = {
        "spark.kubernetes.container.image": site.image("data"),
        "spark.executor.instances": "1",
        "spark.executor.memory": "512m",
        "spark.executor.memoryOverhead": "512m",
    }
    flags = [word for setting, value in settings.items() for word in ("--spark", f"{setting}={value}")]
    fields = {
        "RECMILL_NAMESPACE": "metadata.namespace",
        "RECMILL_POD": "metadata.name",
        "RECMILL_POD_IP": "status.podIP",
    }
    environment = [{"name": own, "valueFrom": {"fieldRef": {"fieldPath": path}}} for own, path in fields.items()]
    container = {
        "image": site.image("data"),
        "args": ["recmill", *arguments, "--engine", "spark", "--master", MASTER, *flags],
        "env": [*environment, {"name": "RECMILL_CLAIM", "value": "recmill-runs"}],
    }
    site.cluster.apply(site.job(name, container, has_token=True), namespace=site.namespace)
    with watch_executors(site) as executors:
        site.cluster.finish_job(name, namespace=site.namespace, timeout_s=400)
    assert {pod["spec"]["containers"][0]["image"] for pod in executors.values()} == {site.image("data")}


def test_the_command_line_clusters_on_executors_too(site: TestSite, by_duckdb: str) -> None:
    raw, out = by_duckdb.replace("dataset", "raw"), "/runs/spark-cli"
    run_on_executors(site, "spark-cli", ["cluster", raw, "--out", out])
    site.shell("duckdb-cli", f"recmill cluster {raw} --out /runs/duckdb-cli", image="data")
    assert_same_rows(site, "same-cli", out, "/runs/duckdb-cli")


def test_executors_prepare_the_log_that_duckdb_prepares(site: TestSite) -> None:
    """From a shop's CSV files: joins, histories and vocabularies on executors, parts through the shared volume."""
    site.shell(
        "shop",
        "recmill generate --preset shop --out /runs/shop && recmill init /runs/shop --out /runs/shop.yaml"
        " && recmill prepare /runs/shop.yaml --out /runs/prepared-duckdb",
        image="data",
    )
    run_on_executors(site, "spark-prepare", ["prepare", "/runs/shop.yaml", "--out", "/runs/prepared-spark"])
    script = (
        "from pathlib import Path\n"
        "import pyarrow.parquet as pq\n"
        "from recmill.data.schema import Schema\n"
        "one, other = Path('/runs/prepared-duckdb'), Path('/runs/prepared-spark')\n"
        "names = [sorted(str(file.relative_to(own)) for file in own.rglob('*.parquet')) for own in (one, other)]\n"
        "is_same = names[0] == names[1] and Schema.load(one) == Schema.load(other)\n"
        "is_same = is_same and all(pq.read_table(one / name) == pq.read_table(other / name) for name in names[0])\n"
        "print('SAME', is_same, sum(pq.read_metadata(file).num_rows for file in one.glob('log-*.parquet')))"
    )
    said = site.shell("same-log", f'python3 -c "{script}"', image="data").strip().splitlines()[-1]
    label, is_same, count = said.split()
    assert (label, is_same) == ("SAME", "True")
    assert int(count) > 1_000
