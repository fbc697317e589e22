"""The definition of pooling windows in torch: every window padded and masked."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.windows import window_rows_of


def pool_windows(rows_ND: Tensor, scores_NH: Tensor | None, starts_W: Tensor, lengths_W: Tensor) -> Tensor:
    longest = max(int(lengths_W.max()), 1) if len(lengths_W) else 1
    is_real_WL = torch.arange(longest, device=lengths_W.device)[None, :] < lengths_W[:, None]
    rows_T = window_rows_of(starts_W, lengths_W)
    padded_WLD = rows_ND.new_zeros(len(lengths_W), longest, rows_ND.shape[1])
    padded_WLD[is_real_WL] = rows_ND[rows_T]
    if scores_NH is None:
        scores_NH = rows_ND.new_zeros(len(rows_ND), 1)
    # A finite floor instead of -inf keeps the softmax of an empty window free of NaN.
    scores_WLH = scores_NH.new_full((len(lengths_W), longest, scores_NH.shape[1]), torch.finfo(scores_NH.dtype).min)
    scores_WLH[is_real_WL] = scores_NH[rows_T]
    weights_WLH = scores_WLH.softmax(1) * is_real_WL[:, :, None].to(scores_NH.dtype)
    return torch.einsum("wlh,wld->whd", weights_WLH, padded_WLD)
