"""Checkpoints as older versions wrote them: torch's own storage, with pickles.

python -m tests.old_checkpoints FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from recmill.artifacts import Checkpoint, write_folder


def write_old(folder: Path, state: Mapping[str, Any]) -> Path:
    with write_folder(folder, manifest_name=Checkpoint.manifest_name) as target:
        dcp.save({"state": dict(state)}, checkpoint_id=str(target), no_dist=True)
        body = {"step": 3, "config": {"a": 1}, "schema": {}, "world_size": 1}
        Checkpoint.of_json(body, inputs={"dataset": "sha256:0"}).seal(target)
    return folder


if __name__ == "__main__":
    write_old(Path(sys.argv[1]), {f"table{n}": torch.full((500, 16), float(n)) for n in range(6)})
