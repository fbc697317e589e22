"""Shared lookups with their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.autograd import Op
from kernels.shared_lookup import calls

# What all ops take last: the lists, the features they belong to, and how to run.
LISTS = (
    "Tensor ids_N, Tensor offsets, Tensor? weights_N, Tensor features, Tensor exact_ids, int[] layout, int width, "
    "bool is_pooled, str kernel, int num_threads"
)


def _shared_lookup(array: Tensor, exponents: Tensor | None, has_max: bool, *lists: Any) -> tuple[Tensor, Tensor]:
    """(vectors, winners): for max, which id of its list gave each element."""
    *described, kernel, num_threads = lists
    if kernel == "triton":
        from kernels.shared_lookup import triton_impl

        return triton_impl.shared_lookup(array, *described, has_max=has_max)
    dtype = array.dtype if exponents is None else torch.float32
    how: dict[str, Any] = {"exponents": exponents, "kernel": kernel, "num_threads": num_threads}
    return calls.look_up(array, calls.Lists(*described, dtype=dtype), has_max=has_max, **how)


def _empty_lookup(array: Tensor, exponents: Tensor | None, has_max: bool, *lists: Any) -> tuple[Tensor, Tensor]:
    ids_N, offsets, _, features, _, _, width, is_pooled, _, _ = lists
    shape = ((offsets.shape[0] - 1) // features.shape[0] if is_pooled else ids_N.shape[0], width)
    dtype = array.dtype if exponents is None else torch.float32
    return array.new_empty(shape, dtype=dtype), array.new_empty(shape if has_max else (0,), dtype=torch.int32)


def _shared_gradient(gradient: Tensor, winners: Tensor | None, num_slots: int, *lists: Any) -> Tensor:
    """The gradient of the whole array."""
    target = gradient.new_zeros(num_slots)
    add_gradient(target, gradient, winners, None, 1.0, *lists)
    return target


def add_gradient(
    target: Tensor, gradient: Tensor, winners: Tensor | None, touched: Tensor | None, scale: float, *lists: Any
) -> None:
    """target += scale * gradient of the array, noting where in `touched`."""
    *described, kernel, num_threads = lists
    if kernel == "triton":
        from kernels.shared_lookup import triton_impl

        none = torch.empty(0, dtype=torch.int32, device=target.device)
        triton_impl.shared_scatter(target, gradient, none if winners is None else winners, scale, *described)
        if touched is not None:
            touched.fill_(1)
        return
    how: dict[str, Any] = {"kernel": kernel, "num_threads": num_threads}
    lists_of_ids = calls.Lists(*described, dtype=target.dtype)
    calls.scatter(target, gradient, lists_of_ids, winners=winners, touched=touched, scale=scale, **how)


def _shared_weigh(array: Tensor, exponents: Tensor | None, gradient: Tensor, *lists: Any) -> Tensor:
    """The gradient of the ids' weights."""
    ids_N, offsets, _, *described, kernel, num_threads = lists
    if kernel == "triton":
        from kernels.shared_lookup import triton_impl

        return triton_impl.shared_weigh(array, gradient, ids_N, offsets, *described)
    dtype = array.dtype if exponents is None else torch.float32
    how: dict[str, Any] = {"exponents": exponents, "kernel": kernel, "num_threads": num_threads}
    return calls.weigh(array, gradient, calls.Lists(ids_N, offsets, None, *described, dtype=dtype), **how)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    array, exponents, has_max, ids_N, offsets, weights_N, features, exact_ids, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    # Only the gradient of the weights reads the array again.
    kept = (array, exponents) if weights_N is not None and weights_N.requires_grad else (None, None)
    ctx.save_for_backward(*kept, output[1] if has_max else None, ids_N, offsets, weights_N, features, exact_ids)
    ctx.num_slots = array.shape[0]


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    array, exponents, winners, *lists = ctx.saved_tensors
    of_array = of_weights = None
    if ctx.needs_input_grad[0]:
        of_array = shared_gradient(gradient, winners, ctx.num_slots, *lists, *ctx.rest)
    if ctx.needs_input_grad[5]:
        of_weights = shared_weigh(array, exponents, gradient, *lists, *ctx.rest).to(lists[2].dtype)
    return of_array, None, None, None, None, of_weights, *[None] * 7


shared_gradient = Op(
    "shared_gradient",
    _shared_gradient,
    schema=f"(Tensor gradient, Tensor? winners, SymInt num_slots, {LISTS}) -> Tensor",
    fake=lambda gradient, winners, num_slots, *_: gradient.new_empty(num_slots),
)
shared_weigh = Op(
    "shared_weigh",
    _shared_weigh,
    schema=f"(Tensor array, Tensor? exponents, Tensor gradient, {LISTS}) -> Tensor",
    fake=lambda array, exponents, gradient, ids_N, *_: gradient.new_empty(ids_N.shape[0]),
)
shared_lookup = Op(
    "shared_lookup",
    _shared_lookup,
    schema=f"(Tensor array, Tensor? exponents, bool has_max, {LISTS}) -> (Tensor, Tensor)",
    fake=_empty_lookup,
    keep=_keep,
    backward=_backward,
)
