import pytest
import torch

from kernels import shared_lookup, shared_step
from kernels.shared_lookup import SharedFeature, SharedFeatures, SharedLayout, packing
from kernels.shared_lookup.layout import count_lines
from tests.kernels.forced import forced


def make_array(num_slots, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-12, 5, (num_slots // 16 + 1,), generator=generator).float())
    return torch.randn(num_slots, generator=generator) * spread.repeat_interleave(16)[:num_slots]


def make_case(*, block=5, mode="sum", exact_width=6):
    layout = SharedLayout(size=300, block_size=block, seed=4)
    kept = {"exact_start": 0, "num_exact": 3, "exact_base": 304, "exact_width": exact_width}
    features = [
        SharedFeature(key=layout.table_key(1), dim=20, is_mean=mode == "mean", **kept),
        SharedFeature(key=layout.table_key(2), dim=20, is_mean=mode == "mean"),
    ]
    ids = torch.randint(0, 60, (40,), generator=torch.Generator().manual_seed(2))
    offsets = torch.tensor([0, 3, 3, 10, 18, 30, 40])
    return layout, SharedFeatures.of(features, torch.tensor([2, 7, 30])), ids, offsets


def test_a_weight_is_at_most_half_a_unit_off_and_the_largest_fills_the_byte():
    values = make_array(403)
    codes, exponents = packing.pack(values)
    units = torch.exp2(exponents.float()).repeat_interleave(16)[:403]
    assert ((packing.unpack(codes, exponents) - values).abs() <= units / 2).all()
    largest = torch.nn.functional.pad(codes.abs(), (0, -403 % 16)).view(-1, 16).max(1).values
    assert (largest >= 63).all()


def test_random_rounding_is_right_on_average():
    values = torch.linspace(-1, 1, 16)
    found = packing.unpack(*packing.pack(values.repeat(4_000), key=3)).view(4_000, 16)
    unit = 1 / 64
    assert (found.mean(0) - values).abs().max() < 5 * unit / 2 / 4_000**0.5
    assert (found - values).abs().max() < unit
    assert len(found[:, 3].unique()) == 2


@pytest.mark.parametrize(("mode", "pooled"), [("sum", True), ("mean", True), ("sum", False)])
def test_lookups_give_what_they_give_of_the_unpacked_array(mode, pooled):
    for block in (1, 5, 20):
        layout, features, ids, offsets = make_case(block=block, mode=mode)
        codes, exponents = packing.pack(make_array(330))
        common = {"layout": layout, "features": features, "is_pooled": pooled}
        expected = shared_lookup(packing.unpack(codes, exponents), ids, offsets, **common)
        for how in ({}, {"threads": 3}, {"is_portable": True}):
            with forced(**how):
                assert torch.equal(shared_lookup(codes, ids, offsets, exponents=exponents, **common), expected)
        again = shared_lookup(codes, ids, offsets, exponents=exponents, kernel="reference", **common)
        torch.testing.assert_close(again, expected)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("num_slots", [1, 16, 37, 4_000])
def test_a_step_has_the_bits_of_the_reference_on_any_number_of_threads(num_slots, kind):
    generator = torch.Generator().manual_seed(1)
    codes, exponents = packing.pack(make_array(num_slots))
    num_lines = count_lines(num_slots)
    momentum = torch.rand({"sgd": 0, "adagrad": num_slots, "rowwise_adagrad": num_lines}[kind], generator=generator)
    gradient = torch.randn(num_slots, generator=generator)
    how = {"lr": 0.03, "eps": 1e-8, "key": -7_000_000_001}
    expected = packing.step_packed(codes, exponents, momentum, gradient, **how)
    for threads in (1, 3):
        own = [tensor.clone() for tensor in (codes, exponents, momentum, gradient)]
        touched = torch.ones(num_lines, dtype=torch.uint8)
        with forced(threads=threads):
            shared_step(own[0], *own[2:], touched, exponents=own[1], **how)
        assert torch.equal(own[0], expected[0])
        assert torch.equal(own[1], expected[1])
        torch.testing.assert_close(own[2], expected[2])
        assert not own[3].any()
        assert not touched.any()


def test_lines_that_were_not_touched_stay_and_steps_below_a_unit_add_up():
    codes, exponents = packing.pack(torch.full((64,), 1.0))
    before, touched = packing.unpack(codes, exponents), torch.tensor([1, 0, 1, 0], dtype=torch.uint8)
    for key in range(1_000):
        gradient = torch.full((64,), 1e-4)
        shared_step(codes, torch.empty(0), gradient, touched.clone(), lr=1.0, exponents=exponents, key=key * 12_345)
    after = packing.unpack(codes, exponents)
    assert torch.equal(after[16:32], before[16:32])
    assert torch.equal(after[48:], before[48:])
    # a unit is 1 / 64, a step 1 / 156 of it
    assert (before - after)[:16].mean() == pytest.approx(0.1, abs=0.02)


def test_what_is_not_finite_stays_visible():
    codes, exponents = packing.pack(torch.ones(32))
    gradient = torch.zeros(32)
    gradient[3] = torch.nan
    shared_step(codes, torch.empty(0), gradient, torch.ones(2, dtype=torch.uint8), lr=1.0, exponents=exponents)
    after = packing.unpack(codes, exponents)
    assert after[:16].isnan().all()
    assert torch.equal(after[16:], torch.ones(16))
    assert packing.pack(after, exponents)[1].tolist() == exponents.tolist()


def test_bad_arguments_are_named():
    layout, features, ids, offsets = make_case()
    codes, exponents = packing.pack(make_array(330))
    with pytest.raises(ValueError, match="exponents: has 3 elements, expected 21"):
        shared_lookup(codes, ids, offsets, layout=layout, features=features, exponents=exponents[:3])
    with pytest.raises(ValueError, match="dtype is int8, expected"):
        shared_lookup(codes, ids, offsets, layout=layout, features=features)
    touched = torch.ones(21, dtype=torch.uint8)
    with pytest.raises(ValueError, match="momentum: has 5"):
        shared_step(codes, torch.zeros(5), torch.zeros(330), touched, lr=0.1, exponents=exponents)
