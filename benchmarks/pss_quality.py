"""AUC against bytes of every method of shrinking embedding tables, in one harness.

All methods feed the same network (factorisation machine + one hidden layer of 128 with dropout) with rows of the same
width; bytes exclude the network, which is the same for all. Rows are trained by Adam, where a weight costs 12 bytes
(itself and two moments), or by row-wise Adagrad, where a row of 64 costs 260 (its weights and one momentum). Learning
rates rise for a tenth of the steps and then fall linearly to zero.

    full           one row per id
    full adagrad   the same, row-wise Adagrad
    hash           the hashing trick: ids of all fields modulo the number of rows that fit
    quotient       quotient-remainder: the product of two small rows
    narrow         one row per id, as narrow as the bytes require, repeated over the width
    shared Z       PSS: rows from one array, blocks of Z
    hot            the most read rows are exact (few weights each, repeated over the width; their ids cost
                   8 bytes each), all others shared
    hot int8       the same with weights of one byte, blocks of 32 and row-wise Adagrad; N times smaller than `full
                   adagrad`, momenta, exponents and ids included, and so more than 2.9 N times smaller than `full`
    narrow int8    `narrow` with weights of one byte and row-wise Adagrad, in the bytes of `hot int8`
    hash int8      `hash` with weights of one byte and row-wise Adagrad, in the bytes of `hot int8`
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pss_data import Samples
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding
from torchrec import EmbeddingBagConfig

from kernels import shared_lookup
from kernels.shared_lookup.reference import mix_bits
from recmill.model.stores.interface import TableOptimiser
from recmill.model.stores.shared import SharedArray, SharedEmbeddingBagCollection, SharedTable
from recmill.planning.sharing.choice import DEFAULT_BLOCK_SIZE, choose_exact_share, choose_exact_width

DIM = 64
STD = 0.05
WEIGHT_BYTES = 12  # float32 and the two moments of Adam
ADAGRAD_BYTES = 4 + 4 / DIM  # float32 and its part of a row's momentum
PACKED_BYTES = 1 + 1 / 16 + 4 / 16  # a byte, and its part of a line's exponent and momentum
ID_BYTES = 8
NETWORK_LR = 3e-3
WARM_UP = 0.1  # of all steps
HIDDEN = 128
DROPOUT = 0.1

# N = samples, F = fields


class Rows(nn.Module):
    """Plain rows: `places` maps field and id to a row; with two of them, rows are multiplied."""

    def __init__(self, samples: Samples, num_rows: int, *places: Tensor, width: int = DIM) -> None:
        super().__init__()
        std = STD if len(places) < 2 else STD**0.5
        self.weight = nn.Parameter(torch.randn(num_rows, width) * std)
        self.first_row, self.places = samples.first_row, places
        self.num_bytes = num_rows * width * WEIGHT_BYTES

    def forward(self, ids_NF: Tensor) -> Tensor:
        line_NF = ids_NF + self.first_row
        places = [place[line_NF] for place in self.places] or [line_NF]
        found = [embedding(place, self.weight) for place in places]
        row = found[0] if len(found) == 1 else found[0] * found[1]
        return row.repeat(1, 1, -(-DIM // row.shape[2]))[..., :DIM]


class AdagradRows(Rows):
    """Rows that are updated by row-wise Adagrad in the backward pass."""

    def __init__(self, samples: Samples) -> None:
        super().__init__(samples, sum(samples.num_rows))
        self.momentum = torch.zeros(len(self.weight), 1)
        self.num_bytes = round(self.weight.numel() * ADAGRAD_BYTES)
        self.lr = 0.0
        self.weight.register_post_accumulate_grad_hook(self._step)

    def set_lr(self, lr: float) -> None:
        self.lr = lr

    @torch.no_grad()
    def _step(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self.momentum += weight.grad.square().mean(1, keepdim=True)
        weight -= self.lr * weight.grad / (self.momentum.sqrt() + 1e-8)
        weight.grad = None


@dataclass(frozen=True, kw_only=True)
class Exact:
    """Share of the weights for exact rows, and the number of weights per exact row."""

    share: float
    width: int

    @classmethod
    def planned(cls, compression: float) -> Exact:
        """As `recmill plan --compress` chooses it."""
        squeeze = math.sqrt(compression)
        return cls(share=choose_exact_share(squeeze), width=choose_exact_width(DIM, squeeze))

    def count(self, num_weights: int, num_rows: int) -> int:
        """Number of rows that fit, ids included."""
        return min(num_rows, round(self.share * num_weights / (self.width + ID_BYTES / WEIGHT_BYTES)))


class Shared(nn.Module):
    """PSS over all fields, with the most read rows exact."""

    def __init__(
        self,
        samples: Samples,
        num_weights: int,
        *,
        seed: int,
        block_size: int,
        exact: Exact | None = None,
    ) -> None:
        super().__init__()
        num_exact = exact.count(num_weights, sum(samples.num_rows)) if exact else 0
        width = exact.width if exact else None
        top = torch.topk(samples.counts(), num_exact).indices
        names = [str(f) for f in range(len(samples.num_rows))]
        tables = []
        for name, first, rows in zip(names, samples.first_row.tolist(), samples.num_rows, strict=True):
            own = top[(top >= first) & (top < first + rows)] - first
            kept = own if len(own) else None
            tables.append(SharedTable(name=name, num_rows=rows, dim=DIM, exact_rows=kept, exact_width=width))
        shared = num_weights - num_exact * (width or 0) - math.ceil(num_exact * ID_BYTES / WEIGHT_BYTES)
        # Exact rows begin at a line of 16 slots.
        shared = max(16, shared // 16 * 16) if num_exact else max(1, shared)
        self.array = SharedArray(tables, memory_bytes=4 * shared, block_size=block_size, seed=seed, std=STD)
        self.features = self.array.features(names)
        self.num_bytes = self.array.num_slots * WEIGHT_BYTES + num_exact * ID_BYTES

    def forward(self, ids_NF: Tensor) -> Tensor:
        num_samples, num_fields = ids_NF.shape
        found = shared_lookup(
            self.array.weight,
            ids_NF.t().reshape(-1),
            torch.arange(ids_NF.numel() + 1),
            layout=self.array.layout,
            features=self.features,
        )
        return found.view(num_samples, num_fields, DIM)


class PackedShared(nn.Module):
    """Hot rows exact, all others shared, one byte per weight, as with `recmill plan --compress --precision int8`."""

    def __init__(self, samples: Samples, num_bytes: float, *, seed: int) -> None:
        super().__init__()
        squeeze = math.sqrt(sum(samples.num_rows) * DIM / (num_bytes / PACKED_BYTES))
        width = choose_exact_width(DIM, squeeze, precision="int8")
        num_exact = round(choose_exact_share(squeeze) * num_bytes / (width * PACKED_BYTES + ID_BYTES))
        top = torch.topk(samples.counts(), min(num_exact, sum(samples.num_rows))).indices
        configs, exact = [], {}
        for f, (first, rows) in enumerate(zip(samples.first_row.tolist(), samples.num_rows, strict=True)):
            name = f"field {f}"
            configs.append(EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name]))
            if len(own := top[(top >= first) & (top < first + rows)] - first):
                exact[name] = own
        left = (num_bytes - len(top) * (width * PACKED_BYTES + ID_BYTES)) / PACKED_BYTES
        self.tables = SharedEmbeddingBagCollection(
            configs,
            memory_bytes=max(1, int(left) // 16) * 17,  # whole lines: one byte per slot and one for the exponent
            block_size=DEFAULT_BLOCK_SIZE,
            seed=seed,
            exact_rows=exact,
            exact_width=width,
            optimiser=TableOptimiser(kind="rowwise_adagrad"),
            dtype=torch.int8,
        )
        self.tables.array.std = STD
        self.tables.array.reset_parameters()
        self.weight_bytes = self.tables.array.num_bytes
        self.num_bytes = self.weight_bytes + self.tables.step.momentum.nbytes
        self.set_lr = self.tables.set_lr

    def forward(self, ids_NF: Tensor) -> Tensor:
        found = self.tables.look_up(ids_NF.t().reshape(-1), torch.arange(ids_NF.numel() + 1))
        return found.view(*ids_NF.shape, DIM)


class PackedRows(nn.Module):
    """Plain rows of one byte per weight, with the update of `PackedShared`: every row is exact, nothing is shared."""

    def __init__(self, samples: Samples, num_rows: int, place: Tensor | None, *, width: int, seed: int) -> None:
        super().__init__()
        self.first_row, self.place = samples.first_row, place
        config = EmbeddingBagConfig(name="rows", num_embeddings=num_rows, embedding_dim=DIM, feature_names=["rows"])
        self.tables = SharedEmbeddingBagCollection(
            [config],
            memory_bytes=17,  # one line that no row reads
            block_size=16,
            seed=seed,
            exact_rows={"rows": torch.arange(num_rows)},
            exact_width=width,
            optimiser=TableOptimiser(kind="rowwise_adagrad"),
            dtype=torch.int8,
        )
        self.tables.array.std = STD
        self.tables.array.reset_parameters()
        self.num_bytes = round(num_rows * width * PACKED_BYTES)  # a table needs no list of its ids
        self.weight_bytes = round(num_rows * width * (1 + 1 / 16))
        self.set_lr = self.tables.set_lr

    def forward(self, ids_NF: Tensor) -> Tensor:
        line_NF = ids_NF + self.first_row
        rows_NF = line_NF if self.place is None else self.place[line_NF]
        found = self.tables.look_up(rows_NF.reshape(-1), torch.arange(rows_NF.numel() + 1))
        return found.view(*rows_NF.shape, DIM)


Make = Callable[[Samples, int, int], nn.Module]  # (samples, weights that fit, seed)


def full(samples: Samples, num_weights: int, seed: int) -> nn.Module:
    return Rows(samples, sum(samples.num_rows))


def full_adagrad(samples: Samples, num_weights: int, seed: int) -> nn.Module:
    return AdagradRows(samples)


def packed(samples: Samples, num_weights: int, seed: int) -> nn.Module:
    return PackedShared(samples, num_weights * ADAGRAD_BYTES, seed=seed)


def narrow(samples: Samples, num_weights: int, seed: int) -> nn.Module:
    return Rows(samples, sum(samples.num_rows), width=max(1, num_weights // sum(samples.num_rows)))


def hash_rows(samples: Samples, num_weights: int, seed: int) -> nn.Module:
    num_rows = max(1, num_weights // DIM)
    line = torch.arange(sum(samples.num_rows))
    return Rows(samples, num_rows, (mix_bits(line * 0x1234567 + seed) >> 1) % num_rows)


def narrow_packed(samples: Samples, num_weights: int, seed: int) -> nn.Module:
    """The number of weights per row that comes nearest to the bytes, at least one."""
    num_rows = sum(samples.num_rows)
    width = max(1, min(DIM, round(num_weights * ADAGRAD_BYTES / PACKED_BYTES / num_rows)))
    return PackedRows(samples, num_rows, None, width=width, seed=seed)


def hash_packed(samples: Samples, num_weights: int, seed: int) -> nn.Module:
    num_rows = max(1, int(num_weights * ADAGRAD_BYTES / PACKED_BYTES / DIM))
    line = torch.arange(sum(samples.num_rows))
    place = (mix_bits(line * 0x1234567 + seed) >> 1) % num_rows
    return PackedRows(samples, num_rows, place, width=DIM, seed=seed)


def quotient_remainder(samples: Samples, num_weights: int, seed: int) -> nn.Module:
    """Rows per field in proportion to the square root of its ids, half for remainders, half for quotients."""
    roots = np.sqrt(np.array(samples.num_rows, dtype=float))
    rooms = np.maximum(1, np.floor(roots / roots.sum() * (num_weights // DIM) / 2)).astype(int)
    remainders, quotients, used = [], [], 0
    for rows, room in zip(samples.num_rows, np.minimum(rooms, samples.num_rows).tolist(), strict=True):
        ids = torch.arange(rows)
        remainders.append(ids % room + used)
        quotients.append(ids // room % room + used + room)
        used += 2 * room
    return Rows(samples, used, torch.cat(remainders), torch.cat(quotients))


def shared(block_size: int, *, exact: Exact | None = None) -> Make:
    def make(samples: Samples, num_weights: int, seed: int) -> nn.Module:
        size = min(block_size, num_weights)
        return Shared(samples, num_weights, seed=seed, block_size=size, exact=exact)

    return make


class Network(nn.Module):
    def __init__(self, rows: nn.Module, num_fields: int) -> None:
        super().__init__()
        self.rows = rows
        self.deep = nn.Sequential(
            nn.Linear(num_fields * DIM, HIDDEN), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(HIDDEN, 1)
        )

    def forward(self, ids_NF: Tensor) -> Tensor:
        found_NFD = self.rows(ids_NF)
        total_ND = found_NFD.sum(1)
        pairs_N = 0.5 * (total_ND.square() - found_NFD.square().sum(1)).sum(1)
        return self.deep(found_NFD.flatten(1)).squeeze(1) + pairs_N


def train_once(
    samples: Samples, make: Make, *, compression: float, seed: int, epochs: int, lr: float, batch_size: int
) -> dict[str, Any]:
    """Test AUC after one epoch, and at the best validation epoch."""
    torch.manual_seed(seed)
    rows = make(samples, int(sum(samples.num_rows) * DIM / compression), seed)
    network = Network(rows, len(samples.num_rows))
    ids_NF, label_N = samples.train
    steps_itself = hasattr(rows, "set_lr")
    groups: list[dict[str, Any]] = [{"params": network.deep.parameters(), "lr": NETWORK_LR}]
    if not steps_itself:
        groups.insert(0, {"params": rows.parameters(), "lr": lr})
    optimiser = torch.optim.Adam(groups, fused=True)
    num_steps = epochs * math.ceil(len(label_N) / batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (step + 1) / (WARM_UP * num_steps)) * (1 - step / num_steps)
    )
    measured = []
    for _ in range(epochs):
        for batch in torch.randperm(len(label_N)).split(batch_size):
            if steps_itself:
                rows.set_lr(lr * schedule.get_last_lr()[-1] / NETWORK_LR)
            loss = binary_cross_entropy_with_logits(network(ids_NF[batch]), label_N[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        measured.append([_auc(network, split) for split in (samples.valid, samples.test)])
    best = max(range(epochs), key=lambda epoch: measured[epoch][0])
    return {
        "bytes": int(rows.num_bytes),
        "weight_bytes": _weight_bytes(rows),
        "one_epoch": measured[0][1],
        "best": measured[best][1],
        "best_valid": measured[best][0],
        "best_epoch": best + 1,
    }


def _weight_bytes(rows: nn.Module) -> int:
    """Bytes of the tables after training, without optimiser state."""
    if isinstance(rows, PackedShared | PackedRows):
        return rows.weight_bytes
    return rows.array.num_bytes if isinstance(rows, Shared) else rows.weight.nbytes


@torch.no_grad()
def _auc(network: Network, split: tuple[Tensor, Tensor]) -> float:
    network.eval()
    logits = torch.cat([network(part) for part in split[0].split(8192)])
    network.train()
    return float(roc_auc_score(split[1], logits))
