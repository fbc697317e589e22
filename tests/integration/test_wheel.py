"""The wheel in an empty environment: it installs, and `recmill doctor` prints the command that completes it."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_wheel_installs_in_an_empty_environment_and_the_doctor_completes_it(tmp_path: Path) -> None:
    build = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT)
    built = run(*build, cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"recmill/py.typed", "kernels/py.typed"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)

    python = tmp_path / "empty" / "bin" / "python"
    assert run(sys.executable, "-m", "venv", python.parents[1], cwd=tmp_path).returncode == 0
    constraints = ROOT / "constraints.txt"
    installed = run(python, "-m", "pip", "install", "--constraint", constraints, wheel, cwd=tmp_path)
    if "No matching distribution" in installed.stderr or "ConnectionError" in installed.stderr:
        pytest.skip(f"the package index lacks a dependency: {installed.stderr.splitlines()[-1]}")
    assert installed.returncode == 0, installed.stderr

    before = run(python.with_name("recmill"), "doctor", "--json", cwd=tmp_path)
    assert (before.returncode, before.stderr) == (1, "")
    missing = [entry for entry in json.loads(before.stdout)["checks"] if entry["is_required"] and not entry["is_ok"]]
    assert {entry["name"] for entry in missing} == {"fbgemm", "torchrec"}
    (command,) = {entry["remedy"] for entry in missing}
    completed = run("bash", "-c", command, cwd=tmp_path)
    assert completed.returncode == 0, completed.stderr
    after = run(python.with_name("recmill"), "doctor", "--json", cwd=tmp_path)
    assert (after.returncode, json.loads(after.stdout)["ok"]) == (0, True)
