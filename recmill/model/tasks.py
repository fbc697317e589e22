"""Several labels from one representation of a sample: shared bottom, MMoE, PLE, and their loss.

    shared     x ── bottom ──┬── tower ── click              one bottom serves all labels
                             └── tower ── purchase

    mmoe       x ── experts ─┬─ gate, tower ── click         each label mixes the experts with a gate of its own
                             └─ gate, tower ── purchase      (Ma et al. 2018)

    ple        x ── own and shared experts, gates, level by level ── tower ── click
                    each label mixes its own experts with the shared ones (Tang et al. 2020)

Shape suffixes: B = samples, D = width, E = experts, T = labels (tasks).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from recmill.model.layers import MLP
from recmill.model.settings import RankerConfig


class SharedBottom(nn.Module):
    """Logits [B, T]: one bottom, one tower per label."""

    def __init__(self, in_width: int, bottom: nn.Module, num_tasks: int, tower_layers: tuple[int, ...]) -> None:
        super().__init__()
        self.bottom = bottom
        self.towers = _towers(in_width, num_tasks, tower_layers)

    def forward(self, x_BD: Tensor) -> Tensor:
        shared_BD = self.bottom(x_BD)
        return torch.cat([tower(shared_BD) for tower in self.towers], dim=1)


class MixtureOfExperts(nn.Module):
    """Logits [B, T]: experts that all labels share, mixed for each label by a softmax gate."""

    def __init__(self, in_width: int, num_tasks: int, config: RankerConfig) -> None:
        super().__init__()
        self.experts = _experts(in_width, config)
        self.gates = nn.ModuleList(nn.Linear(in_width, config.num_experts, bias=False) for _ in range(num_tasks))
        self.towers = _towers(_expert_width(in_width, config), num_tasks, config.tower_layers)

    def forward(self, x_BD: Tensor) -> Tensor:
        experts_BED = torch.stack([expert(x_BD) for expert in self.experts], dim=1)
        mixed = [_mix(gate(x_BD), experts_BED) for gate in self.gates]
        return torch.cat([tower(own_BD) for tower, own_BD in zip(self.towers, mixed, strict=True)], dim=1)


class ExtractionLevel(nn.Module):
    """One level of PLE: a vector per label and a shared one in, the same out (the last level: none shared)."""

    def __init__(self, in_width: int, num_tasks: int, config: RankerConfig, *, is_last: bool) -> None:
        super().__init__()
        self.own = nn.ModuleList(_experts(in_width, config) for _ in range(num_tasks))
        self.shared = _experts(in_width, config)
        self.gates = nn.ModuleList(nn.Linear(in_width, 2 * config.num_experts, bias=False) for _ in range(num_tasks))
        num_all = (num_tasks + 1) * config.num_experts
        self.shared_gate = None if is_last else nn.Linear(in_width, num_all, bias=False)

    def forward(self, x_T: list[Tensor], shared_BD: Tensor) -> tuple[list[Tensor], Tensor]:
        own = [
            torch.stack([expert(x_BD) for expert in experts], dim=1)  # type: ignore[attr-defined]
            for experts, x_BD in zip(self.own, x_T, strict=True)
        ]
        shared_BED = torch.stack([expert(shared_BD) for expert in self.shared], dim=1)
        mixed = [
            _mix(gate(x_BD), torch.cat([own_BED, shared_BED], dim=1))
            for gate, x_BD, own_BED in zip(self.gates, x_T, own, strict=True)
        ]
        if self.shared_gate is None:
            return mixed, shared_BD
        return mixed, _mix(self.shared_gate(shared_BD), torch.cat([*own, shared_BED], dim=1))


class ProgressiveExtraction(nn.Module):
    """Logits [B, T]: levels in which each label has experts of its own beside the shared ones."""

    def __init__(self, in_width: int, num_tasks: int, config: RankerConfig) -> None:
        super().__init__()
        out_width, last = _expert_width(in_width, config), config.extraction_levels - 1
        self.levels = nn.ModuleList(
            ExtractionLevel(out_width if level else in_width, num_tasks, config, is_last=level == last)
            for level in range(config.extraction_levels)
        )
        self.towers = _towers(out_width, num_tasks, config.tower_layers)

    def forward(self, x_BD: Tensor) -> Tensor:
        own, shared_BD = [x_BD] * len(self.towers), x_BD
        for level in self.levels:
            own, shared_BD = level(own, shared_BD)
        return torch.cat([tower(own_BD) for tower, own_BD in zip(self.towers, own, strict=True)], dim=1)


def _mix(gate_BE: Tensor, experts_BED: Tensor) -> Tensor:
    return torch.bmm(torch.softmax(gate_BE, dim=1)[:, None], experts_BED).squeeze(1)


def _experts(in_width: int, config: RankerConfig) -> nn.ModuleList:
    experts = (MLP(in_width, config.top_layers, dropout=config.dropout) for _ in range(config.num_experts))
    return nn.ModuleList(experts)


def _towers(in_width: int, num_tasks: int, layers: tuple[int, ...]) -> nn.ModuleList:
    return nn.ModuleList(MLP(in_width, (*layers, 1), is_logit=True) for _ in range(num_tasks))


def _expert_width(in_width: int, config: RankerConfig) -> int:
    return config.top_layers[-1] if config.top_layers else in_width


def sum_losses(logits: Tensor, label_BT: Tensor, weights: Sequence[float] = ()) -> Tensor:
    """The log loss summed over samples; of several labels the sum, each times its weight (1 if none is given)."""
    if logits.dim() == 1:
        return functional.binary_cross_entropy_with_logits(logits, label_BT[:, 0], reduction="sum")
    losses_T = functional.binary_cross_entropy_with_logits(logits, label_BT, reduction="none").sum(dim=0)
    return (losses_T * losses_T.new_tensor(list(weights))).sum() if weights else losses_T.sum()
