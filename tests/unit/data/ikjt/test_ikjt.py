import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recmill.data.ikjt import InverseKeyedJaggedTensor


def make_kjt(lists, weights=False, lengths_dtype=torch.int32, values_dtype=torch.int64):
    """A KeyedJaggedTensor from {key: [list of sample 0, list of sample 1, ...]}."""
    values = [value for rows in lists.values() for row in rows for value in row]
    lengths = [len(row) for rows in lists.values() for row in rows]
    return KeyedJaggedTensor(
        keys=list(lists),
        values=torch.tensor(values, dtype=values_dtype),
        lengths=torch.tensor(lengths, dtype=lengths_dtype),
        weights=(torch.tensor(values) % 4).float() if weights else None,
        stride=len(next(iter(lists.values()))),
    )


def assert_same_kjt(found, expected):
    assert found.keys() == expected.keys()
    assert found.stride() == expected.stride()
    for part in ("values", "lengths", "offsets", "weights_or_none"):
        one, other = getattr(found, part)(), getattr(expected, part)()
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


LISTS = {
    "a": [[7, 9], [7, 9], [7, 9], [4]],
    "b": [[1], [1], [2], []],
    "c": [[5], [6], [7], [8]],
}


def test_a_group_repeats_only_where_all_its_features_do():
    ikjt = InverseKeyedJaggedTensor.from_kjt(make_kjt(LISTS), groups=[["a", "b"], ["c"]])
    assert ikjt.groups == [["a", "b"], ["c"]]
    assert ikjt.inverse(0).tolist() == [0, 0, 1, 2]
    group = ikjt.group_kjt(0)
    assert group.keys() == ["a", "b"]
    assert group.stride() == ikjt.num_distinct(0) == 3
    assert group["a"].to_dense()[1].tolist() == [7, 9]
    assert group["b"].to_dense()[1].tolist() == [2]
    assert_same_kjt(ikjt.to_kjt(), make_kjt(LISTS))


def test_a_group_that_repeats_too_little_stays_plain_without_a_copy():
    kjt = make_kjt(LISTS)
    ikjt = InverseKeyedJaggedTensor.from_kjt(kjt, groups=[["a"], ["b", "c"]])
    assert not ikjt.is_plain(0)
    assert ikjt.is_plain(1)
    group = ikjt.group_kjt(1)
    assert group.stride() == 4
    alone = InverseKeyedJaggedTensor.from_kjt(kjt, groups=[["a"], ["b"], ["c"]]).group_kjt(2)
    assert alone.values().untyped_storage().data_ptr() == kjt.values().untyped_storage().data_ptr()
    assert ikjt.inverse(1).tolist() == [0, 1, 2, 3]
    x = torch.randn(4, 3)
    assert ikjt.expand(1, x) is x
    assert_same_kjt(ikjt.to_kjt(), kjt)


def test_the_threshold_decides_what_stays_plain():
    kjt = make_kjt({"a": [[1], [1], [2], [3]]})  # 4 values, 3 distinct: 1.33x
    assert not InverseKeyedJaggedTensor.from_kjt(kjt, min_factor=4 / 3).is_plain(0)
    assert InverseKeyedJaggedTensor.from_kjt(kjt, min_factor=1.34).is_plain(0)


def test_shifted_lists_are_stored_as_windows():
    kjt = make_kjt({"h": [[1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6], [3, 4, 5, 6]], "i": [[1], [2], [3], [4]]})
    ikjt = InverseKeyedJaggedTensor.from_kjt(kjt, groups=[["h"], ["i"]], windows=["h"])
    buffer, starts, lengths = ikjt.windows("h")
    assert buffer.tolist() == [1, 2, 3, 4, 5, 6]
    assert starts.tolist() == [0, 1, 2]
    assert lengths.tolist() == [4, 4, 4]
    assert ikjt.inverse(0).tolist() == [0, 1, 2, 2]
    assert ikjt.group_kjt(0).values().tolist() == [1, 2, 3, 4, 2, 3, 4, 5, 3, 4, 5, 6]
    assert ikjt.dedup_factor("h") == 16 / 6
    assert ikjt.windows("i") is None
    assert_same_kjt(ikjt.to_kjt(), kjt)


def test_windows_pay_even_where_no_row_repeats():
    rows = [list(range(start, start + 20)) for start in range(10)]
    kjt = make_kjt({"h": rows, "w": rows}, weights=True)
    ikjt = InverseKeyedJaggedTensor.from_kjt(kjt, groups=[["h", "w"]], windows=["h"])
    assert ikjt.is_plain(0)
    assert len(ikjt.windows("h")[0]) == len(ikjt.windows("w")[0]) == 29
    assert ikjt.windows("w")[0].tolist() == list(range(29))
    assert_same_kjt(ikjt.group_kjt(0), kjt)
    assert_same_kjt(ikjt.to_kjt(), kjt)
    assert ikjt.size_in_bytes() < kjt.size_in_bytes() / 3


