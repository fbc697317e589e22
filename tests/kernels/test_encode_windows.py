import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.encode_windows import EncoderBlock, WindowEncoder, encode_windows
from tests.kernels.forced import forced
from tests.kernels.test_dense_layers import CPUS


def encoder_of(*, width=8, num_heads=2, num_blocks=2, num_queries=2, num_positions=100, inner=20, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, scale=None):
        return torch.randn(*shape, generator=generator) * (shape[-1] ** -0.5 if scale is None else scale)

    blocks = [
        EncoderBlock(
            packed_ED=random(3 * width, width),
            packed_bias_E=random(3 * width),
            project_DD=random(width, width),
            first_FD=random(inner, width),
            first_bias_F=random(inner),
            last_DF=random(width, inner),
            bias_D=random(width),
        )
        for _ in range(num_blocks)
    ]
    return WindowEncoder(
        blocks,
        num_heads=num_heads,
        epsilon=1e-5,
        position_PD=random(num_positions, width) if num_positions else None,
        query_QD=random(num_queries, width, scale=1.0),
        mix_weight=random(width, num_queries * width),
        mix_bias_D=random(width),
    )


def windows_of(lengths, *, width, gap=0, seed=0):
    """Rows and windows that follow one another, `gap` rows apart; negative: they overlap."""
    starts, at = [], 0
    for length in lengths:
        starts.append(at)
        at = max(0, at + length + gap)
    num_rows = max([start + length for start, length in zip(starts, lengths, strict=True)], default=0)
    rows_ND = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))
    return rows_ND, torch.tensor(starts, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64)


@given(
    head_width=st.sampled_from([1, 3, 8, 16, 17]),
    num_heads=st.integers(1, 3),
    num_blocks=st.integers(0, 3),
    num_queries=st.sampled_from([1, 2, 17]),
    inner=st.sampled_from([1, 16, 33]),
    lengths=st.lists(st.sampled_from([0, 1, 2, 5, 16, 17, 63, 64, 65, 90]), max_size=8),
    gap=st.sampled_from([0, 3, -2]),
    has_positions=st.booleans(),
    cpu=st.sampled_from([*CPUS]),
    num_threads=st.integers(1, 3),
)
@settings(max_examples=150, deadline=None)
def test_vectors_are_those_of_the_reference(
    head_width, num_heads, num_blocks, num_queries, inner, lengths, gap, has_positions, cpu, num_threads
):
    width = head_width * num_heads
    encoder = encoder_of(
        width=width,
        num_heads=num_heads,
        num_blocks=num_blocks,
        num_queries=num_queries,
        num_positions=90 if has_positions else 0,
        inner=inner,
    )
    rows_ND, starts_W, lengths_W = windows_of(lengths, width=width, gap=gap)
    expected = encode_windows(encoder, rows_ND, starts_W, lengths_W, kernel="reference")
    with forced(threads=num_threads, **CPUS[cpu]):
        found = encode_windows(encoder, rows_ND, starts_W, lengths_W)
    assert found.shape == (len(lengths), width)
    largest = max(1.0, float(expected.abs().max())) if len(lengths) else 1.0
    torch.testing.assert_close(found, expected, atol=1e-5 * largest, rtol=1e-5)
    assert not found[lengths_W == 0].any()


@pytest.mark.parametrize("cpu", CPUS)
def test_a_window_has_the_same_bits_in_any_company(cpu):
    encoder = encoder_of(width=24, num_heads=3)
    rows_ND, starts_W, lengths_W = windows_of([3, 70, 0, 1, 12, 64, 9, 33], width=24)
    with forced(**CPUS[cpu]):
        alone = [
            encode_windows(encoder, rows_ND, starts_W[w : w + 1], lengths_W[w : w + 1]) for w in range(len(lengths_W))
        ]
    for threads in (1, 3):
        with forced(threads=threads, **CPUS[cpu]):
            assert torch.equal(encode_windows(encoder, rows_ND, starts_W, lengths_W), torch.cat(alone))


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_scores_that_are_far_apart_stay_numbers(scale, cpu):
    encoder = encoder_of(width=16)
    rows_ND, starts_W, lengths_W = windows_of([40, 5], width=16)
    rows_ND = rows_ND * scale
    rows_ND[3] = 50.0 * scale
    with forced(**CPUS[cpu]):
        found = encode_windows(encoder, rows_ND, starts_W, lengths_W)
    expected = encode_windows(encoder, rows_ND, starts_W, lengths_W, kernel="reference")
    torch.testing.assert_close(found, expected, atol=1e-6 * max(1.0, float(rows_ND.abs().max())), rtol=1e-5)


def test_hostile_windows_are_refused():
    encoder, rows_ND = encoder_of(num_positions=5), torch.zeros(9, 8)
    wrong = [
        ([0], [10], "window 0"),
        ([-1], [2], "window 0"),
        ([0, 8], [1, 2], "window 1"),
        ([0], [-1], "window 0"),
        ([2**62], [2**62], "window 0"),
        ([0], [6], "6 rows, (at most 5|more than)"),
    ]
    for starts, lengths, message in wrong:
        for kernel in ("cpu", "reference"):
            with pytest.raises(ValueError, match=message):
                encode_windows(encoder, rows_ND, torch.tensor(starts), torch.tensor(lengths), kernel=kernel)
    with pytest.raises(ValueError, match="rows of 8 numbers"):
        encode_windows(encoder, torch.zeros(9, 7), torch.tensor([0]), torch.tensor([1]))
    with pytest.raises(ValueError, match="starts of shape"):
        encode_windows(encoder, rows_ND, torch.tensor([0, 1]), torch.tensor([1]))


def test_weights_that_do_not_fit_together_are_refused():
    good = encoder_of()
    block = good.blocks[0]
    wrong = [
        {"first_FD": torch.zeros(20, 9)},
        {"last_DF": torch.zeros(8, 21)},
        {"first_bias_F": torch.zeros(19)},
        {"bias_D": torch.zeros(9)},
        {"packed_ED": torch.zeros(24, 9)},
    ]
    for change in wrong:
        changed = EncoderBlock(**{**block.__dict__, **change})
        with pytest.raises(ValueError, match=r"expected layers|elements, expected|expected queries"):
            WindowEncoder(
                [changed],
                num_heads=2,
                epsilon=1e-5,
                position_PD=None,
                query_QD=good.query_QD,
                mix_weight=good.mix_weight,
                mix_bias_D=good.mix_bias_D,
            )
    with pytest.raises(ValueError, match="mix: expected a column"):
        WindowEncoder(
            [],
            num_heads=1,
            epsilon=1e-5,
            position_PD=None,
            query_QD=good.query_QD,
            mix_weight=torch.zeros(8, 8),
            mix_bias_D=good.mix_bias_D,
        )
