"""How FBGEMM is told where a table lives and how its rows are stepped."""

from __future__ import annotations

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, EmbeddingLocation

from recmill.artifacts import InputError
from recmill.model.stores.interface import TableOptimiser

OPTIMISERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


def step_options(optimiser: TableOptimiser) -> dict[str, Any]:
    """The arguments that make FBGEMM take this optimiser's steps."""
    if optimiser.kind not in OPTIMISERS:
        raise InputError(f"table optimiser is {optimiser.kind!r}, expected one of {', '.join(OPTIMISERS)}")
    return {"optimizer": OPTIMISERS[optimiser.kind], "learning_rate": optimiser.lr, "eps": optimiser.eps}


def place_on(device: torch.device) -> tuple[EmbeddingLocation, ComputeDevice]:
    """Where rows lie and who looks them up."""
    if device.type == "cuda":
        return EmbeddingLocation.DEVICE, ComputeDevice.CUDA
    return EmbeddingLocation.HOST, ComputeDevice.CPU