def test_weights_are_part_of_a_row():
    kjt = KeyedJaggedTensor(
        keys=["a"],
        values=torch.tensor([1, 1, 1, 1]),
        lengths=torch.tensor([1, 1, 1, 1]),
        weights=torch.tensor([0.5, 0.5, 0.25, 0.5]),
    )
    ikjt = InverseKeyedJaggedTensor.from_kjt(kjt, groups=[["a"]])
    assert ikjt.inverse(0).tolist() == [0, 0, 1, 0]
    assert ikjt.group_kjt(0).weights().tolist() == [0.5, 0.25]
    assert_same_kjt(ikjt.to_kjt(), kjt)


row = st.lists(st.integers(0, 3), max_size=4)


@st.composite
def batches(draw):
    num_keys, num_rows = draw(st.integers(1, 4)), draw(st.integers(0, 10))
    pool = draw(st.lists(row, min_size=1, max_size=4))
    pick = st.sampled_from(pool)
    lists = {f"k{k}": [draw(pick) for _ in range(num_rows)] for k in range(num_keys)}
    labels = [draw(st.integers(0, 2)) for _ in range(num_keys)]
    groups = [[key for key, own in zip(lists, labels, strict=True) if own == label] for label in sorted(set(labels))]
    return lists, draw(st.permutations(groups))


