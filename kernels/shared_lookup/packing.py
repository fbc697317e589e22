"""Weights of one byte each in plain torch: the definition of the packed kernels.

    line of 16 slots:   codes  [ 12 -127  3 ... ]  int8      exponent  -9  int8      weight = code * 2 ** exponent

The exponent is the smallest with which the line's largest weight fits. Weights are rounded to the nearest, or at
random: up with the probability of the lost fraction, from a hash of a key and the slot.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.shared_lookup.layout import ID_FACTOR, LINE, count_lines, signed
from kernels.shared_lookup.reference import adagrad, mix_bits, shift_right

TOP = 127
NOT_FINITE = -128  # the exponent of a line with an infinity or NaN; all of its weights read as NaN
EXPONENTS = (-120, 120)

# L = lines


def unpack(codes: Tensor, exponents_L: Tensor) -> Tensor:
    """The weights as float32."""
    units_L = torch.exp2(exponents_L.float()).masked_fill(exponents_L == NOT_FINITE, torch.nan)
    return codes.float() * units_L.repeat_interleave(LINE)[: len(codes)]


def pack(values: Tensor, kept_L: Tensor | None = None, *, key: int | None = None) -> tuple[Tensor, Tensor]:
    """(codes, exponents). Rounds to the nearest without a key; lines of zeros keep their exponent in `kept_L`."""
    num_slots, num_lines = len(values), count_lines(len(values))
    lines = pad(values.float(), (0, num_lines * LINE - num_slots)).view(num_lines, LINE)
    kept_L = torch.zeros(num_lines, dtype=torch.int8) if kept_L is None else kept_L
    largest_L = lines.abs().max(1).values if num_lines else lines.new_empty(0)
    exponents_L = choose_exponents(largest_L, kept_L)
    is_finite_L = exponents_L != NOT_FINITE
    scaled = lines.nan_to_num() * torch.exp2(-exponents_L.float() * is_finite_L)[:, None]
    raised = (scaled + (0.5 if key is None else _fractions(num_lines, key))).floor().clamp(-TOP, TOP)
    codes = torch.where(is_finite_L[:, None], raised, 1.0).to(torch.int8)
    return codes.flatten()[:num_slots].contiguous(), exponents_L.to(torch.int8)


def choose_exponents(largest_L: Tensor, kept_L: Tensor) -> Tensor:
    """int64: the smallest exponents with which 127 units reach the largest weight."""
    fraction_L, exponents_L = torch.frexp(largest_L / TOP)
    exponents_L = (exponents_L.long() - (fraction_L == 0.5).long()).clamp(*EXPONENTS)
    kept_L = kept_L.long().masked_fill(kept_L == NOT_FINITE, 0)
    exponents_L = torch.where(largest_L == 0, kept_L, exponents_L)
    return torch.where(largest_L.isfinite(), exponents_L, NOT_FINITE)


def step_packed(
    codes: Tensor, exponents_L: Tensor, momentum: Tensor, gradient: Tensor, *, lr: float, eps: float, key: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, exponents, momentum) after a step on all lines; without momentum it is SGD."""
    values = unpack(codes, exponents_L)
    if len(momentum):
        group = 1 if len(momentum) == len(codes) else LINE
        values, momentum = adagrad(values, momentum, gradient, group=group, lr=lr, eps=eps)
    else:
        values = values - lr * gradient
    return *pack(values, exponents_L, key=key), momentum


def _fractions(num_lines: int, key: int) -> Tensor:
    """[L, 16] in [0, 1), sixteen bits each: a word makes four."""
    words = mix_bits(key + torch.arange(num_lines * LINE // 4) * signed(ID_FACTOR))
    bits = [(shift_right(words, shift) if shift else words) & 0xFFFF for shift in (0, 16, 32, 48)]
    return torch.stack(bits, 1).view(num_lines, LINE).float() / 65_536
