"""Every named data set: what it is, where its raw data lies, and the training settings that suit it.

The commands list these names in their help, so nothing slow is imported here: a converter is named by its module.
A variant of a synthetic log is `replace(tiny(), num_sessions=100)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from recmill.data.sources.synthetic.config import History, IdList, SyntheticConfig, UserGroup


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named data set: synthetic if it has a `config`, else real data that `converter` turns into a log."""

    config: Callable[[], SyntheticConfig] | None = None
    converter: str = ""  # module:function, in this package
    candidates: tuple[str, ...] = ()  # where the real data may lie below RECMILL_DATA_DIR
    home: str = ""  # where people get the real data
    overrides: tuple[str, ...] = ()  # settings of real data that a user may change
    training: Mapping[str, str] = field(default_factory=dict)  # instead of TrainConfig's defaults; --set overrides it


def numbered(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}_{number}" for number in range(count))


def tiny() -> SyntheticConfig:
    """About 50,000 samples that train in seconds: for tests."""
    dim = 16
    return SyntheticConfig(
        name="tiny",
        num_sessions=3_000,
        samples_per_session=16.5,
        zipf=1.1,
        stay_prob=0.9,
        shift_prob=0.5,
        user_groups=(
            UserGroup(name="user", lists=(IdList(name="user_segment", num_rows=1_000, dim=dim),), stay_prob=1.0),
            UserGroup(
                name="interests",
                lists=(
                    IdList(name="liked_topics", num_rows=2_000, dim=dim, mean_length=4),
                    IdList(name="followed_pages", num_rows=5_000, dim=dim, mean_length=6),
                ),
                dense=("account_age", "activity"),
            ),
            UserGroup(
                name="recent",
                lists=(
                    IdList(name="recent_queries", num_rows=5_000, dim=dim, mean_length=5),
                    IdList(name="recent_categories", num_rows=200, dim=dim, mean_length=3),
                ),
                dense=("time_spent", "num_visits"),
            ),
        ),
        histories=(History(name="history", item="item", length=16),),
        items=(
            IdList(name="item", num_rows=5_000, dim=dim),
            IdList(name="category", num_rows=200, dim=dim),
            IdList(name="creator", num_rows=1_000, dim=dim),
        ),
        item_dense=("price", "age", "quality", "distance"),
        sessions_per_s=2.0,
        popular_rows=50,
    )


def demo() -> SyntheticConfig:
    """About 140,000 impressions shaped like those of a feed: requests of four candidates, three requests a session.

    Users, items and creators follow Zipf's law; the last 40 items of a user move on between requests.
    """
    dim = 16
    return SyntheticConfig(
        name="demo",
        num_sessions=12_000,
        samples_per_session=12.0,
        samples_per_request=4.0,
        zipf=1.05,
        stay_prob=0.8,
        shift_prob=0.8,
        user_groups=(
            UserGroup(name="user", lists=(IdList(name="user_id", num_rows=20_000, dim=dim),), stay_prob=1.0),
            UserGroup(
                name="interests",
                lists=(
                    IdList(name="liked_topics", num_rows=1_000, dim=dim, mean_length=6),
                    IdList(name="followed_creators", num_rows=5_000, dim=dim, mean_length=12),
                ),
                dense=("account_age", "activity"),
                stay_prob=0.95,
            ),
            UserGroup(
                name="context",
                lists=(IdList(name="recent_queries", num_rows=10_000, dim=dim, mean_length=4),),
                dense=("time_spent", "num_visits"),
            ),
        ),
        histories=(History(name="history", item="item", length=40),),
        items=(
            IdList(name="item", num_rows=20_000, dim=dim),
            IdList(name="category", num_rows=300, dim=dim),
            IdList(name="creator", num_rows=5_000, dim=dim),
        ),
        item_dense=("price", "age", "quality", "distance"),
        sessions_per_s=5.0,
        popular_rows=100,
    )


