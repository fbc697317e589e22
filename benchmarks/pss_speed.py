"""Time of a training step (forward, backward, SGD) of one table: shared array, FBGEMM's full table, plain-torch PSS."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
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

LR = 0.01


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A table, its batches and the array."""

    dim: int = 64
    pooling: int = 1
    array_mb: int = 10
    batch_size: int = 8192
    num_rows: int = 4_000_000


class Batches:
    """Several batches in turn, so that no step finds its rows in the cache because the previous one read them."""

    def __init__(self, shape: Shape, *, seed: int, count: int = 4) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_ids = shape.batch_size * shape.pooling
        self.ids = [torch.randint(shape.num_rows, (num_ids,), generator=generator) for _ in range(count)]
        self.offsets = torch.arange(shape.batch_size + 1) * shape.pooling
        self.gradient = torch.randn(shape.batch_size, shape.dim, generator=generator) / shape.batch_size
        self.turn = 0

    def next_ids(self) -> Tensor:
        self.turn += 1
        return self.ids[self.turn % len(self.ids)]


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


def seconds_of(run: Callable[[], None], *, steps: int) -> Callable[[], float]:
    """Mean time per step, after an untimed one."""

    def measure() -> float:
        run()
        start = time.perf_counter()
        for _ in range(steps):
            run()
        return (time.perf_counter() - start) / steps

    return measure


def measure_steps(size: str, *, seed: int) -> tuple[dict[str, Metric], list[dict[str, Any]]]:
    """The three metrics, and in the full form every dim, pooling and array."""
    torch.manual_seed(seed)
    num_rows = 4_000_000 if size != "tiny" else 10_000
    batch_size = 8192 if size != "tiny" else 128
    repeats = {"tiny": 1, "quick": 5, "full": 9}[size]
    steps = {"tiny": 1, "quick": 4, "full": 8}[size]
    common = {"num_rows": num_rows, "batch_size": batch_size}
    metrics: dict[str, Metric] = {}
    for pooling, array_mb in ((1, 10), (20, 1)):
        shape = Shape(pooling=pooling, array_mb=array_mb, **common)
        batches = Batches(shape, seed=seed)
        few = max(1, steps // (1 if pooling == 1 else 3))
        sides = [fbgemm_step(shape, batches), shared_step(shape, batches)]
        measured = in_turns(*(seconds_of(side, steps=few) for side in sides), repeats=repeats)
        metrics[f"step_vs_fbgemm_pool{pooling}"] = compare(
            *measured,
            unit="s/step",
            less_is_better=True,
            note=f"dim 64, {batch_size} samples, table of {num_rows:,} rows, array of {array_mb} MB, blocks of 64, "
            f"{torch.get_num_threads()} threads",
        )
    shape = Shape(pooling=1, array_mb=10, **common)
    batches = Batches(shape, seed=seed)
    sides = [torch_step(shape, batches, block_size=64), shared_step(shape, batches)]
    measured = in_turns(*(seconds_of(side, steps=max(1, steps // 2)) for side in sides), repeats=repeats)
    note = "plain torch with an index tensor, autograd and dense SGD; dim 64, pooling 1, 10 MB, blocks of 64"
    metrics["step_vs_torch"] = compare(*measured, unit="s/step", less_is_better=True, note=note)
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
