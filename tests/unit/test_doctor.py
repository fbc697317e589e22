"""`recmill doctor` on this machine, and on machines that lack something."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
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


# As in an environment that holds only the wheel: these are neither importable nor listed as installed.
WITHOUT = """
import importlib.abc, importlib.metadata, sys
MISSING = {"torch", "torchrec", "fbgemm_gpu", "kubernetes"}
PACKAGES = MISSING | {"fbgemm-gpu", "fbgemm-gpu-cpu"}

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def version(name, find=importlib.metadata.version):
    if name in PACKAGES:
        raise importlib.metadata.PackageNotFoundError(name)
    return find(name)

sys.meta_path.insert(0, Blocker())
importlib.metadata.version = version
from pathlib import Path
from recmill.cli import doctor, main
doctor.CHECKOUT = Path("no-such-folder")
main(["doctor", "--json"])
"""


def test_an_environment_without_torchrec_is_told_the_exact_command_that_completes_it() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    findings = {entry["name"]: entry for entry in json.loads(done.stdout)["checks"]}
    pip = f"{sys.executable} -m pip install"
    rest = "fbgemm-gpu-cpu==1.8.0 pyre-extensions tensordict torchmetrics==1.0.3 tqdm iopath"
    for name in ("torchrec", "fbgemm"):
        assert findings[name]["remedy"] == f"{pip} {rest} && {pip} --no-deps torchrec==1.8.0"
    assert findings["torch"]["remedy"] == findings["gpu"]["remedy"] == f"{pip} torch==2.13.0"
    assert findings["cluster"]["remedy"] == f"{pip} 'kubernetes<31,>=30'"
    assert findings["kernels"]["is_ok"]


def test_the_doctor_names_the_build_of_torch() -> None:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    assert checks.check_torch().found == f"{torch.__version__}, {build} build"


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
