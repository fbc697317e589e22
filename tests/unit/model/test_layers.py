import pytest
import torch
from torch import nn

from recmill.model import layers
from recmill.model.encoders import AttentionEncoder, MeanEncoder, TransformerEncoder
from recmill.model.layers import MLP, CrossNetwork, Linear


def encoders():
    torch.manual_seed(0)
    return [MeanEncoder(), AttentionEncoder(8, 2), TransformerEncoder(8, 2, 2, 16)]


def test_cross_layer_is_the_formula_of_dcn_v2():
    torch.manual_seed(0)
    network = CrossNetwork(4, 1, 0)
    start = torch.randn(3, 4)
    layer = network.layers[0]
    torch.testing.assert_close(network(start), start * (start @ layer.weight.T + layer.bias) + start)


@pytest.mark.parametrize("encoder", encoders(), ids=lambda e: type(e).__name__)
def test_encoders_do_not_see_padding(encoder):
    rows, lengths = torch.randn(3, 5, 8), torch.tensor([5, 2, 1])
    noisy = rows.clone()
    noisy[1, 2:] = 100.0
    noisy[2, 1:] = -100.0
    wider = torch.cat([noisy, torch.full((3, 4, 8), 7.0)], dim=1)
    torch.testing.assert_close(encoder(noisy, lengths), encoder(rows, lengths))
    torch.testing.assert_close(encoder(wider, lengths), encoder(rows, lengths))


@pytest.mark.parametrize("encoder", encoders(), ids=lambda e: type(e).__name__)
def test_an_empty_sequence_encodes_to_zero_with_finite_gradients(encoder):
    rows = torch.randn(2, 3, 8, requires_grad=True)
    encoded = encoder(rows, torch.tensor([0, 3]))
    assert encoded[0].tolist() == [0.0] * 8
    encoded.sum().backward()
    assert torch.isfinite(rows.grad).all()
    assert rows.grad[0].abs().sum() == 0


def test_transformer_counts_positions_from_the_newest_element():
    torch.manual_seed(0)
    encoder = TransformerEncoder(8, 2, 1, 16)
    sequence = torch.randn(1, 4, 8)
    swapped = sequence[:, [1, 0, 2, 3]]
    four = torch.tensor([4])
    assert not torch.allclose(encoder(sequence, four), encoder(swapped, four))


def run_with_gradients(module, rows):
    module.zero_grad()
    rows = rows.clone().requires_grad_()
    out = module(rows)
    (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
    return [out.detach(), rows.grad, *(own.grad.clone() for own in module.parameters())]


needs_onednn = pytest.mark.skipif(not layers.HAS_ONEDNN, reason="oneDNN is not faster on this CPU")


@needs_onednn
@pytest.mark.parametrize("is_logit", [True, False])
@pytest.mark.parametrize("widths", [(256, 128, 1), (64,), (7, 300)])
def test_layers_through_onednn_are_those_of_torch_with_their_gradients(widths, is_logit, monkeypatch):
    torch.manual_seed(0)
    ours = MLP(61, widths, is_logit=is_logit)
    rows = torch.randn(192, 61)
    assert "_LayersBackward" in str(ours(rows).grad_fn)
    found = run_with_gradients(ours, rows)
    monkeypatch.setattr(layers, "HAS_ONEDNN", False)
    assert "_LayersBackward" not in str(ours(rows).grad_fn)
    for own, expected in zip(found, run_with_gradients(ours, rows), strict=True):
        assert (own - expected).abs().max() <= 2e-6 * expected.abs().max()


@needs_onednn
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_linear_layer_through_onednn_is_that_of_torch(has_bias):
    torch.manual_seed(0)
    ours, plain = Linear(100, 90, bias=has_bias), nn.Linear(100, 90, bias=has_bias)
    plain.load_state_dict(ours.state_dict())
    rows = torch.randn(128, 100)
    for own, expected in zip(run_with_gradients(ours, rows), run_with_gradients(plain, rows), strict=True):
        assert (own - expected).abs().max() <= 2e-6 * expected.abs().max()


@pytest.mark.parametrize("num_rows", [0, 1, 63, 65])
def test_other_numbers_of_rows_take_torchs_layers(num_rows):
    network = MLP(61, (64, 32))
    assert torch.equal(network(torch.ones(num_rows, 61)), nn.Sequential(*network)(torch.ones(num_rows, 61)))


def test_dropout_draws_as_in_a_sequence_of_layers():
    network, rows = MLP(61, (64, 32), dropout=0.5), torch.ones(64, 61)
    torch.manual_seed(1)
    expected = nn.Sequential(*network)(rows)
    torch.manual_seed(1)
    assert torch.equal(network(rows), expected)
    assert (expected == 0).any()


@needs_onednn
def test_an_exported_network_takes_any_number_of_rows_and_holds_torchs_layers_only():
    network, rows = MLP(61, (64, 1), is_logit=True), torch.randn(70, 61)
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(network, (rows[:64],), dynamic_shapes=({0: batch},))
    assert "mkldnn" not in str(program.graph)
    assert torch.allclose(program.module()(rows), network(rows))
