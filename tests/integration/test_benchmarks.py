"""Every benchmark runs and writes what the checks read, at sizes that measure nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
FIELDS = {"baseline", "ours", "ratio", "pairs", "is_exact", "spread", "unit", "note"}
RECD = (
    "storage_session_vs_best",
    "storage_deduplicated_vs_best",
    "preprocess",
    "train_sequence",
    "train_pooled",
    "train_control_same_lookups",
)
RECD_GLOBO = (
    "storage_globo_vs_best",
    "preprocess_globo",
    "train_sequence_globo",
    "train_standard_globo",
    "train_pooled_globo",
    "reader_bytes_globo",
    "wire_bytes_globo",
)
RECD_OTHER = (
    "dedup_kernel",
    "dedup_kernel_vs_consecutive",
    "dedup_kernel_vs_hash",
    "peak_memory",
    "reader_bytes",
    "train_standard",
    "wire_bytes",
)


def run_benchmark(name: str, tmp_path: Path, *, data: str = "") -> tuple[dict[str, Any], str]:
    """The JSON of a benchmark in its tiny form, and what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RECMILL_DATA_DIR": data}
    out = tmp_path / f"{name}.json"
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--tiny", "--json", str(out), "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text(encoding="utf-8")), done.stdout


def check_result(
    result: dict[str, Any],
    printed: str,
    name: str,
    *,
    may_be_zero: frozenset[str] = frozenset(),
    signed: frozenset[str] = frozenset(),
) -> None:
    assert result["benchmark"] == name
    assert result["quick"] is True
    assert len(result["commit"]) in (0, 40)
    assert result["machine"]
    for metric, entry in result["metrics"].items():
        assert set(entry) == FIELDS, metric
        assert entry["pairs"] >= 1, metric
        if entry["spread"]["interval"] is not None:
            low, high = entry["spread"]["interval"]
            assert low <= (entry["ratio"] or entry["ours"]) + 1e-12, metric
            assert high >= (entry["ratio"] or entry["ours"]) - 1e-12, metric
        assert entry["ours"] > 0 or metric in signed or (entry["ours"] == 0 and metric in may_be_zero), metric
        assert metric in printed
        if entry["baseline"] is None:
            assert entry["ratio"] is None, metric
            continue
        better = {entry["ours"] / entry["baseline"], entry["baseline"] / entry["ours"]}
        assert entry["ratio"] in [pytest.approx(value) for value in better], metric
        assert entry["spread"]["ratio"][0] <= entry["spread"]["ratio"][1], metric


@pytest.mark.parametrize("name", ["dedup_kernel", "generate", pytest.param("prepare", marks=pytest.mark.slow)])
def test_a_small_benchmark_writes_the_contract(name: str, tmp_path: Path) -> None:
    result, printed = run_benchmark(name, tmp_path)
    check_result(result, printed, name)
    assert result["skipped"] == {}


@pytest.mark.slow
def test_encoders_are_measured_and_globo_is_skipped_without_data(tmp_path: Path) -> None:
    result, printed = run_benchmark("encoders", tmp_path)
    check_result(result, printed, "encoders")
    assert {"transformer_recd", "standard_transformer_recd", "hstu_recd", "din_recd"} <= set(result["metrics"])
    assert {name.rpartition("_")[2] for name in result["skipped"]} == {"globo"}


def test_recd_measures_every_metric_that_needs_no_data_and_says_why_it_skips_the_others(tmp_path: Path) -> None:
    result, printed = run_benchmark("recd", tmp_path)
    check_result(result, printed, "recd")
    assert set(result["metrics"]) == {*RECD, *RECD_OTHER}
    assert result["skipped"] == dict.fromkeys(RECD_GLOBO, "RECMILL_DATA_DIR is not set")
    moved = result["series"]["bytes_per_sample"]["recd"]
    for way in ("reader_to_trainer", "over_the_wire"):
        assert moved[way]["ours"] < moved[way]["baseline"]


@pytest.mark.slow
def test_recd_measures_globo_where_it_is_there(tmp_path: Path) -> None:
    data = os.environ.get("RECMILL_DATA_DIR", "")
    if not (Path(data) / "globo" / "clicks.parquet").exists():
        pytest.skip("RECMILL_DATA_DIR holds no globo/clicks.parquet")
    result, printed = run_benchmark("recd", tmp_path, data=data)
    check_result(result, printed, "recd")
    assert set(result["metrics"]) == {*RECD, *RECD_OTHER, *RECD_GLOBO}
    assert result["skipped"] == {}


def run_grid(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    out = tmp_path / "grid.json"
    command = [sys.executable, str(FOLDER / "auto_grid.py"), "--json", str(out), "--work", str(tmp_path / "work")]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text(encoding="utf-8")), done.stdout


@pytest.mark.slow
def test_the_grid_of_auto_measures_its_cells_and_resumes(tmp_path: Path) -> None:
    first, _ = run_grid(tmp_path, "--tiny")
    result, printed = run_grid(tmp_path, "--tiny")  # finds the cells of the first call
    assert result["metrics"] == first["metrics"]
    assert {"rate_tiny_dlrm_2048", "rate_single_dlrm_2048", "lost_cells", "doubtful_cells"} <= set(result["metrics"])
    assert "| tiny | dlrm | 2,048 | 2 |" in printed
    # A quiet machine reaches 0.97; this only notices a switch that is on and costs.
    assert result["metrics"]["lowest_rate"]["ours"] > 0.7


