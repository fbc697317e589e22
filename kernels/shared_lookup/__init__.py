"""Rows of many logical tables from one small shared array."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels import _cpu
from kernels.backends import pick_backend
from kernels.shared_lookup.layout import SharedFeature, SharedFeatures, SharedLayout

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "SharedFeature",
    "SharedFeatures",
    "SharedLayout",
    "shared_adagrad",
    "shared_lookup",
    "shared_scatter",
    "shared_step_packed",
]

BACKENDS = ("reference", "cpu", "cpu_portable", "triton")


# N = ids of all lists, B = samples, F = features, D = width of a row, W = width of all features together
def shared_lookup(
    array: Tensor,
    ids_N: Tensor,
    offsets: Tensor,
    *,
    layout: SharedLayout,
    features: SharedFeatures,
    weights_N: Tensor | None = None,
    is_pooled: bool = True,
    exponents: Tensor | None = None,
    kernel: str | None = None,
    num_threads: int = 0,
) -> Tensor:
    """The pooled vectors [B, W] of B samples with F lists each, or unpooled one row [N, D] per id.

    List f of sample b is `ids_N[offsets[f * B + b] : offsets[f * B + b + 1]]`; ids are any int64. `array` is float32 or
    float64 and holds the shared slots, then the exact rows. No index is stored: backward computes the hashes again. Its
    bits do not depend on the number of threads. `weights_N` apply to sum, mean and unpooled rows. With `exponents` (one
    per line of 16 slots) the array consists of bytes (packing.py): vectors are float32 and the array gets no gradient;
    `shared_scatter` and `shared_step_packed` train it.
    """
    if features.has_max and weights_N is not None:
        raise ValueError("weights of ids are given, but max does not take any")
    backend = pick_backend(kernel, array, BACKENDS)
    lists = (ids_N, offsets, weights_N, features.rows, features.exact_ids, layout.numbers())
    if backend == "reference":
        from kernels.shared_lookup import packing, reference

        array = array if exponents is None else packing.unpack(array, exponents)
        return reference.shared_lookup(array, *lists, is_pooled)
    if exponents is not None and backend == "triton":
        raise ValueError("exponents are given: an array of bytes is looked up on a CPU")
    from kernels.shared_lookup import ops

    width = features.width if is_pooled else features.unpooled_width()
    has_max = features.has_max and is_pooled
    vectors: Tensor = ops.shared_lookup(array, exponents, has_max, *lists, width, is_pooled, backend, num_threads)[0]
    return vectors


def shared_scatter(
    target: Tensor,
    gradient: Tensor,
    ids_N: Tensor,
    offsets: Tensor,
    *,
    layout: SharedLayout,
    features: SharedFeatures,
    weights_N: Tensor | None = None,
    winners: Tensor | None = None,
    touched: Tensor | None = None,
    scale: float = 1.0,
    is_pooled: bool = True,
    kernel: str | None = None,
    num_threads: int = 0,
) -> None:
    """target += scale * (gradient of the array), the backward pass of `shared_lookup`, in place.

    A target of zeros becomes the gradient; the array itself with scale -lr makes a step of SGD in one pass. `touched`
    (uint8, one per line of 16 slots) is set where something was added; `winners` come with the vectors of max.
    """
    from kernels.shared_lookup import ops

    backend = pick_backend(kernel, target, BACKENDS[1:])
    width = features.width if is_pooled else features.unpooled_width()
    lists = (ids_N, offsets, weights_N, features.rows, features.exact_ids, layout.numbers(), width, is_pooled)
    ops.add_gradient(target, gradient, winners, touched, scale, *lists, backend, num_threads)


def shared_adagrad(
    array: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    touched: Tensor,
    *,
    lr: float,
    eps: float = 1e-8,
    num_threads: int = 0,
) -> None:
    """A step of Adagrad on the touched lines of an array, in place; leaves `gradient` and `touched` zero.

    `momentum` with one element per slot means Adagrad, with one per line of 16 slots row-wise Adagrad.
    """
    if array.device.type == "cpu":
        _cpu.shared_step(array, None, momentum, gradient, touched, lr, eps, 0, num_threads)
        return
    from kernels.shared_lookup import calls, reference

    group = 1 if len(momentum) == len(array) else calls.LINE
    stepped = reference.adagrad(array, momentum, gradient, group=group, lr=lr, eps=eps)
    array.copy_(stepped[0])
    momentum.copy_(stepped[1])
    gradient.zero_()
    touched.zero_()


def shared_step_packed(
    array: Tensor,
    exponents: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    touched: Tensor,
    *,
    lr: float,
    eps: float = 1e-8,
    key: int = 0,
    num_threads: int = 0,
) -> None:
    """A step on the touched lines of an array of bytes, in place; leaves `gradient` and `touched` zero.

    `momentum` without elements means SGD, with one per slot Adagrad, with one per line of 16 slots row-wise Adagrad.
    Weights are rounded up or down at random, by `key` and slot: with the same key in every step, the same slots would
    always be favoured.
    """
    _cpu.shared_step(array, exponents, momentum, gradient, touched, lr, eps, key, num_threads)
