"""Shared lookups with their gradients, called with tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import _cpu
from kernels.autograd import Op

# What all ops take last: the lists, the features they belong to, and how to run.
LISTS = (
    "Tensor ids_N, Tensor offsets, Tensor features, Tensor exact_ids, int[] layout, int width, bool is_pooled, "
    "str kernel"
)


def check_lists(ids_N: Tensor, offsets: Tensor, *described: Any) -> _cpu.SharedLists:
    """The lists of ids of a lookup and the features they belong to, checked once for forward and backward."""
    if ids_N.dim() != 1:
        raise ValueError(f"ids: shape is {tuple(ids_N.shape)}, expected one dimension")
    return _cpu.SharedLists(ids_N.long().contiguous(), offsets.long().contiguous(), *described)


def look_up(array: Tensor, exponents: Tensor | None, lists: _cpu.SharedLists) -> Tensor:
    """The vectors of checked lists."""
    out = torch.empty(lists.num_rows, lists.width, dtype=array.dtype if exponents is None else torch.float32)
    _cpu.shared_lookup(lists, array.contiguous(), exponents, out)
    return out


def scatter(
    target: Tensor, gradient: Tensor, lists: _cpu.SharedLists, *, touched: Tensor | None = None, scale: float = 1.0
) -> None:
    """target += scale * gradient of the array, noting where in `touched`."""
    _cpu.shared_scatter(lists, target, gradient.to(target.dtype).contiguous(), touched, scale)


def _shared_lookup(array: Tensor, exponents: Tensor | None, *lists: Any) -> Tensor:
    *described, kernel = lists
    if kernel == "triton":
        from kernels.shared_lookup import triton_impl

        return triton_impl.shared_lookup(array, *described)
    return look_up(array, exponents, check_lists(*described))


def _empty_lookup(array: Tensor, exponents: Tensor | None, *lists: Any) -> Tensor:
    ids_N, offsets, features, _, _, width, is_pooled, _ = lists
    num_rows = (offsets.shape[0] - 1) // features.shape[0] if is_pooled else ids_N.shape[0]
    return array.new_empty((num_rows, width), dtype=array.dtype if exponents is None else torch.float32)


def _shared_gradient(gradient: Tensor, num_slots: int, *lists: Any) -> Tensor:
    """The gradient of the whole array."""
    target = gradient.new_zeros(num_slots)
    add_gradient(target, gradient, *lists)
    return target


def add_gradient(
    target: Tensor, gradient: Tensor, *lists: Any, touched: Tensor | None = None, scale: float = 1
) -> None:
    """As `scatter`, on any device."""
    *described, kernel = lists
    if kernel != "triton":
        scatter(target, gradient, check_lists(*described), touched=touched, scale=scale)
        return
    from kernels.shared_lookup import triton_impl

    triton_impl.shared_scatter(target, gradient, scale, *described)
    if touched is not None:
        touched.fill_(1)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    array, _, ids_N, offsets, features, exact_ids, *ctx.rest = inputs
    ctx.save_for_backward(ids_N, offsets, features, exact_ids)
    ctx.num_slots = array.shape[0]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return shared_gradient(gradient, ctx.num_slots, *ctx.saved_tensors, *ctx.rest), *[None] * 9


shared_gradient = Op(
    "shared_gradient",
    _shared_gradient,
    schema=f"(Tensor gradient, SymInt num_slots, {LISTS}) -> Tensor",
    fake=lambda gradient, num_slots, *_: gradient.new_empty(num_slots),
)
shared_lookup = Op(
    "shared_lookup",
    _shared_lookup,
    schema=f"(Tensor array, Tensor? exponents, {LISTS}) -> Tensor",
    fake=_empty_lookup,
    keep=_keep,
    backward=_backward,
)
