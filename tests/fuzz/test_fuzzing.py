"""A short run of every fuzzer, and tests of kernels under sanitizers; tests/fuzz/README.md has longer runs."""

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


def test_tests_of_the_kernels_pass_under_sanitizers() -> None:
    """Those of the kernels that read what files claim; make test-sanitizers runs all."""
    names = ("decode_pages", "check_pages", "decode_streams", "dedup_rows", "merge_windows", "join_lists", "take_rows")
    names += ("pool_tables", "dense_layers", "encode_windows")
    tests = [f"tests/kernels/test_{name}.py" for name in names]
    command = ["tests/fuzz/sanitized.sh", sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