@given(
    batch=batches(),
    weights=st.booleans(),
    windowed=st.booleans(),
    automatic=st.booleans(),
    min_factor=st.sampled_from([0.0, 1.25, 100.0]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
@settings(max_examples=250, deadline=None)
def test_every_batch_comes_back_bit_for_bit(batch, weights, windowed, automatic, min_factor, dtype):
    lists, groups = batch
    kjt = make_kjt(lists, weights=weights, lengths_dtype=dtype, values_dtype=dtype)
    ikjt = InverseKeyedJaggedTensor.from_kjt(
        kjt, None if automatic else groups, windows=list(lists) if windowed else (), min_factor=min_factor
    )
    assert_same_kjt(ikjt.to_kjt(), kjt)
    assert sorted(key for group in ikjt.groups for key in group) == sorted(lists)
    for g, group in enumerate(ikjt.groups):
        inverse, distinct = ikjt.inverse(g), ikjt.group_kjt(g)
        assert distinct.stride() == ikjt.num_distinct(g)
        for key in group:
            rows = [row.tolist() for row in distinct[key].to_dense()] if distinct.stride() else []
            assert [rows[i] for i in inverse.tolist()] == lists[key]
        if not ikjt.is_plain(g):
            contents = [tuple(tuple(lists[key][b]) for key in group) for b in range(kjt.stride())]
            assert ikjt.num_distinct(g) == len(set(contents))
    assert_same_kjt(pickle.loads(pickle.dumps(ikjt)).to_kjt(), kjt)
    assert repr(ikjt)


def test_all_equal_and_all_distinct_batches_have_the_factors_they_should():
    equal = InverseKeyedJaggedTensor.from_kjt(make_kjt({"a": [[1, 2, 3]] * 8}))
    assert equal.dedup_factor() == equal.dedup_factor("a") == 8
    distinct = InverseKeyedJaggedTensor.from_kjt(make_kjt({"a": [[n] for n in range(8)]}))
    assert distinct.is_plain(0)
    assert distinct.dedup_factor() == 1
    empty = InverseKeyedJaggedTensor.from_kjt(make_kjt({"a": [[]] * 6}))
    assert empty.dedup_factor("a") == 6
    assert empty.dedup_factor() == 1
    nothing = InverseKeyedJaggedTensor.from_kjt(make_kjt({"a": []}))
    assert nothing.dedup_factor("a") == nothing.dedup_factor() == 1


def test_the_factor_weighs_features_by_their_values():
    ikjt = InverseKeyedJaggedTensor.from_kjt(make_kjt({"a": [[1, 2, 3]] * 4, "b": [[1], [2], [3], [4]]}))
    assert ikjt.groups == [["a"], ["b"]]
    assert ikjt.dedup_factor("a") == 4
    assert ikjt.dedup_factor("b") == 1
    assert ikjt.dedup_factor() == (12 + 4) / (3 + 4)


def test_features_that_change_together_are_put_in_one_group():
    sessions = [[n // 4] for n in range(80)]
    lists = {
        "user": sessions,
        "item": [[n] for n in range(80)],
        "profile": [[s[0] + 100, 1] for s in sessions],
        "other_item": [[n, n] for n in range(80)],
        "ad": [[n // 2] for n in range(80)],
    }
    ikjt = InverseKeyedJaggedTensor.from_kjt(make_kjt(lists))
    assert ikjt.groups == [["user", "profile"], ["item", "other_item"], ["ad"]]


def test_features_of_the_same_size_that_change_apart_are_kept_apart():
    lists = {"a": [[n // 2] for n in range(40)], "b": [[(n + 1) // 2 % 20] for n in range(40)]}
    assert InverseKeyedJaggedTensor.from_kjt(make_kjt(lists)).groups == [["a"], ["b"]]


def test_a_feature_in_no_group_gets_its_own():
    ikjt = InverseKeyedJaggedTensor.from_kjt(make_kjt(LISTS), groups=[["b"]])
    assert ikjt.groups == [["b"], ["a"], ["c"]]
    assert ikjt.group_of("c") == 2


def test_expansion_reaches_every_sample_and_sums_gradients():
    ikjt = InverseKeyedJaggedTensor.from_kjt(make_kjt(LISTS), groups=[["a", "b"], ["c"]])
    x = torch.randn(3, 2, requires_grad=True)
    expanded = ikjt.expand(0, x)
    assert torch.equal(expanded, x[torch.tensor([0, 0, 1, 2])])
    expanded.sum().backward()
    assert x.grad.tolist() == [[2, 2], [1, 1], [1, 1]]
    keyed = ikjt.expand(0, KeyedTensor(["p", "q"], [1, 1], x.detach()))
    assert keyed["q"].shape == (4, 1)
    assert torch.equal(keyed.values(), expanded)


def test_jagged_tensors_are_expanded_list_by_list():
    ikjt = InverseKeyedJaggedTensor.from_kjt(make_kjt(LISTS), groups=[["a", "b"], ["c"]])
    lists = ikjt.group_kjt(0)["a"]
    expanded = ikjt.expand(0, lists)
    assert [row.tolist() for row in expanded.to_dense()] == LISTS["a"]
    weighted = JaggedTensor(values=lists.values(), lengths=lists.lengths(), weights=lists.values().float())
    assert ikjt.expand(0, weighted).weights().tolist() == [7, 9, 7, 9, 7, 9, 4]


def test_a_wrong_number_of_rows_is_refused():
    ikjt = InverseKeyedJaggedTensor.from_kjt(make_kjt(LISTS), groups=[["a", "b"], ["c"]])
    with pytest.raises(ValueError, match="group 0: received 4 rows, expected its 3 distinct rows"):
        ikjt.expand(0, torch.ones(4, 2))


@pytest.mark.parametrize("windows", [(), ("a", "b")])
def test_values_are_mapped_once_and_come_out_as_on_all_samples(windows):
    lists = {"a": [[1, 2, 3], [2, 3, 4], [2, 3, 4]], "b": [[9, 8], [9, 8], [9, 8]]}
    seen = []

    def double(values):
        seen.append(len(values))
        return values * 2

    ikjt = InverseKeyedJaggedTensor.from_kjt(make_kjt(lists), groups=[["a", "b"]], windows=windows)
    mapped = ikjt.map_values("a", double)
    assert seen[0] < 9
    assert mapped.to_kjt()["a"].values().tolist() == [2, 4, 6, 4, 6, 8, 4, 6, 8]
    assert mapped.to_kjt()["b"].values().tolist() == [9, 8] * 3
    assert_same_kjt(ikjt.to_kjt(), make_kjt(lists))


def test_maps_that_break_the_lists_are_refused():
    ikjt = InverseKeyedJaggedTensor.from_kjt(make_kjt(LISTS), groups=[["a", "b"], ["c"]])
    with pytest.raises(ValueError, match=r"map_values\('a'\): received \(1,\)"):
        ikjt.map_values("a", lambda values: values[:1])
    with pytest.raises(ValueError, match=r"map_values\('a'\): returned torch.float32"):
        ikjt.map_values("a", lambda values: values.float())
    assert ikjt.map_values("c", lambda values: values.float()).group_kjt(1).values().dtype == torch.float32
    with pytest.raises(ValueError, match="unknown feature 'z'; the batch has a, b, c"):
        ikjt.map_values("z", lambda values: values)


def test_a_plain_batch_is_one_group_that_shares_its_memory():
    kjt = make_kjt(LISTS, weights=True)
    plain = InverseKeyedJaggedTensor.from_plain(kjt)
    assert plain.groups == [kjt.keys()]
    assert plain.is_plain(0)
    assert plain.group_kjt(0) is kjt
    assert_same_kjt(plain.to_kjt(), kjt)
    for key in LISTS:
        values, lengths = plain.lists(key)
        assert values.tolist() == kjt[key].values().tolist()
        assert lengths.tolist() == kjt[key].lengths().tolist()
    assert values.untyped_storage().data_ptr() == kjt.values().untyped_storage().data_ptr()


@pytest.mark.parametrize("windows", [(), ("a",)])
def test_the_lists_of_a_feature_are_its_distinct_ones(windows):
    lists = {"a": [[1, 2, 3], [2, 3, 4], [2, 3, 4]], "b": [[9], [9], [9]]}
    ikjt = InverseKeyedJaggedTensor.from_kjt(make_kjt(lists), groups=[["b", "a"]], windows=windows)
    assert [part.tolist() for part in ikjt.lists("a")] == [[1, 2, 3, 2, 3, 4], [3, 3]]
    assert [part.tolist() for part in ikjt.lists("b")] == [[9, 9], [1, 1]]


def test_the_size_counts_inverse_and_windows():
    kjt = make_kjt({"a": [[1, 2]] * 4})
    ikjt = InverseKeyedJaggedTensor.from_kjt(kjt)
    assert ikjt.size_in_bytes() == 2 * 8 + 1 * 4 + 4 * 4  # values, lengths, inverse
    histories = make_kjt({"h": [[1, 2, 3], [2, 3, 4]]})
    windowed = InverseKeyedJaggedTensor.from_kjt(histories, windows=["h"])
    assert windowed.size_in_bytes() == 4 * 8 + 2 * 4 + 2 * 8  # buffer, lengths, starts


def test_a_pickle_holds_no_more_than_the_batch():
    lists = {"a": [[n // 8] * 50 for n in range(400)], "i": [[n] for n in range(400)]}
    ikjt = InverseKeyedJaggedTensor.from_kjt(make_kjt(lists), groups=[["a"], ["i"]])
    ikjt.group_kjt(0)
    assert len(pickle.dumps(ikjt)) < ikjt.size_in_bytes() + 4000


def test_devices_are_changed_for_all_parts():
    ikjt = InverseKeyedJaggedTensor.from_kjt(make_kjt(LISTS, weights=True), groups=[["a", "b"], ["c"]])
    moved = ikjt.to("meta")
    assert moved.device() == torch.device("meta")
    assert moved.size_in_bytes() == ikjt.size_in_bytes()
    assert_same_kjt(ikjt.to(torch.device("cpu"), non_blocking=True).to_kjt(), make_kjt(LISTS, weights=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory and streams need CUDA")
def test_a_pinned_batch_moves_on_a_stream():
    ikjt = InverseKeyedJaggedTensor.from_kjt(make_kjt(LISTS), groups=[["a", "b"], ["c"]]).pin_memory()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        moved = ikjt.to("cuda", non_blocking=True)
    moved.record_stream(stream)
    stream.synchronize()
    assert_same_kjt(moved.to("cpu").to_kjt(), make_kjt(LISTS))


def test_a_person_can_read_it():
    ikjt = InverseKeyedJaggedTensor.from_kjt(make_kjt(LISTS), groups=[["a"], ["b", "c"]])
    assert repr(ikjt).splitlines() == [
        f"InverseKeyedJaggedTensor(4 samples, 3 features, 1.40x deduplicated, {ikjt.size_in_bytes()} bytes)",
        "  0: a: 2 distinct rows, 3 values stored",
        "  1: b, c: plain, 7 values stored",
    ]


def test_groups_that_make_no_sense_are_refused():
    kjt = make_kjt(LISTS)
    with pytest.raises(ValueError, match="unknown feature 'x'; the id features are a, b, c"):
        InverseKeyedJaggedTensor.from_kjt(kjt, groups=[["a", "x"]])
    with pytest.raises(ValueError, match="unknown feature 'x'"):
        InverseKeyedJaggedTensor.from_kjt(kjt, windows=["x"])
    for groups in ([["a"], ["a", "b"]], [["a", "a"]], [[]]):
        with pytest.raises(ValueError, match="expected each feature once and no empty group"):
            InverseKeyedJaggedTensor.from_kjt(kjt, groups=groups)
    variable = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.arange(3),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key_per_rank=[[1], [2]],
    )
    with pytest.raises(ValueError, match="expected a KeyedJaggedTensor with one batch size"):
        InverseKeyedJaggedTensor.from_kjt(variable)


def test_huge_lists_come_back():
    long = list(range(100_000))
    kjt = make_kjt({"a": [long, long, [1], long[1:]]})
    assert_same_kjt(InverseKeyedJaggedTensor.from_kjt(kjt, windows=["a"]).to_kjt(), kjt)
