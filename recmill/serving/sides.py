"""Which features of a model belong to the user of a request, and which to each candidate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recmill.artifacts import InputError
from recmill.data.schema import Schema

MIN_REPEATS = 0.9  # of a session's samples whose list is that of the sample before


def choose_user_features(
    schema: Schema, *, given: Sequence[str] = (), repeats: Mapping[str, float] | None = None
) -> tuple[tuple[str, ...], str]:
    """The features that are the same for all candidates of a request, in schema order, and how that was decided.

    `given` names all of them. Otherwise the schema tells: `side` of a feature, if it has one. Of the others, histories,
    the user's id and features of a group, which change together in a session, are the user's; the item's id and targets
    of histories are the candidates'. Of the rest, those are the user's whose lists hardly ever change inside a session:
    `repeats` is the share of a session's samples with the list of the sample before, as a profile has it. All others
    are the candidates'. A feature on the candidate side is never wrong, it only costs time: the caller gives it for
    every candidate.
    """
    if given:
        for name in given:
            schema.feature(name)
        if len(set(given)) == len(schema.features):
            raise InputError("every feature is named as the user's, expected at least one that candidates differ in")
        return tuple(f.name for f in schema.features if f.name in given), "given at export"
    marked = {feature.name: feature.side for feature in schema.features if feature.side}
    items = {schema.item, *(feature.target for feature in schema.sequence)} - {""}
    named = {f.name for f in schema.features if f.kind == "sequence" or f.name == schema.user or f.group} - items
    repeating = {name for name, share in (repeats or {}).items() if share >= MIN_REPEATS}
    repeating -= items | named | marked.keys()
    of_users = {name for name, side in marked.items() if side == "user"}
    if len(of_users) == len(schema.features):
        raise InputError("every feature has the side 'user', expected at least one that candidates differ in")
    ours = of_users | ((named | repeating) - marked.keys())
    chosen = tuple(feature.name for feature in schema.features if feature.name in ours)
    if len(chosen) == len(schema.features):
        return (), "nothing: the schema would leave no feature to the candidates"
    found = ["schema: sequences, the user's id and features of groups"] if len(marked) < len(schema.features) else []
    if marked:
        found.insert(0, f"schema: side of {', '.join(marked) if found else 'every feature'}")
    if repeating:
        found.append(f"profile: {', '.join(sorted(repeating))}")
    return chosen, "; ".join(found)
