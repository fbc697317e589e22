"""The compiled kernels called with tensors, once these are checked."""

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
LINE = 16  # slots noted as touched together, sharing a momentum in row-wise Adagrad and an exponent if they are bytes


def count_lines(num_slots: int) -> int:
    return -(-num_slots // LINE)


def kernels_for(array: Tensor) -> tuple[Any, Any, Any, Any]:
    if array.dtype not in KERNELS:
        raise ValueError(f"array: dtype is {array.dtype}, expected {' or '.join(map(str, KERNELS))}")
    return KERNELS[array.dtype]


class Lists:
    """The lists of ids of a call and the features they belong to, checked and as the kernels take them."""

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
        if len(features) == 0 or offsets.dim() != 1 or len(offsets) == 0 or (len(offsets) - 1) % len(features):
            raise ValueError(
                f"offsets: shape is {tuple(offsets.shape)} for {len(features)} features, expected F * B + 1 of them"
            )
        if ids_N.dim() != 1:
            raise ValueError(f"ids: shape is {tuple(ids_N.shape)}, expected one dimension")
        if weights_N is not None and weights_N.shape != ids_N.shape:
            raise ValueError(f"weights: shape is {tuple(weights_N.shape)}, expected that of ids {tuple(ids_N.shape)}")
        num_samples = (len(offsets) - 1) // len(features)
        self.shape = (num_samples if is_pooled else len(ids_N), width)
        # kept alive: the kernels see addresses only
        features, exact_ids = features.contiguous(), exact_ids.contiguous()
        self.tensors = (ids_N.long().contiguous(), offsets.long().contiguous(), features, exact_ids)
        self.weights = None if weights_N is None else weights_N.detach().to(dtype).contiguous()
        size, key, block, is_fold, is_signed = layout
        ids, starts = self.tensors[:2]
        lists = (
            address_of(ids, name="ids"),
            len(ids),
            address_of(starts, name="offsets"),
            num_samples,
            0 if self.weights is None else address_of(self.weights, name="weights"),
        )
        rows, exact = address_of(features, name="features"), address_of(exact_ids, name="exact_ids")
        self.packed = (
            (size, key, block, bool(is_fold), bool(is_signed)),
            lists,
            (rows, len(features), exact, width, is_pooled),
        )


def check_size(array: Tensor, layout: list[int], features: Tensor) -> None:
    """Nothing outside the array is read: it must hold the shared slots and all exact rows."""
    needed = max([layout[0], *(row[7] + row[6] * row[8] for row in features.tolist() if row[6])])
    if array.dim() != 1 or len(array) < needed:
        raise ValueError(f"array: shape is {tuple(array.shape)}, expected one dimension of at least {needed} slots")


def check_exponents(array: Tensor, exponents: Tensor) -> None:
    if array.dtype != torch.int8 or exponents.dtype != torch.int8 or len(exponents) != count_lines(len(array)):
        raise ValueError(
            f"array is {array.dtype} with {len(exponents)} exponents of {exponents.dtype}, expected int8 of both and "
            f"{count_lines(len(array))} exponents"
        )


def look_up(
    array: Tensor,
    lists: Lists,
    *,
    has_max: bool,
    exponents: Tensor | None = None,
    kernel: str = "cpu",
    num_threads: int = 0,
) -> tuple[Tensor, Tensor]:
    """(vectors, winners): for max, which id of its list gave each element."""
    array = array.detach().contiguous()
    out = torch.empty(lists.shape, dtype=array.dtype if exponents is None else torch.float32)
    winners = torch.empty(lists.shape if has_max else (0,), dtype=torch.int32)
    how = (out.data_ptr(), winners.data_ptr(), num_threads, kernel != "cpu_portable")
    if exponents is None:
        kernels_for(array)[0](address_of(array, name="array"), *lists.packed, *how)
    else:
        layout, ids, features = lists.packed
        _cpu.shared_lookup_int8(_addresses(array, exponents), layout, ids, features, *how)
    return out, winners


def _addresses(array: Tensor, exponents: Tensor) -> tuple[int, int]:
    check_exponents(array, exponents)
    return (
        address_of(array, name="array", dtypes=("int8",)),
        address_of(exponents, name="exponents", dtypes=("int8",)),
    )


def scatter(
    target: Tensor,
    gradient: Tensor,
    lists: Lists,
    *,
    winners: Tensor | None = None,
    touched: Tensor | None = None,
    scale: float = 1.0,
    kernel: str = "cpu",
    num_threads: int = 0,
    is_deterministic: bool = True,
) -> None:
    """target += scale * gradient of the array."""
    gradient = gradient.to(target.dtype).contiguous()
    if tuple(gradient.shape) != lists.shape:
        raise ValueError(f"gradient: shape is {tuple(gradient.shape)}, expected {lists.shape}")
    if touched is not None and len(touched) != count_lines(len(target)):
        raise ValueError(f"touched: has {len(touched)} lines, expected {count_lines(len(target))}")
    kernels_for(target)[1](
        address_of(target, name="target"),
        len(target),
        *lists.packed,
        address_of(gradient, name="gradient"),
        0 if winners is None else address_of(winners, name="winners", dtypes=("int32",)),
        0 if touched is None else address_of(touched, name="touched", dtypes=("uint8",)),
        scale,
        num_threads,
        is_deterministic,
        kernel != "cpu_portable",
    )


def weigh(
    array: Tensor,
    gradient: Tensor,
    lists: Lists,
    *,
    exponents: Tensor | None = None,
    kernel: str = "cpu",
    num_threads: int = 0,
) -> Tensor:
    """The gradient of the weights of the ids; ids outside all lists have none."""
    dtype = array.dtype if exponents is None else torch.float32
    array, gradient = array.detach().contiguous(), gradient.to(dtype).contiguous()
    out_N = torch.zeros(len(lists.tensors[0]), dtype=dtype)
    how = (address_of(gradient, name="gradient"), out_N.data_ptr(), num_threads, kernel != "cpu_portable")
    if exponents is None:
        kernels_for(array)[2](address_of(array, name="array"), *lists.packed, *how)
    else:
        layout, ids, features = lists.packed
        _cpu.shared_weigh_int8(_addresses(array, exponents), layout, ids, features, *how)
    return out_N


def adagrad(
    array: Tensor, momentum: Tensor, gradient: Tensor, touched: Tensor, *, lr: float, eps: float, num_threads: int = 0
) -> None:
    """A step on the touched lines; gradient and touched are zero again afterwards."""
    if len(momentum) not in (len(array), count_lines(len(array))) or len(touched) != count_lines(len(array)):
        raise ValueError(
            f"momentum has {len(momentum)} and touched {len(touched)} elements for an array of {len(array)}, "
            f"expected {len(array)} or {count_lines(len(array))}, and {count_lines(len(array))}"
        )
    kernels_for(array)[3](
        address_of(array, name="array"),
        address_of(momentum, name="momentum"),
        address_of(gradient, name="gradient"),
        address_of(touched, name="touched", dtypes=("uint8",)),
        len(array),
        len(momentum) != len(array),
        lr,
        eps,
        num_threads,
    )


def step_packed(
    array: Tensor,
    exponents: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    touched: Tensor,
    *,
    lr: float,
    eps: float,
    key: int,
    num_threads: int = 0,
) -> None:
    """A step on the touched lines of an array of bytes; gradient and touched are zero again afterwards."""
    num_lines = count_lines(len(array))
    kinds = {len(array): 1, num_lines: 2, 0: 0}
    if len(momentum) not in kinds or len(touched) != num_lines or len(gradient) != len(array):
        raise ValueError(
            f"momentum has {len(momentum)}, gradient {len(gradient)} and touched {len(touched)} elements for an array "
            f"of {len(array)}, expected 0, {len(array)} or {num_lines}; {len(array)}; and {num_lines}"
        )
    _cpu.shared_step_int8(
        _addresses(array, exponents),
        address_of(momentum, name="momentum", dtypes=("float32",)),
        address_of(gradient, name="gradient", dtypes=("float32",)),
        address_of(touched, name="touched", dtypes=("uint8",)),
        len(array),
        kinds[len(momentum)],
        lr,
        eps,
        key,
        num_threads,
    )
