"""The Triton kernels agree with their references in Triton's interpreter, which needs no GPU.

Triton reads TRITON_INTERPRET when it is imported, and torchrec imports Triton: by the time a test sets the variable it
may be too late. So the files interpreted_*.py run in a process of their own, whatever this process has imported.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(Path(__file__).parent.glob("interpreted_*.py"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_agree_with_their_references():
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, FILES)],
        env={**inherited, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_every_triton_kernel_has_a_file_to_check_it():
    kernels = {path.parent.name for path in (ROOT / "kernels").glob("*/triton_impl.py")}
    checked = "\n".join(path.read_text(encoding="utf-8") for path in FILES)
    assert {kernel for kernel in kernels if f"{kernel}(" not in checked} == set()
