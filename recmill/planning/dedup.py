"""Which features are worth training once a distinct list, and in what layout the data should lie for it."""

from __future__ import annotations

from collections.abc import Mapping

from recmill.artifacts import AccessProfile
from recmill.artifacts.dataset import Layout
from recmill.artifacts.plan import DedupPlan, FeatureDedup
from recmill.artifacts.profile import FeatureDuplication
from recmill.data.schema import Feature, Schema

MIN_FACTOR = 1.5  # samples a distinct list; below it the expansion eats what the lookup saves
MIN_MEAN_LENGTH = 3.0  # a shorter bag costs no more to look up than its vector costs to copy


def pays(factor: float, mean_length: float, *, is_sequence: bool) -> bool:
    """Whether a feature is trained faster once a distinct list."""
    return factor >= MIN_FACTOR and (is_sequence or mean_length >= MIN_MEAN_LENGTH)


def choose_features(profile: AccessProfile, schema: Schema, *, batch_size: int) -> dict[str, FeatureDedup]:
    """What the profile says of every feature with ids; nothing where it measured no duplication."""
    duplication = profile.duplication
    return {
        feature.name: _judge(feature, duplication[feature.name], batch_size)
        for feature in schema.id_features
        if feature.name in duplication and duplication[feature.name].batch_dedup_factor
    }


def _judge(feature: Feature, entry: FeatureDuplication, batch_size: int) -> FeatureDedup:
    by_size = entry.batch_dedup_factor
    factor = by_size[min(by_size, key=lambda size: abs(size - batch_size))]
    return FeatureDedup(
        factor=factor,
        session_factor=entry.dedup_factor,
        id_factor=max(factor, _window_factor(entry)) if feature.shift else factor,
        mean_length=entry.mean_length,
        is_deduplicated=pays(factor, entry.mean_length, is_sequence=feature.kind == "sequence"),
    )


def _window_factor(entry: FeatureDuplication) -> float:
    """Ids of a session's histories over those of the one sequence that holds them; 1 where sessions are apart."""
    same, shifted = entry.same_as_previous or 0.0, entry.shifted_by_one or 0.0
    pairs = max(entry.samples_per_session - 1, 0.0)
    left = entry.mean_length * (1 + pairs * max(1 - same - shifted, 0.0)) + pairs * shifted
    return entry.mean_length * (1 + pairs) / left if left else 1.0


def plan_dedup(features: Mapping[str, FeatureDedup], profile: AccessProfile, schema: Schema) -> DedupPlan:
    """The layout to store, why, and every feature's figures."""
    sequences = {feature.name for feature in schema.sequence}
    worth = [
        name
        for name, found in features.items()
        if pays(found.session_factor, found.mean_length, is_sequence=name in sequences)
    ]
    layout, why = _layout(features, worth, profile)
    return DedupPlan(layout=layout, why=why, features=features)


def _layout(features: Mapping[str, FeatureDedup], worth: list[str], profile: AccessProfile) -> tuple[Layout, str]:
    size = profile.samples_per_session
    if worth:
        best = max(features[name].session_factor for name in worth)
        named = worth[0] if len(worth) == 1 else f"{len(worth)} of {len(features)} features"
        return "deduplicated", (
            f"{named} repeat inside sessions of {size:.1f} samples, up to {best:.1f} times: store each distinct list "
            "once and train on it once"
        )
    if size > 1.0:
        return "session", (
            f"lists hardly repeat inside sessions of {size:.1f} samples: sessions side by side compress better, and "
            "there is nothing to deduplicate"
        )
    return "time", "sessions are of one sample: no order of the rows stores or trains better than time"
