"""Steps that begin behind the frozen prefix, with its outputs kept for some views of every image."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from conftest import StopsAt, tiny_config
from torch import nn

from ptlf.run.config import Config
from ptlf.run.loop import Run
from ptlf.training.kept_views import KeptViews
from ptlf.training.process import Stopped
from ptlf.views.operations import UNIFORMS_PER_VIEW


def continued(keep: int, **settings: object) -> Config:
    """The last layer alone trains, on two tasks."""
    freezing = {"freezing__initial": 0.67, "freezing__final": 0.67, "training__batch": 16, "training__lr": 0.01}
    return tiny_config("digits/vicreg/continue", training__keep_views=keep, **{**freezing, **settings})


@contextmanager
def calls_of(module: nn.Module) -> Iterator[list[int]]:
    """Sizes of its batches."""
    sizes: list[int] = []
    handle = module.register_forward_hook(lambda module, inputs, output: sizes.append(len(inputs[0])))
    try:
        yield sizes
    finally:
        handle.remove()


def test_a_step_runs_the_suffix_alone_and_learns_the_same_from_the_same_views(monkeypatch) -> None:
    """All views of an image are the same here, so that new and kept ones are."""

    def draw(count: int, generator: torch.Generator, views: int = 2) -> torch.Tensor:
        return torch.full((views, count, UNIFORMS_PER_VIEW), 0.5)

    monkeypatch.setattr("ptlf.training.trainer.draw", draw)
    monkeypatch.setattr("ptlf.training.kept_views.DTYPE", torch.float32)
    states, counts = [], []
    for keep in (0, 2):
        run = Run(continued(keep, training__epochs=3, training__lr=1e-4))
        with calls_of(run.model.encoder[0]) as sizes:
            run.train()
        states.append({name: value for name, value in run.model.encoder.state_dict().items() if "6.weight" in name})
        counts.append(sum(sizes))
    start = Run(continued(0)).model.encoder.state_dict()
    for name, value in states[0].items():
        moved = (value - start[name]).norm()
        assert moved > 0 and (value - states[1][name]).norm() < 1e-3 * moved
    assert counts[1] < counts[0]


def test_a_stopped_run_resumes_bit_exactly(tmp_path) -> None:
    whole = Run(continued(4), tmp_path / "whole")
    whole.train()
    assert whole.trainer.kept is not None and whole.model.begins_behind_prefix
    with pytest.raises(Stopped):  # in the middle of the second task's last epoch
        Run(continued(4), tmp_path / "stopped").train(StopsAt(len(whole.record.per_epoch) * 3 - 2))
    resumed = Run(continued(4), tmp_path / "stopped")
    resumed.train(resume=True)
    for mine, its in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_methods_with_a_memory_and_teachers_that_move_get_new_views() -> None:
    for recipe in ("digits/simsiam/lump", "digits/byol/finetune"):
        freezing = {"freezing__policy": "ascending", "freezing__final": 0.67, "freezing__shape": "constant"}
        run = Run(tiny_config(recipe, training__keep_views=4, training__batch=64, **freezing))
        run.train()
        assert run.trainer.kept is None and not run.model.begins_behind_prefix


def test_each_of_a_steps_views_is_picked_among_its_own_kind() -> None:
    indices = np.array([7, 3, 5])
    kept = KeptViews.make((), indices, 4, lambda part, view: torch.stack([part, part * 0 + view], 1).float())
    first, second = kept.pick(torch.tensor([5, 7]), torch.tensor([[0.0, 0.9999], [0.4, 0.6]]))
    assert first.tolist() == [[5, 0], [7, 2]] and second.tolist() == [[5, 1], [7, 3]]
