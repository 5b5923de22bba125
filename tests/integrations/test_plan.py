"""What the callbacks of trainers share."""

import pytest
import torch
from torch import nn

from ptlf.integrations.plan import FreezingPlan


def linear() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(2, 4)


def convolution() -> tuple[nn.Module, torch.Tensor]:
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)
    return nn.Sequential(*layers), torch.zeros(2, 3, 4, 4)


@pytest.mark.parametrize("make", [linear, convolution])
def test_after_an_interrupted_training_the_next_one_thaws_what_was_frozen(make):
    """A trainer that an exception leaves does not call `end`."""
    model, x = make()
    plan = FreezingPlan({0: 1, 5: 0}, example=x)

    def begin() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan.begin(model, [optimizer], None, lambda batch: model(batch).sum(), lambda: [x])

    begin()
    assert plan.at("epoch", 0) == ["0"]
    begin()
    assert plan.at("epoch", 0) == ["0"]
    plan.at("epoch", 5)
    assert all(parameter.requires_grad for parameter in model.parameters())
    plan.end()


def test_a_resume_is_refused_if_the_frozen_weights_are_not_those_of_the_checkpoint():
    """So is one whose trainer has loaded no weights, as that of transformers 5 does; older states have no checksum."""
    model, x = convolution()
    plan = FreezingPlan({0: 1}, example=x)

    def begin(model: nn.Module) -> None:
        plan.begin(model, [torch.optim.SGD(model.parameters(), lr=0.1)], None, lambda batch: batch, lambda: [x])

    begin(model)
    nothing = plan.state()
    plan.at("epoch", 0)
    state, weights = plan.state(), model.state_dict()
    for key in ("0.weight", "1.running_mean", None):
        other, _ = convolution()
        other.load_state_dict({name: torch.ones_like(w) if name == key else w for name, w in weights.items()})
        plan.loaded = state
        if key is not None:
            with pytest.raises(ValueError, match=r"make the model with from_pretrained\(CHECKPOINT\), then resume"):
                begin(other)
            assert all(parameter.requires_grad for parameter in other.parameters())
            plan.loaded = {name: value for name, value in state.items() if name != "checksum"}
        begin(other)
        assert plan.state() == {**state, "checksum": plan.state()["checksum"]}
    assert plan.state() == state
    plan.loaded = nothing
    begin(convolution()[0])
