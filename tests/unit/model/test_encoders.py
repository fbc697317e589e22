"""Encoders over windows give what plain torch gives sequence by sequence, forward, backward and after steps."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from recmill.model.encoders import (
    AttentionEncoder,
    HSTUEncoder,
    SequenceWindows,
    StandardTransformerEncoder,
    TargetAttentionEncoder,
    TransformerEncoder,
    fold_encoder,
)

DIM, HEADS, LAYERS, LONGEST = 8, 2, 2, 16
# Histories that grow, that shift when they are full, that repeat, and none.
WINDOWS = {
    "growing": ([0, 0, 0, 0], [1, 2, 3, 7]),
    "shifting": ([0, 1, 2, 3], [16, 16, 16, 16]),
    "both": ([0, 0, 2, 5, 5, 19], [3, 16, 16, 0, 11, 5]),
    "apart": ([0, 3, 3, 9], [3, 0, 6, 1]),
    "empty": ([0, 0], [0, 0]),
}
STACKED = {
    "standard": lambda: StandardTransformerEncoder(DIM, HEADS, LAYERS, LONGEST),
    "hstu": lambda: HSTUEncoder(DIM, HEADS, LAYERS, LONGEST),
    "hstu, one block": lambda: HSTUEncoder(DIM, HEADS, 1, LONGEST),
}


def make_windows(name, rows):
    starts, lengths = WINDOWS[name]
    return SequenceWindows(rows_ND=rows, starts_U=torch.tensor(starts), lengths_U=torch.tensor(lengths))


def sequences_of(windows):
    pairs = zip(windows.starts_U.tolist(), windows.lengths_U.tolist(), strict=True)
    return [windows.rows_ND[start : start + length] for start, length in pairs]


def standard_reference(encoder):
    """torch.nn.TransformerEncoder with the encoder's weights, over sequences with positions; then its pooling."""
    layer = nn.TransformerEncoderLayer(
        DIM, HEADS, 4 * DIM, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    reference = nn.TransformerEncoder(layer, len(encoder.blocks), norm=nn.LayerNorm(DIM), enable_nested_tensor=False)
    names = {
        "attention_norm": "norm1",
        "query_key_value.weight": "self_attn.in_proj_weight",
        "query_key_value.bias": "self_attn.in_proj_bias",
        "project": "self_attn.out_proj",
        "feed_forward.0": "norm2",
        "feed_forward.1": "linear1",
        "feed_forward.3": "linear2",
    }
    state = {}
    for path, value in encoder.state_dict().items():
        if path.startswith("blocks."):
            _, number, rest = path.split(".", 2)
            mine = next(name for name in names if rest.startswith(name))
            state[f"layers.{number}.{names[mine]}{rest.removeprefix(mine)}"] = value
        elif path.startswith("norm."):
            state[path] = value
    reference.load_state_dict(state)
    reference.double()

    def encode(sequence_LD):
        length = len(sequence_LD)
        if not length:
            return torch.zeros(DIM, dtype=torch.float64)
        ages = torch.arange(length - 1, -1, -1)
        hidden_1LD = reference((sequence_LD + encoder.position.weight.double()[ages])[None])
        weights_LH = (hidden_1LD[0] @ encoder.pool.query_HD.double().T).softmax(0)
        pooled_HD = weights_LH.T @ hidden_1LD[0]
        value, mix = encoder.pool.value, encoder.pool.mix
        values = functional.linear(pooled_HD, value.weight.double(), value.bias.double()).flatten()
        return functional.linear(values, mix.weight.double(), mix.bias.double())

    return encode


def hstu_reference(encoder):
    """The paper's equations, row by row and pair by pair."""

    def encode(sequence_LD):
        if not len(sequence_LD):
            return torch.zeros(DIM, dtype=torch.float64)
        hidden_LD = sequence_LD
        for unit in encoder.units:
            normed = functional.layer_norm(hidden_LD, [DIM], eps=1e-3)
            gates = functional.silu(normed @ unit.gate.weight.double().T)
            queries, keys, values = functional.silu(normed @ unit.query_key_value.weight.double().T).chunk(3, dim=1)
            found = []
            for i in range(len(hidden_LD)):
                heads = []
                for head in torch.arange(DIM).chunk(HEADS):
                    total = torch.zeros(len(head), dtype=torch.float64)
                    for j in range(i + 1):
                        score = queries[i, head] @ keys[j, head] + unit.distance_R.double()[i - j]
                        total = total + functional.silu(score) / LONGEST * values[j, head]
                    heads.append(total)
                joined = functional.layer_norm(torch.cat(heads), [DIM], eps=0.1 / LONGEST**2) * gates[i]
                output = unit.output
                found.append(hidden_LD[i] + functional.linear(joined, output.weight.double(), output.bias.double()))
            hidden_LD = torch.stack(found)
        norm = encoder.norm
        return functional.layer_norm(hidden_LD[-1], [DIM], norm.weight.double(), norm.bias.double())

    return encode


REFERENCES = {"standard": standard_reference, "hstu": hstu_reference, "hstu, one block": hstu_reference}


def make(kind):
    torch.manual_seed(0)
    encoder = STACKED[kind]()
    for parameter in encoder.parameters():  # norms and biases start at ones and zeros
        nn.init.normal_(parameter, std=0.5)
    return encoder


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("kind", STACKED)
def test_windows_are_encoded_as_plain_torch_encodes_each_sequence(kind, name):
    encoder = make(kind)
    rows = torch.randn(24, DIM, requires_grad=True)
    exact_rows = rows.detach().double().requires_grad_()
    exact = torch.stack([REFERENCES[kind](encoder)(own) for own in sequences_of(make_windows(name, exact_rows))])
    gradient = torch.randn(exact.shape, dtype=torch.float64)
    found = encoder.encode(make_windows(name, rows))
    padded = padded_encoding(encoder, make_windows(name, rows))
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(padded.double(), exact, rtol=1e-4, atol=1e-4)
    found.backward(gradient.float())
    if exact.requires_grad:
        exact.backward(gradient)
        torch.testing.assert_close(rows.grad.double(), exact_rows.grad, rtol=1e-3, atol=1e-3)
    assert all(parameter.grad is not None for parameter in encoder.parameters())


def padded_encoding(encoder, windows, *others):
    padded = nn.utils.rnn.pad_sequence([*sequences_of(windows), torch.zeros(1, DIM)], batch_first=True)[:-1]
    return encoder(padded, windows.lengths_U, *others)


def steps(encoder, encode, rows, num_steps=5, lr=0.1):
    """All weights after some steps that pull the encodings towards fixed vectors.

    SGD: Adam would make whole steps of gradients that are only rounding, as those of biases before a softmax.
    """
    rows = rows.clone().requires_grad_()
    optimiser = torch.optim.SGD([*encoder.parameters(), rows], lr=lr)
    for _ in range(num_steps):
        found = encode(encoder, rows)
        wanted = torch.linspace(-1, 1, found.numel()).view(found.shape)
        optimiser.zero_grad()
        ((found - wanted) ** 2).mean().backward()
        optimiser.step()
    return {"rows": rows.detach(), **encoder.state_dict()}


@pytest.mark.parametrize("name", ["both", "shifting"])
@pytest.mark.parametrize("kind", STACKED)
def test_training_over_windows_gives_the_weights_of_training_over_padded_sequences(kind, name):
    rows = torch.randn(24, DIM, generator=torch.Generator().manual_seed(1))
    ours = steps(make(kind), lambda encoder, rows: encoder.encode(make_windows(name, rows)), rows)
    plain = steps(make(kind), lambda encoder, rows: padded_encoding(encoder, make_windows(name, rows)), rows)
    for path, value in plain.items():
        torch.testing.assert_close(ours[path], value, rtol=1e-4, atol=1e-5, msg=lambda text, path=path: path + text)


def din_reference(encoder, sequence_LD, target_D):
    """The published form: the unit sees four joined vectors of one element at a time."""
    weights = []
    for element_D in sequence_LD:
        joined = torch.cat([element_D, target_D, element_D - target_D, element_D * target_D])
        hidden = functional.linear(joined, encoder.first.weight.double(), encoder.first.bias.double())
        for layer in encoder.others:
            if isinstance(layer, nn.PReLU):
                hidden = torch.where(hidden >= 0, hidden, hidden * layer.weight.double())
            else:
                hidden = functional.linear(hidden, layer.weight.double(), layer.bias.double())
        weights.append(hidden)
    if not weights:
        return torch.zeros(DIM, dtype=torch.float64)
    found_L1 = torch.stack(weights)
    return ((found_L1.softmax(0) if encoder.is_softmax else found_L1) * sequence_LD).sum(0)


@pytest.mark.parametrize("is_softmax", [False, True])
@pytest.mark.parametrize("widths", [(36,), (12, 5)])
@pytest.mark.parametrize("name", WINDOWS)
def test_target_attention_over_windows_is_the_published_unit_for_each_sample(name, widths, is_softmax):
    torch.manual_seed(0)
    encoder = TargetAttentionEncoder(DIM, widths, is_softmax=is_softmax)
    rows = torch.randn(24, DIM, requires_grad=True)
    inverse = torch.arange(9) % len(WINDOWS[name][0])
    targets = torch.randn(9, DIM, requires_grad=True)
    exact_rows, exact_targets = (leaf.detach().double().requires_grad_() for leaf in (rows, targets))
    sequences = sequences_of(make_windows(name, exact_rows))
    exact = torch.stack(
        [din_reference(encoder, sequences[u], exact_targets[b]) for b, u in enumerate(inverse.tolist())]
    )
    windows = make_windows(name, rows)
    found = encoder.encode(windows, targets, inverse)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    samples = SequenceWindows(rows_ND=rows, starts_U=windows.starts_U[inverse], lengths_U=windows.lengths_U[inverse])
    torch.testing.assert_close(encoder.encode(samples, targets, None), found)
    torch.testing.assert_close(padded_encoding(encoder, samples, targets), found, rtol=1e-4, atol=1e-5)
    gradient = torch.randn(exact.shape, dtype=torch.float64)
    found.backward(gradient.float())
    if exact.requires_grad:
        exact.backward(gradient)
        torch.testing.assert_close(rows.grad.double(), exact_rows.grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(targets.grad.double(), exact_targets.grad, rtol=1e-4, atol=1e-4)
    assert all(parameter.grad is not None for parameter in encoder.parameters())


@pytest.mark.parametrize("is_softmax", [False, True])
def test_training_target_attention_over_windows_gives_the_weights_of_padded_sequences(is_softmax):
    generator = torch.Generator().manual_seed(1)
    rows, targets = torch.randn(24, DIM, generator=generator), torch.randn(9, DIM, generator=generator)
    inverse = torch.arange(9) % 6

    def ours(encoder, rows):
        return encoder.encode(make_windows("both", rows), targets, inverse)

    def plain(encoder, rows):
        windows = make_windows("both", rows)
        samples = SequenceWindows(
            rows_ND=rows, starts_U=windows.starts_U[inverse], lengths_U=windows.lengths_U[inverse]
        )
        return padded_encoding(encoder, samples, targets)

    found = []
    for encode in (ours, plain):
        torch.manual_seed(0)
        found.append(steps(TargetAttentionEncoder(DIM, (12,), is_softmax=is_softmax), encode, rows, lr=0.01))
    for path, value in found[1].items():
        torch.testing.assert_close(found[0][path], value, rtol=1e-4, atol=1e-5)


def test_windows_with_one_start_are_parts_of_the_longest():
    windows, longest = make_windows("both", torch.zeros(24, DIM)).longest_per_start()
    assert windows.starts_U.tolist() == [0, 2, 5, 19]
    assert windows.lengths_U.tolist() == [16, 16, 11, 5]
    assert longest.tolist() == [0, 0, 1, 2, 2, 3]


def test_the_newest_element_alone_reads_out_of_hstu():
    """A causal encoder's older rows do not change when a history grows."""
    encoder = make("hstu")
    rows = torch.randn(6, DIM)
    windows = SequenceWindows(rows_ND=rows, starts_U=torch.tensor([0, 0]), lengths_U=torch.tensor([5, 6]))
    alone = SequenceWindows(rows_ND=rows, starts_U=torch.tensor([0]), lengths_U=torch.tensor([5]))
    torch.testing.assert_close(encoder.encode(windows)[:1], encoder.encode(alone))


def test_standard_blocks_are_sequential_and_ours_parallel():
    """With the same weights the two give different results, so neither stands in for the other."""
    torch.manual_seed(0)
    ours, standard = TransformerEncoder(DIM, HEADS, 1, LONGEST), StandardTransformerEncoder(DIM, HEADS, 1, LONGEST)
    standard.load_state_dict(ours.state_dict(), strict=False)
    rows, lengths = torch.randn(1, 5, DIM), torch.tensor([5])
    assert not torch.allclose(ours(rows, lengths), standard(rows, lengths), atol=1e-3)


FOLDED = {
    "attention": lambda: AttentionEncoder(DIM, HEADS),
    **{
        f"transformer, {layers} blocks": lambda layers=layers: TransformerEncoder(DIM, HEADS, layers, LONGEST)
        for layers in (1, 2, 3)
    },
}


@pytest.mark.parametrize("windows", [*WINDOWS, "one", "one, empty", "one, cut", "packed"])
@pytest.mark.parametrize("name", FOLDED)
def test_a_folded_encoder_encodes_what_the_encoder_encodes(name, windows):
    torch.manual_seed(0)
    encoder, rows_ND = FOLDED[name](), torch.randn(24, DIM)
    for weight in encoder.parameters():
        nn.init.normal_(weight, std=0.5)  # norms and biases too
    lists = {"one": [24], "one, empty": [0], "one, cut": [24], "packed": [16, 0, 3, 5]}
    if windows in lists:
        lengths_U = torch.tensor(lists[windows])
        limit = 8 if windows == "one, cut" else 24
        rows_ND = rows_ND[: lengths_U.sum()]
        given = SequenceWindows.of_lists(rows_ND, lengths_U, max_length=min(limit, LONGEST))
    else:
        given = make_windows(windows, rows_ND)
    with torch.no_grad():
        expected_UD = encoder.encode(given)
        found_UD = fold_encoder(encoder).encode(given)
    assert found_UD.shape == expected_UD.shape
    torch.testing.assert_close(found_UD, expected_UD, atol=2e-6 * max(1.0, float(expected_UD.abs().max())), rtol=1e-5)


def test_encoders_without_a_folded_form_stay_as_they_are():
    for make in STACKED.values():
        encoder = make()
        assert fold_encoder(encoder) is encoder
