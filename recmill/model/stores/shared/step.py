"""The optimiser of a shared array, fused into the backward pass and the same on all ranks.

Lookups hand over the gradients of their outputs; when the whole backward pass is done the array takes one step:

    one rank     sgd       straight into the array, in one pass over the ids
                 adagrad   summed in a scratch array, then applied to the lines that were touched
    more ranks   dense     each rank sums its own, the scratch array is all-reduced
                 sparse    ids and output gradients of all ranks are gathered, and every rank sums them in rank order

Sparse is taken when it moves fewer bytes. Both leave the same bits on every rank.

Weights of one byte are stepped from a scratch array of floats, SGD too, and rounded at random. Which way is a hash of
seed, step and slot, so ranks and threads agree, and a run that goes on from a checkpoint rounds as if it never stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from kernels import shared_adagrad, shared_scatter, shared_step_packed
from kernels.shared_lookup import SharedFeatures, calls
from kernels.shared_lookup.calls import count_lines
from kernels.shared_lookup.layout import ID_FACTOR, mix_bits, signed
from recmill.artifacts import InputError
from recmill.model.stores.interface import TableOptimiser
from recmill.model.stores.shared.array import SharedArray

SYNCS = ("auto", "dense", "sparse")


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradient:
    """One lookup's part of a step: its ids and the gradient of what it gave."""

    features: SharedFeatures
    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    winners: Tensor | None
    output: Tensor
    is_pooled: bool
    lists: calls.Lists | None = None  # ids, offsets and weights once they are checked, if this rank looked them up

    def tensors(self) -> list[Tensor]:
        """What other ranks need to know to add this."""
        kept = [self.ids, self.offsets, self.output]
        kept += [tensor for tensor in (self.weights, self.winners) if tensor is not None]
        return kept

    def with_tensors(self, tensors: list[Tensor]) -> Gradient:
        ids, offsets, output, *rest = tensors
        weights = rest.pop(0) if self.weights is not None else None
        return Gradient(
            features=self.features,
            ids=ids,
            offsets=offsets,
            weights=weights,
            winners=rest.pop(0) if self.winners is not None else None,
            output=output,
            is_pooled=self.is_pooled,
        )


