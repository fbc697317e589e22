"""Rows of many logical tables out of one small shared array."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.jagged import pick_backend
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
    is_deterministic: bool = True,
) -> Tensor:
    """The pooled vectors [B, W] of B samples with F lists each, or unpooled the row [N, D] of every id.

    List f of sample b is `ids_N[offsets[f * B + b] : offsets[f * B + b + 1]]`; ids are any int64. `array` is float32 or
    float64 and holds the shared slots, then the exact rows. No index is stored: backward hashes again. Its bits do not
    depend on the number of threads unless `is_deterministic` is False. `weights_N` go with sum, mean and unpooled rows.
    With `exponents` (one a line of 16 slots) the array is of bytes (packing.py): vectors are float32 and the array gets
    no gradient; `shared_scatter` and `shared_step_packed` train it.
    """
    if features.has_max and weights_N is not None:
        raise ValueError("weights of ids are given, max does not take any")
    backend = pick_backend(kernel, array, BACKENDS)
    if backend == "reference":
        from kernels.shared_lookup import reference

        if exponents is not None:
            from kernels.shared_lookup.packing import unpack

            array = unpack(array, exponents)
        numbers = layout.numbers()
        return reference.shared_lookup(
            array, ids_N, offsets, weights_N, features.rows, features.exact_ids, numbers, is_pooled
        )
    import torch

    from kernels.shared_lookup import calls, ops

    rows, exact_ids, numbers = features.rows, features.exact_ids, layout.numbers()
    width = features.width if is_pooled else features.unpooled_width()
    has_max, how = features.has_max and is_pooled, (backend, num_threads, is_deterministic)
    is_plain = type(array) in (torch.Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
    vectors: Tensor
    if is_plain and backend != "triton":
        calls.check_size(array, numbers, rows)
        dtype = array.dtype if exponents is None else torch.float32
        lists = calls.Lists(ids_N, offsets, weights_N, rows, exact_ids, numbers, width, is_pooled, dtype)
        vectors = ops.Eager.apply(array, weights_N, lists, has_max, *how, exponents)  # type: ignore[no-untyped-call]
    elif exponents is not None:
        raise ValueError("exponents are given: an array of bytes is looked up on a CPU, outside of compiled graphs")
    else:
        inputs = (array, ids_N, offsets, weights_N, rows, exact_ids, numbers, width, is_pooled, has_max)
        vectors = ops.shared_lookup(*inputs, *how)[0]
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
    is_deterministic: bool = True,
) -> None:
    """target += scale * (gradient of the array), the way back of `shared_lookup`, in place.

    Into zeros it gives the gradient; into the array itself with -lr it is a whole step of SGD in one pass. `touched`
    (uint8, one a line of 16 slots) notes where something was added; `winners` come with the vectors of max.
    """
    import torch

    from kernels.shared_lookup import calls, ops

    backend = pick_backend(kernel, target, BACKENDS[1:])
    rows, numbers = features.rows, layout.numbers()
    width = features.width if is_pooled else features.unpooled_width()
    lists = (ids_N, offsets, weights_N, rows, features.exact_ids, numbers, width, is_pooled)
    if backend == "triton" or torch.compiler.is_compiling():
        won = torch.empty(0, dtype=torch.int32, device=target.device) if winners is None else winners
        how = (backend, num_threads, is_deterministic)
        ops.shared_scatter(target, touched, gradient, won, scale, *lists, *how)
        return
    calls.check_size(target, numbers, rows)
    calls.scatter(
        target,
        gradient,
        calls.Lists(*lists, target.dtype),
        winners=winners,
        touched=touched,
        scale=scale,
        kernel=backend,
        num_threads=num_threads,
        is_deterministic=is_deterministic,
    )


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

    `momentum` of one element a slot is Adagrad, of one a line of 16 slots row-wise Adagrad.
    """
    from kernels.shared_lookup import calls, ops

    if array.device.type == "cpu":
        calls.adagrad(array, momentum, gradient, touched, lr=lr, eps=eps, num_threads=num_threads)
    else:
        ops.shared_adagrad(array, momentum, gradient, touched, lr, eps, num_threads)


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

    `momentum` of no elements is SGD, of one a slot Adagrad, of one a line of 16 slots row-wise Adagrad. Weights are
    rounded up or down at random, by `key` and slot: another key for every step, or the same slots are always favoured.
    """
    from kernels.shared_lookup import calls

    how = {"lr": lr, "eps": eps, "key": key, "num_threads": num_threads}
    calls.step_packed(array, exponents, momentum, gradient, touched, **how)  # type: ignore[arg-type]
