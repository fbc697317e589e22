"""Target attention of the Deep Interest Network (arXiv 1706.06978): what of a history matters for this candidate."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import expand_rows, pool_windows, target_attention
from kernels.target_attention import LANES
from kernels.windows import window_places, window_rows_of
from recmill.model.encoders.pooling import valid_positions
from recmill.model.encoders.windows import SequenceWindows

# B = samples, D = embedding width, L = padded length, K = width of the activation unit's first layer
# N = rows of a buffer, U = windows into it, P = pairs of a sample and an element of its history


class TargetAttentionEncoder(nn.Module):
    """The elements of a history, each weighted by an activation unit that sees the element and the candidate.

    The unit is an MLP with PReLU over [history, target, history - target, history * target]. As published, weights are
    not normalised unless `is_softmax`, and the sum of an empty history is zero. PReLU stands where the paper also tries
    Dice, whose batch statistics would depend on how a batch is cut over ranks.
    """

    def __init__(self, dim: int, widths: tuple[int, ...], *, is_softmax: bool = False) -> None:
        super().__init__()
        self.is_softmax = is_softmax
        self.first = nn.Linear(4 * dim, widths[0])
        layers: list[nn.Module] = []
        for width, next_width in zip(widths, (*widths[1:], 1), strict=True):
            layers += [nn.PReLU(width), nn.Linear(width, next_width)]
        self.others = nn.Sequential(*layers)

    def forward(self, padded_BLD: Tensor, lengths_B: Tensor, target_BD: Tensor) -> Tensor:
        target_BLD = target_BD[:, None, :].expand_as(padded_BLD)
        joined = [padded_BLD, target_BLD, padded_BLD - target_BLD, padded_BLD * target_BLD]
        # PReLU expects its units in the second dimension.
        weights_BL1 = self.others(self.first(torch.cat(joined, dim=2)).flatten(0, 1)).view(*padded_BLD.shape[:2], 1)
        valid_BL1 = valid_positions(lengths_B, padded_BLD.shape[1])[:, :, None]
        if self.is_softmax:
            # A finite minimum instead of -inf avoids NaN in the softmax of an empty sequence.
            weights_BL1 = weights_BL1.masked_fill(~valid_BL1, torch.finfo(padded_BLD.dtype).min).softmax(1)
        return (weights_BL1 * valid_BL1.to(padded_BLD.dtype) * padded_BLD).sum(1)

    def encode(self, windows: SequenceWindows, target_BD: Tensor, inverse_B: Tensor | None) -> Tensor:
        """The same for windows: [B, D]. Sample b has the window `inverse_B[b]`, or window b if it is None.

        The unit's first layer is linear in its four inputs. So the share of a history's element alone is computed once
        per row of the buffer, that of a target once per sample, and only that of their product once per pair.
        """
        starts_B, lengths_B = windows.starts_U, windows.lengths_U
        if inverse_B is not None:
            starts_B, lengths_B = starts_B[inverse_B], lengths_B[inverse_B]
        of_history_KD, of_target_KD, of_difference_KD, of_product_KD = self.first.weight.chunk(4, dim=1)
        shares_KD = (of_history_KD + of_difference_KD, of_target_KD - of_difference_KD, of_product_KD)
        if len(self.others) == 2 and not self.is_softmax:
            return self._sum_in_place(windows.rows_ND, target_BD, starts_B, lengths_B, shares_KD)
        share_NK = functional.linear(windows.rows_ND, shares_KD[0], self.first.bias)
        num_pairs = int(lengths_B.sum())
        rows_P = window_rows_of(starts_B, lengths_B, num_values=num_pairs)
        samples_P = torch.repeat_interleave(lengths_B, output_size=num_pairs)
        history_PD = expand_rows(windows.rows_ND, rows_P)
        products_PK = (history_PD * expand_rows(target_BD, samples_P)) @ shares_KD[2].T
        target_PK = expand_rows(functional.linear(target_BD, shares_KD[1]), samples_P)
        weights_P1 = self.others(expand_rows(share_NK, rows_P) + target_PK + products_PK)
        places_B = window_places(lengths_B)
        if self.is_softmax:
            return pool_windows(history_PD, weights_P1, places_B, lengths_B).squeeze(1)
        means_BD = pool_windows(history_PD * weights_P1, None, places_B, lengths_B).squeeze(1)
        return means_BD * lengths_B[:, None].to(means_BD.dtype)

    def _sum_in_place(
        self, rows_ND: Tensor, target_BD: Tensor, starts_B: Tensor, lengths_B: Tensor, shares_KD: tuple[Tensor, ...]
    ) -> Tensor:
        """With one hidden layer and without softmax: nothing is stored per pair.

        Units that are always 0 fill the kernel's vectors, and one that is always 1 has the score's bias as its weight.
        """
        num_units = len(self.first.bias)
        spare = LANES - num_units % LANES
        ones_K = torch.zeros(num_units + spare, dtype=rows_ND.dtype, device=rows_ND.device)
        ones_K[num_units] = 1.0
        history_KD, of_target_KD, product_KD = (functional.pad(share, (0, 0, 0, spare)) for share in shares_KD)
        slope, score = self.others
        assert isinstance(slope, nn.PReLU)
        assert isinstance(score, nn.Linear)
        return target_attention(
            rows_ND,
            functional.linear(rows_ND, history_KD, functional.pad(self.first.bias, (0, spare))),
            target_BD,
            functional.linear(target_BD, of_target_KD, ones_K),
            product_KD,
            functional.pad(slope.weight, (0, spare)),
            functional.pad(torch.cat([score.weight[0], score.bias]), (0, spare - 1)),
            starts_B,
            lengths_B,
        )
