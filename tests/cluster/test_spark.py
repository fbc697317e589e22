"""generate_data on Spark: the step's pod drives, executors are pods of the same image, the volume joins them."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipelines.commands import compile_pipeline
from tests.cluster.deployment import TestSite
from tests.cluster.tasks import PipelineRun


@pytest.fixture(scope="module")
def package(site: TestSite, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spark")
    (folder / "placement.yml").write_text("executors: 1\nsteps: {generate_data: {cpu: 500m, memory: 2000Mi}}")
    args = ["--out", str(folder), "--image-tag", site.tag, "--placement", str(folder / "placement.yml")]
    outcome = CliRunner().invoke(compile_pipeline, args)
    assert outcome.exit_code == 0, outcome.output
    return folder / "recmill.yaml"


def test_spark_executors_write_what_duckdb_writes(site: TestSite, package: Path) -> None:
    digests = {}
    executors: set[str] = set()
    done = threading.Event()

    def look_for_executors() -> None:
        while not done.wait(1):
            for pod in site.cluster.pods("spark-role=executor", namespace=site.namespace):
                (container,) = pod["spec"]["containers"]
                assert container["securityContext"]["readOnlyRootFilesystem"]
                executors.add(container["image"])

    watching = threading.Thread(target=look_for_executors)
    watching.start()
    try:
        for engine, master in (("duckdb", ""), ("spark", "k8s://https://kubernetes.default.svc")):
            arguments = {
                "workdir": f"/runs/{engine}",
                "data_settings": json.dumps({"sessions": "200"}),
                "engine": engine,
                "master": master,
            }
            run = PipelineRun.load(package, site=site, run_id=engine, arguments=arguments)
            run.run("generate-data", timeout_s=400)
            script = (
                "import duckdb\n"
                "columns = 'count(*), sum(session_id), sum(timestamp), sum(label)'\n"
                f"print(duckdb.read_parquet('/runs/{engine}/dataset/*.parquet').aggregate(columns).fetchall())"
            )
            said = site.shell(f"rows-{engine}", f'python3 -c "{script}"', image="data")
            digests[engine] = said.strip().splitlines()[-1]
    finally:
        done.set()
        watching.join()
    assert digests["spark"] == digests["duckdb"]
    assert executors == {site.image("data")}
    assert site.cluster.pods("spark-role=executor", namespace=site.namespace) == []
