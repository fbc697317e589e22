"""Which features are worth deduplicating in a batch, and in which layout to store the data."""

from __future__ import annotations

from collections.abc import Mapping

from recmill.artifacts import AccessProfile
from recmill.artifacts.plan import DedupPlan, FeatureDedup
from recmill.artifacts.profile import FeatureDuplication
from recmill.data.repeats import SessionRepeats, layout_for, pays
from recmill.data.schema import Feature, Schema


def choose_features(profile: AccessProfile, schema: Schema, *, batch_size: int) -> dict[str, FeatureDedup]:
    """The verdict on every feature with ids whose duplication the profile measured."""
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
    """Ids of a session's histories over the ids of the one sequence that contains them all."""
    same, shifted = entry.same_as_previous or 0.0, entry.shifted_by_one or 0.0
    pairs = max(entry.samples_per_session - 1, 0.0)
    left = entry.mean_length * (1 + pairs * max(1 - same - shifted, 0.0)) + pairs * shifted
    return entry.mean_length * (1 + pairs) / left if left else 1.0


def plan_dedup(features: Mapping[str, FeatureDedup], profile: AccessProfile, schema: Schema) -> DedupPlan:
    """The layout to store, why, and every feature's figures."""
    sequences = {feature.name for feature in schema.sequence}
    repeats = {
        name: SessionRepeats(factor=own.session_factor, mean_length=own.mean_length, is_sequence=name in sequences)
        for name, own in features.items()
    }
    layout, why = layout_for(repeats, profile.samples_per_session)
    return DedupPlan(layout=layout, why=why, features=features)
