import pytest
import torch

from recmill.model.encoders import AttentionEncoder, MeanEncoder, TransformerEncoder
from recmill.model.layers import CrossNetwork


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
