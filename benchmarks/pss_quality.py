"""AUC against bytes of every way to make embedding tables smaller, in one harness.

All ways feed the same small network (factorisation machine + one hidden layer of 128) and are trained by the same Adam,
so a weight costs 12 bytes (itself and two moments) everywhere; the network itself is left out, it is the same for all.
Learning rates rise for a tenth of the steps and fall to zero in a straight line; 0.01 for the network, and what
pss.py states for the rows of each way.

    full           a row an id
    hash           the hashing trick: ids of all fields modulo the rows there is room for
    quotient       quotient-remainder: the product of two small rows
    shared Z       PSS: rows out of one array, blocks of Z
    hot            rows that are read most are exact, all others shared (the ids of exact rows cost 8 bytes each)
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from harness import say
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding

from kernels import shared_lookup
from kernels.shared_lookup.reference import mix_bits
from recmill.data.sources.frappe import FIELDS
from recmill.model.shared_embedding import SharedArray, SharedTable

DIM = 16
STD = 0.05
WEIGHT_BYTES = 12  # float32 and the two moments of Adam
ID_BYTES = 8
NETWORK_LR = 1e-2
WARM_UP = 0.1  # of all steps
HIDDEN = 128

# N = samples, F = fields


@dataclass(frozen=True, kw_only=True)
class Samples:
    """A data set: ids [N, F] and labels [N] of each split, and the rows of every field."""

    name: str
    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    num_rows: tuple[int, ...]

    @property
    def first_row(self) -> Tensor:
        return torch.tensor([0, *np.cumsum(self.num_rows)[:-1].tolist()])

    @property
    def full_weights(self) -> int:
        return sum(self.num_rows) * DIM

    def counts(self) -> Tensor:
        """Reads of every row of all fields, in one line."""
        return torch.bincount((self.train[0] + self.first_row).flatten(), minlength=sum(self.num_rows))


class Rows(nn.Module):
    """Plain rows: `places` says which one an id of which field reads; two of them multiply."""

    def __init__(self, samples: Samples, num_rows: int, *places: Tensor) -> None:
        super().__init__()
        std = STD if len(places) < 2 else STD**0.5
        self.weight = nn.Parameter(torch.randn(num_rows, DIM) * std)
        self.first_row, self.places = samples.first_row, places
        self.num_bytes = num_rows * DIM * WEIGHT_BYTES

    def forward(self, ids_NF: Tensor) -> Tensor:
        line_NF = ids_NF + self.first_row
        if not self.places:
            return embedding(line_NF, self.weight)
        found = [embedding(place[line_NF], self.weight) for place in self.places]
        return found[0] if len(found) == 1 else found[0] * found[1]


class Shared(nn.Module):
    """PSS over all fields, with the `num_exact` most read rows kept."""

    def __init__(
        self,
        samples: Samples,
        num_weights: int,
        *,
        seed: int,
        block_size: int,
        mapping: str = "robe",
        num_exact: int = 0,
    ) -> None:
        super().__init__()
        top = torch.topk(samples.counts(), num_exact).indices
        names = [str(f) for f in range(len(samples.num_rows))]
        tables = []
        for name, first, rows in zip(names, samples.first_row.tolist(), samples.num_rows, strict=True):
            own = top[(top >= first) & (top < first + rows)] - first
            tables.append(SharedTable(name=name, num_rows=rows, dim=DIM, exact_rows=own if len(own) else None))
        shared = num_weights - num_exact * DIM - math.ceil(num_exact * ID_BYTES / WEIGHT_BYTES)
        # Exact rows begin at a line of 16 slots.
        shared = shared // 16 * 16 if num_exact else shared
        self.array = SharedArray(
            tables, memory_bytes=4 * shared, block_size=block_size, mapping=mapping, seed=seed, std=STD
        )
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


Make = Callable[[Samples, int, int], nn.Module]  # (samples, weights there is room for, seed)
Way = tuple[str, float, Make, float]  # (name, compression, how, learning rate of the rows)


def full(samples: Samples, num_weights: int, seed: int) -> nn.Module:
    return Rows(samples, sum(samples.num_rows))


def hash_rows(samples: Samples, num_weights: int, seed: int) -> nn.Module:
    num_rows = num_weights // DIM
    line = torch.arange(sum(samples.num_rows))
    return Rows(samples, num_rows, (mix_bits(line * 0x1234567 + seed) >> 1) % num_rows)


def quotient_remainder(samples: Samples, num_weights: int, seed: int) -> nn.Module:
    """Rooms in proportion to the square root of a field's rows, half for remainders, half for quotients."""
    roots = np.sqrt(np.array(samples.num_rows, dtype=float))
    rooms = np.maximum(1, np.floor(roots / roots.sum() * (num_weights // DIM) / 2)).astype(int)
    remainders, quotients, used = [], [], 0
    for rows, room in zip(samples.num_rows, np.minimum(rooms, samples.num_rows).tolist(), strict=True):
        ids = torch.arange(rows)
        remainders.append(ids % room + used)
        quotients.append(ids // room % room + used + room)
        used += 2 * room
    return Rows(samples, used, torch.cat(remainders), torch.cat(quotients))


def shared(block_size: int, *, mapping: str = "robe", exact_share: float = 0.0) -> Make:
    def make(samples: Samples, num_weights: int, seed: int) -> nn.Module:
        num_exact = math.ceil(exact_share * num_weights / DIM) if exact_share else 0
        return Shared(samples, num_weights, seed=seed, block_size=block_size, mapping=mapping, num_exact=num_exact)

    return make


class Network(nn.Module):
    def __init__(self, rows: nn.Module, num_fields: int) -> None:
        super().__init__()
        self.rows = rows
        self.deep = nn.Sequential(nn.Linear(num_fields * DIM, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, ids_NF: Tensor) -> Tensor:
        found_NFD = self.rows(ids_NF)
        total_ND = found_NFD.sum(1)
        pairs_N = 0.5 * (total_ND.square() - found_NFD.square().sum(1)).sum(1)
        return self.deep(found_NFD.flatten(1)).squeeze(1) + pairs_N


def train_once(
    samples: Samples, make: Make, *, compression: float, seed: int, epochs: int, lr: float, batch_size: int
) -> dict[str, Any]:
    """AUC on the test split after one epoch, and where the validation split is best."""
    torch.manual_seed(seed)
    rows = make(samples, int(samples.full_weights / compression), seed)
    network = Network(rows, len(samples.num_rows))
    ids_NF, label_N = samples.train
    groups = [{"params": rows.parameters(), "lr": lr}, {"params": network.deep.parameters(), "lr": NETWORK_LR}]
    optimiser = torch.optim.Adam(groups, fused=True)
    num_steps = epochs * math.ceil(len(label_N) / batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (step + 1) / (WARM_UP * num_steps)) * (1 - step / num_steps)
    )
    measured = []
    for _ in range(epochs):
        for batch in torch.randperm(len(label_N)).split(batch_size):
            loss = binary_cross_entropy_with_logits(network(ids_NF[batch]), label_N[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        with torch.no_grad():
            measured.append([_auc(network, split) for split in (samples.valid, samples.test)])
    best = max(range(epochs), key=lambda epoch: measured[epoch][0])
    return {
        "bytes": int(rows.num_bytes),
        "one_epoch": measured[0][1],
        "best": measured[best][1],
        "best_valid": measured[best][0],
        "best_epoch": best + 1,
    }


def _auc(network: Network, split: tuple[Tensor, Tensor]) -> float:
    logits = torch.cat([network(part) for part in split[0].split(8192)])
    return float(roc_auc_score(split[1], logits))


def measure_ways(
    samples: Samples, ways: list[Way], *, seeds: list[int], epochs: int, batch_size: int
) -> list[dict[str, Any]]:
    """One entry a way and compression: bytes, and AUC of all seeds."""
    curve = []
    for name, compression, make, lr in ways:
        start = time.perf_counter()
        how = {"compression": compression, "epochs": epochs, "lr": lr, "batch_size": batch_size}
        runs = [train_once(samples, make, seed=seed, **how) for seed in seeds]
        entry = {
            "data": samples.name,
            "way": name,
            "compression": compression,
            "bytes": runs[0]["bytes"],
            "epochs": epochs,
            "lr": lr,
            "best": [run["best"] for run in runs],
            "best_valid": [run["best_valid"] for run in runs],
            "one_epoch": [run["one_epoch"] for run in runs],
        }
        curve.append(entry)
        took = time.perf_counter() - start
        middle = statistics.median(entry["best"])
        say(f"{samples.name} {name} {compression:g}x: AUC {middle:.4f}, {runs[0]['bytes']:,} B ({took:.0f} s)")
    return curve


def why_no(folder: str, file: str) -> str | None:
    """Why a data set cannot be used, or None."""
    root = os.environ.get("RECMILL_DATA_DIR")
    if not root:
        return f"RECMILL_DATA_DIR is not set; expected {folder}/{file} in it"
    return None if (Path(root) / folder / file).exists() else f"{root}/{folder}/{file} does not exist"


def load_frappe(limit: int | None = None) -> Samples:
    """The published split; `limit` takes that many training rows."""
    folder = Path(os.environ["RECMILL_DATA_DIR"]) / "frappe"
    tables = [pq.read_table(folder / f"{split}.parquet") for split in ("train", "valid", "test")]
    columns = [np.concatenate([table[name].to_numpy() for table in tables]) for name in FIELDS]
    ids = torch.from_numpy(np.stack([column - column.min() for column in columns], 1).astype(np.int64))
    label = torch.from_numpy(np.concatenate([table["label"].to_numpy() for table in tables]).astype(np.float32))
    ends = np.cumsum([table.num_rows for table in tables]).tolist()
    first = torch.randperm(ends[0], generator=torch.Generator().manual_seed(0))[: limit or ends[0]]
    return Samples(
        name="frappe",
        train=(ids[first], label[first]),
        valid=(ids[ends[0] : ends[1]], label[ends[0] : ends[1]]),
        test=(ids[ends[1] :], label[ends[1] :]),
        num_rows=tuple((ids.max(0).values + 1).tolist()),
    )


def load_globo(limit: int = 200_000) -> Samples:
    """Clicks in time order against as many articles drawn by popularity: user, article and the last article read."""
    path = Path(os.environ["RECMILL_DATA_DIR"]) / "globo" / "clicks.parquet"
    table = pq.read_table(path, columns=["user_id", "click_article_id", "click_timestamp"])
    table = table.filter(pc.less(pc.field("user_id"), 20_000)).sort_by("click_timestamp").slice(0, limit)
    user, article = (table[name].to_numpy().astype(np.int64) for name in ("user_id", "click_article_id"))
    _, article = np.unique(article, return_inverse=True)
    last, previous = np.zeros(len(user), dtype=np.int64), {}
    for place, (who, what) in enumerate(zip(user.tolist(), article.tolist(), strict=True)):
        last[place] = previous.get(who, 0)
        previous[who] = what + 1
    drawn = np.random.default_rng(0).permutation(article)
    clicked, other = np.stack([user, article, last], 1), np.stack([user, drawn, last], 1)
    ids = torch.from_numpy(np.stack([clicked, other], 1).reshape(-1, 3))
    label = torch.tensor([1.0, 0.0]).repeat(len(user))
    return _cut("globo", ids, label)


def make_synthetic(num_samples: int = 120_000, num_rows: int = 20_000, num_fields: int = 6) -> Samples:
    """Zipf-like ids whose rows have hidden effects and hidden vectors that multiply."""
    generator = torch.Generator().manual_seed(0)
    ids = (num_rows ** torch.rand(num_samples, num_fields, generator=generator)).long() - 1
    line = ids + torch.arange(num_fields) * num_rows
    effects = torch.randn(num_fields * num_rows, generator=generator)
    vectors = torch.randn(num_fields * num_rows, 3, generator=generator) * 0.5
    total = embedding(line, vectors).sum(1)
    logit = 0.7 * effects[line].sum(1) + 0.5 * (total.square() - embedding(line, vectors).square().sum(1)).sum(1)
    label = (torch.rand(num_samples, generator=generator) < torch.sigmoid(logit)).float()
    return _cut("synthetic", ids, label)


def _cut(name: str, ids: Tensor, label: Tensor) -> Samples:
    """The first 80% train, then 10% each to validate and test."""
    first, second = len(label) * 8 // 10, len(label) * 9 // 10
    return Samples(
        name=name,
        train=(ids[:first], label[:first]),
        valid=(ids[first:second], label[first:second]),
        test=(ids[second:], label[second:]),
        num_rows=tuple((ids.max(0).values + 1).tolist()),
    )
