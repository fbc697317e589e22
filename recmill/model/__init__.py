"""The ranking model: `embeddings` looks up ids in `stores`, `encoders` pool sequences, a `ranker` scores samples.

`settings` has its shape, `tasks` the heads of several labels, `servable` is the exported form. The embedding
collections are also usable on their own: `tiered_embedding`, `hot_embedding` and `shared_embedding`.
"""

__all__ = [
    "embeddings",
    "encoders",
    "hot_embedding",
    "layers",
    "ranker",
    "ranking_model",
    "servable",
    "settings",
    "shared_embedding",
    "stores",
    "tasks",
    "tiered_embedding",
]
