"""The Lightning callback; the example, killed and resumed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ptlf.freezing import FreezeSchedule, correlation_ratios

lightning = pytest.importorskip("lightning")

from ptlf.integrations.lightning import FreezingCallback  # noqa: E402

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
# Kills the process in the middle of the fifth epoch.
KILLED = """
import os, signal, sys
sys.path.insert(0, {folder!r})
import lightning_digits as example

def on_train_batch_end(self, trainer, *others):
    if trainer.current_epoch == 4 and trainer.global_step % 5 == 3:
        os.kill(os.getpid(), signal.SIGKILL)

example.Report.on_train_batch_end = on_train_batch_end
sys.argv = ["example", {out!r}]
example.main()
"""


def run(words: list[str]) -> tuple[int, list[str]]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, timeout=300)
    return done.returncode, [line for line in done.stdout.splitlines() if line.startswith("epoch")]


def test_the_example_is_killed_and_resumes_with_the_same_frozen_units_and_bits(tmp_path):
    script, whole, torn = str(EXAMPLES / "lightning_digits.py"), tmp_path / "whole", tmp_path / "torn"
    code, expected = run([script, str(whole)])
    assert code == 0 and len(expected) == 6
    assert [line.count(",") for line in expected] == [1, 1, 1, 1, 1, 2]  # one unit, then two
    code, before = run(["-c", KILLED.format(folder=str(EXAMPLES), out=str(torn))])
    assert code == -signal.SIGKILL and before == expected[:4]
    code, after = run([script, str(torn)])
    assert code == 0 and after == expected[4:]
    weights = [torch.load(folder / "weights.pt") for folder in (whole, torn)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


class Small(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)
        self.seen: list[tuple[str, ...]] = []

    def training_step(self, batch: list[Tensor], index: int) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(self.head(self.encoder(batch[0])), batch[1])
        self.log("loss", loss)
        self.seen.append(tuple(name for name, p in self.encoder.named_parameters() if not p.requires_grad))
        return {"loss": loss}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(24, 6, generator=draw), torch.randint(3, (24,), generator=draw)


def fit(callback: FreezingCallback, epochs: int, tmp_path: Path) -> Small:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    model = Small()
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, callbacks=[callback], default_root_dir=tmp_path, **quiet
    )
    trainer.fit(model, DataLoader(TensorDataset(*data()), batch_size=8))
    return model


FIRST = ("0.weight", "0.bias", "1.weight", "1.bias")


def test_units_freeze_and_thaw_by_step_and_by_fraction(tmp_path):
    callback = FreezingCallback({1: "0", 0.5: 2, 5: []}, by="step", part="encoder", example=data()[0])
    model = fit(callback, 2, tmp_path)
    assert model.seen == [(), FIRST, FIRST, (*FIRST, "3.weight", "3.bias"), (*FIRST, "3.weight", "3.bias"), ()]
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_ratios_are_those_of_the_training_step_and_order_the_units(tmp_path):
    images, labels = data()
    callback = FreezingCallback(
        FreezeSchedule(0.5, 0.5, 1, "constant"), part="encoder", replay=[images[:4]], batches=2, example=images
    )
    model = fit(callback, 1, tmp_path)
    reference = Small().train()
    batches = iter([(images[:8], labels[:8]), (images[8:16], labels[8:16])])

    def loss_fn() -> Tensor:
        x, y = next(batches)
        return nn.functional.cross_entropy(reference.head(reference.encoder(x)), y)

    expected = correlation_ratios(reference.encoder, images[:4], loss_fn, batches=2, example=images, keep=[reference])
    assert callback.plan.freezer.ratios == expected
    best = max(expected, key=expected.get)
    assert model.seen[2:] == [FIRST if best == "0" else ("3.weight", "3.bias")] * 3


def test_what_cannot_be_is_said():
    with pytest.raises(ValueError, match="by 'epoch' or by 'step', not by 'hour'"):
        FreezingCallback({}, by="hour")
    with pytest.raises(ValueError, match="replay ranks the units for a FreezeSchedule"):
        FreezingCallback({0: 1}, replay=torch.zeros(1, 6))
