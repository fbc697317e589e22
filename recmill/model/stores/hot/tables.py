"""Rows of several tables of one width in FBGEMM, with lookup and update as calls of their own.

TorchRec's fused tables update themselves with the gradients of the rank that holds them. Replicated rows must be
updated with everybody's, in the same order everywhere, so the update is called with the gradients of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from kernels import update_rows
from recmill.model.stores.fbgemm import place_on, step_options
from recmill.model.stores.interface import TableOptimiser

# T = tables, F = features, B = bags of a feature, N = ids, H = rows of a table, D = width
POOLINGS = {"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN, "none": PoolingMode.NONE}


class FusedTables:
    """Tables of `num_rows` rows each; feature f reads table `table_of_feature[f]` (not falling)."""

    def __init__(
        self,
        num_rows: Sequence[int],
        table_of_feature: Sequence[int],
        *,
        dim: int,
        pooling: str,
        optimiser: TableOptimiser,
        device: torch.device,
    ) -> None:
        self.dim, self.pooling, self.optimiser, self.device = dim, pooling, optimiser, device
        self.num_features = len(table_of_feature)
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [(max(rows, 1), dim, *place_on(device)) for rows in num_rows],
            feature_table_map=list(table_of_feature),
            pooling_mode=POOLINGS[pooling],
            device=device,
            **step_options(optimiser),
        )
        self._is_cuda = device.type == "cuda"
        bases = [0]
        for rows in num_rows:
            bases.append(bases[-1] + max(rows, 1))
        self.num_rows = bases[-1]
        self.bases = torch.tensor(bases, dtype=torch.int64, device=device)  # where each table's rows begin in all rows
        features = list(table_of_feature)
        self.base_of_feature = self.bases[torch.tensor(features, dtype=torch.int64, device=device)]
        self._buffer = torch.empty(0, dim, device=device)

    @property
    def num_tables(self) -> int:
        return len(self.bases) - 1

    def set_lr(self, lr: float) -> None:
        self.module.set_learning_rate(lr)

    def weights(self, table: int) -> Tensor:
        """[H, D], a view of the live rows."""
        return self.module.split_embedding_weights()[table]

    def state(self, table: int) -> dict[str, Tensor]:
        """The optimiser's state of a table by name, views of the live ones: [H] or [H, D]."""
        if not self.optimiser.state_names:
            return {}
        own = self.module.split_optimizer_states()[table]
        return dict(zip(self.optimiser.state_names, own, strict=True))

    @torch.no_grad()
    def clear(self) -> None:
        for table in range(self.num_tables):
            for live in (self.weights(table), *self.state(table).values()):
                live.zero_()

    @torch.no_grad()
    def look_up(self, ids_N: Tensor, offsets: Tensor) -> Tensor:
        """[B, F * D] of pooled tables, [N, D] of others; `offsets` is feature-major, F * B + 1 entries."""
        return self.module(ids_N, offsets)

    @torch.no_grad()
    def update(self, ids_N: Tensor, offsets: Tensor, gradient: Tensor) -> None:
        """One optimiser step with the gradient of what `look_up` would give for the same ids and offsets."""
        if self._is_cuda:
            with torch.enable_grad():
                torch.autograd.backward(self.module(ids_N, offsets), gradient)
            return
        is_pooled = self.pooling != "none"
        own = self.module
        width: list[Any] = [own.D_offsets, own.max_D] if is_pooled else [self.dim]
        bags: list[Any] = [int(POOLINGS[self.pooling]), None] if is_pooled else []
        self._apply(gradient, width, bags, ids_N, offsets)

    def buffer(self, num_rows: int) -> Tensor:
        """[num_rows, D] to work in until the next call: fresh pages of some megabytes a step cost milliseconds."""
        if len(self._buffer) < num_rows:
            self._buffer = torch.empty(num_rows + num_rows // 8, self.dim, device=self.device)
        return self._buffer[:num_rows]

    @torch.no_grad()
    def update_rows(self, blocks: Sequence[tuple[Tensor, Tensor]], *, scale: float) -> None:
        """One optimiser step with `scale` times the gradients of single rows, given as (rows in all tables, gradients).

        A row may come several times: its gradients are added up first, in the order given.
        """
        if self._is_cuda:
            positions = torch.cat([rows for rows, _ in blocks]).long()
            positions, order = positions.sort(stable=True)
            edges_T = torch.searchsorted(positions, self.bases)
            ids = positions - torch.repeat_interleave(self.bases[:-1], edges_T.diff())
            self._update_rows_as_bags(ids, edges_T, torch.cat([own for _, own in blocks])[order] * scale)
            return
        # FBGEMM keeps all tables of one width one after another: together they are one matrix.
        weights = self.module.weights_host.detach().view(-1, self.dim)
        state = self.module.momentum1_host.detach() if self.optimiser.state_names else None
        if self.optimiser.kind == "adagrad" and state is not None:
            state = state.view(-1, self.dim)
        lr = float(self.module.learning_rate_tensor)
        update_rows(weights, state, blocks, optimiser=self.optimiser.kind, lr=lr, eps=self.optimiser.eps, scale=scale)

    def _update_rows_as_bags(self, ids_U: Tensor, edges_T: Tensor, gradient_UD: Tensor) -> None:
        """The CUDA operator knows bags of every feature: a bag a row, and no bags for features that repeat a table."""
        counts = edges_T.diff()
        longest = int(counts.max()) if len(counts) else 0
        features = torch.searchsorted(self.base_of_feature, self.bases[:-1])  # the first feature of every table
        lengths = torch.zeros(self.num_features, longest, dtype=torch.int64, device=self.device)
        steps = torch.arange(longest, device=self.device)
        lengths[features] = (steps[None, :] < counts[:, None]).long()
        offsets = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
        if self.pooling == "none":
            self.update(ids_U, offsets, gradient_UD)
            return
        gradient = gradient_UD.new_zeros(self.num_features, longest, self.dim)
        gradient[lengths.bool()] = gradient_UD
        self.update(ids_U, offsets, gradient.transpose(0, 1).reshape(longest, -1))

    def _apply(self, gradient: Tensor, width: list[Any], bags: list[Any], ids_N: Tensor, offsets: Tensor) -> None:
        # The operator that FBGEMM's own backward pass calls, so what it computes is the same to the last bit.
        own, bag = self.module, "" if self.pooling != "none" else "nobag_"
        operator = getattr(torch.ops.fbgemm, f"split_embedding_{bag}backward_codegen_{self.optimiser.kind}_cpu")
        state: list[Any] = []
        if self.optimiser.state_names:
            state = [own.momentum1_host, own.momentum1_placements, own.momentum1_offsets]
        operator(
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
