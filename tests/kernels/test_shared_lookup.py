import importlib
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import shared_lookup, shared_scatter, shared_step
from kernels.shared_lookup import SharedFeature, SharedFeatures, SharedLayout, ops, reference
from kernels.shared_lookup.layout import count_lines, mix_bits
from tests.kernels.forced import forced

SIZE = 301
EQUAL_PIECES = [(8, (8, 40)), (16, (16, 64)), (32, (32, 96)), (64, (64, 64)), (90, (64, 64))]  # block, dims
IDS = [0, 1, 7, 40, -1, -(2**63), 2**63 - 1, 2**40, 2**41 + 3, 123_456_789_012]


def make_case(
    *,
    lengths=(3, 0, 2, 1, 4, 0),
    block=8,
    mode="sum",
    dims=(20, 9),
    exact=False,
    exact_width=0,
    dtype=torch.float32,
    seed=0,
):
    """Two features over one array; the first may keep ids 1, 7 and 40 exactly."""
    layout = SharedLayout(size=SIZE, block_size=block, seed=seed)
    first = {"exact_start": 0, "num_exact": 3, "exact_base": 304, "exact_width": exact_width} if exact else {}
    features = SharedFeatures.of(
        [
            SharedFeature(key=layout.table_key(0), dim=dims[0], is_mean=mode == "mean", **first),
            SharedFeature(key=layout.table_key(1), dim=dims[1], is_mean=mode == "mean"),
        ],
        torch.tensor([1, 7, 40]) if exact else None,
    )
    generator = torch.Generator().manual_seed(seed)
    array = torch.randn(304 + 3 * dims[0] if exact else SIZE, generator=generator, dtype=torch.float64).to(dtype)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.tensor(IDS * 10)[torch.randint(100, (int(offsets[-1]),), generator=generator)]
    return layout, features, array, ids, offsets


def gradients(array, ids, offsets, **options):
    """(vectors, gradient of the array) for a fixed gradient of the vectors."""
    array = array.clone().requires_grad_()
    vectors = shared_lookup(array, ids, offsets, **options)
    generator = torch.Generator().manual_seed(5)
    vectors.backward(torch.randn(vectors.shape, generator=generator, dtype=torch.float64).to(array.dtype))
    return [vectors.detach(), array.grad]


def assert_within_twice_the_error_of_torch(found, plain, exact):
    """Against float64, at most twice the error of plain torch in float32 (one unit in the last place is free)."""
    for ours, theirs, truth in zip(found, plain, exact, strict=True):
        floor = torch.finfo(torch.float32).eps * truth.abs().max().clamp(min=1) if truth.numel() else 0
        error, allowed = (
            (ours.double() - truth).abs(),
            2 * (theirs.double() - truth).abs().max() if truth.numel() else 0,
        )
        assert (error <= allowed + floor).all()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("pooled", [True, False])
def test_forward_and_backward_keep_the_2x_rule(mode, exact, pooled):
    for block in (5, 32):
        options = {"block": block, "mode": mode, "exact": exact}
        if not pooled:
            options["dims"] = (20, 20)
        layout, features, array, ids, offsets = make_case(**options)
        common = {"layout": layout, "features": features, "is_pooled": pooled}
        exactly = gradients(array.double(), ids, offsets, kernel="reference", **common)
        plain = gradients(array, ids, offsets, kernel="reference", **common)
        ours = gradients(array, ids, offsets, **common)
        assert_within_twice_the_error_of_torch(ours, plain, exactly)
        for how in ({"threads": 3}, {"threads": 2, "is_portable": True}):
            with forced(**how):
                again = gradients(array, ids, offsets, **common)
            assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


@given(
    lengths=st.lists(st.integers(0, 5), min_size=2, max_size=12).filter(lambda found: len(found) % 2 == 0),
    block=st.integers(1, 40),
    dims=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    mode=st.sampled_from(["sum", "mean"]),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=60, deadline=None)
