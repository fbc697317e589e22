"""One step of all dense parameters is torch's Adam, parameter by parameter, to the last bit."""

import copy

import pytest
import torch
from torch import nn

from recmill.model.dense_optimiser import ALIGNMENT, DenseOptimiser


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.PReLU(), nn.Linear(7, 3), nn.PReLU(), nn.Linear(3, 1))


def take_steps(module, optimiser, *, count):
    for step in range(count):
        for group in optimiser.param_groups:
            group["lr"] = 0.1 / (1 + step)
        (module(torch.arange(20.0).view(4, 5) * (step - 1)).sum() ** 2).backward()
        optimiser.step()
        optimiser.zero_grad()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_are_those_of_adam_to_the_last_bit(weight_decay):
    ours, theirs = network(), network()
    optimiser = DenseOptimiser(list(ours.parameters()), lr=0.1, weight_decay=weight_decay)
    adam = torch.optim.Adam(theirs.parameters(), lr=0.1, weight_decay=weight_decay, foreach=True)
    take_steps(ours, optimiser, count=5)
    take_steps(theirs, adam, count=5)
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(own, other)
        assert not torch.equal(own, network().state_dict()["0.weight"])
        for name, value in adam.state[other].items():
            assert torch.equal(optimiser.state[own][name], value), name


def test_state_that_is_written_in_place_goes_on_where_it_was():
    first, second = network(), network()
    optimiser = DenseOptimiser(list(first.parameters()), lr=0.1)
    take_steps(first, optimiser, count=3)
    resumed = DenseOptimiser(list(second.parameters()), lr=0.1)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for own, saved in zip(resumed.parameters, optimiser.parameters, strict=True):
        for name, value in resumed.state[own].items():
            value.copy_(optimiser.state[saved][name])
    take_steps(first, optimiser, count=2)
    take_steps(second, resumed, count=2)
    assert all(torch.equal(own, other) for own, other in zip(first.parameters(), second.parameters(), strict=True))


def test_every_parameter_begins_where_vectors_do():
    module = network()
    DenseOptimiser(list(module.parameters()), lr=0.1)
    assert {own.data_ptr() % (4 * ALIGNMENT) for own in module.parameters()} == {0}
