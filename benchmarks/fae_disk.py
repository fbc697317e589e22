"""Trains a table of 50 GB in a process that may hold 12: `fae_disk.py FOLDER NUM_BATCHES TABLE_GB`; prints JSON."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from recmill.model.stores.disk.store import DiskStore
from recmill.model.stores.interface import TableOptimiser

DIM, LENGTH, BATCH = 64, 4, 2048
HOT_ROWS = 1_000_000
RESIDENT_LIMIT = 12 * 10**9
AHEAD = 2


def draw_rows(rng: np.random.Generator, num_rows: int, count: int) -> np.ndarray:
    """Ids by Zipf 1.05 over all rows (inverse of its continuous form), scattered over the table."""
    exponent = -0.05
    low, high = 1.0, float(num_rows + 1) ** exponent
    rank = (low - rng.random(count) * (low - high)) ** (1 / exponent)
    rank = np.minimum(rank.astype(np.int64) - 1, num_rows - 1)
    return scatter(rank, num_rows)


def scatter(rank: np.ndarray, num_rows: int) -> np.ndarray:
    return (rank * 2_654_435_761 + 12_345) % num_rows  # 2654435761 is prime and does not divide the row count


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def main() -> None:
    warnings.simplefilter("ignore")
    folder, num_batches, table_gb = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    # The kernel rejects private memory beyond the limit; pages of the file are included in the peak below.
    resource.setrlimit(resource.RLIMIT_DATA, (RESIDENT_LIMIT, RESIDENT_LIMIT))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    num_rows = int(table_gb * 1e9) // (4 * (DIM + 1))
    hot = torch.from_numpy(np.unique(scatter(np.arange(min(HOT_ROWS, num_rows // 10)), num_rows)))
    config = EmbeddingBagConfig(name="t", num_embeddings=num_rows, embedding_dim=DIM, feature_names=["f"])
    store = DiskStore([config], folder=folder, optimiser=TableOptimiser(), hot_rows={"t": hot})
    dense = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, 1))
    optimiser = torch.optim.Adam(dense.parameters())
    rng = np.random.default_rng(0)
    batches = [
        KeyedJaggedTensor(
            keys=["f"],
            values=torch.from_numpy(draw_rows(rng, num_rows, BATCH * LENGTH)),
            lengths=torch.full((BATCH,), LENGTH),
        )
        for _ in range(num_batches)
    ]
    labels = torch.from_numpy((rng.random((num_batches, BATCH)) < 0.25).astype(np.float32))
    is_hot = torch.isin(batches[0].values(), hot).float().mean()
    start = time.perf_counter()
    for ids in batches[:AHEAD]:
        store.prefetch(ids)
    for number, ids in enumerate(batches):
        if number + AHEAD < num_batches:
            store.prefetch(batches[number + AHEAD])
        logits = dense(store(ids).to_dict()["f"]).squeeze(1)
        functional.binary_cross_entropy_with_logits(logits, labels[number]).backward()
        optimiser.step()
        optimiser.zero_grad()
    store.flush()
    seconds = time.perf_counter() - start
    file = os.stat(folder / "t.rows")
    result = {
        "samples_per_s": num_batches * BATCH / seconds,
        "peak_bytes": peak_bytes(),
        "table_bytes": file.st_size,
        "written_bytes": file.st_blocks * 512,
        "hot_share": float(is_hot),
        "resident_limit": RESIDENT_LIMIT,
    }
    store.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
