"""Shared lookups as torch.library ops, so that autograd, torch.compile and torch.export know them.

The dispatcher costs 130 us a call where the kernel takes 300, so plain eager calls go around it: `Eager` does the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.shared_lookup import calls
from kernels.shared_lookup.calls import LINE, Lists


@torch.library.custom_op("recmill::shared_lookup", mutates_args=())
def shared_lookup(
    array: Tensor,
    ids_N: Tensor,
    offsets: Tensor,
    weights_N: Tensor | None,
    features: Tensor,
    exact_ids: Tensor,
    layout: list[int],
    width: int,
    is_pooled: bool,
    has_max: bool,
    kernel: str,
    num_threads: int,
    is_deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """(vectors, winners): for max, which id of its list gave each element."""
    calls.check_size(array, layout, features)
    if kernel == "triton":
        from kernels.shared_lookup import triton_impl

        return triton_impl.shared_lookup(
            array, ids_N, offsets, weights_N, features, exact_ids, layout, width, is_pooled, has_max
        )
    lists = Lists(ids_N, offsets, weights_N, features, exact_ids, layout, width, is_pooled, array.dtype)
    return calls.look_up(array, lists, has_max=has_max, kernel=kernel, num_threads=num_threads)


@shared_lookup.register_fake
def _(
    array: Tensor,
    ids_N: Tensor,
    offsets: Tensor,
    weights_N: Tensor | None,
    features: Tensor,
    exact_ids: Tensor,
    layout: list[int],
    width: int,
    is_pooled: bool,
    has_max: bool,
    kernel: str,
    num_threads: int,
    is_deterministic: bool,
) -> tuple[Tensor, Tensor]:
    shape = ((offsets.shape[0] - 1) // features.shape[0] if is_pooled else ids_N.shape[0], width)
    return array.new_empty(shape), array.new_empty(shape if has_max else (0,), dtype=torch.int32)


@torch.library.custom_op("recmill::shared_scatter", mutates_args=("target", "touched"))
def shared_scatter(
    target: Tensor,
    touched: Tensor | None,
    gradient: Tensor,
    winners: Tensor,
    scale: float,
    ids_N: Tensor,
    offsets: Tensor,
    weights_N: Tensor | None,
    features: Tensor,
    exact_ids: Tensor,
    layout: list[int],
    width: int,
    is_pooled: bool,
    kernel: str,
    num_threads: int,
    is_deterministic: bool,
) -> None:
    """target += scale * gradient of the array. Into zeros it gives the gradient, into the array with -lr a step of SGD.

    `touched` (uint8, one a line of 16 slots) notes where something was added.
    """
    calls.check_size(target, layout, features)
    if kernel == "triton":
        from kernels.shared_lookup import triton_impl

        triton_impl.shared_scatter(
            target, gradient, winners, scale, ids_N, offsets, weights_N, features, exact_ids, layout, width, is_pooled
        )
        if touched is not None:
            touched.fill_(1)
        return
    calls.scatter(
        target,
        gradient,
        Lists(ids_N, offsets, weights_N, features, exact_ids, layout, width, is_pooled, target.dtype),
        winners=winners,
        touched=touched,
        scale=scale,
        kernel=kernel,
        num_threads=num_threads,
        is_deterministic=is_deterministic,
    )


@torch.library.custom_op("recmill::shared_gradient", mutates_args=())
def shared_gradient(
    num_slots: int,
    gradient: Tensor,
    winners: Tensor,
    ids_N: Tensor,
    offsets: Tensor,
    weights_N: Tensor | None,
    features: Tensor,
    exact_ids: Tensor,
    layout: list[int],
    width: int,
    is_pooled: bool,
    kernel: str,
    num_threads: int,
    is_deterministic: bool,
) -> Tensor:
    """The gradient of the whole array."""
    target = gradient.new_zeros(num_slots)
    lists = (ids_N, offsets, weights_N, features, exact_ids, layout, width, is_pooled)
    shared_scatter(target, None, gradient, winners, 1.0, *lists, kernel, num_threads, is_deterministic)
    return target


@shared_gradient.register_fake
def _(
    num_slots: int,
    gradient: Tensor,
    winners: Tensor,
    ids_N: Tensor,
    offsets: Tensor,
    weights_N: Tensor | None,
    features: Tensor,
    exact_ids: Tensor,
    layout: list[int],
    width: int,
    is_pooled: bool,
    kernel: str,
    num_threads: int,
    is_deterministic: bool,
) -> Tensor:
    return gradient.new_empty(num_slots)


@torch.library.custom_op("recmill::shared_weigh", mutates_args=())
def shared_weigh(
    array: Tensor,
    gradient: Tensor,
    ids_N: Tensor,
    offsets: Tensor,
    features: Tensor,
    exact_ids: Tensor,
    layout: list[int],
    width: int,
    is_pooled: bool,
    kernel: str,
    num_threads: int,
) -> Tensor:
    """The gradient of the weights of the ids."""
    if kernel == "triton":
        from kernels.shared_lookup import triton_impl

        return triton_impl.shared_weigh(array, gradient, ids_N, offsets, features, exact_ids, layout, width, is_pooled)
    lists = Lists(ids_N, offsets, None, features, exact_ids, layout, width, is_pooled, array.dtype)
    return calls.weigh(array, gradient, lists, kernel=kernel, num_threads=num_threads)


@shared_weigh.register_fake
def _(
    array: Tensor,
    gradient: Tensor,
    ids_N: Tensor,
    offsets: Tensor,
    features: Tensor,
    exact_ids: Tensor,
    layout: list[int],
    width: int,
    is_pooled: bool,
    kernel: str,
    num_threads: int,
) -> Tensor:
    return array.new_empty(ids_N.shape[0])


@torch.library.custom_op("recmill::shared_adagrad", mutates_args=("array", "momentum", "gradient", "touched"))
def shared_adagrad(
    array: Tensor, momentum: Tensor, gradient: Tensor, touched: Tensor, lr: float, eps: float, num_threads: int
) -> None:
    """A step on the touched lines; gradient and touched are zero again afterwards."""
    if array.device.type == "cpu":
        calls.adagrad(array, momentum, gradient, touched, lr=lr, eps=eps, num_threads=num_threads)
        return
    from kernels.shared_lookup import reference

    group = 1 if len(momentum) == len(array) else LINE
    stepped = reference.adagrad(array, momentum, gradient, group=group, lr=lr, eps=eps)
    array.copy_(stepped[0])
    momentum.copy_(stepped[1])
    gradient.zero_()
    touched.zero_()


def _keep_for_lookup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    array, ids_N, offsets, weights_N, features, exact_ids, layout, width, is_pooled, _, *options = inputs
    ctx.mark_non_differentiable(output[1])
    # only the weights' gradient reads the array again
    kept = array if weights_N is not None and weights_N.requires_grad else None
    ctx.save_for_backward(kept, ids_N, offsets, weights_N, features, exact_ids, output[1])
    ctx.num_slots, ctx.shape, ctx.options = array.shape[0], (layout, width, is_pooled), options


def _lookup_backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    array, ids_N, offsets, weights_N, features, exact_ids, winners = ctx.saved_tensors
    kernel, num_threads, is_deterministic = ctx.options
    of_array = of_weights = None
    if ctx.needs_input_grad[0]:
        lists = (ids_N, offsets, weights_N, features, exact_ids, *ctx.shape)
        of_array = shared_gradient(ctx.num_slots, gradient, winners, *lists, kernel, num_threads, is_deterministic)
    if ctx.needs_input_grad[3]:
        lists = (ids_N, offsets, features, exact_ids, *ctx.shape)
        of_weights = shared_weigh(array, gradient, *lists, kernel, num_threads).to(weights_N.dtype)
    return of_array, None, None, of_weights, *[None] * 9


shared_lookup.register_autograd(_lookup_backward, setup_context=_keep_for_lookup)


class Eager(torch.autograd.Function):
    """The op `shared_lookup` on a CPU, without the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any,
        array: Tensor,
        weights_N: Tensor | None,
        lists: Lists,
        has_max: bool,
        kernel: str,
        num_threads: int,
        is_deterministic: bool,
        exponents: Tensor | None,
    ) -> Tensor:
        ctx.options = {"kernel": kernel, "num_threads": num_threads}
        out, winners = calls.look_up(array, lists, has_max=has_max, exponents=exponents, **ctx.options)
        ctx.save_for_backward(array if weights_N is not None else None, exponents)
        ctx.lists, ctx.winners, ctx.num_slots = lists, winners, len(array)
        ctx.is_deterministic = is_deterministic
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        of_array = of_weights = None
        if ctx.needs_input_grad[0]:
            of_array = gradient.new_zeros(ctx.num_slots)
            how = {**ctx.options, "is_deterministic": ctx.is_deterministic}
            calls.scatter(of_array, gradient, ctx.lists, winners=ctx.winners, **how)
        if ctx.needs_input_grad[1]:
            array, exponents = ctx.saved_tensors
            of_weights = calls.weigh(array, gradient, ctx.lists, exponents=exponents, **ctx.options)
        return of_array, of_weights, *[None] * 6
