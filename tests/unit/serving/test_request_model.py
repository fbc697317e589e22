"""A request model scores what the exported model scores with the user repeated for every candidate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recmill.artifacts import InputError
from recmill.artifacts.manifest import sign_manifest
from recmill.artifacts.plan import SharedParameters, SharedTablePlan
from recmill.data.schema import Feature, Schema
from recmill.model.ranker import Ranker
from recmill.model.ranking_model import RankingModel
from recmill.model.servable import ServableModel
from recmill.model.settings import RankerConfig
from recmill.model.stores.shared.tables import attach_shared_tables
from recmill.serving import RequestBatch, RequestModel
from recmill.serving.export import write_request_model
from recmill.serving.mapping import mapped_bytes
from recmill.serving.sides import choose_user_features
from recmill.serving.signature import TABLE_FORMS, Signature
from recmill.training.serving import shared_slots

ENCODERS = ("mean", "attention", "transformer", "standard_transformer", "din", "hstu")
LIMIT = 6


def schema_of(labels: tuple[str, ...] = ("label",)) -> Schema:
    return Schema(
        features=(
            Feature(name="price", kind="dense"),
            Feature(name="age", kind="dense", group="user"),
            Feature(name="tags", kind="sparse", num_rows=30, dim=4, pooling="mean", group="user"),
            Feature(name="person", kind="sparse", num_rows=12, dim=8, group="user"),
            Feature(name="item", kind="sparse", table="items", num_rows=50, dim=8),
            Feature(name="seen", kind="sequence", table="items", num_rows=50, dim=8),
            Feature(name="words", kind="sparse", num_rows=40, dim=5),
            Feature(name="related", kind="sequence", table="items", num_rows=50, dim=8, target="item"),
        ),
        labels=labels,
        user="person",
        item="item",
    )


def trained_model(config: RankerConfig, schema: Schema, *, shares: str = "") -> RankingModel:
    """A model with random weights; `shares` is the precision of the array that two of its tables share."""
    torch.manual_seed(0)
    shared = ("items", "words") if shares else ()
    model = RankingModel(schema, config, elsewhere=frozenset(shared), table_device=torch.device("cpu")).eval()
    if shares:
        exact = {"items": torch.tensor([3, 7, 11])}
        plans = {
            name: SharedTablePlan(kind="both" if name in exact else "share", exact_rows=len(exact.get(name, ())))
            for name in shared
        }
        sharing = SharedParameters(
            array_bytes=400, block_size=4, mapping="robe", seed=5, exact_width=8, tables=plans, precision=shares
        )
        attach_shared_tables(model.embeddings, sharing, exact)
    for weight in model.embeddings.table_weights().values():
        weight.normal_(0.0, 0.5)
    with torch.no_grad():
        for weight in model.ranker.top.parameters():
            weight.mul_(4.0)  # scores that differ: new weights give 0.5 to everything
    return model


def write_model(folder: Path, model: RankingModel, config: RankerConfig, **options: Any) -> RequestModel:
    manifest = write_request_model(
        folder,
        ranker=model.ranker,
        config=config,
        tables=model.embeddings.table_weights(),
        shared=shared_slots(model),
        checkpoint_hash="sha256:0",
        **options,
    )
    return RequestModel.load(manifest.path)


def random_batch(signature: Signature, counts: Sequence[int], *, seed: int = 0) -> RequestBatch:
    """Lists of 0 to 9 ids, so that some sequences are cut; single ids for the user and the item."""
    rng = np.random.default_rng(seed)
    num_lists = {"user": len(counts), "candidate": sum(counts)}
    ids: dict[str, dict[str, Any]] = {"user": {}, "candidate": {}}
    for feature in signature.features:
        num = num_lists[feature.side]
        lengths = np.ones(num, int) if feature.name in ("person", "item") else rng.integers(0, 10, num)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        ids[feature.side][feature.name] = (rng.integers(0, feature.num_rows, offsets[-1]), offsets)
    return RequestBatch(
        counts_R=np.asarray(counts, dtype=np.int64),
        dense_user_RF=rng.normal(size=(len(counts), len(signature.dense_user))).astype(np.float32),
        dense_candidate_NF=rng.normal(size=(sum(counts), len(signature.dense_candidate))).astype(np.float32),
        user_ids=ids["user"],
        candidate_ids=ids["candidate"],
    )


def score_repeated(model: RankingModel, batch: RequestBatch, signature: Signature) -> np.ndarray:
    """Today's exported form: the user's features are repeated for every candidate, every list is padded."""
    schema, request_N = model.embeddings.schema, np.repeat(np.arange(batch.num_requests), batch.counts_R)
    columns = {name: batch.dense_user_RF[request_N, n] for n, name in enumerate(signature.dense_user)}
    columns |= {name: batch.dense_candidate_NF[:, n] for n, name in enumerate(signature.dense_candidate)}
    dense = np.stack([np.zeros(len(request_N)), *(columns[f.name] for f in schema.dense)], axis=1)[:, 1:].astype(
        np.float32
    )
    ids = []
    for feature in schema.id_features:
        is_user = feature.name in batch.user_ids
        values, offsets = (batch.user_ids if is_user else batch.candidate_ids)[feature.name]
        lists = [values[a:b] for a, b in pairwise(offsets)]
        lists = [lists[request] for request in request_N] if is_user else lists
        lists = [own[-LIMIT:] if feature.kind == "sequence" else own for own in lists]
        padded = np.full((len(lists), max([1, *map(len, lists)])), -1)
        for row, own in zip(padded, lists, strict=True):
            row[: len(own)] = own
        ids.append(torch.from_numpy(padded))
    with torch.no_grad():
        return ServableModel(model)(torch.from_numpy(dense), ids).numpy()


COUNTS = (3, 0, 1, 7)
SHAPES = (COUNTS, (5,), (20, 30))  # few candidates per request, one request, many candidates per request


@pytest.mark.parametrize("name", ["dlrm", "dcn"])
@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("shares", ["", "float32", "int8"])
def test_a_request_scores_what_repeating_the_user_scores(tmp_path, name, encoder, shares):
    config = RankerConfig(model=name, sequence_encoder=encoder, max_sequence_length=LIMIT)
    model = trained_model(config, schema_of(), shares=shares)
    served = write_model(tmp_path, model, config)
    assert {f.name for f in served.signature.of_side("user")} == {"tags", "person", "seen", "related"}
    plain = RequestModel.load(tmp_path, is_split=False)
    for seed, counts in enumerate(SHAPES):
        batch = random_batch(served.signature, counts, seed=seed)
        expected = score_repeated(model, batch, served.signature)
        assert np.ptp(expected) > 1e-3
        np.testing.assert_allclose(served.score(batch), expected, atol=1e-5, rtol=0)
        np.testing.assert_allclose(plain.score(batch), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", TABLE_FORMS)
@pytest.mark.parametrize("encoder", ["mean", "attention", "transformer", "din"])
def test_one_lookup_of_all_tables_scores_what_lookups_of_each_score(tmp_path, encoder, form):
    config = RankerConfig(sequence_encoder=encoder, max_sequence_length=LIMIT)
    counts = {"items": (np.arange(0, 50, 3), np.arange(17) + 1)}
    fused = write_model(tmp_path, trained_model(config, schema_of()), config, form=form, counts=counts)
    apart = RequestModel.load(tmp_path, is_fused=False)
    for seed, counts_R in enumerate((*SHAPES, (1,), (1, 1, 1))):
        batch = random_batch(fused.signature, counts_R, seed=seed)
        np.testing.assert_allclose(fused.score(batch), apart.score(batch), atol=1e-6, rtol=0)


@pytest.mark.parametrize("encoder", ["mean", "transformer", "din"])
@pytest.mark.parametrize("name", ["dlrm", "dcn"])
@pytest.mark.parametrize("shares", ["", "int8"])
def test_requests_of_one_candidate_score_what_larger_ones_score(tmp_path, name, encoder, shares):
    """They take a way of their own: nothing is computed once per request."""
    config = RankerConfig(model=name, sequence_encoder=encoder, max_sequence_length=LIMIT)
    model = trained_model(config, schema_of(), shares=shares)
    served = write_model(tmp_path, model, config)
    for counts in ((1,), (1, 1, 1, 1)):
        batch = random_batch(served.signature, counts)
        expected = score_repeated(model, batch, served.signature)
        np.testing.assert_allclose(served.score(batch), expected, atol=1e-5, rtol=0)


def test_what_is_wrong_with_a_batch_is_named_whoever_notices(tmp_path):
    """The lookup of all tables checks lists itself; the sentence is that of the batch."""
    config = RankerConfig(max_sequence_length=LIMIT)
    served = write_model(tmp_path, trained_model(config, schema_of()), config)
    for counts in ((1,), (2, 3)):
        batch = random_batch(served.signature, counts)
        values, offsets = batch.candidate_ids["item"]
        for wrong, message in (
            ((values + 50, offsets), r"'item': ids must lie in \[0, 50\)"),
            ((values, offsets + 1), "'item': offsets must rise from 0"),
            ((values, offsets[:-1]), "'item': .* lists, expected"),
            ((values.astype(np.int32), offsets), "'item': values and offsets must be one-dimensional arrays of int64"),
        ):
            with pytest.raises(InputError, match=message):
                served.score(replace(batch, candidate_ids={**batch.candidate_ids, "item": wrong}))


@pytest.mark.parametrize("heads", ["shared", "mmoe", "ple"])
def test_several_labels_are_columns(tmp_path, heads):
    config = RankerConfig(multi_task=heads, max_sequence_length=LIMIT)
    model = trained_model(config, schema_of(("click", "buy")))
    served = write_model(tmp_path, model, config)
    for counts in SHAPES:
        batch = random_batch(served.signature, counts)
        found = served.score(batch)
        assert found.shape == (sum(counts), 2)
        np.testing.assert_allclose(found, score_repeated(model, batch, served.signature), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["dlrm", "dcn"])
@pytest.mark.parametrize(
    "user_features",
    [
        ("price", "age"),
        ("price",),
        ("price", "age", "tags", "person", "item", "seen", "words"),
        ("related",),
        ("item", "seen"),
    ],
)
def test_any_feature_may_belong_to_the_user(tmp_path, name, user_features):
    config = RankerConfig(model=name, sequence_encoder="din", max_sequence_length=LIMIT)
    model = trained_model(config, schema_of())
    served = write_model(tmp_path, model, config, user_features=user_features)
    assert served.signature.user_features_from == "given at export"
    batch = random_batch(served.signature, COUNTS)
    np.testing.assert_allclose(served.score(batch), score_repeated(model, batch, served.signature), atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", TABLE_FORMS)
def test_every_form_of_the_tables_scores_the_same_mapped_resident_and_hot_first(tmp_path, form):
    config = RankerConfig(sequence_encoder="attention", max_sequence_length=LIMIT)
    model = trained_model(config, schema_of())
    counts = {"items": (np.arange(0, 50, 3), np.arange(17) + 1), "words": (np.arange(40), np.arange(40, 0, -1))}
    plain = write_model(tmp_path / "plain", model, config, form=form)
    ordered = write_model(tmp_path / "ordered", model, config, form=form, counts=counts)
    resident = RequestModel.load(tmp_path / "ordered", memory="resident")
    limited = RequestModel.load(tmp_path / "ordered", cold_bytes=0)
    assert ordered.manifest.tables["items"].hot_rows == 12  # 17 + 16 + ... + 6 of 153 reads are 90%
    assert not ordered.manifest.tables["words"].order_file  # its rows were in this order already
    batch = random_batch(plain.signature, COUNTS)
    found = plain.score(batch)
    np.testing.assert_array_equal(ordered.score(batch), found)
    np.testing.assert_array_equal(resident.score(batch), found)
    np.testing.assert_array_equal(limited.score(batch), found)
    limited.files.release()
    np.testing.assert_array_equal(limited.score(batch), found)
    tolerance = {"float32": 1e-5, "bf16": 5e-3, "int8": 5e-3, "int4": 0.1}[form]
    np.testing.assert_allclose(found, score_repeated(model, batch, plain.signature), atol=tolerance, rtol=0)


def test_joined_batches_score_what_each_scores(tmp_path):
    config = RankerConfig(max_sequence_length=LIMIT)
    served = write_model(tmp_path, trained_model(config, schema_of()), config)
    parts = [random_batch(served.signature, counts, seed=n) for n, counts in enumerate([(2, 3), (1,), (0, 4)])]
    found = served.score(RequestBatch.join(parts))
    np.testing.assert_allclose(found, np.concatenate([served.score(part) for part in parts]), atol=1e-6)
    empty = random_batch(served.signature, (0, 0))
    assert served.score(empty).shape == (0,)


def test_lists_of_a_request_become_a_batch(tmp_path):
    config = RankerConfig(max_sequence_length=LIMIT)
    served = write_model(tmp_path, trained_model(config, schema_of()), config)
    user = {"age": [0.5], "tags": [[1, 2]], "person": [3], "seen": [[4, 5]], "related": [[]]}
    candidate = {"price": [1.0, 2.0], "item": [7, 8], "words": [[1], [2, 3]]}
    batch = RequestBatch.of_lists(served.signature, [2], user=user, candidate=candidate)
    assert batch.candidate_ids["words"][1].tolist() == [0, 1, 3]
    assert served.score(batch).shape == (2,)
    wrong = [
        (user, {**candidate, "item": [7, 50]}, r"'item': ids must lie in \[0, 50\)"),
        (user, {**candidate, "item": [7, 2**70]}, r"'item': ids must lie in \[0, 50\)"),
        (user, {**candidate, "item": [7, 1.5]}, "'item': ids must be whole numbers"),
        (user, {**candidate, "item": [7]}, "'item': 1 lists, expected 2 on the candidate side"),
        ({**user, "age": ["old"]}, candidate, "'age': expected numbers"),
        ({**user, "age": [float("nan")]}, candidate, "user side must be finite"),
        ({**user, "height": [1.0]}, candidate, "'height' is not one of the user side"),
        ({**user, "item": [1]}, candidate, "'item' is not one of the user side"),
        ({"age": [0.5]}, candidate, "'tags' is missing, expected on the user side"),
    ]
    for own, of_candidates, message in wrong:
        with pytest.raises(InputError, match=message):
            RequestBatch.of_lists(served.signature, [2], user=own, candidate=of_candidates)


def test_damage_is_named(tmp_path, monkeypatch):
    config = RankerConfig(max_sequence_length=LIMIT)
    served = write_model(tmp_path, trained_model(config, schema_of()), config)
    path = Path(served.manifest.path, served.manifest.tables["items"].file)
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"its content is not what request\.json recorded"):
        RequestModel.load(tmp_path)
    monkeypatch.setattr("recmill.serving.signature.MAX_CHECKED_BYTES", 0)  # as if the tables were larger
    RequestModel.load(tmp_path)
    for options in ({"memory": "resident"}, {"verify": True}):
        with pytest.raises(InputError, match=r"its content is not what request\.json recorded"):
            RequestModel.load(tmp_path, **options)
    path.write_bytes(data[:-1])
    with pytest.raises(InputError, match=r"\d+.rows: has \d+ bytes, request.json says"):
        RequestModel.load(tmp_path)
    with pytest.raises(InputError, match="every feature is named as the user's"):
        choose_user_features(schema_of(), given=[feature.name for feature in schema_of().features])


def test_a_manifest_names_only_files_of_its_folder(tmp_path):
    """Whoever wrote the folder can make all hashes fit."""
    config = RankerConfig(max_sequence_length=LIMIT)
    served = write_model(tmp_path, trained_model(config, schema_of()), config)
    place = Path(served.manifest.path, "request.json")
    known = json.loads(place.read_text())
    items = known["tables"]["items"]
    for changed in (
        {"dense_file": "/etc/hostname"},
        {"tables": {**known["tables"], "items": {**items, "file": "../../outside"}}},
        {"tables": {**known["tables"], "items": {**items, "order_file": "/dev/zero"}}},
    ):
        place.write_text(json.dumps(sign_manifest({**known, **changed})))
        with pytest.raises(InputError, match="which is not among its files"):
            RequestModel.load(tmp_path)


def test_models_without_dense_values_or_layers_of_their_own(tmp_path):
    """The corners of the split: every vector is kept, nothing is deep, nothing is crossed."""
    features = tuple(feature for feature in schema_of().features if feature.kind != "dense")
    schema = Schema(features=features, user="person", item="item")
    for number, settings in enumerate(
        (
            {"top_layers": ()},
            {"model": "dcn", "top_layers": ()},
            {"model": "dcn", "cross_layers": 0},
            {"model": "dcn", "cross_rank": 0},
        )
    ):
        config = RankerConfig(max_sequence_length=LIMIT, **settings)
        model = trained_model(config, schema)
        served = write_model(tmp_path / str(number), model, config)
        for counts in SHAPES:
            batch = random_batch(served.signature, counts)
            expected = score_repeated(model, batch, served.signature)
            np.testing.assert_allclose(served.score(batch), expected, atol=1e-5, rtol=0)


def test_features_that_never_change_in_a_session_are_the_users():
    chosen, why = choose_user_features(schema_of(), repeats={"words": 0.95, "item": 1.0, "price": 0.2})
    assert chosen == ("age", "tags", "person", "seen", "words", "related")
    assert why.endswith("; profile: words")


def test_the_side_of_a_feature_in_the_schema_decides(tmp_path):
    sides = {"words": "user", "seen": "candidate", "price": "user"}
    plain = schema_of()
    schema = replace(plain, features=tuple(replace(f, side=sides.get(f.name, "")) for f in plain.features))
    assert Schema.from_json(schema.to_json()) == schema
    assert "side" not in plain.to_json()["features"][0]
    chosen, why = choose_user_features(schema, repeats={"words": 0.1, "seen": 1.0})
    assert chosen == ("price", "age", "tags", "person", "words", "related")
    assert why == "schema: side of price, seen, words; schema: sequences, the user's id and features of groups"
    assert choose_user_features(schema, given=["seen"])[0] == ("seen",)
    whole = replace(plain, features=tuple(replace(f, side="candidate") for f in plain.features))
    assert choose_user_features(whole) == ((), "schema: side of every feature")
    config = RankerConfig(max_sequence_length=LIMIT)
    model = trained_model(config, schema)
    served = write_model(tmp_path, model, config)
    batch = random_batch(served.signature, COUNTS)
    assert {*batch.user_ids} == {"tags", "person", "words", "related"}
    np.testing.assert_allclose(served.score(batch), score_repeated(model, batch, served.signature), atol=1e-5, rtol=0)


def test_a_side_that_does_not_exist_is_refused():
    with pytest.raises(InputError, match="feature 'age': side is 'people', expected 'user' or 'candidate'"):
        Feature(name="age", kind="dense", side="people")
    with pytest.raises(InputError, match="every feature has the side 'user'"):
        choose_user_features(Schema(features=(Feature(name="item", kind="sparse", num_rows=3, dim=2, side="user"),)))


def test_mapped_pages_stay_within_their_limit(tmp_path):
    """Every row of a table is read; only those that are read first stay."""
    schema = Schema(features=(Feature(name="item", kind="sparse", num_rows=200_000, dim=16),))
    config = RankerConfig(top_layers=(4,))
    ranker, rows = Ranker(schema, config), torch.zeros(200_000, 16)
    how = {"tables": {"item": rows}, "shared": None, "checkpoint_hash": "sha256:0"}
    path = write_request_model(tmp_path, ranker=ranker, config=config, **how).path
    served = RequestModel.load(path, cold_bytes=2_000_000)
    assert served.files.cold_bytes == 12_800_000
    empty = np.zeros((100, 0), np.float32)
    before = None
    for ids in np.random.default_rng(0).permutation(200_000).reshape(-1, 100)[:200]:
        batch = RequestBatch(
            counts_R=np.array([100]),
            dense_user_RF=empty[:1],
            dense_candidate_NF=empty,
            candidate_ids={"item": (ids, np.arange(101))},
        )
        served.score(batch)
        before = before or mapped_bytes()  # the first call may load code
        assert mapped_bytes() - before < 4_000_000
    assert served.files.num_released > 0
