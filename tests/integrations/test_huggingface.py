"""The callback for the Trainer of Hugging Face."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ptlf.freezing import FreezeSchedule

transformers = pytest.importorskip("transformers")

from ptlf.integrations.huggingface import FreezingCallback  # noqa: E402

pytestmark = pytest.mark.slow


class Pictures(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(index))
        return {"pixel_values": image, "labels": torch.tensor(index % 3)}


class Network(nn.Module):
    """Six units. (The Trainer of transformers 5 does not restore a ViT from its own checkpoint.)"""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 4, stride=4), nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.norm(self.stem(pixel_values)).flatten(2).mT
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x.mean(1))
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


class Watch(transformers.TrainerCallback):
    """How many parameters are frozen in each step."""

    def __init__(self) -> None:
        self.frozen: dict[int, int] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self.frozen[state.global_step] = sum(not parameter.requires_grad for parameter in model.parameters())


def train(out: Path, callback: FreezingCallback, resume: Path | None = None) -> tuple[Any, dict[int, int]]:
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model, watch = Network(), Watch()
    arguments = transformers.TrainingArguments(
        output_dir=str(out), num_train_epochs=3, per_device_train_batch_size=4, save_steps=6, save_strategy="steps",
        report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=0.01, seed=0,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Pictures(), callbacks=[callback, watch])
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return model, watch.frozen


def plan(kind: str) -> FreezingCallback:
    example = {"pixel_values": torch.zeros(2, 3, 16, 16)}
    if kind == "steps":
        return FreezingCallback({2: 1, 0.5: 4, 10: []}, by="step", example=example)
    return FreezingCallback(FreezeSchedule(0.2, 0.6, 3), replay=[torch.randn(4, 3, 16, 16)], batches=2, example=example)


@pytest.mark.parametrize("kind", ["steps", "ratios"])
def test_a_resumed_run_freezes_the_same_units_and_has_the_same_bits(kind, tmp_path):
    callback = plan(kind)
    model, frozen = train(tmp_path / "whole", callback)
    again = plan(kind)
    again.plan.replay = None if kind == "steps" else [torch.full((1, 3, 16, 16), float("nan"))]  # not computed again
    resumed, after = train(tmp_path / "whole", again, tmp_path / "whole" / "checkpoint-6")
    assert after == {step: count for step, count in frozen.items() if step > 6}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in model.parameters())
    if kind == "steps":
        counts = list(frozen.values())
        assert counts[:2] == [0, 0] and counts[10:] == [0, 0]
        assert 0 < counts[2] == counts[5] < counts[6] == counts[9]
    else:
        assert again.plan.order == callback.plan.order and again.plan.freezer.ratios == callback.plan.freezer.ratios
        assert len(set(frozen.values())) == 3
