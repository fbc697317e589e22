"""The FAE benchmark runs and writes what the checks read, at sizes that measure nothing."""

from pathlib import Path

import pytest

from tests.integration.test_benchmarks import check_result, run_benchmark

METRICS = {
    "hot_batch_embedding",
    "train_shaped",
    *(f"ahead_vs_{rival}_{network}" for rival in ("dedup", "tables", "hot") for network in ("shaped", "loopback")),
    "train_loopback",
    "layout_ids_per_s",
    "swap_rows_vs_index",
    "auc_difference",
    "auc_random_orders",
    "auc_finest_turns",
    "low_skew",
    "beyond_memory_samples_per_s",
}


@pytest.mark.slow
def test_fae_measures_every_metric_or_says_why_not(tmp_path: Path) -> None:
    result, printed = run_benchmark("fae", tmp_path)
    check_result(result, printed, "fae", signed=frozenset({"auc_difference", "auc_random_orders", "auc_finest_turns"}))
    assert set(result["metrics"]) | set(result["skipped"]) == METRICS
    assert all(name.endswith("_shaped") for name in result["skipped"])
    shares = [entry["sample_share"] for entry in result["series"]["share_against_budget"]["Zipf 1.2"]]
    assert shares == sorted(shares)