class SharedStep:
    """Optimiser state of an array, and the steps on it."""

    def __init__(
        self,
        array: SharedArray,
        optimiser: TableOptimiser,
        *,
        process_group: dist.ProcessGroup | None = None,
        sync: str = "auto",
        gradient_scaling: float = 0.0,
        num_threads: int = 0,
    ) -> None:
        if optimiser.kind not in ("sgd", "adagrad", "rowwise_adagrad"):
            raise InputError(f"optimiser is {optimiser.kind!r}, expected sgd, adagrad or rowwise_adagrad")
        if sync not in SYNCS:
            raise InputError(f"sync is {sync!r}, expected one of {', '.join(SYNCS)}")
        self.array, self.optimiser, self.process_group, self.sync = array, optimiser, process_group, sync
        self.num_threads = num_threads
        self.scale = array.share_count**-gradient_scaling if gradient_scaling else 1.0
        num_slots = array.num_slots
        sizes = {"sgd": 0, "adagrad": num_slots, "rowwise_adagrad": count_lines(num_slots)}
        self.momentum = torch.zeros(sizes[optimiser.kind], dtype=array.value_dtype, device=self.slots.device)
        self.num_steps = torch.zeros(1, dtype=torch.int64)  # a tensor, so that checkpoints can fill it
        self._scratch: tuple[Tensor, Tensor] | None = None
        self._pending: list[Gradient] = []

    @property
    def slots(self) -> Tensor:
        return self.array.weight.data

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.process_group) if dist.is_available() and dist.is_initialized() else 1

    @property
    def num_bytes(self) -> int:
        """The array, its optimiser state, and what a step needs besides."""
        scratch = sum(tensor.nbytes for tensor in self._scratch) if self._scratch else 0
        return self.array.num_bytes + self.momentum.nbytes + scratch

    def add(self, gradient: Gradient) -> None:
        """Take part in the step at the end of the backward pass that is running."""
        if not self._pending:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._pending.append(gradient)

    def _finish(self) -> None:
        pending, self._pending = self._pending, []
        self.step(pending)

    @torch.no_grad()
    def step(self, gradients: list[Gradient]) -> None:
        """One step with the gradients of all ranks."""
        lr, world_size = self.optimiser.lr, self.world_size
        scale = 1.0 / world_size
        if world_size == 1 and self.optimiser.kind == "sgd" and self.scale == 1 and not self.array.is_packed:
            for gradient in gradients:
                self._scatter(self.slots, gradient, scale=-lr * scale)
            return
        target, touched = self._scratch_arrays()
        if world_size > 1 and self._is_dense(gradients):
            for gradient in gradients:
                self._scatter(target, gradient, scale=scale)
            dist.all_reduce(target, group=self.process_group)
            touched.fill_(1)
        else:
            for gradient in gradients:
                for part in self._of_all_ranks(gradient):
                    self._scatter(target, part, scale=scale, touched=touched)
        if self.scale != 1:
            target[: self.array.layout.size].mul_(self.scale)  # exact rows are not shared
        self._apply(target, touched)

    def _apply(self, target: Tensor, touched: Tensor) -> None:
        """Step the array by a gradient and leave that zero."""
        lr, eps = self.optimiser.lr, self.optimiser.eps
        if self.array.exponents is not None:
            slots, key = (self.slots, self.array.exponents), self._rounding_key()
            how = {"lr": lr, "eps": eps, "key": key, "num_threads": self.num_threads}
            shared_step_packed(*slots, self.momentum, target, touched, **how)  # type: ignore[arg-type]
        elif self.optimiser.kind == "sgd":
            self.slots.add_(target, alpha=-lr)
            target.zero_()
            touched.zero_()
        else:
            shared_adagrad(self.slots, self.momentum, target, touched, lr=lr, eps=eps, num_threads=self.num_threads)

    def _rounding_key(self) -> int:
        """Another one for every step."""
        self.num_steps += 1
        return signed(mix_bits(mix_bits(self.array.layout.seed + 1) + ID_FACTOR * int(self.num_steps)))

    def _scratch_arrays(self) -> tuple[Tensor, Tensor]:
        """A gradient and a byte a line, all zero between steps."""
        if self._scratch is None:
            lines = torch.zeros(count_lines(len(self.slots)), dtype=torch.uint8, device=self.slots.device)
            self._scratch = (torch.zeros_like(self.slots, dtype=self.array.value_dtype), lines)
        return self._scratch

    def _scatter(self, target: Tensor, gradient: Gradient, *, scale: float, touched: Tensor | None = None) -> None:
        how: dict[str, Any] = {"winners": gradient.winners, "touched": touched, "scale": scale}
        how["num_threads"] = self.num_threads
        if gradient.lists is not None:
            calls.scatter(target, gradient.output, gradient.lists, **how)
            return
        shared_scatter(
            target,
            gradient.output,
            gradient.ids,
            gradient.offsets,
            layout=self.array.layout,
            features=gradient.features,
            weights_N=gradient.weights,
            is_pooled=gradient.is_pooled,
            **how,
        )

    def _is_dense(self, gradients: list[Gradient]) -> bool:
        """Whether to all-reduce the array; decided by the largest rank, so all decide alike."""
        if self.sync != "auto":
            return self.sync == "dense"
        own = sum(tensor.nbytes for gradient in gradients for tensor in gradient.tensors())
        largest = torch.tensor([own], device=self.slots.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.process_group)
        world_size = self.world_size
        dense = len(self.slots) * self.array.value_dtype.itemsize
        return 2 * dense * (world_size - 1) / world_size < int(largest) * (world_size - 1)

    def _of_all_ranks(self, gradient: Gradient) -> list[Gradient]:
        if self.world_size == 1:
            return [gradient]
        parts: list[list[Tensor]] = [[] for _ in range(self.world_size)]
        for tensor in gradient.tensors():
            for part, received in zip(parts, gather_all(tensor, self.process_group), strict=True):
                part.append(received)
        return [gradient.with_tensors(part) for part in parts]


def gather_all(tensor: Tensor, group: Any) -> list[Tensor]:
    """The tensors of all ranks in rank order; they may differ in their first size."""
    world_size = dist.get_world_size(group)
    size = torch.tensor([len(tensor)], device=tensor.device)
    sizes = [torch.empty_like(size) for _ in range(world_size)]
    dist.all_gather(sizes, size, group=group)
    counts = [int(count) for count in sizes]
    longest = max(counts)
    padded = pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, longest - len(tensor))).contiguous()
    received = [torch.empty_like(padded) for _ in range(world_size)]
    if longest:
        dist.all_gather(received, padded, group=group)
    return [each[:count] for each, count in zip(received, counts, strict=True)]
