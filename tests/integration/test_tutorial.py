"""Every command of docs/tutorial.md runs, in order, in an empty folder."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tutorial_runs_from_top_to_bottom(tmp_path):
    environment = {**os.environ, "RECMILL_TRACKING": "off", "OMP_NUM_THREADS": "1"}
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert [kind for kind, _ in blocks].count("") == 6
    for kind, text in blocks:
        if kind == "yaml":  # what a command wrote
            written = (tmp_path / "log.yaml").read_text(encoding="utf-8")
            assert all(line in written for line in text.splitlines())
            continue
        if kind == "python":
            subprocess.run([sys.executable, "-c", text], cwd=tmp_path, env=environment, check=True)
            continue
        for line in text.strip().splitlines():
            assert line.startswith("recmill "), line
            command = [sys.executable, "-m", "recmill", *shlex.split(line)[1:]]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert (tmp_path / "runs/mine/report.html").is_file()
    assert (tmp_path / "work/model/model.pt2").is_file()
    assert "Data checks" in (tmp_path / "runs/mine/report.html").read_text(encoding="utf-8")
    page = (tmp_path / "runs/compare/report.html").read_text(encoding="utf-8")
    assert "What each switch gains" in page
