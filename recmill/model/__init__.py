"""The ranking model: `embeddings` looks up ids in `stores`, `encoders` pool sequences, a `ranker` scores samples.

`servable` is the exported form. The embedding collections are also usable on their own:
`tiered_embedding`, `hot_embedding` and `shared_embedding`.
"""

__all__ = [
    "embeddings",
    "encoders",
    "hot_embedding",
    "layers",
    "ranker",
    "ranking_model",
    "servable",
    "shared_embedding",
    "stores",
    "tiered_embedding",
]
