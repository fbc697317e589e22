"""Heads of several labels against plain torch: forward and backward, and their loss by hand."""

import itertools
import math

import pytest
import torch
from torch import nn

from recmill.artifacts import InputError
from recmill.data.schema import Feature, Schema
from recmill.model.ranker import Ranker
from recmill.model.settings import RankerConfig
from recmill.model.tasks import MixtureOfExperts, ProgressiveExtraction, SharedBottom, sum_losses

WIDTH, TASKS, EXPERTS, LAYERS, TOWERS = 6, 3, 2, (5, 4), (3,)


def plain_mlp(layers, x, *, is_logit=False):
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    for position, linear in enumerate(linears):
        x = x @ linear.weight.T + linear.bias
        if not (is_logit and position == len(linears) - 1):
            x = torch.clamp(x, min=0)
    return x


def plain_mix(gate, x, experts):
    scores = torch.exp(x @ gate.weight.T)
    shares = scores / scores.sum(dim=1, keepdim=True)
    return sum(shares[:, number, None] * expert for number, expert in enumerate(experts))


def towers(module, inputs):
    return torch.stack(
        [plain_mlp(t, x, is_logit=True)[:, 0] for t, x in zip(module.towers, inputs, strict=True)], dim=1
    )


def plain_shared(module, x):
    return towers(module, [plain_mlp(module.bottom, x)] * TASKS)


def plain_mmoe(module, x):
    experts = [plain_mlp(expert, x) for expert in module.experts]
    return towers(module, [plain_mix(gate, x, experts) for gate in module.gates])


def plain_ple(module, x):
    own, shared = [x] * TASKS, x
    for number, level in enumerate(module.levels):
        of_tasks = [[plain_mlp(expert, x) for expert in level.own[task]] for task, x in enumerate(own)]
        of_all = [plain_mlp(expert, shared) for expert in level.shared]
        mixed = [plain_mix(level.gates[task], own[task], of_tasks[task] + of_all) for task in range(TASKS)]
        if number < len(module.levels) - 1:
            shared = plain_mix(level.shared_gate, shared, [*itertools.chain(*of_tasks), *of_all])
        own = mixed
    return towers(module, own)


def make(kind):
    config = RankerConfig(num_experts=EXPERTS, top_layers=LAYERS, tower_layers=TOWERS, extraction_levels=3)
    if kind == "shared":
        from recmill.model.layers import MLP

        return SharedBottom(LAYERS[-1], MLP(WIDTH, LAYERS), TASKS, TOWERS)
    if kind == "mmoe":
        return MixtureOfExperts(WIDTH, TASKS, config)
    return ProgressiveExtraction(WIDTH, TASKS, config)


REFERENCES = {"shared": plain_shared, "mmoe": plain_mmoe, "ple": plain_ple}


@pytest.mark.parametrize("kind", REFERENCES)
def test_heads_equal_plain_torch_forward_and_backward(kind):
    torch.manual_seed(0)
    module = make(kind).double()
    x, labels = torch.randn(7, WIDTH, dtype=torch.float64), torch.randint(0, 2, (7, TASKS)).double()
    gradients = []
    for forward in (module, lambda x: REFERENCES[kind](module, x)):
        own = x.clone().requires_grad_()
        logits = forward(own)
        assert logits.shape == (7, TASKS)
        loss = sum_losses(logits, labels, (1.0, 2.0, 0.5))
        gradients.append((logits.detach(), *torch.autograd.grad(loss, [own, *module.parameters()])))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", REFERENCES)
def test_every_parameter_learns(kind):
    torch.manual_seed(0)
    module = make(kind)
    module(torch.randn(64, WIDTH)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_the_loss_is_the_weighted_sum_over_labels():
    logits, labels = torch.tensor([[0.0, 2.0], [1.0, -1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    first = math.log(2) + math.log(1 + math.e)
    second = math.log(1 + math.exp(2)) + math.log(1 + math.e)
    assert float(sum_losses(logits, labels)) == pytest.approx(first + second, rel=1e-6)
    assert float(sum_losses(logits, labels, (0.25, 3.0))) == pytest.approx(0.25 * first + 3 * second, rel=1e-6)
    assert float(sum_losses(logits[:, 0], labels[:, :1])) == pytest.approx(first, rel=1e-6)


def schema(*labels):
    features = (
        Feature(name="age", kind="dense"),
        Feature(name="a", kind="sparse", num_rows=5, dim=4),
        Feature(name="b", kind="sparse", num_rows=5, dim=4),
    )
    return Schema(features=features, labels=labels)


@pytest.mark.parametrize("model", ["dlrm", "dcn"])
@pytest.mark.parametrize("kind", REFERENCES)
def test_rankers_give_one_logit_per_label(model, kind):
    config = RankerConfig(model=model, multi_task=kind, top_layers=(8, 4), tower_layers=(3,), num_experts=2)
    torch.manual_seed(0)
    pooled = {"a": torch.randn(9, 4), "b": torch.randn(9, 4)}
    several = Ranker(schema("click", "buy", "like"), config)(torch.randn(9, 1), pooled, {})
    assert several.shape == (9, 3)
    assert Ranker(schema("click"), config)(torch.randn(9, 1), pooled, {}).shape == (9,)


def test_labels_must_be_distinct_columns():
    for wrong in ([], ["a", "a"], [""], "label", [3]):
        with pytest.raises(InputError, match="labels must be a list of distinct column names"):
            Schema(features=schema("x").features, labels=wrong)
    for taken in ("age", "session_id", "x/y"):
        with pytest.raises(InputError, match=f"label '{taken}': the name belongs to another column"):
            schema("label", taken)
