"""Jagged features as the ops take them: row b of a feature is values[offsets[b] : offsets[b + 1]]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kernels.buffers import address_of

if TYPE_CHECKING:
    from torch import Tensor

    from kernels._cpu import Lists


def count_jagged_rows(values: Sequence[Tensor], offsets: Sequence[Tensor]) -> int:
    """B, the rows that all features of a group have in common; ValueError if they are not a group."""
    if not values or len(values) != len(offsets):
        raise ValueError(f"received {len(values)} values and {len(offsets)} offsets, expected one of each a feature")
    for feature, own in enumerate(offsets):
        if own.dim() != 1 or len(own) == 0 or len(own) != len(offsets[0]):
            raise ValueError(
                f"offsets of feature {feature}: shape is {tuple(own.shape)}, "
                f"expected B + 1 = {len(offsets[0])} of them as in feature 0"
            )
        if str(own.dtype) != "torch.int64":
            raise ValueError(f"offsets of feature {feature}: dtype is {own.dtype}, expected torch.int64")
    return len(offsets[0]) - 1


def item_bytes(values: Tensor) -> int:
    """The bytes of one element of a list: an id, a weight, or a whole vector where values has more dimensions."""
    return values.element_size() * values[:1].numel() if len(values) else values.element_size()


def describe_lists(values: Sequence[Tensor], offsets: Sequence[Tensor]) -> list[Lists]:
    """The features as the compiled kernels read them. The tensors must outlive the call."""
    return [
        (
            address_of(own, name=f"values of feature {feature}"),
            item_bytes(own),
            len(own),
            address_of(offsets[feature], name=f"offsets of feature {feature}", dtypes=("int64",)),
        )
        for feature, own in enumerate(values)
    ]


def pick_backend(kernel: str | None, tensor: Tensor, backends: tuple[str, ...]) -> str:
    """The backend asked for, or the one for the tensor's device."""
    backend = kernel or ("cpu" if tensor.device.type == "cpu" else "triton" if "triton" in backends else "reference")
    if backend not in backends:
        raise ValueError(f"kernel is {kernel!r}, expected one of {', '.join(backends)}")
    return backend
