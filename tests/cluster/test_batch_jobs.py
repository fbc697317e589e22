"""What runs without Kubeflow: old runs are removed on a schedule, and an Indexed Job scores a log on several pods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.deployment import RUNS, TestSite
from tests.cluster.kube import wait_until

COMPONENTS = Path(__file__).parents[2] / "manifests" / "components"


def component(site: TestSite, path: str, template: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The object of a component with the images of the tests, and its container."""
    found: dict[str, Any] = yaml.safe_load((COMPONENTS / path).read_text(encoding="utf-8"))
    pod = found["spec"]
    for key in template.split("."):
        pod = pod[key]
    (container,) = pod["spec"]["containers"]
    container["image"] = site.image(container["image"].partition("/")[2].partition(":")[0])
    assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == RUNS
    return found, container


def test_a_cron_job_removes_old_runs_and_nothing_else(site: TestSite) -> None:
    record = json.dumps({"format_version": 1, "kind": "run", "name": "old"})
    site.shell(
        "retention-data",
        "mkdir -p /runs/retention && cd /runs/retention\n"
        "for name in old older new log; do mkdir $name; touch $name/data; done\n"
        f"for name in old older new; do echo '{record}' > $name/run.json; done\n"
        "find old older log -exec touch --date '60 days ago' {} +",
    )
    job, container = component(site, "retention/cronjob.yaml", "jobTemplate.spec.template")
    job["spec"]["schedule"] = "* * * * *"
    container["command"][2] = "/runs/retention"
    container["command"][-1] = "1"
    site.cluster.apply(job, namespace=site.namespace)
    try:
        ended = wait_until(
            lambda: [
                entry["metadata"]["name"]
                for entry in site.cluster.get("jobs", namespace=site.namespace)["items"]
                if entry["metadata"]["name"].startswith("recmill-retention-") and entry["status"].get("succeeded")
            ],
            timeout_s=180,
            what="the first scheduled clean-up",
        )
        (pod,) = site.cluster.pods(f"job-name={ended[0]}", namespace=site.namespace)
        said = site.cluster.logs(pod["metadata"]["name"], namespace=site.namespace)
    finally:
        site.cluster.delete("cronjob", "recmill-retention", namespace=site.namespace)
    assert "2 of 3 runs removed" in said
    assert site.shell("retention-look", "ls /runs/retention").split() == ["log", "new"]


def test_an_indexed_job_scores_every_row_once(site: TestSite, dataset: str, alone: dict[str, Any]) -> None:
    """With the model of another test, in three shares of which two run at a time."""
    model = "/runs/training/alone/checkpoint"
    site.shell(
        "scoring-alone", f"recmill predict {model} {dataset} --out /runs/scores/alone --rows-per-part 500 --json"
    )
    job, container = component(site, "scoring/job.yaml", "template")
    job["spec"]["completions"] = 3
    values = {"SHARES": "3", "MODEL": model, "DATA": dataset, "OUT": "/runs/scores/shares"}
    for entry in container["env"]:
        if "value" in entry:
            entry["value"] = values.pop(entry["name"])
    assert not values
    container["command"] += ["--rows-per-part", "500", "--json"]
    container["resources"]["requests"]["memory"] = "768Mi"
    site.cluster.apply(job, namespace=site.namespace)
    site.cluster.finish_job("recmill-scoring", namespace=site.namespace, timeout_s=300)
    compare = (
        "import json, pathlib, pyarrow.parquet as pq\n"
        "alone, shares = pathlib.Path('/runs/scores/alone'), pathlib.Path('/runs/scores/shares')\n"
        "read = lambda folder: [row for path in folder.glob('part-*') for row in pq.read_table(path).to_pylist()]\n"
        "one, many = (sorted(map(str, read(folder))) for folder in (alone, shares))\n"
        "said = json.loads((shares / 'scores.json').read_text())\n"
        "print(json.dumps([len(one), one == many, said['num_rows'], len(said['parts'])]))"
    )
    rows, is_equal, num_rows, num_parts = json.loads(
        site.shell("scoring-look", f'python3 -c "{compare}"').splitlines()[-1]
    )
    assert is_equal
    assert rows == num_rows > 0
    assert num_parts >= 2  # whole row groups; a share without any ends at once
    pods = site.cluster.pods("job-name=recmill-scoring", namespace=site.namespace)
    assert {pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] for pod in pods} == {"0", "1", "2"}
