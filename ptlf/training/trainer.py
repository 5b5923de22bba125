"""One task: epochs of steps over its images. `Trainer.step` is the whole of training, read from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from ptlf.batch import Batch, to_device
from ptlf.errors import UserError
from ptlf.freezing.correlation import unchanged
from ptlf.methods import Method
from ptlf.model import Model
from ptlf.randomness import Randomness
from ptlf.settings import key
from ptlf.stream.loading import ImageSource
from ptlf.training.cost import backward_flops, kept_bytes
from ptlf.training.optimizer import OptimizerConfig, learning_rate
from ptlf.views import View, draw, make_views


@dataclass
class TrainingConfig(OptimizerConfig):
    epochs: int = key(200, "passes over each task's images", least=1)
    batch: int = key(256, "images per step (each gives two views)", least=2)
    last_batch: str = key("use", "what to do with an epoch's last, smaller batch", choices=("use", "drop"))
    precision: str = key("fp32", "the encoder's arithmetic; heads and losses stay float32", choices=("fp32", "bf16"))
    channels_last: bool = key(False, "memory layout of images and convolutions; faster on a GPU")


@dataclass
class EpochResult:
    losses: dict[str, float]
    steps: int
    views: int
    seconds: float


@dataclass
class Trainer:
    model: Model
    method: Method
    optimizer: torch.optim.Optimizer
    source: ImageSource
    recipe: tuple[View, ...]
    view_size: int
    config: TrainingConfig
    random: Randomness
    device: torch.device
    on_step: Callable[[int], None] = field(default=lambda step: None)

    def step(self, batch: Batch) -> dict[str, Tensor]:
        batch.views = self.views(batch)
        batch.mixed = self.method.mix(batch)
        losses = self.method.losses(self.model, batch)
        self.optimizer.zero_grad(set_to_none=True)
        total(losses).backward()
        self.method.after_backward(self.model, self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.model.objective.after_step(self.model.encoder)
        self.method.remember(batch)
        return {name: loss.detach() for name, loss in losses.items()}

    def epoch(self, indices: np.ndarray, epoch: int) -> EpochResult:
        """One pass over the images with these indices. The device is asked for the losses once, at the end."""
        self.model.train()
        started, steps, views = time.perf_counter(), 0, 0
        totals: dict[str, Tensor] = {}
        order = list(self.batches(indices, self.random["order"]))
        for chosen in order:
            rate = learning_rate(self.config, epoch + steps / len(order), self.config.epochs)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            batch = self.load(chosen, self.random["views"], self.method.draw(len(chosen)))
            for name, loss in self.step(batch).items():
                totals[name] = totals[name] + loss if name in totals else loss
            steps, views = steps + 1, views + len(batch) * len(batch.views)
            self.on_step(views)
        losses = {name: float(total) / steps for name, total in totals.items()}  # waits for the device
        return EpochResult(losses, steps, views, time.perf_counter() - started)

    def views(self, batch: Batch) -> list[Tensor]:
        views = make_views(batch.images, batch.uniforms, self.recipe, self.view_size)
        if self.config.channels_last:
            views = [view.contiguous(memory_format=torch.channels_last) for view in views]
        return views

    def load(self, chosen: Tensor, generator: torch.Generator, draws: dict[str, Tensor] | None = None) -> Batch:
        """The images with these indices and the step's randomness, on the device."""
        return Batch(
            images=self.source.gather(chosen),
            labels=to_device(self.source.labels[chosen], self.device),
            uniforms=to_device(draw(len(chosen), generator, len(self.recipe)), self.device),
            draws={name: to_device(value, self.device) for name, value in (draws or {}).items()},
        )

    def batches(self, indices: np.ndarray, generator: torch.Generator) -> Iterator[Tensor]:
        """Shuffled batches of indices. A single left-over image has no batch statistics and is always dropped."""
        shuffled = torch.from_numpy(indices)[torch.randperm(len(indices), generator=generator)]
        for part in shuffled.split(self.config.batch):
            if len(part) == self.config.batch or (self.config.last_batch == "use" and len(part) > 1):
                yield part

    def steps(self, indices: np.ndarray) -> int:
        """Steps of a whole task with these images."""
        full, rest = divmod(len(indices), self.config.batch)
        return self.config.epochs * (full + (rest > 1 and self.config.last_batch == "use"))

    def cost_of_step(self, indices: np.ndarray, exclude: Iterable[Tensor] = ()) -> StepCost:
        """Bytes kept for backward and backward FLOPs of a step as things stand. Trains nothing, leaves no trace.

        Parameters and buffers are there anyway and do not count, nor does what `exclude` names, nor forwards without a
        backward such as a frozen copy's.
        """
        chosen = torch.from_numpy(indices[: self.config.batch])
        self.model.train()
        with self.method.rehearsal(), unchanged(self.model, self.method):
            batch = self.load(chosen, torch.Generator().manual_seed(0), self.method.draw(len(chosen)))
            batch.views = self.views(batch)
            batch.mixed = self.method.mix(batch)
            losses: list[Tensor] = []
            kept = kept_bytes(
                lambda: losses.append(total(self.method.losses(self.model, batch))),
                exclude=[*tensors_of(self.model), *tensors_of(self.method), *exclude],
            )
            flops = backward_flops(losses.pop())
        self.optimizer.zero_grad(set_to_none=True)
        return StepCost(kept, flops / (len(batch) * len(batch.views)))

    def sample_loss(self, indices: np.ndarray, generator: torch.Generator) -> Tensor:
        """The objective on a random batch of these images, unmixed: the gradient a new task asks for."""
        chosen = torch.from_numpy(indices)[torch.randperm(len(indices), generator=generator)[: self.config.batch]]
        batch = self.load(chosen, generator)
        batch.views = batch.mixed = self.views(batch)
        return self.model.objective.loss(self.model.encode(batch.mixed), batch)


@dataclass(frozen=True)
class StepCost:
    kept_bytes: int
    backward_flops_per_view: float


def tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def total(losses: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(losses.values())).sum()


def check_batch(config: TrainingConfig, sizes: list[int]) -> None:
    for number, size in enumerate(sizes, start=1):
        if config.batch > size:
            raise UserError(
                f"training.batch is {config.batch}, but task {number} has only {size} images; "
                f"choose a batch of at most {min(sizes)}"
            )
