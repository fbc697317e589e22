from pathlib import Path

import pytest

from tests.unit.report.report_runs import write_run


@pytest.fixture(scope="session")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "baseline")


@pytest.fixture(scope="session")
def faster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains twice as fast, on data a quarter the size, at an AUC that is 0.0016 better."""
    path = tmp_path_factory.mktemp("runs") / "dedup"
    return write_run(path, speed=2.0, auc=0.7950, data_bytes=9_600_000, config={"batch_size": 4096})
