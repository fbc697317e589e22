"""A short run of every fuzzer; tests/fuzz/README.md has longer runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler"),
]


@pytest.mark.parametrize("options", [[], ["--driver"]], ids=["libfuzzer if there", "driver"])
def test_no_fuzzer_finds_anything(options: list[str]) -> None:
    command = [sys.executable, "tests/fuzz/run.py", "--runs", "20000", *options]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
