"""What methods compute is in tests/training/test_reference.py."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from ptlf.objectives import MomentumTeacher
from ptlf.run.loop import Run


def one_step(run: Run) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Its losses and gradients."""
    torch.manual_seed(0)
    losses = run.trainer.step(run.trainer.load(torch.arange(32), torch.Generator().manual_seed(0), run.method.draw(32)))
    gradients = {name: p.grad for name, p in run.model.encoder.named_parameters() if p.grad is not None}
    return {name: float(loss) for name, loss in losses.items()}, gradients


def test_der_shows_norms_no_blank_images_and_si_leaves_frozen_parameters_alone(tiny) -> None:
    run, seen = Run(tiny("digits/simsiam/finetune", method__name="der")), []
    run.model.encoder.register_forward_pre_hook(lambda encoder, given: seen.append(given[0]))
    one_step(run)  # the memory is empty
    first, _, replayed = seen
    assert torch.equal(replayed, first)
    run = Run(tiny("digits/simsiam/finetune", method__name="si"))
    run.freezing.freezer.freeze(["0"])
    one_step(run)
    by_name = dict(zip(dict(run.model.encoder.named_parameters()), run.method.path, strict=True))
    assert not by_name["0.weight"].any() and by_name["3.weight"].any()


ANCHOR = {"freezing__policy__name": "ascending", "freezing__final": 0.5, "freezing__initial": 0.5}


@pytest.mark.parametrize("objective", ["simsiam", "barlow_twins", "byol"])
@pytest.mark.parametrize(
    ("method", "batch_statistics"), [("anchor", False), ("pfr", True), ("pfr", False), ("cassle", False)]
)
def test_a_teacher_shares_the_frozen_prefix(tiny, objective: str, method: str, batch_statistics: bool) -> None:
    """The step is the same to rounding, and the teacher runs only what trains in the student."""
    steps = []
    for share in (True, False):
        settings = {**ANCHOR, "method__name": method, "freezing__batch_statistics": batch_statistics}
        run = Run(tiny(f"digits/{objective}/finetune", **settings))
        run.progress.task = 1  # PFR has no teacher in the first task
        run.begin_task(10)
        run.freeze(run.stream.tasks[0].train)
        assert run.model.prefix is not None
        assert run.model.sharing[0] is run.method.teacher()
        if not share:
            run.model.share_prefix([], torch.zeros(0))
        teacher = run.method.teacher().encoder
        calls: list[object] = []
        teacher[0].register_forward_hook(lambda layer, *_, calls=calls: calls.append(layer))
        with torch.no_grad():
            teacher[6].weight.mul_(0.5)
        steps.append(one_step(run))
        assert len(calls) == (0 if share else 2)
    (shared, left), (alone, right) = steps
    assert shared == pytest.approx(alone, rel=1e-4)
    assert left.keys() == right.keys()
    for name, gradient in left.items():
        torch.testing.assert_close(gradient, right[name], rtol=1e-3, atol=1e-5)


def test_an_earlier_models_norms_follow_those_that_are_frozen_and_still_the_same(tiny) -> None:
    run = Run(tiny("digits/simsiam/finetune", method__name="cassle"))
    freezer, teacher = run.freezing.freezer, run.method.teacher()

    def the_batch_decides() -> list[bool]:
        """By norm, whether its output for an image depends on the others of the batch."""
        with torch.no_grad():
            return [
                not torch.allclose(norm(x)[:2], norm(x[:2]), atol=1e-5)
                for norm in teacher.encoder.modules()
                if isinstance(norm, nn.BatchNorm2d)
                for x in [3 * torch.randn(4, norm.num_features, 5, 5)]
            ]

    norms = len(the_batch_decides())
    assert norms > 1 and all(the_batch_decides())
    freezer.freeze(freezer.units[:2])
    run.rebuild_step()
    held = [unit.norm is not None for unit in freezer.units[:2]].count(True)
    assert the_batch_decides() == [False] * held + [True] * (norms - held)
    freezer.thaw()
    run.rebuild_step()
    assert all(the_batch_decides())
    with torch.no_grad():
        freezer.units[0].layer.weight.mul_(1.1)  # it trained since: the earlier model has another
    freezer.freeze(freezer.units[:1])
    run.rebuild_step()
    assert all(the_batch_decides())


def test_a_method_may_follow_the_model_after_the_optimizers_step(tiny) -> None:
    run = Run(tiny("digits/simsiam/finetune"))
    average, before = MomentumTeacher(run.model.encoder, nn.Identity(), 0.75, 0.75), deepcopy(run.model.encoder)
    run.method.remember = lambda model, batch: average.follow(model.encoder, nn.Identity())
    one_step(run)
    parts = zip(run.model.encoder.parameters(), before.parameters(), average.parameters(), strict=True)
    assert all(not torch.equal(p, old) and torch.allclose(kept, 0.75 * old + 0.25 * p) for p, old, kept in parts)
