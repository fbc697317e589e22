"""Training once a distinct row gives what training once a sample gives, on one and on two processes."""

import numpy as np
import pytest

from recmill.data.cluster import cluster_sessions
from recmill.data.sources import make_raw_log
from recmill.training.config import TrainConfig
from recmill.training.trainer import train

CONFIG = TrainConfig(batch_size=256, bottom_layers=(16,), top_layers=(16,), threads=1, max_steps=12, eval_every=12)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """The same sessions, one record a sample and one record a session."""
    folder = tmp_path_factory.mktemp("sessions")
    make_raw_log("tiny", out=folder / "raw", overrides={"sessions": "300"})
    return {
        layout: cluster_sessions(
            folder / "raw", out=folder / layout, layout=layout, eval_fraction=0.2, rows_per_group=512
        ).path
        for layout in ("session", "deduplicated")
    }


def losses(result):
    return [entry["loss"] for entry in result["curve"]]


@pytest.mark.parametrize(("optimiser", "nproc"), [("sgd", 1), ("rowwise_adagrad", 2)])
def test_dedup_keeps_the_loss(datasets, tmp_path, optimiser, nproc):
    settings = {"table_optimiser": optimiser, "sequence_encoder": "transformer"}
    plain = train(
        datasets["session"],
        out=tmp_path / "plain",
        nproc=nproc,
        config=TrainConfig.from_overrides(settings | {"dedup": "false"}, base=CONFIG),
    )
    shared = train(
        datasets["deduplicated"],
        out=tmp_path / "shared",
        nproc=nproc,
        config=TrainConfig.from_overrides(settings | {"dedup": "true"}, base=CONFIG),
    )
    assert not plain["dedup"]["groups"]
    assert "history" in {name for group in shared["dedup"]["groups"] for name in group}
    np.testing.assert_allclose(losses(shared), losses(plain), rtol=1e-4)
    assert shared["metrics"]["auc"] == pytest.approx(plain["metrics"]["auc"], abs=1e-4)


def test_auto_leaves_alone_what_does_not_repeat(tmp_path):
    make_raw_log("tiny", out=tmp_path / "raw", overrides={"sessions": "3000", "samples_per_session": "1"})
    data = cluster_sessions(tmp_path / "raw", out=tmp_path / "data", eval_fraction=0.2, rows_per_group=512)
    config = TrainConfig.from_overrides({"dedup": "auto", "max_steps": "2", "eval_every": "2"}, base=CONFIG)
    assert train(data.path, out=tmp_path / "run", config=config)["dedup"] == {"groups": [], "windows": []}
