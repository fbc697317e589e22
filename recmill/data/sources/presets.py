"""The synthetic logs that have a name. A variant is `replace(tiny(), num_sessions=100)`."""

from __future__ import annotations

from recmill.data.sources.synthetic.config import History, IdList, SyntheticConfig, UserGroup


def numbered(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}_{number}" for number in range(count))


def tiny() -> SyntheticConfig:
    """About 50,000 samples that train in seconds: the demo."""
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
