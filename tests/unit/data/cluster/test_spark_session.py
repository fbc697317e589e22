"""Spark of the caller's choice: what its settings are, and what is refused before Spark starts."""

from __future__ import annotations

import pytest
import yaml

from recmill.artifacts import InputError
from recmill.data.cluster.spark_session import ExecutorPods, session_settings, spark_session

IMAGE = "spark.kubernetes.container.image"


def test_without_a_master_spark_is_left_to_its_own_settings() -> None:
    assert session_settings("duckdb", None, ()) == {}
    assert session_settings("spark", None, ()) == {}
    assert session_settings("spark", "local[2]", ("spark.sql.shuffle.partitions=4",)) == {
        "spark.master": "local[2]",
        "spark.sql.shuffle.partitions": "4",
    }


def test_executors_are_pods_without_root_on_the_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECMILL_CLAIM", "recmill-runs")
    settings = session_settings("spark", "k8s://https://host:6443", (f"{IMAGE}=recmill/data:t1",))
    assert settings[IMAGE] == "recmill/data:t1"
    assert settings["spark.kubernetes.executor.volumes.persistentVolumeClaim.runs.options.claimName"] == "recmill-runs"
    with open(settings["spark.kubernetes.executor.podTemplateFile"], encoding="utf-8") as file:
        pod = yaml.safe_load(file)["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"]
    assert pod["automountServiceAccountToken"] is False


def test_executors_of_a_step_belong_to_its_pod() -> None:
    pods = ExecutorPods(image="i:1", driver_host="10.0.0.7", driver_pod="generate-data-1", node_selector={"a": "b"})
    settings = pods.settings()
    assert settings["spark.driver.host"] == "10.0.0.7"
    assert settings["spark.kubernetes.driver.pod.name"] == "generate-data-1"
    # They must call that address, not the one the driver binds to.
    assert settings["spark.driver.bindAddress"] == "0.0.0.0"
    assert settings["spark.kubernetes.executor.useDriverPodIP"] == "false"


@pytest.mark.parametrize(
    ("engine", "master", "flags", "says"),
    [
        ("duckdb", "local", (), "are for --engine spark"),
        ("spark", None, ("memory=1",), "starts with 'spark.'"),
        ("spark", None, ("spark.memory",), "NAME=VALUE"),
    ],
)
def test_wrong_flags_are_refused(engine: str, master: str | None, flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(InputError, match=says):
        session_settings(engine, master, flags)


def test_a_cluster_without_an_image_is_refused_before_spark_starts() -> None:
    with pytest.raises(InputError, match=IMAGE), spark_session({"spark.master": "k8s://https://host"}):
        pass


def test_without_settings_nothing_starts() -> None:
    with spark_session({}):
        pass
