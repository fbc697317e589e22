"""Dense building blocks of the rankers: MLP and feature crosses."""

from __future__ import annotations

from torch import Tensor, nn

# B = batch, F = features, D = embedding width


class MLP(nn.Sequential):
    """Linear layers with ReLU and dropout between them; `is_logit` omits the activation after the last layer."""

    def __init__(self, in_width: int, widths: tuple[int, ...], *, dropout: float = 0.0, is_logit: bool = False) -> None:
        layers: list[nn.Module] = []
        for position, width in enumerate(widths):
            layers.append(nn.Linear(in_width, width))
            if not (is_logit and position == len(widths) - 1):
                layers.append(nn.ReLU())
                if dropout:
                    layers.append(nn.Dropout(dropout))
            in_width = width
        super().__init__(*layers)


class CrossNetwork(nn.Module):
    """DCNv2's crosses: x_{k+1} = x_0 * (W_k x_k + b_k) + x_k, with low-rank W_k if `rank` is given."""

    def __init__(self, width: int, num_layers: int, rank: int) -> None:
        super().__init__()

        def weight() -> nn.Module:
            if not rank or rank >= width:
                return nn.Linear(width, width)
            return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))

        self.layers = nn.ModuleList(weight() for _ in range(num_layers))

    def forward(self, start_BD: Tensor) -> Tensor:
        crossed_BD = start_BD
        for layer in self.layers:
            crossed_BD = start_BD * layer(crossed_BD) + crossed_BD
        return crossed_BD
