"""Embedding bags whose rows share parameters: a table of any size in a fixed amount of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, pad

from kernels import shared_lookup
from kernels.shared_lookup import SharedFeatures
from recmill.artifacts import InputError
from recmill.model.stores.shared.array import SharedArray, SharedTable

# B = bags, N = ids of all bags, D = embedding width
TABLE = "table"  # its name in the array: part of the hash


class SharedEmbeddingBag(nn.Module):
    """`torch.nn.EmbeddingBag` whose logical table [num_embeddings, embedding_dim] lives in a shared array.

    All arguments of EmbeddingBag have the same meaning, with two exceptions: `max_norm` is rejected (rows overlap, so
    none can be renormalised alone), and ids may exceed `num_embeddings`: every int64 has a row. New arguments:

    compression, memory_bytes   logical weights per parameter (default 10), or the size of the array in bytes
    block_size                  weights that stay side by side in the array (kernels/shared_lookup/layout.py)
    seed                        seed of the mapping and of the initial weights, the same on every machine
    exact_rows, exact_width     ids that get their own rows, and the number of weights of each: if that is less than the
                                width, they repeat over the row, so that many exact rows fit into little memory

    Sum and mean are pooled inside the lookup. With max, per_sample_weights or scale_grad_by_freq, torch pools rows that
    are looked up one by one.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        compression: float | None = None,
        memory_bytes: int | None = None,
        block_size: int | None = None,
        seed: int = 0,
        exact_rows: Tensor | Sequence[int] | None = None,
        exact_width: int | None = None,
    ) -> None:
        super().__init__()
        if max_norm is not None:
            raise InputError(f"max_norm is {max_norm}: rows that share parameters cannot be renormalised individually")
        if mode not in ("sum", "mean", "max"):
            raise InputError(f"mode is {mode!r}, expected sum, mean or max")
        if mode == "max" and (scale_grad_by_freq or sparse):
            raise InputError("mode is 'max', which supports neither scale_grad_by_freq nor sparse")
        self.num_embeddings, self.embedding_dim, self.mode = num_embeddings, embedding_dim, mode
        self.max_norm, self.norm_type, self.include_last_offset = None, norm_type, include_last_offset
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.padding_idx = _check_padding(padding_idx, num_embeddings)
        kept = None if exact_rows is None else torch.as_tensor(exact_rows, dtype=torch.int64)
        own: dict[str, Any] = {"num_rows": num_embeddings, "dim": embedding_dim}
        self.array = SharedArray(
            [SharedTable(name=TABLE, exact_rows=kept, exact_width=exact_width, **own)],
            compression=compression,
            memory_bytes=memory_bytes,
            block_size=block_size,
            seed=seed,
            device=device,
            dtype=dtype,
        )
        if self.array.is_packed:
            raise InputError(
                "dtype is torch.int8, which has no gradient: use SharedEmbeddingBagCollection to train int8 weights"
            )
        feature = self.array.feature(TABLE, is_mean=mode == "mean")
        self._features = SharedFeatures.of([feature], self.array.exact_ids)
        if _weight is not None:
            self._take(_weight)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **options: Any,
    ) -> SharedEmbeddingBag:
        """A bag over a full table [rows, D] folded into the array; weights that share a slot are averaged."""
        num_rows, dim = embeddings.shape
        bag = cls(
            num_rows,
            dim,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            mode=mode,
            sparse=sparse,
            _weight=embeddings,
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
            device=embeddings.device,
            dtype=embeddings.dtype,
            **options,
        )
        bag.array.weight.requires_grad_(not freeze)
        return bag

    @property
    def weight(self) -> nn.Parameter:
        """The array's parameters, one-dimensional."""
        return self.array.weight

    def __setattr__(self, name: str, value: Any) -> None:
        # `bag.weight -= step` assigns; nn.Module would register a second parameter.
        if name == "weight":
            self.array.weight = value
        else:
            super().__setattr__(name, value)

    @torch.no_grad()
    def _take(self, weight: Tensor) -> None:
        """Load an array of this size, or a full table."""
        if tuple(weight.shape) == tuple(self.weight.shape):
            self.weight.copy_(weight)
        elif tuple(weight.shape) == (self.num_embeddings, self.embedding_dim):
            self.array.fold(self.weight.data, TABLE, torch.arange(self.num_embeddings), weight)
        else:
            raise InputError(
                f"_weight: shape is {tuple(weight.shape)}, expected {tuple(self.weight.shape)} or "
                f"{(self.num_embeddings, self.embedding_dim)}"
            )

    def reset_parameters(self) -> None:
        self.array.reset_parameters()

    def materialise(self, rows: Tensor | range | Sequence[int] | None = None) -> Tensor:
        """[R, D]: rows of the logical table (default: all) as lookups see them."""
        return self.array.materialise(TABLE, range(self.num_embeddings) if rows is None else rows)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """[B, D]: the bags of a 2-D `input` row by row, or of a 1-D one cut at `offsets`."""
        if per_sample_weights is not None and self.mode != "sum":
            raise NotImplementedError(f"per_sample_weights require mode 'sum', the mode is {self.mode!r}")
        ids_N, offsets, weights_N = self._flatten(input, offsets, per_sample_weights)
        if self.padding_idx is not None:
            ids_N, offsets, weights_N = drop_padding(ids_N, offsets, weights_N, self.padding_idx)
        slots: Tensor = self.weight
        if self.sparse:
            slots = _SparseGradient.apply(slots)  # type: ignore[no-untyped-call]
        features = self._features if slots.device.type == "cpu" else self._features.to(slots.device)
        is_pooled = self.mode != "max" and weights_N is None and not self.scale_grad_by_freq
        how: dict[str, Any] = {"layout": self.array.layout, "features": features, "is_pooled": is_pooled}
        found = shared_lookup(slots, ids_N, offsets, **how)
        return found if is_pooled else self._pool(found, ids_N, offsets, weights_N)

    def _pool(self, rows_ND: Tensor, ids_N: Tensor, offsets: Tensor, weights_N: Tensor | None) -> Tensor:
        """[B, D] from one row per id."""
        if self.scale_grad_by_freq and rows_ND.requires_grad:
            frequency_N = _frequency(ids_N)
            rows_ND.register_hook(lambda gradient_ND: gradient_ND / frequency_N[:, None])  # type: ignore[no-untyped-call]
        how: dict[str, Any] = {"mode": self.mode, "per_sample_weights": weights_N, "include_last_offset": True}
        return embedding_bag(torch.arange(len(ids_N), device=ids_N.device), rows_ND, offsets, **how)

    def _flatten(
        self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if ids.dtype not in (torch.int64, torch.int32):
            raise InputError(f"input: dtype is {ids.dtype}, expected torch.int64 or torch.int32")
        if weights is not None and weights.shape != ids.shape:
            raise InputError(
                f"per_sample_weights: shape is {tuple(weights.shape)}, expected {tuple(ids.shape)} as for input"
            )
        if ids.dim() == 2:
            if offsets is not None:
                raise InputError("input has 2 dimensions (its rows are the bags): expected no offsets")
            ends = torch.arange(ids.shape[0] + 1, device=ids.device) * ids.shape[1]
            return ids.flatten(), ends, None if weights is None else weights.flatten()
        if ids.dim() != 1 or offsets is None or offsets.dim() != 1:
            raise InputError("expected a 2-D input, or a 1-D one with 1-D offsets")
        if len(offsets) and int(offsets[0]) != 0:
            raise InputError(f"offsets[0] is {int(offsets[0])}, expected 0")
        if self.include_last_offset:
            if not len(offsets):
                raise InputError("include_last_offset is set but offsets are empty, expected at least one")
            return ids, offsets.long(), weights
        return ids, pad(offsets.long(), (0, 1), value=len(ids)), weights

    def extra_repr(self) -> str:
        shown = f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}"
        return shown if self.padding_idx is None else f"{shown}, padding_idx={self.padding_idx}"


def drop_padding(
    ids_N: Tensor, offsets: Tensor, weights_N: Tensor | None, padding_idx: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The lists without the padding id, which counts in neither sums nor means."""
    is_real_N = ids_N != padding_idx
    kept = pad(is_real_N.long().cumsum(0), (1, 0))[offsets]
    return ids_N[is_real_N], kept, None if weights_N is None else weights_N[is_real_N]


def _check_padding(padding_idx: int | None, num_embeddings: int) -> int | None:
    if padding_idx is None:
        return None
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise InputError(f"padding_idx is {padding_idx}, expected a row in [-{num_embeddings}, {num_embeddings})")
    return padding_idx % num_embeddings


def _frequency(ids_N: Tensor) -> Tensor:
    """How often each id occurs in the batch."""
    _, inverse_N, counts = torch.unique(ids_N, return_inverse=True, return_counts=True)
    return counts[inverse_N]


class _SparseGradient(torch.autograd.Function):
    """The same array, whose gradient becomes sparse."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor) -> Tensor:
        return slots.view_as(slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].to_sparse()
