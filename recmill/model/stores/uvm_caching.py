"""Tables in host memory with a cache on the GPU: TorchRec's and FBGEMM's UVM caching, on CUDA only."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import CacheParams

from recmill.artifacts import module_name

MIN_LOAD_FACTOR = 0.01


def cache_tables(sharding_plan: Any, tables: Collection[str], *, load_factor: float) -> None:
    """Let a TorchRec ShardingPlan keep these tables in host memory, with `load_factor` of their rows on the GPU.

    The cache evicts the least recently used rows. This has never run on a GPU.
    """
    wanted = {module_name(table) for table in tables}
    share = min(1.0, max(MIN_LOAD_FACTOR, load_factor))
    for module in sharding_plan.plan.values():
        for name, parameter in module.items():
            if name in wanted:
                parameter.compute_kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
                parameter.cache_params = CacheParams(algorithm=CacheAlgorithm.LRU, load_factor=share)
