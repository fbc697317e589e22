"""The optimiser of a shared array, fused into the backward pass and identical on all ranks.

Lookups hand over the gradients of their outputs; at the end of the backward pass the array takes one step:

    one rank       sgd       directly into the array, in one pass over the ids
                   adagrad   summed in a scratch array, then applied to the touched lines
    several ranks  dense     each rank sums its own gradients, the scratch array is all-reduced
                   sparse    ids and output gradients of all ranks are gathered, every rank sums them in rank order

Sparse is used when it sends fewer bytes. Both leave the same bits on every rank.

int8 weights are always stepped through a scratch array of floats and rounded stochastically. The rounding direction is
a hash of seed, step and slot, so ranks and threads agree, and a resumed run rounds like an uninterrupted one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import _cpu, shared_scatter, shared_step
from kernels.shared_lookup import SharedFeatures, ops
from kernels.shared_lookup.layout import ID_FACTOR, count_lines, mix_bits, signed
from recmill.artifacts import InputError
from recmill.model.stores.collectives import gather_all, world_size
from recmill.model.stores.interface import TableOptimiser
from recmill.model.stores.shared.array import SharedArray


@dataclass(frozen=True, kw_only=True, eq=False)
class LookupGradient:
    """The contribution of one lookup to a step: its lists of ids and the gradient of its output."""

    features: SharedFeatures
    ids: Tensor
    offsets: Tensor
    output: Tensor
    is_pooled: bool
    lists: _cpu.SharedLists | None = None  # ids and offsets after their checks, if this rank looked them up

    def tensors(self) -> list[Tensor]:
        """What other ranks need in order to add it: ids, offsets, gradient."""
        return [self.ids, self.offsets, self.output]


class SharedStep:
    """The optimiser state of an array and the steps on it."""

    def __init__(
        self, array: SharedArray, optimiser: TableOptimiser, *, process_group: dist.ProcessGroup | None = None
    ) -> None:
        if optimiser.kind not in ("sgd", "adagrad", "rowwise_adagrad"):
            raise InputError(f"optimiser is {optimiser.kind!r}, expected sgd, adagrad or rowwise_adagrad")
        self.array, self.optimiser, self.process_group = array, optimiser, process_group
        self.sync = "auto"  # or "dense" or "sparse", to force one of them
        num_slots = array.num_slots
        sizes = {"sgd": 0, "adagrad": num_slots, "rowwise_adagrad": count_lines(num_slots)}
        self.momentum = torch.zeros(sizes[optimiser.kind], dtype=array.value_dtype, device=self.slots.device)
        self.num_steps = torch.zeros(1, dtype=torch.int64)  # a tensor, so that checkpoints can load into it
        self._scratch: tuple[Tensor, Tensor] | None = None
        self._pending: list[LookupGradient] = []

    @property
    def slots(self) -> Tensor:
        return self.array.weight.data

    @property
    def world_size(self) -> int:
        return world_size(self.process_group)

    @property
    def num_bytes(self) -> int:
        """Bytes of the array, its optimiser state and scratch."""
        scratch = sum(tensor.nbytes for tensor in self._scratch) if self._scratch else 0
        return self.array.num_bytes + self.momentum.nbytes + scratch

    def add(self, gradient: LookupGradient) -> None:
        """Add a gradient to the step at the end of the current backward pass."""
        if not self._pending:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._pending.append(gradient)

    def _finish(self) -> None:
        pending, self._pending = self._pending, []
        self.step(pending)

    @torch.no_grad()
    def step(self, gradients: list[LookupGradient]) -> None:
        """Take one step with the gradients of all ranks."""
        lr, num_ranks = self.optimiser.lr, self.world_size
        scale = 1.0 / num_ranks
        if num_ranks == 1 and self.optimiser.kind == "sgd" and not self.array.is_packed:
            for gradient in gradients:
                self._scatter(self.slots, gradient, scale=-lr * scale)
            return
        target, touched = self._scratch_arrays()
        if num_ranks > 1 and self._is_dense(gradients):
            for gradient in gradients:
                self._scatter(target, gradient, scale=scale)
            dist.all_reduce(target, group=self.process_group)
            touched.fill_(1)
        else:
            for gradient in gradients:
                for part in self._of_all_ranks(gradient):
                    self._scatter(target, part, scale=scale, touched=touched)
        self._apply(target, touched)

    def _apply(self, target: Tensor, touched: Tensor) -> None:
        """Apply the gradient in `target` to the array and reset it to zero."""
        lr, exponents = self.optimiser.lr, self.array.exponents
        if self.optimiser.kind == "sgd" and exponents is None:
            self.slots.add_(target, alpha=-lr)
            target.zero_()
            touched.zero_()
            return
        how: dict[str, Any] = {"exponents": exponents, "key": 0 if exponents is None else self._rounding_key()}
        shared_step(self.slots, self.momentum, target, touched, lr=lr, eps=self.optimiser.eps, **how)

    def _rounding_key(self) -> int:
        """A new key for every step."""
        self.num_steps += 1
        return signed(mix_bits(mix_bits(self.array.layout.seed + 1) + ID_FACTOR * int(self.num_steps)))

    def _scratch_arrays(self) -> tuple[Tensor, Tensor]:
        """(gradient, one byte per line that marks it as touched), all zero between steps."""
        if self._scratch is None:
            lines = torch.zeros(count_lines(len(self.slots)), dtype=torch.uint8, device=self.slots.device)
            self._scratch = (torch.zeros_like(self.slots, dtype=self.array.value_dtype), lines)
        return self._scratch

    def _scatter(
        self, target: Tensor, gradient: LookupGradient, *, scale: float, touched: Tensor | None = None
    ) -> None:
        if gradient.lists is not None:
            ops.scatter(target, gradient.output, gradient.lists, touched=touched, scale=scale)
            return
        how: dict[str, Any] = {"features": gradient.features, "is_pooled": gradient.is_pooled, "touched": touched}
        lists = (gradient.ids, gradient.offsets)
        shared_scatter(target, gradient.output, *lists, layout=self.array.layout, scale=scale, **how)

    def _is_dense(self, gradients: list[LookupGradient]) -> bool:
        """Whether to all-reduce the array; the largest rank decides, so all ranks agree."""
        if self.sync != "auto":
            return self.sync == "dense"
        own = sum(tensor.nbytes for gradient in gradients for tensor in gradient.tensors())
        largest = torch.tensor([own], device=self.slots.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.process_group)
        dense = len(self.slots) * self.array.value_dtype.itemsize
        return 2 * dense / self.world_size < int(largest)

    def _of_all_ranks(self, gradient: LookupGradient) -> list[LookupGradient]:
        if self.world_size == 1:
            return [gradient]
        parts = zip(*(gather_all(tensor, self.process_group) for tensor in gradient.tensors()), strict=True)
        return [
            replace(gradient, ids=ids, offsets=offsets, output=output, lists=None) for ids, offsets, output in parts
        ]