def small() -> SyntheticConfig:
    """About a million samples over tables of 100,000 rows: for benchmarks that take minutes."""
    dim = 16
    return SyntheticConfig(
        name="small",
        num_sessions=60_000,
        samples_per_session=16.5,
        zipf=1.05,
        stay_prob=0.9,
        shift_prob=0.5,
        user_groups=(
            UserGroup(name="user", lists=(IdList(name="user_segment", num_rows=50_000, dim=dim),), stay_prob=1.0),
            *(
                UserGroup(
                    name=group,
                    lists=tuple(
                        IdList(name=name, num_rows=100_000, dim=dim, mean_length=6) for name in numbered(group, 2)
                    ),
                    dense=numbered(f"{group}_value", 2),
                )
                for group in ("profile", "interests", "recent")
            ),
        ),
        histories=(History(name="history", item="item", length=32),),
        items=(
            IdList(name="item", num_rows=100_000, dim=dim),
            IdList(name="category", num_rows=1_000, dim=dim),
            IdList(name="creator", num_rows=20_000, dim=dim),
            IdList(name="campaign", num_rows=10_000, dim=dim),
        ),
        item_dense=numbered("item_value", 6),
        popular_rows=300,
    )


def recd() -> SyntheticConfig:
    """The shape of RecD's RM1: long user lists and histories that repeat over 16.5 samples a session."""
    dim = 32
    groups = tuple(
        UserGroup(
            name=f"user_{number}",
            lists=tuple(
                IdList(name=f"user_list_{3 * number + k}", num_rows=100_000, dim=dim, mean_length=20) for k in range(3)
            ),
        )
        for number in range(4)
    )
    return SyntheticConfig(
        name="recd",
        num_sessions=12_000,
        samples_per_session=16.5,
        zipf=1.05,
        stay_prob=0.9,
        shift_prob=0.5,
        user_groups=(*groups, UserGroup(name="user_dense", dense=numbered("user_value", 8))),
        histories=tuple(History(name=f"history_{k}", item=f"item_{k}", length=64) for k in range(2)),
        items=tuple(IdList(name=name, num_rows=100_000, dim=dim) for name in numbered("item", 6)),
        item_dense=numbered("item_value", 5),
        sessions_per_s=50.0,
        popular_rows=300,
    )


PRESETS: dict[str, Preset] = {
    "tiny": Preset(config=tiny, training={"eval_every": "6"}),
    "demo": Preset(config=demo, training={"batch_size": "1024", "eval_every": "16"}),
    "small": Preset(config=small),
    "recd": Preset(config=recd),
    "globo": Preset(
        converter="globo:convert_globo",
        candidates=("globo/clicks.parquet", "globo"),
        home="https://www.kaggle.com/datasets/gspmoreira/news-portal-user-interactions-by-globocom",
        overrides=("seed", "limit", "negatives", "one_in"),
    ),
    "frappe": Preset(
        converter="frappe:convert_frappe",
        candidates=("frappe",),
        home="https://huggingface.co/datasets/reczoo/Frappe_x1",
        overrides=("limit",),
        # 200,000 samples overfit after three or four epochs: stop there and keep the best weights.
        training={
            "epochs": "8",
            "patience": "2",
            "batch_size": "1024",
            "table_lr": "0.1",
            "top_layers": "400,400",
            "dropout": "0.2",
        },
    ),
    "movielens": Preset(
        converter="movielens:convert_movielens",
        candidates=("ml-1m", "ml-1m.zip"),
        home="https://files.grouplens.org/datasets/movielens/ml-1m.zip",
        overrides=("limit",),
    ),
    "criteo": Preset(
        converter="criteo:convert_criteo",
        candidates=("criteo",),
        home="https://ailab.criteo.com/ressources",
        overrides=("limit",),
    ),
}


def training_settings(source: str) -> dict[str, str]:
    """The training settings that suit a data set; none for a user's own data."""
    return dict(PRESETS[source].training) if source in PRESETS else {}