def test_any_shape_matches_the_reference(lengths, block, dims, mode, seed):
    layout, features, array, ids, offsets = make_case(
        lengths=lengths, block=block, dims=dims, mode=mode, dtype=torch.float64, seed=seed
    )
    common = {"layout": layout, "features": features}
    expected = gradients(array, ids, offsets, kernel="reference", **common)
    for found, wanted in zip(gradients(array, ids, offsets, **common), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("block", "dims"), [(8, (8, 40)), (16, (16, 64)), (32, (32, 96)), (64, (64, 64)), (90, (64, 64))]
)
@pytest.mark.parametrize(("mode", "pooled"), [("sum", True), ("mean", True), ("sum", False)])
def test_rows_in_equal_pieces_have_the_bits_of_the_general_walk(block, dims, dtype, mode, pooled):
    layout, features, array, ids, offsets = make_case(
        lengths=(3, 0, 2, 700, 1, 1), block=block, dims=dims if pooled else dims[1:] * 2, mode=mode, dtype=dtype
    )
    common = {"layout": layout, "features": features, "is_pooled": pooled}
    with forced(is_portable=True):
        walked = gradients(array, ids, offsets, **common)
    for threads in (1, 3):
        with forced(threads=threads):
            found = gradients(array, ids, offsets, **common)
        assert all(map(torch.equal, found, walked))
    touched = torch.zeros(2, count_lines(len(array)), dtype=torch.uint8)
    few = (ids[:1], torch.tensor([0, 1, 1]))
    for is_portable, lines in zip((False, True), touched, strict=True):
        target, output = torch.zeros_like(array), torch.ones_like(walked[0][:1])
        with forced(is_portable=is_portable):
            shared_scatter(target, output, *few, touched=lines, **common)
    assert torch.equal(*touched)
    assert 0 < touched[0].sum() < len(touched[0])


