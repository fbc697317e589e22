"""Embedding bags whose rows share parameters: a table of any size in a fixed amount of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kernels import shared_lookup
from recmill.artifacts import InputError
from recmill.model.stores.shared.array import SharedArray, SharedTable

# B = bags, N = ids of all bags, D = embedding width


class SharedEmbeddingBag(nn.Module):
    """`torch.nn.EmbeddingBag` whose logical table [num_embeddings, embedding_dim] lives in a shared array.

    All arguments of EmbeddingBag have the same meaning, with two exceptions: `max_norm` is rejected (rows overlap, so
    none can be renormalised alone), and ids may exceed `num_embeddings`: every int64 has a row. New arguments:

    compression, memory_bytes   logical weights per parameter (default 10), or the size of the array in bytes
    block_size, mapping         how rows map to the array (kernels/shared_lookup/layout.py)
    seed                        seed of the mapping and of the initial weights, the same on every machine
    gradient_scaling            gradients of shared slots are divided by share_count ** gradient_scaling: 0 is the plain
                                gradient, 1 the mean over all weights that share a slot, which keeps SGD stable
    exact_rows, exact_width     ids that get their own rows, and the number of weights of each: if that is less than the
                                width, they repeat over the row, so that many exact rows fit into little memory
    array, table                a SharedArray of several tables, and the table that this bag reads
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
        mapping: str = "robe",
        seed: int = 0,
        gradient_scaling: float = 0.0,
        exact_rows: Tensor | Sequence[int] | None = None,
        exact_width: int | None = None,
        array: SharedArray | None = None,
        table: str = "table",
    ) -> None:
        super().__init__()
        if max_norm is not None:
            raise InputError(f"max_norm is {max_norm}: rows that share parameters cannot be renormalised individually")
        if mode not in ("sum", "mean", "max"):
            raise InputError(f"mode is {mode!r}, expected sum, mean or max")
        if mode == "max" and (scale_grad_by_freq or sparse):
            raise InputError("mode is 'max', which supports neither scale_grad_by_freq nor sparse")
        self.num_embeddings, self.embedding_dim, self.mode = num_embeddings, embedding_dim, mode
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = (
            None,
            norm_type,
            scale_grad_by_freq,
            sparse,
        )
        self.include_last_offset = include_last_offset
        self.padding_idx = _check_padding(padding_idx, num_embeddings)
        if array is None:
            kept = None if exact_rows is None else torch.as_tensor(exact_rows, dtype=torch.int64)
            own = SharedTable(
                name=table, num_rows=num_embeddings, dim=embedding_dim, exact_rows=kept, exact_width=exact_width
            )
            options: dict[str, Any] = {"block_size": block_size, "mapping": mapping, "seed": seed}
            array = SharedArray(
                [own], compression=compression, memory_bytes=memory_bytes, device=device, dtype=dtype, **options
            )
        elif table not in array.tables or array.tables[table].dim != embedding_dim:
            raise InputError(f"the array has no table {table!r} of width {embedding_dim}")
        if array.is_packed:
            raise InputError(
                "dtype is torch.int8, which has no gradient: use SharedEmbeddingBagCollection to train int8 weights"
            )
        self.array, self.table = array, table
        self._scale = array.share_count**-gradient_scaling if gradient_scaling else 1.0
        self._features = array.features([table], [mode])
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
            self.array.fold(self.weight.data, self.table, torch.arange(self.num_embeddings), weight)
        else:
            raise InputError(
                f"_weight: shape is {tuple(weight.shape)}, expected {tuple(self.weight.shape)} or "
                f"{(self.num_embeddings, self.embedding_dim)}"
            )

    def reset_parameters(self) -> None:
        self.array.reset_parameters()

    def materialise(self, rows: Tensor | range | Sequence[int] | None = None) -> Tensor:
        """[R, D]: rows of the logical table (default: all) as lookups see them."""
        return self.array.materialise(self.table, range(self.num_embeddings) if rows is None else rows)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """[B, D]: the bags of a 2-D `input` row by row, or of a 1-D one cut at `offsets`."""
        if per_sample_weights is not None and self.mode != "sum":
            raise NotImplementedError(f"per_sample_weights require mode 'sum', the mode is {self.mode!r}")
        ids_N, offsets, weights_N = self._flatten(input, offsets, per_sample_weights)
        if self.padding_idx is not None:
            ids_N, offsets, weights_N = drop_padding(ids_N, offsets, weights_N, self.padding_idx)
        slots = self.weight
        if self._scale != 1 or self.sparse:
            slots = _ScaledGradient.apply(slots, self._scale, self.array.layout.size, self.sparse)  # type: ignore[no-untyped-call]
        if not self.scale_grad_by_freq:
            return self._look_up(slots, ids_N, offsets, weights_N)
        frequency_N = _frequency(ids_N).to(slots.dtype)
        own_N = 1 / frequency_N if weights_N is None else weights_N.detach() / frequency_N
        value = self._look_up(slots.detach(), ids_N, offsets, weights_N)
        return _ValueOf.apply(value, self._look_up(slots, ids_N, offsets, own_N))  # type: ignore[no-untyped-call]

    def _look_up(self, slots: Tensor, ids_N: Tensor, offsets: Tensor, weights_N: Tensor | None) -> Tensor:
        features = self._features if slots.device.type == "cpu" else self._features.to(slots.device)
        return shared_lookup(slots, ids_N, offsets, layout=self.array.layout, features=features, weights_N=weights_N)

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


class _ScaledGradient(torch.autograd.Function):
    """The same array with its gradient scaled in the shared slots, or made sparse."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, scale: float, num_shared: int, is_sparse: bool) -> Tensor:
        ctx.scale, ctx.num_shared, ctx.is_sparse = scale, num_shared, is_sparse
        return slots.view_as(slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = gradients[0]
        if ctx.scale != 1:
            gradient = torch.cat([gradient[: ctx.num_shared] * ctx.scale, gradient[ctx.num_shared :]])
        return gradient.to_sparse() if ctx.is_sparse else gradient, None, None, None


class _ValueOf(torch.autograd.Function):
    """Returns the first tensor; passes the gradient to both, so that the second determines the array's gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, stand_in: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0]
