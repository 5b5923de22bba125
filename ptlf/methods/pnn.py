"""PNN: each split is tested with its own task's column, or with the vectors of all columns joined."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ptlf.core.errors import UserError
from ptlf.core.randomness import seeded
from ptlf.core.settings import Presets, key
from ptlf.encoders import ResNet
from ptlf.methods.method import Method, MethodConfig
from ptlf.model import Model


@dataclass
class PNNConfig(MethodConfig):
    name: str = "pnn"
    width: float = key(1.0, "a column's channels, as a share of the encoder's", gt=0)


class PNN(Method[PNNConfig]):
    """PNN: a new column for every task, fed by the columns before it, which are never touched again."""

    Config = PNNConfig
    freezable = False
    grows = True
    # Of ResNet-18's 64 channels, so that many columns stay affordable: remembered from LUMP's appendix, not verified.
    presets: ClassVar[Presets] = {
        "split-cifar100": {"method": {"width": 12 / 64}},
        "split-tinyimagenet": {"method": {"width": 8 / 64}},
    }

    @staticmethod
    def adapt_encoder(config: PNNConfig, encoder: nn.Module, tasks: int) -> nn.Module:
        if not isinstance(encoder, ResNet):
            raise UserError(f"method 'pnn' builds columns of a residual network, not of {type(encoder).__name__}")
        return Columns(encoder, config.width, tasks)

    def begin_task(self, index: int, model: Model, steps: int) -> None:
        super().begin_task(index, model, steps)
        assert isinstance(model.encoder, Columns)
        model.encoder.begin(index)
        for module in model.objective.modules():
            # A moving average continues from a copy of the encoder, norms' statistics included: its older columns would
            # follow the encoder's, which no longer move, and rounding has moved the columns that had not begun.
            if isinstance(module, Columns):
                module.load_state_dict(model.encoder.state_dict())


class Columns(nn.Module):
    """Residual networks side by side, one per task, all there from the start; `current` is the newest in use.

    In training the vector is the current column's (B, feature_dim); in eval mode those of all columns so far, joined.
    From the second stage on, a column also gets the maps of all older columns, through a lateral connection. Older
    columns do not move. Initial weights of a column follow from torch's seed and its number, however many there are.
    """

    def __init__(self, template: ResNet, width: float, tasks: int) -> None:
        super().__init__()
        shape = {**template.shape, "width": max(1, round(width * template.shape["width"]))}
        channels = [shape["width"] * 2**stage * shape["block"].expansion for stage in range(len(shape["blocks"]))]
        self.columns, self.laterals = nn.ModuleList(), nn.ModuleList()
        for number in range(tasks):
            with seeded(torch.initial_seed(), f"column {number}"):
                self.columns.append(ResNet(**shape))
                self.laterals.append(nn.ModuleList([Lateral(number, c) for c in channels[:-1] if number]))
        self.feature_dim = channels[-1]
        self.current = 0
        self.newest = nn.Buffer(torch.zeros((), dtype=torch.int64))  # `current`, for the state
        self.register_load_state_dict_post_hook(lambda columns, _: columns.begin(int(columns.newest)))

    def begin(self, index: int) -> None:
        self.current = index
        self.newest.fill_(index)
        for older in range(index):
            self.columns[older].requires_grad_(False)
            self.laterals[older].requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for column in self.columns[: self.current]:
            column.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        maps: list[list[Tensor]] = []  # by column, by stage
        for index in range(self.current + 1):
            with torch.set_grad_enabled(torch.is_grad_enabled() and index == self.current):
                maps.append(self.run(index, images, maps))
        vectors = [torch.mean(stages[-1], dim=(2, 3)) for stages in maps]
        return vectors[-1] if self.training else torch.cat(vectors, dim=1)

    def run(self, index: int, images: Tensor, older: list[list[Tensor]]) -> list[Tensor]:
        """Feature maps after each stage of one column."""
        column = self.columns[index]
        assert isinstance(column, ResNet)
        given: list[Tensor] = []
        x = column.stem(images)
        for number, stage in enumerate(column.stages.children()):
            if number > 0 and older:
                x = x + self.laterals[index][number - 1]([maps[number - 1] for maps in older])  # type: ignore[index]
            x = stage(x)
            given.append(x)
        return given

    def feature_slice(self, task: int) -> slice:
        """Slice of the concatenated vector that is the task's column; the newest column for tasks not learned yet."""
        index = min(task, self.current)
        return slice(index * self.feature_dim, (index + 1) * self.feature_dim)


class Lateral(nn.Module):
    """Maps of all older columns, each channel scaled, through a 1x1 convolution and ReLU to one column's channels."""

    def __init__(self, older: int, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(0.1 * torch.rand(1, older * channels, 1, 1))  # small at first, and learned
        self.conv = nn.Conv2d(older * channels, channels, 1)

    def forward(self, maps: list[Tensor]) -> Tensor:
        weight = self.conv.weight * self.scale  # scaled weights in place of scaled maps: backward keeps the maps once
        return torch.relu(F.conv2d(torch.cat(maps, dim=1), weight, self.conv.bias))