@pytest.mark.slow
def test_the_default_run_does_not_lose_on_real_clicks(tmp_path: Path) -> None:
    if not (Path(os.environ.get("RECMILL_DATA_DIR", "")) / "frappe").is_dir():
        pytest.skip("RECMILL_DATA_DIR holds no folder frappe")
    result, printed = run_grid(tmp_path, "--quick", "--seconds-per-cell", "60", "--cell", "frappe-dlrm-2048")
    assert result["skipped"] == {}
    assert result["metrics"]["lost_cells"]["ours"] == 0, printed


SERVING_ZEROS = frozenset({"score_difference", *(f"globo_auc_difference_{form}" for form in ("bf16", "int8", "int4"))})


@pytest.mark.slow
def test_the_main_job_is_measured_over_seeds_and_resumes(tmp_path: Path) -> None:
    out = tmp_path / "main_job.json"
    command = [sys.executable, str(FOLDER / "main_job.py"), "--tiny", "--json", str(out), "--work", str(tmp_path)]
    first, second = (subprocess.run(command, capture_output=True, text=True, timeout=900) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout == second.stdout  # the second call reads the runs of the first
    result = json.loads(out.read_text(encoding="utf-8"))
    check_result(result, first.stdout, "main_job", signed=frozenset({"auc", "gauc"}))
    assert {"rate", "with_trial", "auc", "gauc"} <= result["metrics"].keys()
    assert {metric["pairs"] for name, metric in result["metrics"].items() if name != "time"} == {2}
    assert "2 of 2  tiny, seed 1: " in second.stderr


@pytest.mark.slow
def test_growth_is_measured_resumes_and_is_drawn(tmp_path: Path) -> None:
    out, work, drawn = tmp_path / "growth.json", tmp_path / "work", tmp_path / "growth.svg"
    command = [sys.executable, str(FOLDER / "growth.py"), "--tiny", "--json", str(out), "--work", str(work)]
    first, second = (subprocess.run(command, capture_output=True, text=True, timeout=900) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout == second.stdout  # the second call reads the steps of the first
    result = json.loads(out.read_text(encoding="utf-8"))
    check_result(result, first.stdout, "growth", signed=frozenset(result["metrics"]))  # slopes
    assert {"samples_cluster_seconds", "rows_train_peak_bytes"} <= result["metrics"].keys()
    assert not list(work.rglob("*.parquet"))  # outputs are removed, figures are kept
    chart = [sys.executable, str(FOLDER / "growth_chart.py"), str(out), str(drawn)]
    subprocess.run(chart, check=True, timeout=60)
    assert all(f">{step}<" in drawn.read_text(encoding="utf-8") for step in ("cluster", "evaluate"))


@pytest.mark.slow
def test_serving_is_measured_and_what_is_missing_is_skipped(tmp_path: Path) -> None:
    result, printed = run_benchmark("serving", tmp_path)
    check_result(result, printed, "serving", may_be_zero=SERVING_ZEROS)
    shapes = {f"recd_{name}_{count}" for name in ("transformer", "pooled") for count in (1, 20, 100, 500)}
    assert shapes | {"score_difference", "recd_pooled_100_int8", "large_table_resident"} <= result["metrics"].keys()
    assert result["metrics"]["score_difference"]["ours"] < 1e-5
    assert {"globo", "loopback", "recd_pooled_1_vs_onnxruntime"} <= result["skipped"].keys()
    assert "is_partial" not in result


@pytest.mark.slow
def test_a_benchmark_of_serving_that_was_cut_continues(tmp_path: Path) -> None:
    whole, _ = run_benchmark("serving", tmp_path)
    before = {name: whole["metrics"][name] for name in ("recd_pooled_20", "score_difference")}
    cut = {**whole, "is_partial": True, "stages": ["recd_transformer", "recd_pooled", "score_difference"]}
    cut["metrics"] = before
    (tmp_path / "serving.json").write_text(json.dumps(cut), encoding="utf-8")
    result, _ = run_benchmark("serving", tmp_path)
    assert result["metrics"].items() >= before.items()
    assert result["metrics"].keys() == before.keys() | {"large_table_resident", "large_table_p99"}
    assert "is_partial" not in result


@pytest.mark.slow
def test_serving_measures_globo_where_it_is_there(tmp_path: Path) -> None:
    data = os.environ.get("RECMILL_DATA_DIR", "")
    if not (Path(data) / "globo" / "clicks.parquet").exists():
        pytest.skip("RECMILL_DATA_DIR holds no globo/clicks.parquet")
    result, printed = run_benchmark("serving", tmp_path, data=data)
    check_result(result, printed, "serving", may_be_zero=SERVING_ZEROS)
    assert {"globo_pooled_100", "globo_auc_difference_int8"} <= result["metrics"].keys()
