"""A model spread over ranks by TorchRec: tables by the plan, everything else replicated."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import Adagrad
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recmill.artifacts import ShardPlan
from recmill.data.schema import Schema
from recmill.data.tables import distinct_tables, logical_names
from recmill.model.embeddings import initial_rows
from recmill.model.ranker import RankerConfig
from recmill.model.ranking_model import RankingModel
from recmill.training.config import TrainConfig

# One bucket holds all dense gradients, so the order in which they are summed over ranks never changes within a run
# and a resumed run adds them as the uninterrupted one did.
DENSE_BUCKET_MB = 1 << 14


@dataclass(frozen=True, kw_only=True)
class ShardedModel:
    """The model as one rank holds it, with both optimisers; tables update themselves in the backward pass."""

    module: DistributedModelParallel
    dense_optimiser: torch.optim.Optimizer
    schema: Schema

    def table_weights(self) -> dict[str, Any]:
        """Every table as a ShardedTensor in row order; the rank's own shards are views of the live weights."""
        return {
            self._table_of(path): value
            for path, value in self.module.state_dict().items()
            if path.startswith("embeddings.")
        }

    def table_optimiser_state(self) -> dict[str, Any]:
        """The optimiser state of the tables this rank holds, by table and name of the state."""
        state = self.module.fused_optimizer.state_dict()["state"]
        return {
            self._table_of(path): {key.split(".")[-1]: value for key, value in entry.items()}
            for path, entry in state.items()
        }

    def _table_of(self, path: str) -> str:
        # embeddings.pooled.embedding_bags.<module name>.weight
        return logical_names(self.schema)[path.split(".")[-2]]

    def dense_state(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.module.state_dict().items() if name.startswith("ranker.")}


def shard_model(
    schema: Schema,
    config: TrainConfig,
    plan: ShardPlan,
    device: torch.device,
    *,
    deduplicated: frozenset[str] = frozenset(),
) -> ShardedModel:
    """Build the model, place its tables by the plan, and start all weights as this seed starts them anywhere.

    `deduplicated` names the features whose batches hold distinct rows only.
    """
    torch.manual_seed(config.seed)
    model = RankingModel(schema, RankerConfig.of(config.to_json()), deduplicated=deduplicated)
    _fuse_table_optimiser(model.embeddings, config)
    sharders: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = DistributedModelParallel(
            model,
            device=device,
            plan=plan.to_torchrec(device.type, distinct=distinct_tables(schema, deduplicated)),
            sharders=sharders,
            data_parallel_wrapper=DefaultDataParallelWrapper(bucket_cap_mb=DENSE_BUCKET_MB),
        )
    dense = [parameter for name, parameter in module.named_parameters() if name.startswith("ranker.")]
    optimiser = torch.optim.Adam(dense, lr=config.dense_lr, weight_decay=config.dense_weight_decay)
    sharded = ShardedModel(module=module, dense_optimiser=optimiser, schema=schema)
    _start_tables(sharded, config)
    return sharded


def table_scale(num_rows: int, config: TrainConfig) -> float:
    """Half the width of the uniform distribution a table's rows start from."""
    return config.table_init_scale or max(0.01, 1 / math.sqrt(num_rows))


def _fuse_table_optimiser(embeddings: nn.Module, config: TrainConfig) -> None:
    optimisers: dict[str, tuple[Any, dict[str, float]]] = {
        "rowwise_adagrad": (RowWiseAdagrad, {"lr": config.table_lr, "eps": 1e-8}),
        "adagrad": (Adagrad, {"lr": config.table_lr, "eps": 1e-8}),
        "sgd": (torch.optim.SGD, {"lr": config.table_lr}),
    }
    kind, arguments = optimisers[config.table_optimiser]
    apply_optimizer_in_backward(kind, embeddings.parameters(), arguments)


@torch.no_grad()
def _start_tables(sharded: ShardedModel, config: TrainConfig) -> None:
    # TorchRec draws the weights it materialises from each rank's own generator: not the same at two world sizes.
    rows_of = {table.name: table.num_rows for table in sharded.schema.tables}
    for name, weight in sharded.table_weights().items():
        for shard in weight.local_shards():
            first, column = shard.metadata.shard_offsets
            num_rows, width = shard.metadata.shard_sizes
            dim = weight.size()[1]
            for start in range(first, first + num_rows, 1 << 20):
                stop = min(start + (1 << 20), first + num_rows)
                scale = table_scale(rows_of[name], config)
                rows = initial_rows(name, start=start, stop=stop, dim=dim, scale=scale, seed=config.seed)
                shard.tensor[start - first : stop - first].copy_(rows[:, column : column + width])
