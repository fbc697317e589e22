"""The FlexShard benchmark runs on eight real ranks and writes what the checks read, at sizes that measure nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "flexshard.py"
FIELDS = {"baseline", "ours", "ratio", "pairs", "is_exact", "spread", "unit", "note"}
LAWS = ("08", "10", "12")
COUNTED = ("alltoall_bytes", "total_bytes", "inter_node_bytes", "comm_time")
METRICS = {
    *(f"{name}_zipf{law}" for name in COUNTED for law in LAWS),
    *(f"comm_time_zipf{law}_{rival}" for law in LAWS for rival in ("vs_dedup", "bf16_vs_dedup")),
    "predicted_bytes_error",
    "planner_gap",
}


@pytest.mark.slow
def test_every_metric_that_needs_no_data_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "flexshard.json"
    environment = {**os.environ, "RECMILL_DATA_DIR": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--tiny", "--json", str(out), "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    assert all(set(entry) == FIELDS for entry in result["metrics"].values())
    globo = [*(f"{name}_globo" for name in COUNTED), "comm_time_globo_vs_dedup", "comm_time_globo_bf16_vs_dedup"]
    skipped = dict(result["skipped"])
    assert {name: skipped.pop(name) for name in globo} == dict.fromkeys(globo, "RECMILL_DATA_DIR is not set")
    assert set(result["metrics"]) | set(skipped) | {f"inter_node_bytes_zipf{law}" for law in LAWS} == METRICS
    # Over loopback nothing is measured that depends on a network.
    shaped = result["network"]["kind"] == "namespaces"
    assert set(result["metrics"]) == (METRICS if shaped else {"planner_gap"})
    assert {"16x8 zipf12", "128x8 zipf12"} <= set(result["simulation"]["shapes"])