def test_gradients_are_right_in_float64():
    for mode, exact in (("sum", True), ("mean", False)):
        layout, features, array, ids, offsets = make_case(
            mode=mode, exact=exact, dims=(5, 3), block=2, dtype=torch.float64
        )
        lookup = lambda a, of=(ids, offsets), own=(layout, features): shared_lookup(  # noqa: E731
            a, *of, layout=own[0], features=own[1]
        )
        assert torch.autograd.gradcheck(lookup, array.requires_grad_())


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_narrow_exact_rows_repeat_over_the_row(mode):
    layout, features, array, ids, offsets = make_case(mode=mode, exact=True, exact_width=6, dtype=torch.float64)
    one = shared_lookup(array, torch.tensor([7]), torch.tensor([0, 1, 1]), layout=layout, features=features)
    assert torch.equal(one[0, :20], array[310:316].repeat(4)[:20])
    common = {"layout": layout, "features": features}
    expected = gradients(array, ids, offsets, kernel="reference", **common)
    for found, wanted in zip(gradients(array, ids, offsets, **common), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    lookup = lambda a: shared_lookup(a, ids, offsets, layout=layout, features=features)  # noqa: E731
    assert torch.autograd.gradcheck(lookup, array.requires_grad_())


def test_the_slots_are_the_formula_by_hand():
    layout, features, array, _, _ = make_case(block=8, seed=3)
    key, factor, step = layout.table_key(0), 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
    expected = []
    for column in range(20):
        hashed = mix_bits(key + 7 * factor + (column // 8) * step)
        expected.append(float(array[(hashed * (SIZE - 8 + 1) >> 64) + column % 8]))
    found = shared_lookup(array, torch.tensor([7]), torch.tensor([0, 1, 1]), layout=layout, features=features)
    assert found[0, :20].tolist() == expected


def test_the_mapping_is_the_same_on_every_machine():
    layout = SharedLayout(size=1000, block_size=4, seed=1)
    rows = SharedFeatures.of([SharedFeature(key=layout.table_key(2), dim=8)]).rows[0].tolist()
    slots = reference.find_slots(torch.tensor([0, -5, 2**62]), rows, torch.empty(0).long(), layout.numbers())
    assert slots[:, ::4].tolist() == [[29, 43], [414, 920], [23, 735]]


def test_hashes_spread_evenly():
    layout = SharedLayout(size=64, block_size=1)
    feature = SharedFeatures.of([SharedFeature(key=layout.table_key(0), dim=16)]).rows[0].tolist()
    slots = reference.find_slots(torch.arange(4000), feature, torch.empty(0).long(), layout.numbers())
    counts = torch.bincount(slots.flatten(), minlength=64).double()
    assert ((counts - 1000).square() / 1000).sum() < 120  # chi-square of 63 degrees: 1 in 100,000


def test_tables_and_seeds_get_other_rows():
    array = torch.arange(1000.0)
    seen = set()
    for seed in (0, 1):
        layout = SharedLayout(size=1000, block_size=4, seed=seed)
        for table in (0, 1):
            features = SharedFeatures.of([SharedFeature(key=layout.table_key(table), dim=4)])
            row = shared_lookup(array, torch.tensor([5]), torch.tensor([0, 1]), layout=layout, features=features)
            seen.add(tuple(row[0].tolist()))
    assert len(seen) == 4


def test_scatter_into_the_array_is_a_step_of_sgd():
    layout, features, array, ids, offsets = make_case(exact=True)
    vectors, gradient = gradients(array, ids, offsets, layout=layout, features=features)
    output = torch.randn(vectors.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).float()
    stepped, touched = array.clone(), torch.zeros(count_lines(len(array)), dtype=torch.uint8)
    common = {"layout": layout, "features": features, "touched": touched}
    shared_scatter(stepped, output, ids, offsets, scale=-0.5, **common)
    torch.testing.assert_close(stepped, array - 0.5 * gradient)
    changed = torch.nn.functional.pad(stepped != array, (0, -len(array) % 16)).view(-1, 16).any(1)
    assert (touched.bool() >= changed).all()
    assert touched.sum() < len(touched)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("num_slots", [1, 16, 37, 160])
def test_adagrad_matches_the_reference_and_clears_up(num_slots, grouped):
    generator = torch.Generator().manual_seed(0)
    array, gradient = torch.randn(2, num_slots, generator=generator)
    gradient[: num_slots // 2] = 0
    momentum = torch.rand(count_lines(num_slots) if grouped else num_slots, generator=generator)
    expected = reference.adagrad(array, momentum, gradient, group=16 if grouped else 1, lr=0.1, eps=1e-8)
    touched = torch.ones(count_lines(num_slots), dtype=torch.uint8)
    shared_step(array, momentum, gradient, touched, lr=0.1)
    torch.testing.assert_close(array, expected[0])
    torch.testing.assert_close(momentum, expected[1])
    assert not gradient.any()
    assert not touched.any()


@pytest.mark.parametrize("lengths", [(0, 0), (0, 0, 0, 0)])
def test_empty_lists_give_zeros(lengths):
    for mode in ("sum", "mean"):
        layout, features, array, ids, offsets = make_case(lengths=lengths, mode=mode)
        found = gradients(array, ids, offsets, layout=layout, features=features)
        assert not found[0].any()
        assert not found[1].any()
    none = shared_lookup(array, ids, torch.tensor([0]), layout=layout, features=features)
    assert none.shape == (0, 29)


def test_the_ops_keep_the_rules_of_torch_library():
    layout, features, array, ids, offsets = make_case(exact=True)
    lists = (ids, offsets, *features.described(layout, is_pooled=True), "cpu")
    torch.library.opcheck(ops.shared_lookup.traced, (array.requires_grad_(), None, *lists))
    torch.library.opcheck(ops.shared_gradient.traced, (torch.randn(3, features.width), len(array), *lists))


def test_it_stays_in_one_graph_when_compiled():
    layout, features, array, ids, offsets = make_case(exact=True)

    def run(array):
        return shared_lookup(array, ids, offsets, layout=layout, features=features).sin().sum()

    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        leaf = array.clone().requires_grad_()
        function(leaf).backward()
        results.append(leaf.grad)
    assert torch.equal(*results)


def test_bad_arguments_are_named():
    layout, features, array, ids, offsets = make_case()
    common = {"layout": layout, "features": features}
    with pytest.raises(ValueError, match="expected F \\* B \\+ 1"):
        shared_lookup(array, ids, offsets[:-1], **common)
    with pytest.raises(ValueError, match="expected ascending offsets"):
        shared_lookup(array, ids, offsets.flip(0), **common)
    with pytest.raises(ValueError, match="at least 301 slots"):
        shared_lookup(array[:-1], ids, offsets, **common)
    with pytest.raises(ValueError, match="dtype is float16"):
        shared_lookup(array.half(), ids, offsets, **common)
    with pytest.raises(ValueError, match="kernel is 'gpu'"):
        shared_lookup(array, ids, offsets, kernel="gpu", **common)
    with pytest.raises(ValueError, match="expected one width"):
        shared_lookup(array, ids, offsets, is_pooled=False, **common)
    with pytest.raises(ValueError, match="at least one block of 16"):
        SharedLayout(size=10)


def test_the_gradient_is_the_same_in_processes_of_one_and_two_threads():
    script = (
        "import torch, hashlib; from kernels import shared_lookup; from kernels.shared_lookup import *;"
        "g = torch.Generator().manual_seed(0); layout = SharedLayout(size=5000, block_size=16);"
        "f = SharedFeatures.of([SharedFeature(key=layout.table_key(0), dim=64)]);"
        "a = torch.randn(5000, generator=g).requires_grad_(); ids = torch.randint(10**9, (40000,), generator=g);"
        "o = shared_lookup(a, ids, torch.arange(0, 40001, 20), layout=layout, features=f);"
        "o.backward(torch.randn(o.shape, generator=g));"
        "print(hashlib.sha256(o.detach().numpy().tobytes() + a.grad.numpy().tobytes()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "OMP_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "2")
    }
    assert len(digests) == 1


def test_the_package_gives_the_function_and_the_folder_its_parts():
    assert importlib.import_module("kernels").shared_lookup is shared_lookup
