"""Dense building blocks of the rankers: linear layers, MLP and feature crosses.

On CPUs with AVX-512 their products go through oneDNN. torch takes MKL, which on CPUs of other makers than Intel does
not use AVX-512. Milliseconds of forward and backward for 1,024 rows on one core of an AMD EPYC, MKL and oneDNN:

    64 -> 16    0.07   0.07        128 -> 64    0.46   0.26
    61 -> 256   1.15   0.54        256 -> 128   1.79   0.87
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.autograd import is_compiled_float

# B = batch, F = features, D = embedding width, K = inputs of a layer, O = its outputs
MIN_WEIGHTS = 1024  # of a layer: smaller products are as fast in MKL
ROW_STEP = 64  # oneDNN compiles every number of rows anew, in 0.5 ms: those of distinct rows differ from step to step
HAS_ONEDNN = (
    torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


class MLP(nn.Sequential):
    """Linear layers with ReLU and dropout between them; `is_logit` omits the activation after the last layer."""

    def __init__(self, in_width: int, widths: tuple[int, ...], *, dropout: float = 0.0, is_logit: bool = False) -> None:
        layers: list[nn.Module] = []
        for position, width in enumerate(widths):
            layers.append(Linear(in_width, width))
            if not (is_logit and position == len(widths) - 1):
                layers.append(nn.ReLU())
                if dropout:
                    layers.append(nn.Dropout(dropout))
            in_width = width
        super().__init__(*layers)

    def forward(self, input_BK: Tensor) -> Tensor:
        linear = [layer for layer in self if isinstance(layer, Linear)]
        drops = self.training and any(isinstance(layer, nn.Dropout) for layer in self)
        if drops or not linear or not _takes_onednn(input_BK, linear[0].weight):
            dropped_BO: Tensor = super().forward(input_BK)  # type: ignore[no-untyped-call]
            return dropped_BO
        num_relu = sum(isinstance(layer, nn.ReLU) for layer in self)
        parameters = [own for layer in linear for own in (layer.weight, layer.bias)]
        out_BO: Tensor = _Layers.apply(input_BK, num_relu, *parameters)  # type: ignore[no-untyped-call]
        return out_BO


class Linear(nn.Linear):
    """nn.Linear with the same parameters; products of large matrices through oneDNN where that is faster."""

    def forward(self, input_BK: Tensor) -> Tensor:
        if not _takes_onednn(input_BK, self.weight):
            return super().forward(input_BK)
        out_BO: Tensor = _Layers.apply(input_BK, 0, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out_BO


class CrossNetwork(nn.Module):
    """DCNv2's crosses: x_{k+1} = x_0 * (W_k x_k + b_k) + x_k, with low-rank W_k if `rank` is given."""

    def __init__(self, width: int, num_layers: int, rank: int) -> None:
        super().__init__()

        def weight() -> nn.Module:
            if not rank or rank >= width:
                return Linear(width, width)
            return nn.Sequential(Linear(width, rank, bias=False), Linear(rank, width))

        self.layers = nn.ModuleList(weight() for _ in range(num_layers))

    def forward(self, start_BD: Tensor) -> Tensor:
        crossed_BD = start_BD
        for layer in self.layers:
            crossed_BD = start_BD * layer(crossed_BD) + crossed_BD
        return crossed_BD


def _takes_onednn(input_BK: Tensor, weight_OK: Tensor) -> bool:
    if not HAS_ONEDNN or not is_compiled_float(input_BK, weight_OK):  # tracing must not ask for the number of rows
        return False
    return input_BK.dim() == 2 and len(input_BK) > 0 and len(input_BK) % ROW_STEP == 0 and not input_BK.is_cuda


def _multiply(input_BK: Tensor, weight_OK: Tensor, bias_O: Tensor | None = None, *, is_relu: bool = False) -> Tensor:
    if weight_OK.numel() < MIN_WEIGHTS:
        out_BO = functional.linear(input_BK, weight_OK, bias_O)
        return out_BO.relu_() if is_relu else out_BO
    found_BO: Tensor = torch.ops.mkldnn._linear_pointwise(
        input_BK, weight_OK, bias_O, "relu" if is_relu else "none", [], ""
    )
    return found_BO


def _outer(gradient_BO: Tensor, input_BK: Tensor) -> Tensor:
    """gradient.T @ input: the narrower of the two is transposed faster."""
    if input_BK.shape[1] < gradient_BO.shape[1]:
        return _multiply(input_BK.t(), gradient_BO.t()).t()
    return _multiply(gradient_BO.t(), input_BK.t())


class _Layers(torch.autograd.Function):
    """Linear layers one after another, the first `num_relu` of them with ReLU, as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, input_BK: Tensor, num_relu: int, *parameters: Tensor | None) -> Tensor:
        """`parameters`: weight and bias (or None) of every layer in turn."""
        outputs = [input_BK.contiguous()]
        for layer, weight_OK in enumerate(parameters[::2]):
            assert weight_OK is not None
            outputs.append(_multiply(outputs[-1], weight_OK, parameters[2 * layer + 1], is_relu=layer < num_relu))
        ctx.save_for_backward(*outputs, *parameters[::2])
        ctx.num_relu, ctx.has_bias = num_relu, [own is not None for own in parameters[1::2]]
        return outputs[-1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_BO: Tensor) -> tuple[Tensor | None, ...]:
        num_layers = len(ctx.has_bias)
        outputs, weights = ctx.saved_tensors[: num_layers + 1], ctx.saved_tensors[num_layers + 1 :]
        found: list[Tensor | None] = []
        gradient_BO = gradient_BO.contiguous()
        for layer in reversed(range(num_layers)):
            if layer < ctx.num_relu:
                gradient_BO = torch.ops.aten.threshold_backward(gradient_BO, outputs[layer + 1], 0)
            weight_OK, input_BK = weights[layer], outputs[layer]
            is_small = weight_OK.numel() < MIN_WEIGHTS
            found.append(gradient_BO.sum(0) if ctx.has_bias[layer] else None)
            found.append(gradient_BO.t() @ input_BK if is_small else _outer(gradient_BO, input_BK))
            if layer or ctx.needs_input_grad[0]:
                gradient_BO = gradient_BO @ weight_OK if is_small else _multiply(gradient_BO, weight_OK.t())
        return gradient_BO if ctx.needs_input_grad[0] else None, None, *reversed(found)
