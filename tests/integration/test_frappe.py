"""The published benchmark: frappe's own split, the DLRM of the preset."""

import os
from pathlib import Path

import pytest

from recmill.data.cluster import cluster_sessions
from recmill.data.sources import make_raw_log
from recmill.data.sources.presets import training_settings
from recmill.training.config import TrainConfig
from recmill.training.trainer import train

FOLDER = Path(os.environ.get("RECMILL_DATA_DIR", "")) / "frappe"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not (FOLDER / "train.parquet").exists(), reason="frappe is not in RECMILL_DATA_DIR")
def test_the_preset_reaches_an_auc_of_0_975(tmp_path):
    make_raw_log("frappe", out=tmp_path / "raw")
    data = cluster_sessions(tmp_path / "raw", out=tmp_path / "data")
    result = train(data.path, out=tmp_path / "run", config=TrainConfig.from_overrides(training_settings("frappe")))
    # A published DLRM reaches 0.984 with exact negatives; part of these were drawn again.
    assert result["metrics"]["auc"] >= 0.975
    assert result["metrics"]["num_samples"] == 28_860
