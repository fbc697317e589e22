"""Train a model with 100 GB of logical embeddings in a separate process, which reports its peak memory.

python benchmarks/pss_memory.py STEPS     # prints one JSON object
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

NUM_TABLES, DIM, NUM_ROWS = 26, 64, 15_100_000  # 26 * 15.1M * 64 * 4 bytes = 100.5 GB
ARRAY_BYTES = 10_000_000
BATCH_SIZE = 2048


def train(steps: int) -> dict[str, Any]:
    import torch
    from torch import nn
    from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

    from recmill.model.stores.interface import TableOptimiser
    from recmill.model.stores.shared import SharedEmbeddingBagCollection

    torch.manual_seed(0)
    names = [f"f{i}" for i in range(NUM_TABLES)]
    configs = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=NUM_ROWS, embedding_dim=DIM, feature_names=[name])
        for i, name in enumerate(names)
    ]
    tables = SharedEmbeddingBagCollection(
        configs, memory_bytes=ARRAY_BYTES, optimiser=TableOptimiser(kind="rowwise_adagrad", lr=0.05)
    )
    top = nn.Sequential(nn.Linear(NUM_TABLES * DIM, 128), nn.ReLU(), nn.Linear(128, 1))
    optimiser = torch.optim.Adam(top.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        # Ids follow a power law over all rows; the label is a parity-free function of a few of them.
        ids = (NUM_ROWS * torch.rand(NUM_TABLES, BATCH_SIZE).pow(8)).long()
        label = ((ids[0] % 7 < 3) ^ (ids[1] % 5 < 1)).float()
        batch = KeyedJaggedTensor(
            keys=names, values=ids.flatten(), lengths=torch.ones(NUM_TABLES * BATCH_SIZE, dtype=torch.int32)
        )
        logit = top(tables(batch).values()).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logit, label)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return {
        "peak_bytes": peak_resident(),
        "logical_bytes": tables.array.num_logical * 4,
        "table_bytes": tables.num_bytes,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "steps": steps,
    }


def peak_resident() -> int:
    """Peak resident memory of this process. Not `ru_maxrss`, which survives exec and starts at the parent's peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def measure_resident(steps: int) -> dict[str, Any]:
    """What a fresh process reports."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), str(steps)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"training 100 GB of embeddings failed: {done.stderr[-500:]}")
    reported: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return reported


if __name__ == "__main__":
    print(json.dumps(train(int(sys.argv[1]))))
