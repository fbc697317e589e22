"""An export without its program reads tables one after another."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from recmill.artifacts import Checkpoint, InputError
from recmill.data.schema import Feature, Schema
from recmill.model.ranker import Ranker
from recmill.serving import RequestModel
from recmill.training.config import TrainConfig
from recmill.training.prediction.scorer import ModelFolder
from recmill.training.tensors.storage import save_tensors

NUM_TABLES, NUM_ROWS, DIM = 8, 200_000, 32
TABLE_BYTES = 4 * NUM_ROWS * DIM  # 25.6 MB

EXPORT = """
import json, resource, sys
from recmill.training.serving import export_checkpoint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
export_checkpoint(sys.argv[1], out=sys.argv[2], has_program=False)
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before))
"""


def write_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    features = tuple(Feature(name=f"f{n}", kind="sparse", num_rows=NUM_ROWS, dim=DIM) for n in range(NUM_TABLES))
    schema, config = Schema(features=features), TrainConfig()
    torch.manual_seed(0)
    tables = {table.name: torch.rand(NUM_ROWS, DIM) for table in schema.tables}
    ranker = Ranker(schema, config)
    dense = {f"ranker.{name}": value.detach() for name, value in ranker.state_dict().items()}
    folder.mkdir()
    save_tensors({"tables": tables, "dense": dense}, folder, no_dist=True)
    body = {"step": 1, "config": json.loads(json.dumps(asdict(config))), "schema": schema.to_json()}
    Checkpoint.of_json({**body, "sharing": None, "world_size": 1}, inputs={}).seal(folder)
    return tables


def test_an_export_without_its_program_holds_about_one_table(tmp_path):
    tables = write_checkpoint(tmp_path / "checkpoint")
    command = [sys.executable, "-c", EXPORT, str(tmp_path / "checkpoint"), str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) < 3.5 * TABLE_BYTES < NUM_TABLES * TABLE_BYTES / 2
    model = tmp_path / "model"
    assert not (model / "model.pt2").exists()
    served = RequestModel.load(model, memory="resident")
    assert list(served.manifest.tables) == list(tables)
    path = Path(served.manifest.path, served.manifest.tables["f3"].file)
    np.testing.assert_array_equal(np.fromfile(path, np.float32).reshape(NUM_ROWS, DIM), tables["f3"].numpy())
    with pytest.raises(InputError, match="was exported without its program; predict with the checkpoint"):
        ModelFolder.open(model)
