"""The definition of the layers in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from kernels.dense_layers import DenseLayers


def dense_layers(layers: DenseLayers, x_NK: Tensor, start_RO: Tensor | None, rows_N: Tensor | None) -> Tensor:
    for number, (weight_OK, bias_O) in enumerate(layers.layers):
        if number:
            x_NK = torch.relu(x_NK)
        if number == 0 and start_RO is not None:
            x_NK = (start_RO if rows_N is None else start_RO[rows_N]) + functional.linear(x_NK, weight_OK)
        else:
            x_NK = functional.linear(x_NK, weight_OK, bias_O)
    return torch.relu(x_NK) if layers.ends_with_relu else x_NK
