"""Shared lookups as torch.library ops, so that autograd, torch.compile and torch.export know them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import _cpu
from kernels.buffers import address_of

KERNELS = {
    torch.float32: (
        _cpu.shared_lookup_float32,
        _cpu.shared_scatter_float32,
        _cpu.shared_weigh_float32,
        _cpu.shared_adagrad_float32,
    ),
    torch.float64: (
        _cpu.shared_lookup_float64,
        _cpu.shared_scatter_float64,
        _cpu.shared_weigh_float64,
        _cpu.shared_adagrad_float64,
    ),
}
LINE = 16  # slots noted as touched together, and sharing a momentum in row-wise Adagrad


def count_lines(num_slots: int) -> int:
    return -(-num_slots // LINE)


def _kernels(array: Tensor) -> tuple[Any, Any, Any, Any]:
    if array.dtype not in KERNELS:
        raise ValueError(f"array: dtype is {array.dtype}, expected {' or '.join(map(str, KERNELS))}")
    return KERNELS[array.dtype]


class Arguments:
    """The ids and features of an op, checked and as the compiled kernels take them; keeps the tensors alive."""

    def __init__(
        self,
        ids_N: Tensor,
        offsets: Tensor,
        weights_N: Tensor | None,
        features: Tensor,
        exact_ids: Tensor,
        layout: list[int],
        width: int,
        is_pooled: bool,
        dtype: torch.dtype,
    ) -> None:
        if len(features) == 0 or offsets.dim() != 1 or (len(offsets) - 1) % len(features):
            raise ValueError(
                f"offsets: shape is {tuple(offsets.shape)} for {len(features)} features, expected F * B + 1 of them"
            )
        if weights_N is not None and weights_N.shape != ids_N.shape:
            raise ValueError(f"weights: shape is {tuple(weights_N.shape)}, expected that of ids {tuple(ids_N.shape)}")
        self.ids, self.offsets = ids_N.long().contiguous(), offsets.long().contiguous()
        self.weights = None if weights_N is None else weights_N.to(dtype).contiguous()
        self.features, self.exact_ids, self.is_pooled = features.contiguous(), exact_ids.contiguous(), is_pooled
        self.num_samples = (len(offsets) - 1) // len(features)
        self.width = width
        self.shape = (self.num_samples, width) if is_pooled else (len(ids_N), width)
        size, key, block, is_fold, is_signed = layout
        weights = 0 if self.weights is None else address_of(self.weights, name="weights")
        self.lists = (
            address_of(self.ids, name="ids"),
            len(self.ids),
            address_of(self.offsets, name="offsets"),
            self.num_samples,
            weights,
        )
        rows, exact = address_of(self.features, name="features"), address_of(self.exact_ids, name="exact_ids")
        self.packed = (
            (size, key, block, bool(is_fold), bool(is_signed)),
            self.lists,
            (rows, len(features), exact, width, is_pooled),
        )


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
    array = array.contiguous()
    own = _kernels(array)
    if kernel == "triton":
        from kernels.shared_lookup import triton_impl

        return triton_impl.shared_lookup(
            array, ids_N, offsets, weights_N, features, exact_ids, layout, width, is_pooled, has_max
        )
    arguments = Arguments(ids_N, offsets, weights_N, features, exact_ids, layout, width, is_pooled, dtype=array.dtype)
    out = array.new_empty(arguments.shape)
    winners = torch.empty(arguments.shape if has_max else (0,), dtype=torch.int32, device=array.device)
    memory = address_of(array, name="array")
    own[0](memory, *arguments.packed, out.data_ptr(), winners.data_ptr(), num_threads, kernel != "cpu_portable")
    return out, winners


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
    own = _kernels(target)
    gradient = gradient.to(target.dtype).contiguous()
    if kernel == "triton":
        from kernels.shared_lookup import triton_impl

        triton_impl.shared_scatter(
            target, gradient, winners, scale, ids_N, offsets, weights_N, features, exact_ids, layout, width, is_pooled
        )
        if touched is not None:
            touched.fill_(1)
        return
    arguments = Arguments(ids_N, offsets, weights_N, features, exact_ids, layout, width, is_pooled, dtype=target.dtype)
    if tuple(gradient.shape) != arguments.shape:
        raise ValueError(f"gradient: shape is {tuple(gradient.shape)}, expected {arguments.shape}")
    if touched is not None and len(touched) != count_lines(len(target)):
        raise ValueError(f"touched: has {len(touched)} lines, expected {count_lines(len(target))}")
    own[1](
        address_of(target, name="target"),
        len(target),
        *arguments.packed,
        address_of(gradient, name="gradient"),
        address_of(winners, name="winners"),
        0 if touched is None else address_of(touched, name="touched", dtypes=("uint8",)),
        scale,
        num_threads,
        is_deterministic,
        kernel != "cpu_portable",
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
    own = _kernels(array)
    gradient = gradient.to(array.dtype).contiguous()
    if kernel == "triton":
        from kernels.shared_lookup import triton_impl

        return triton_impl.shared_weigh(array, gradient, ids_N, offsets, features, exact_ids, layout, width, is_pooled)
    arguments = Arguments(ids_N, offsets, None, features, exact_ids, layout, width, is_pooled, dtype=array.dtype)
    out_N = array.new_zeros(len(arguments.ids))  # ids outside all lists have no influence
    own[2](
        address_of(array.contiguous(), name="array"),
        *arguments.packed,
        address_of(gradient, name="gradient"),
        out_N.data_ptr(),
        num_threads,
        kernel != "cpu_portable",
    )
    return out_N


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
    """A step on the touched lines; gradient and touched are zero again afterwards.

    A momentum a slot is Adagrad; one a line of 16 slots is row-wise Adagrad.
    """
    own = _kernels(array)
    if len(momentum) not in (len(array), count_lines(len(array))) or len(touched) != count_lines(len(array)):
        raise ValueError(
            f"momentum has {len(momentum)} and touched {len(touched)} elements for an array of {len(array)}, "
            f"expected {len(array)} or {count_lines(len(array))}, and {count_lines(len(array))}"
        )
    is_grouped = len(momentum) != len(array)
    if array.device.type != "cpu":
        from kernels.shared_lookup import reference

        group = LINE if is_grouped else 1
        stepped = reference.adagrad(array, momentum, gradient, group=group, lr=lr, eps=eps)
        array.copy_(stepped[0])
        momentum.copy_(stepped[1])
        gradient.zero_()
        touched.zero_()
        return
    own[3](
        address_of(array, name="array"),
        address_of(momentum, name="momentum"),
        address_of(gradient, name="gradient"),
        address_of(touched, name="touched", dtypes=("uint8",)),
        len(array),
        is_grouped,
        lr,
        eps,
        num_threads,
    )


def _keep_for_lookup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    array, ids_N, offsets, weights_N, features, exact_ids, layout, width, is_pooled, _, *options = inputs
    ctx.mark_non_differentiable(output[1])
    needs_array = ctx.needs_input_grad[3]  # only the weights' gradient reads the array again
    ctx.save_for_backward(array if needs_array else None, ids_N, offsets, weights_N, features, exact_ids, output[1])
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
