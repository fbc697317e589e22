"""Time of a training step (forward, backward, SGD) of one table: shared array, FBGEMM's full table, plain torch, ROBE.

The array that is compared with the full table is a tenth of it: at that size test AUC on frappe equals the full
table's (frappe_auc_10x_difference of pss.py). Ids are uniform, which favours a small array, or Zipf 1.05 over the
rows in random order, where the full table's hot rows stay in the cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from harness import Metric, compare, in_turns
from torch import Tensor
from torchrec import EmbeddingBagConfig

from kernels.shared_lookup import SharedLayout
from kernels.shared_lookup.layout import BLOCK_FACTOR, ID_FACTOR, signed
from kernels.shared_lookup.reference import mix_bits, scale_hash
from recmill.model.stores.interface import TableOptimiser
from recmill.model.stores.shared import SharedEmbeddingBagCollection
from recmill.training.processes import torch_threads

LR = 0.01
SCATTER = 1_000_003  # a prime that divides no number of rows used here: a permutation of the rows
ROBE_PRIME = 2_038_074_743  # of the published hash
ROBE_BLOCK = 32
EQUAL_QUALITY = 10  # times smaller than the full table


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A table, its batches and the array."""

    dim: int = 64
    pooling: int = 1
    array_mb: int = 10
    batch_size: int = 8192
    num_rows: int = 4_000_000
    zipf: float = 0.0  # exponent of the ids' law; 0: uniform


class Batches:
    """Several batches in turn, so that no step finds its rows in the cache because the previous one read them."""

    def __init__(self, shape: Shape, *, seed: int, count: int = 4) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_ids = shape.batch_size * shape.pooling
        self.ids = [draw_ids(shape, num_ids, generator) for _ in range(count)]
        self.offsets = torch.arange(shape.batch_size + 1) * shape.pooling
        self.gradient = torch.randn(shape.batch_size, shape.dim, generator=generator) / shape.batch_size
        self.turn = 0

    def next_ids(self) -> Tensor:
        self.turn += 1
        return self.ids[self.turn % len(self.ids)]


def draw_ids(shape: Shape, num_ids: int, generator: torch.Generator) -> Tensor:
    if not shape.zipf:
        return torch.randint(shape.num_rows, (num_ids,), generator=generator)
    edges = torch.arange(1, shape.num_rows + 1, dtype=torch.float64).pow(-shape.zipf).cumsum(0)
    drawn = torch.rand(num_ids, generator=generator, dtype=torch.float64) * edges[-1]
    rank = torch.searchsorted(edges, drawn).clamp(max=shape.num_rows - 1)
    return rank * SCATTER % shape.num_rows  # hot rows are anywhere in the table


def fbgemm_step(shape: Shape, batches: Batches) -> Callable[[], None]:
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(shape.num_rows, shape.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_SGD,
        learning_rate=LR,
    )
    table.init_embedding_weights_uniform(-0.01, 0.01)  # otherwise the first touch of every page would be measured
    return lambda: table(batches.next_ids(), batches.offsets).backward(batches.gradient)


def shared_step(shape: Shape, batches: Batches, *, block_size: int | None = None) -> Callable[[], None]:
    config = EmbeddingBagConfig(name="t", num_embeddings=shape.num_rows, embedding_dim=shape.dim, feature_names=["f"])
    tables = SharedEmbeddingBagCollection(
        [config],
        memory_bytes=shape.array_mb * 10**6,
        block_size=block_size,
        optimiser=TableOptimiser(kind="sgd", lr=LR),
    )
    return lambda: tables.look_up(batches.next_ids(), batches.offsets).backward(batches.gradient)


