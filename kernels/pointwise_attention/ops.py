"""The compiled pointwise attention as a function that autograd knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import _cpu


class PointwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        packed_NE: Tensor,
        bias_R: Tensor,
        starts_W: Tensor,
        lengths_W: Tensor,
        num_heads: int,
        num_out: int,
        *options: Any,
    ) -> Tensor:
        inputs = packed_NE.contiguous(), bias_R.contiguous(), starts_W.contiguous(), lengths_W.contiguous()
        ctx.save_for_backward(*inputs)
        ctx.options = (num_heads, *options)
        out_QD = packed_NE.new_empty(num_out, packed_NE.shape[1] // 3)
        _cpu.pointwise_attention(*inputs, out_QD, *ctx.options)
        return out_QD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_QD: Tensor) -> tuple[Tensor | None, ...]:
        packed_NE, bias_R, *_ = ctx.saved_tensors
        found = torch.zeros_like(packed_NE), torch.zeros_like(bias_R)
        _cpu.pointwise_attention_backward(*ctx.saved_tensors, gradient_QD.contiguous(), *found, *ctx.options)
        return *found, *[None] * 6
