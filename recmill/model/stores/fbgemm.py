"""Rows of several tables of one width in FBGEMM, with lookup and update as separate calls.

TorchRec's fused tables update themselves with the gradients of the rank that holds them. Here the caller decides which
gradients a row gets: those of all ranks for a replicated row, summed ones for a striped row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from kernels import update_rows
from recmill.artifacts import InputError
from recmill.model.stores.interface import TableOptimiser

# F = features, B = bags per feature, N = ids, H = rows of a table, K = chosen rows, D = width, S = state columns
POOLINGS = {"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN, "none": PoolingMode.NONE}
OPTIMISERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


class FusedTables:
    """Tables of `num_rows` rows each; feature f reads table `table_of_feature[f]` (in ascending order)."""

    def __init__(
        self,
        num_rows: Sequence[int],
        table_of_feature: Sequence[int] = (0,),
        *,
        dim: int,
        pooling: str = "none",
        optimiser: TableOptimiser,
        device: torch.device,
    ) -> None:
        if optimiser.kind not in OPTIMISERS:
            raise InputError(f"table optimiser is {optimiser.kind!r}, expected one of {', '.join(OPTIMISERS)}")
        if dim % 4:
            raise InputError(f"embedding width is {dim}; FBGEMM requires a multiple of 4")
        self.dim, self.pooling, self.optimiser, self.device = dim, pooling, optimiser, device
        self.num_features = len(table_of_feature)
        self._is_cuda = device.type == "cuda"
        place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
        if self._is_cuda:
            place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [(max(rows, 1), dim, *place) for rows in num_rows],
            feature_table_map=list(table_of_feature),
            pooling_mode=POOLINGS[pooling],
            device=device,
            optimizer=OPTIMISERS[optimiser.kind],
            learning_rate=optimiser.lr,
            eps=optimiser.eps,
        )
        self.weights: list[Tensor] = [live.detach() for live in self.module.split_embedding_weights()]  # [H, D] each
        self.states: list[dict[str, Tensor]] = [{} for _ in num_rows]  # state name -> [H] or [H, D]
        if optimiser.state_names:
            found = self.module.split_optimizer_states()
            self.states = [dict(zip(optimiser.state_names, own, strict=True)) for own in found]
        bases = [0]
        for rows in num_rows:
            bases.append(bases[-1] + max(rows, 1))
        self.num_rows = bases[-1]
        firsts = [bases[table] for table in table_of_feature]  # each feature's first row among all rows
        self.base_of_feature = torch.tensor(firsts, dtype=torch.int64, device=device)
        self.clear()

    def set_lr(self, lr: float) -> None:
        self.module.set_learning_rate(lr)

    @property
    def num_bytes(self) -> int:
        """Bytes of rows and optimiser state."""
        return sum(live.nbytes for live in self.weights) + sum(
            live.nbytes for own in self.states for live in own.values()
        )

    @torch.no_grad()
    def clear(self) -> None:
        """Set all rows and their state to zero, so that replicas start equal on every rank."""
        for live in (*self.weights, *(state for own in self.states for state in own.values())):
            live.zero_()

    @torch.no_grad()
    def look_up(self, ids_N: Tensor, offsets: Tensor | None = None) -> Tensor:
        """[B, F * D] for pooled tables, [N, D] otherwise; `offsets` is feature-major with F * B + 1 entries."""
        return self.module(ids_N, ids_N.new_tensor([0, len(ids_N)]) if offsets is None else offsets)

    @torch.no_grad()
    def update(self, ids_N: Tensor, offsets: Tensor | None, gradient: Tensor) -> None:
        """Take one optimiser step with the gradient of what `look_up` returns for the same ids and offsets."""
        offsets = ids_N.new_tensor([0, len(ids_N)]) if offsets is None else offsets
        if self._is_cuda:
            with torch.enable_grad():
                torch.autograd.backward(self.module(ids_N, offsets), gradient)
            return
        # The operator that FBGEMM's own backward pass calls, so the result is the same to the last bit.
        own, is_pooled = self.module, self.pooling != "none"
        name = f"split_embedding_{'' if is_pooled else 'nobag_'}backward_codegen_{self.optimiser.kind}_cpu"
        width: list[Any] = [own.D_offsets, own.max_D] if is_pooled else [self.dim]
        bags: list[Any] = [int(POOLINGS[self.pooling]), None] if is_pooled else []
        state: list[Any] = []
        if self.optimiser.state_names:
            state = [own.momentum1_host, own.momentum1_placements, own.momentum1_offsets]
        getattr(torch.ops.fbgemm, name)(
            gradient.contiguous(),
            own.weights_host,
            own.weights_placements,
            own.weights_offsets,
            *width,
            own.hash_size_cumsum,
            own.total_hash_size_bits,
            ids_N,
            offsets,
            *bags,
            False,  # stochastic rounding
            *state,
            own.learning_rate_tensor,
            *([self.optimiser.eps] if state else []),
        )

    @torch.no_grad()
    def update_rows(self, blocks: Sequence[tuple[Tensor, Tensor]], *, scale: float) -> None:
        """Take one optimiser step with `scale` times the gradients of single rows: (rows among all tables, gradients).

        A row may occur several times: its gradients are summed first, in the order given.
        """
        # FBGEMM stores all tables of one width one after another: together they are one matrix.
        place = "dev" if self._is_cuda else "host"
        weights = getattr(self.module, f"weights_{place}").detach().view(-1, self.dim)
        state = getattr(self.module, f"momentum1_{place}").detach() if self.optimiser.state_names else None
        if self.optimiser.kind == "adagrad" and state is not None:
            state = state.view(-1, self.dim)
        lr = float(self.module.learning_rate_tensor)
        update_rows(weights, state, blocks, optimiser=self.optimiser.kind, lr=lr, eps=self.optimiser.eps, scale=scale)

    # Rows with their state as columns, [K, D + S]: how they travel and how files store them. Of the first table.

    @property
    def num_columns(self) -> int:
        """D + S."""
        return self.dim + sum(_columns(live) for live in self.states[0].values())

    def read(self, rows_K: Tensor | slice) -> Tensor:
        """[K, D + S]: weights with their optimiser state."""
        return self.join(self.weights[0][rows_K], {name: live[rows_K] for name, live in self.states[0].items()})

    def join(self, weights_KD: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """[K, D + S] from weights and state: the inverse of `split`."""
        own = [state[name] for name in self.states[0]]
        return torch.cat([weights_KD, *(each.unsqueeze(1) if each.dim() == 1 else each for each in own)], dim=1)

    def split(self, columns: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What `read` returned, as (weights, {state name: one number or one vector per row})."""
        live = self.states[0]
        weights, *rest = torch.split(columns, [self.dim, *(_columns(own) for own in live.values())], dim=1)
        pairs = zip(live, rest, strict=True)
        return weights, {name: values.squeeze(1) if live[name].dim() == 1 else values for name, values in pairs}

    @torch.no_grad()
    def write(self, rows_K: Tensor | slice, weights_KD: Tensor, state: Mapping[str, Tensor]) -> None:
        self.weights[0][rows_K] = weights_KD.to(self.weights[0])
        for name, values in state.items():
            if (live := self.states[0].get(name)) is not None:
                live[rows_K] = values.to(live)


def _columns(state: Tensor) -> int:
    return 1 if state.dim() == 1 else state.shape[1]