def torch_step(shape: Shape, batches: Batches, *, block_size: int) -> Callable[[], None]:
    """PSS in plain torch: an index of ids x dim, a gather, autograd's scatter, dense SGD."""
    layout = SharedLayout(size=shape.array_mb * 250_000, block_size=block_size)
    array = torch.randn(layout.size).requires_grad_()
    column_D = torch.arange(shape.dim)
    optimiser = torch.optim.SGD([array], lr=LR)

    def run() -> None:
        words = layout.table_key(0) + batches.next_ids()[:, None] * signed(ID_FACTOR)
        blocks = torch.arange(-(-shape.dim // block_size))
        starts = scale_hash(mix_bits(words + blocks * signed(BLOCK_FACTOR)), layout.size - block_size + 1)
        slots_ND = starts[:, column_D // block_size] + column_D % block_size
        rows_ND = array[slots_ND]
        pooled = rows_ND.view(shape.batch_size, shape.pooling, shape.dim).sum(1)
        optimiser.zero_grad()
        pooled.backward(batches.gradient)
        optimiser.step()

    return run


def robe_step(shape: Shape, batches: Batches) -> Callable[[], None]:
    """ROBE-Z as published: block c of row x starts at (B x + C c + D) mod P mod m of a circular array.

    Only CUDA kernels are published; this is their arithmetic in torch, without the signs, which would cost more.
    """
    size = shape.array_mb * 250_000
    array = torch.randn(size).requires_grad_()
    b, c, d = (int(value) for value in torch.randint(1, ROBE_PRIME, (3,), generator=torch.Generator().manual_seed(0)))
    block_C = torch.arange(shape.dim // ROBE_BLOCK) * c + d
    within_Z = torch.arange(ROBE_BLOCK)
    optimiser = torch.optim.SGD([array], lr=LR)

    def run() -> None:
        starts_NC = (batches.next_ids()[:, None] * b + block_C) % ROBE_PRIME % size
        slots_ND = ((starts_NC[..., None] + within_Z) % size).flatten(1)
        pooled = array[slots_ND].view(shape.batch_size, shape.pooling, shape.dim).sum(1)
        optimiser.zero_grad()
        pooled.backward(batches.gradient)
        optimiser.step()

    return run


def seconds_of(run: Callable[[], None], *, steps: int) -> Callable[[], float]:
    """Mean time per step, after an untimed one."""

    def measure() -> float:
        run()
        start = time.perf_counter()
        for _ in range(steps):
            run()
        return (time.perf_counter() - start) / steps

    return measure


def step_metrics(poolings: Sequence[int] = (1, 20)) -> dict[str, tuple[int, float, int]]:
    """(pooling, exponent of the ids' law, threads) of every comparison with the full table, by metric."""
    return {
        f"step_{'zipf' if zipf else 'uniform'}_pool{pooling}_threads{count}": (pooling, zipf, count)
        for pooling in poolings
        for zipf in (0.0, 1.05)
        for count in (1, 2)
    }


def measure_steps(size: str, *, seed: int) -> tuple[dict[str, Metric], list[dict[str, Any]]]:
    """Steps against the full table and against other shared arrays; in the full form also every dim and array."""
    torch.manual_seed(seed)
    num_rows = 4_000_000 if size != "tiny" else 100_000
    batch_size = 8192 if size != "tiny" else 128
    repeats = {"tiny": 1, "quick": 5, "full": 15}[size]
    steps = {"tiny": 1, "quick": 4, "full": 8}[size]
    common = {"num_rows": num_rows, "batch_size": batch_size}
    array_mb = max(1, round(num_rows * Shape.dim * 4 / EQUAL_QUALITY / 1e6))
    metrics: dict[str, Metric] = {}
    for name, (pooling, zipf, count) in step_metrics().items():
        shape = Shape(pooling=pooling, array_mb=array_mb, zipf=zipf, **common)
        batches = Batches(shape, seed=seed)
        few = max(1, steps // (1 if pooling == 1 else 3))
        with torch_threads(count):
            sides = [fbgemm_step(shape, batches), shared_step(shape, batches)]
            measured = in_turns(*(seconds_of(side, steps=few) for side in sides), repeats=repeats)
        note = f"dim 64, {batch_size} samples, table of {num_rows:,} rows, array of {array_mb} MB, blocks of 64"
        metrics[name] = compare(*measured, unit="s/step", less_is_better=True, note=note)
    shape = Shape(pooling=1, array_mb=10, **common)
    batches = Batches(shape, seed=seed)
    rivals = {
        "step_vs_torch": (
            torch_step(shape, batches, block_size=64),
            shared_step(shape, batches),
            "the same lookup in plain torch: an index tensor, autograd, dense SGD; blocks of 64",
        ),
        "step_vs_robe": (
            robe_step(shape, batches),
            shared_step(shape, batches, block_size=ROBE_BLOCK),
            f"ROBE's published hash in torch, autograd, dense SGD; blocks of {ROBE_BLOCK}",
        ),
    }
    for name, (theirs, ours, note) in rivals.items():
        measured = in_turns(*(seconds_of(side, steps=max(1, steps // 2)) for side in (theirs, ours)), repeats=repeats)
        metrics[name] = compare(
            *measured, unit="s/step", less_is_better=True, note=f"{note}; dim 64, pooling 1, 10 MB, uniform ids"
        )
    return metrics, sweep(common, seed=seed) if size == "full" else []


def sweep(common: dict[str, int], *, seed: int) -> list[dict[str, Any]]:
    """Median seconds per step for every dim, pooling, array and block size."""
    rows = []
    for dim in (16, 64):
        for pooling in (1, 20):
            shape = Shape(dim=dim, pooling=pooling, **common)
            batches = Batches(shape, seed=seed)
            row: dict[str, Any] = {"dim": dim, "pooling": pooling}
            times = [seconds_of(fbgemm_step(shape, batches), steps=2)() for _ in range(3)]
            rows.append({**row, "what": "fbgemm", "seconds": statistics.median(times)})
            for array_mb in (1, 10, 100):
                shape = Shape(dim=dim, pooling=pooling, array_mb=array_mb, **common)
                for block_size in sorted({4, 16, dim}):
                    step = seconds_of(shared_step(shape, batches, block_size=block_size), steps=2)
                    found = {"what": "shared", "array_mb": array_mb, "block_size": block_size}
                    rows.append({**row, **found, "seconds": statistics.median(step() for _ in range(3))})
                if pooling == 1:
                    plain = seconds_of(torch_step(shape, batches, block_size=min(dim, 64)), steps=1)
                    found = {"what": "torch", "array_mb": array_mb, "block_size": min(dim, 64)}
                    rows.append({**row, **found, "seconds": statistics.median(plain() for _ in range(3))})
    return rows
