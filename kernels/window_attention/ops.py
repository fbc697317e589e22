"""The compiled attention as a function that autograd knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import _cpu


def attend(
    packed_NE: Tensor, starts_W: Tensor, lengths_W: Tensor, num_heads: int, num_values: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The result without autograd, and what the gradient needs."""
    inputs = packed_NE.contiguous(), starts_W.contiguous(), lengths_W.contiguous()
    out_TD = packed_NE.new_empty(num_values, packed_NE.shape[1] // 3)
    log_sums_HT = packed_NE.new_empty(num_heads, num_values)  # logarithms of the sums of the softmax
    _cpu.window_attention(*inputs, out_TD, log_sums_HT)
    return out_TD, (*inputs, out_TD, log_sums_HT)


class WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, packed_NE: Tensor, starts_W: Tensor, lengths_W: Tensor, num_heads: int, num_values: int
    ) -> Tensor:
        out_TD, kept = attend(packed_NE, starts_W, lengths_W, num_heads, num_values)
        ctx.save_for_backward(*kept)
        return out_TD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_TD: Tensor) -> tuple[Tensor | None, ...]:
        found_NE = torch.zeros_like(ctx.saved_tensors[0])
        _cpu.window_attention_backward(*ctx.saved_tensors, gradient_TD.contiguous(), found_NE)
        return found_NE, None, None, None, None
