"""`recmill doctor` on this machine, and on machines that lack something."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from recmill.cli import doctor as checks
from recmill.cli.doctor import Finding, check_cluster, check_compiler, check_fbgemm, check_java, check_package, doctor


def test_a_set_up_machine_has_all_that_is_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    outcome = CliRunner().invoke(doctor, ["--json"])
    found = json.loads(outcome.stdout)
    missing = [entry for entry in found["checks"] if entry["is_required"] and not entry["is_ok"]]
    assert (outcome.exit_code, found["ok"], missing) == (0, True, [])
    assert {"python", "fbgemm", "kernels", "compiler", "java", "gpu", "cluster", "disk", "chromium", "kfp"} <= {
        entry["name"] for entry in found["checks"]
    }


def test_every_part_that_is_missing_comes_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    for finding in (check_cluster(), check_compiler(), check_java(), check_package("no-such-package")):
        assert not finding.is_ok
        assert finding.remedy


def test_a_required_part_that_is_missing_ends_in_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CHECKS", ())
    monkeypatch.setattr(checks, "PACKAGES", ("no-such-package",))
    outcome = CliRunner().invoke(doctor, [])
    assert outcome.exit_code == 1
    assert "make setup" in outcome.output


def test_an_optional_part_that_is_missing_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Finding(name="gpu", is_ok=False, is_required=False, found="none", remedy="buy one")
    monkeypatch.setattr(checks, "CHECKS", (lambda: absent,))
    monkeypatch.setattr(checks, "PACKAGES", ())
    assert CliRunner().invoke(doctor, []).exit_code == 0


def test_two_fbgemms_that_overwrite_each_other_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fbgemm_gpu", "fbgemm_gpu_cpu"):
        folder = tmp_path / f"{name}-9.9.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = check_fbgemm()
    assert not finding.is_ok
    assert "overwrite each other" in finding.found
    assert "pip uninstall" in finding.remedy


def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        host = f"http://127.0.0.1:{unused.getsockname()[1]}"
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": host}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    # kubernetes reads KUBECONFIG once, when it is imported.
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    finding = check_cluster()
    assert not finding.is_ok
    assert finding.found == f"{host} does not answer"
