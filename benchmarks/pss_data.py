"""The data sets of pss.py: frappe, clicks of globo, and a synthetic one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.nn.functional import embedding

from recmill.data.sources.frappe import FIELDS

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

    def counts(self) -> Tensor:
        """Reads of every row, all fields concatenated."""
        return torch.bincount((self.train[0] + self.first_row).flatten(), minlength=sum(self.num_rows))


def why_no(folder: str, file: str) -> str | None:
    """Why a data set cannot be used, or None."""
    root = os.environ.get("RECMILL_DATA_DIR")
    if not root:
        return f"RECMILL_DATA_DIR is not set; expected {folder}/{file} in it"
    return None if (Path(root) / folder / file).exists() else f"{root}/{folder}/{file} does not exist"


def load_frappe(limit: int | None = None) -> Samples:
    """The published split; `limit` takes that many training rows and half as many validation rows."""
    folder = Path(os.environ["RECMILL_DATA_DIR"]) / "frappe"
    tables = [pq.read_table(folder / f"{split}.parquet") for split in ("train", "valid", "test")]
    columns = [np.concatenate([table[name].to_numpy() for table in tables]) for name in FIELDS]
    ids = torch.from_numpy(np.stack([column - column.min() for column in columns], 1).astype(np.int64))
    label = torch.from_numpy(np.concatenate([table["label"].to_numpy() for table in tables]).astype(np.float32))
    ends = np.cumsum([table.num_rows for table in tables]).tolist()
    generator = torch.Generator().manual_seed(0)
    first = torch.randperm(ends[0], generator=generator)[: limit or ends[0]]
    second = torch.randperm(ends[1] - ends[0], generator=generator)[: limit // 2 if limit else None] + ends[0]
    return Samples(
        name="frappe",
        train=(ids[first], label[first]),
        valid=(ids[second], label[second]),
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


def make_synthetic(num_samples: int = 120_000, num_fields: int = 6) -> Samples:
    """Zipf-like ids, one row per field for six samples; rows have hidden effects and vectors that are multiplied."""
    num_rows = num_samples // 6
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
    """The first 80% for training, then 10% each for validation and test."""
    first, second = len(label) * 8 // 10, len(label) * 9 // 10
    return Samples(
        name=name,
        train=(ids[:first], label[:first]),
        valid=(ids[first:second], label[first:second]),
        test=(ids[second:], label[second:]),
        num_rows=tuple((ids.max(0).values + 1).tolist()),
    )
