"""Rows of many logical tables from one small shared array."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels import _cpu
from kernels.backends import pick_backend
from kernels.shared_lookup.layout import SharedFeature, SharedFeatures, SharedLayout

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SharedFeature", "SharedFeatures", "SharedLayout", "shared_lookup", "shared_scatter", "shared_step"]

BACKENDS = ("reference", "cpu", "triton")


# N = ids of all lists, B = samples, F = features, D = width of a row, W = width of all features together
def shared_lookup(
    array: Tensor,
    ids_N: Tensor,
    offsets: Tensor,
    *,
    layout: SharedLayout,
    features: SharedFeatures,
    is_pooled: bool = True,
    exponents: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """The pooled vectors [B, W] of B samples with F lists each, or unpooled one row [N, D] per id.

    List f of sample b is `ids_N[offsets[f * B + b] : offsets[f * B + b + 1]]`; ids are any int64. `array` is float32 or
    float64 and holds the shared slots, then the exact rows. No index is stored: backward computes the hashes again. Its
    bits do not depend on the number of threads. With `exponents` (one per line of 16 slots) the array consists of bytes
    (packing.py): vectors are float32 and the array gets no gradient; `shared_scatter` and `shared_step` train it.
    """
    backend = pick_backend(kernel, array, BACKENDS)
    lists = (ids_N, offsets, *features.described(layout, is_pooled=is_pooled))
    if backend == "reference":
        from kernels.shared_lookup import packing, reference

        return reference.shared_lookup(array if exponents is None else packing.unpack(array, exponents), *lists)
    if exponents is not None and backend == "triton":
        raise ValueError("exponents are given: an array of bytes is looked up on a CPU")
    from kernels.shared_lookup import ops

    vectors: Tensor = ops.shared_lookup(array, exponents, *lists, backend)
    return vectors


def shared_scatter(
    target: Tensor,
    gradient: Tensor,
    ids_N: Tensor,
    offsets: Tensor,
    *,
    layout: SharedLayout,
    features: SharedFeatures,
    touched: Tensor | None = None,
    scale: float = 1.0,
    is_pooled: bool = True,
    kernel: str | None = None,
) -> None:
    """target += scale * (gradient of the array), the backward pass of `shared_lookup`, in place.

    A target of zeros becomes the gradient; the array itself with scale -lr makes a step of SGD in one pass. `touched`
    (uint8, one per line of 16 slots) is set where something was added.
    """
    from kernels.shared_lookup import ops

    lists = (ids_N, offsets, *features.described(layout, is_pooled=is_pooled))
    backend = pick_backend(kernel, target, BACKENDS[1:])
    ops.add_gradient(target, gradient, *lists, backend, touched=touched, scale=scale)


def shared_step(
    array: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    touched: Tensor,
    *,
    lr: float,
    eps: float = 1e-8,
    exponents: Tensor | None = None,
    key: int = 0,
) -> None:
    """A step on the touched lines of an array, in place; leaves `gradient` and `touched` zero.

    `momentum` without elements means SGD, with one per slot Adagrad, with one per line of 16 slots row-wise Adagrad.
    With `exponents` the array consists of bytes: weights are rounded up or down at random, by `key` and slot. With the
    same key in every step, the same slots would always be favoured.
    """
    _cpu.shared_step(array, exponents, momentum, gradient, touched, lr, eps, key)
