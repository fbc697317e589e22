"""Predictions of held-out samples are collected without the batches that they come from."""

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill.data.ikjt.batch import Batch
from recmill.training.evaluation import PredictionCollector


def test_collected_predictions_do_not_keep_the_readers_buffers_alive():
    labels, sessions = torch.arange(1000.0)[:, None], torch.arange(1000)
    ids = KeyedJaggedTensor(keys=["item"], values=torch.tensor([5, 6, 7]), lengths=torch.tensor([2, 1]))
    batch = Batch(dense_BF=torch.zeros(2, 1), ids=ids, label_BT=labels[10:12], num_global=2, session_B=sessions[20:22])
    collector = PredictionCollector(labels=("label",), features=("item",))
    collector.add(batch, torch.tensor([0.5, -0.5]))
    labels.zero_()  # the reader uses its buffers again
    sessions.zero_()
    found = collector.gather()
    assert found is not None
    assert found.label_NT.tolist() == [[10.0], [11.0]]
    assert found.session_N.tolist() == [20, 21]
    assert found.ids["item"].tolist() == [5, 7]
    kept = [*collector.logits, *collector.truth, *collector.sessions, *collector.ids["item"]]
    assert all(part.untyped_storage().nbytes() == part.numel() * part.element_size() for part in kept)
