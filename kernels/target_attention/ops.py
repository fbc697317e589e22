"""The compiled target attention as a function that autograd knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import _cpu


class TargetAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        """Of the seven tensors that have gradients, then starts and lengths of the windows."""
        *given, starts_B, lengths_B = (own.contiguous() for own in tensors)
        ctx.save_for_backward(*given, starts_B, lengths_B)
        out_BD = torch.empty_like(given[2])
        _cpu.target_attention(given, starts_B, lengths_B, out_BD)
        return out_BD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_BD: Tensor) -> tuple[Tensor | None, ...]:
        *given, starts_B, lengths_B = ctx.saved_tensors
        found = [torch.zeros_like(own) for own in given]
        _cpu.target_attention_backward(given, starts_B, lengths_B, gradient_BD.contiguous(), found)
        return *found, None, None
