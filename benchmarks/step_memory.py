"""Peak memory of every step of a pipeline, as the pod of a cluster that runs it would count it.

    python benchmarks/step_memory.py [--quick] [--json PATH|-]

A pod's limit counts a page once however many of its processes map it, so this adds up the proportional set size (PSS)
of a step's processes, ten times per second. Steps start as in their pods: each loads what it needs, and logs to an
MLflow server. docs/kubernetes.md has the result beside what `laptop` requests.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from harness import Metric, finish, parse_options, plain_value

from components.form import FIELDS
from pipelines.local import run_locally
from pipelines.site import LOCAL
from pipelines.train import build_pipeline, steps_of

SAMPLE_S = 0.1
MAX_STEPS = 150  # the peak is reached within the first steps and the first evaluation
PRESETS = {"tiny": "tiny", "quick": "tiny", "full": "demo"}
FUNCTION = re.compile(r"--function_to_execute (\w+)")


def proportional_bytes(process: psutil.Process) -> int:
    """The process's memory, of which a page that n processes map counts as an n-th; 0 if it is gone."""
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
    except (OSError, ProcessLookupError):
        return 0
    found = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


class PeakMemory:
    """Samples the processes of all steps that run, in a thread."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = defaultdict(int)
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_done.wait(SAMPLE_S):
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):
                    if step := FUNCTION.search(" ".join(child.cmdline())):
                        tree = [child, *child.children(recursive=True)]
                        self.peaks[step[1]] = max(self.peaks[step[1]], sum(map(proportional_bytes, tree)))


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    database = f"sqlite:///{folder / 'mlflow.db'}"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", database, "--port", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*command, "--workers", "1"], cwd=folder, start_new_session=True, **quiet)
    try:
        deadline = time.monotonic() + 120
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("MLflow's server does not start")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 15)
        process.wait()


def measure(preset: str, nproc: int) -> dict[str, int]:
    variants = {"with_baseline": True, "with_sharing": True}
    with tempfile.TemporaryDirectory() as scratch, mlflow_server(Path(scratch)) as server, PeakMemory() as memory:
        settings = json.dumps({"max_steps": MAX_STEPS})
        given = {"preset": preset, "nproc": nproc, "settings": settings, "workdir": f"{scratch}/run"}
        defaults = {name: field.default for name, field in FIELDS.items() if name not in ("partitions", "ablations")}
        run_locally(
            build_pipeline(LOCAL, **variants),
            defaults | given,
            steps=steps_of(**variants),
            log_path=f"{scratch}/run.log",
            environment={"KFP_RUN_ID": "measured", "MLFLOW_TRACKING_URI": server},
            follow=lambda step, text: print(f"[{step}] {text}", file=sys.stderr) if " of " not in text else None,
        )
    return memory.peaks


def main() -> None:
    options = parse_options(__doc__, quick="the preset tiny instead of demo")
    metrics: dict[str, Metric] = {}
    for nproc in (1, 2):
        for step, peak in measure(PRESETS[options.size], nproc).items():
            print(f"{step}, {nproc} process(es): {peak / 2**20:,.0f} MiB", file=sys.stderr)
            metrics[f"{step}_{nproc}"] = plain_value([peak], unit="bytes", note=f"processes: {nproc}")
    finish(options, metrics)


if __name__ == "__main__":
    main()
