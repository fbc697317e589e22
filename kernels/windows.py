"""Windows into a buffer of rows: window w is the rows [starts[w], starts[w] + lengths[w]). Windows may overlap.

Shape suffixes: N = rows of the buffer, W = windows, T = rows of all windows in sequence, L = longest window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def window_places(lengths_W: Tensor) -> Tensor:
    """Where each window begins when all windows are laid out in sequence: [W]."""
    return lengths_W.cumsum(0) - lengths_W


def window_rows_of(starts_W: Tensor, lengths_W: Tensor, *, num_values: int | None = None) -> Tensor:
    """The buffer's row for each row of each window: [T]. `num_values`, if known, is T."""
    import torch

    total = int(lengths_W.sum()) if num_values is None else num_values
    shift_T = torch.repeat_interleave(starts_W - window_places(lengths_W), lengths_W, output_size=total)
    return shift_T + torch.arange(total, device=starts_W.device)


def check_windows(starts_W: Tensor, lengths_W: Tensor) -> None:
    """ValueError unless both are int64 and of one length."""
    import torch

    if starts_W.shape != lengths_W.shape or starts_W.dim() != 1:
        raise ValueError(f"received starts of shape {tuple(starts_W.shape)}, lengths of shape {tuple(lengths_W.shape)}")
    for name, own in (("starts_W", starts_W), ("lengths_W", lengths_W)):
        if own.dtype != torch.int64:
            raise ValueError(f"{name}: dtype is {own.dtype}, expected torch.int64")
