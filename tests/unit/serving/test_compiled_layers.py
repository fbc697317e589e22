"""Compiled encoders, and scores on CPUs that lack the instructions of compiled layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from recmill.model.encoders import AttentionEncoder, SequenceWindows, TransformerEncoder, fold_encoder
from recmill.model.settings import RankerConfig
from recmill.serving import RequestModel
from tests.kernels.forced import forced
from tests.unit.serving.test_request_model import COUNTS, LIMIT, random_batch, schema_of, trained_model, write_model

ENCODERS = {
    "attention": lambda: AttentionEncoder(12, 3),
    **{f"{layers} blocks": lambda layers=layers: TransformerEncoder(12, 3, layers, 24) for layers in (1, 2, 3)},
}


@pytest.mark.parametrize("lengths", [[24], [0], [1], [16, 0, 3, 5], [40, 2]])
@pytest.mark.parametrize("name", ENCODERS)
def test_a_compiled_encoder_encodes_what_the_encoder_encodes(name, lengths):
    torch.manual_seed(0)
    encoder, lengths_U = ENCODERS[name](), torch.tensor(lengths)
    for weight in encoder.parameters():
        nn.init.normal_(weight, std=0.3)  # norms and biases too
    windows = SequenceWindows.of_lists(torch.randn(sum(lengths), 12), lengths_U, max_length=24)
    with torch.no_grad():
        compiled = fold_encoder(encoder, is_compiled=True)
        assert compiled is not encoder
        torch.testing.assert_close(compiled.encode(windows), encoder.encode(windows), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["dlrm", "dcn"])
def test_a_cpu_without_avx2_scores_the_same_with_torch(tmp_path, name):
    config = RankerConfig(model=name, sequence_encoder="transformer", max_sequence_length=LIMIT)
    served = write_model(tmp_path, trained_model(config, schema_of()), config)
    batch = random_batch(served.signature, COUNTS)
    expected = served.score(batch)
    with forced(is_portable=True):
        plain = RequestModel.load(tmp_path)
        assert not plain._scorer.is_compiled
        np.testing.assert_allclose(plain.score(batch), expected, atol=1e-5, rtol=0)
