"""Which features of a model belong to the user of a request, and which to each candidate."""

from __future__ import annotations

from collections.abc import Sequence

from recmill.artifacts import InputError
from recmill.data.schema import Schema


def choose_user_features(schema: Schema, *, given: Sequence[str] = ()) -> tuple[tuple[str, ...], str]:
    """The features that are the same for all candidates of a request, in schema order, and how that was decided.

    `given` names all of them. Otherwise the schema tells: histories, the user's id and features of a group, which
    change together in a session, are the user's; the item's id, targets of histories and the rest are the candidates'.
    A feature on the candidate side is never wrong, it only costs time: the caller gives it for every candidate.
    """
    if given:
        for name in given:
            schema.feature(name)
        if len(set(given)) == len(schema.features):
            raise InputError("every feature is named as the user's, expected at least one that candidates differ in")
        return tuple(f.name for f in schema.features if f.name in given), "given at export"
    items = {schema.item, *(feature.target for feature in schema.sequence)} - {""}
    chosen = tuple(
        feature.name
        for feature in schema.features
        if feature.name not in items and (feature.kind == "sequence" or feature.name == schema.user or feature.group)
    )
    if len(chosen) == len(schema.features):
        return (), "nothing: the schema would leave no feature to the candidates"
    return chosen, "schema: sequences, the user's id and features of groups"
