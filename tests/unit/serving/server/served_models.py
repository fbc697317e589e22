"""Small models in the form that `recmill serve` takes, with and without a vocabulary."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from recmill.artifacts import dump_json
from recmill.data.dense_values import DenseValues
from recmill.data.schema import Feature, Schema
from recmill.data.vocabulary import TableMap, VocabularyMap
from recmill.model.ranking_model import RankingModel
from recmill.model.settings import RankerConfig
from recmill.serving.export import write_request_model

WORDS = ["sku-1", "sku-2", "sku-3", "sku-4"]  # rows 1 to 4 of the table `items`
CITIES = [-7, 12, 2**40]  # rows 1 to 3 of the table `city`


def small_schema(labels: tuple[str, ...] = ("label",)) -> Schema:
    return Schema(
        features=(
            Feature(name="age", kind="dense", group="user"),
            Feature(name="price", kind="dense", transforms=({"op": "clip", "max": 100},)),
            Feature(name="city", kind="sparse", num_rows=6, dim=4, group="user"),
            Feature(name="item", kind="sparse", table="items", num_rows=8, dim=4),
            Feature(name="seen", kind="sequence", table="items", num_rows=8, dim=4),
            Feature(
                name="words",
                kind="sparse",
                num_rows=20,
                dim=4,
                transforms=({"op": "first_x", "n": 2}, {"op": "hash_to_range", "num_rows": 20}),
            ),
        ),
        labels=labels,
        item="item",
    )


def write_served_model(
    folder: Path, *, seed: int = 0, labels: tuple[str, ...] = ("label",), vocabulary: bool = False
) -> Path:
    """FOLDER as `recmill export` writes it, as far as the server reads it; replaced in one step if it exists."""
    schema, scratch = small_schema(labels), folder.with_name(f".{folder.name}.new")
    torch.manual_seed(seed)
    config = RankerConfig(max_sequence_length=5)
    model = RankingModel(schema, config, table_device=torch.device("cpu")).eval()
    for weight in model.embeddings.table_weights().values():
        weight.normal_(0.0, 0.5)
    with torch.no_grad():
        for weight in model.ranker.top.parameters():
            weight.mul_(4.0)  # scores that differ: new weights give 0.5 to everything
    scratch.mkdir()
    tables = model.embeddings.table_weights()
    write_request_model(
        scratch, ranker=model.ranker, config=config, tables=tables, shared=None, checkpoint_hash=f"sha256:{seed}"
    )
    if vocabulary:
        write_vocabulary(scratch)
    if folder.exists():
        folder.rename(folder.with_name(f".{folder.name}.old"))
    scratch.rename(folder)
    shutil.rmtree(folder.with_name(f".{folder.name}.old"), ignore_errors=True)
    return folder


def write_vocabulary(folder: Path) -> None:
    known = {
        "items": TableMap(num_rows=8, rare_rows=0, num_values=len(WORDS)),
        "city": TableMap(num_rows=6, rare_rows=0, num_values=len(CITIES)),
        "words": TableMap(num_rows=20, hashed=True),
    }
    (folder / "vocabulary").mkdir()
    dense = {"age": DenseValues(transform=("log1p", "standardise"), mean=1.0, scale=2.0, fill=0.25)}
    about = VocabularyMap(version=1, hash="sha256:0", tables=known, dense=dense)
    (folder / "vocabulary/vocabulary.json").write_text(dump_json(about.to_json()), encoding="utf-8")
    for name, values in (("items", WORDS), ("city", CITIES)):
        rows = list(range(1, len(values) + 1))
        ones = [1] * len(values)
        table = pa.table({"value": values, "row": rows, "count": ones, "since": ones, "last_seen": ones})
        pq.write_table(table, folder / f"vocabulary/{name}.parquet")
