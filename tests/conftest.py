import io
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest

if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import numpy as np
import torch
from markupsafe import Markup
from PIL import Image
from torch import nn

from ptlf.cli import main, show_messages
from ptlf.core.phases import Advance, Watcher
from ptlf.core.settings import merge, nested
from ptlf.encoders.resnet import BasicBlock, ResNet
from ptlf.run.config import Config, from_dict
from ptlf.run.loop import Run
from ptlf.run.recipes import recipe

QUICK = [
    "--stream.groups", "[[0, 1], [2, 3]]", "--encoder.name", "conftest:tiny_encoder", "--training.epochs", "1",
    "--training.batch", "128", "--device", "cpu", "--evaluation.gallery", "false",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` need one, but for those that are emulated where there is none."""
    for item in items:
        mark = item.get_closest_marker("gpu")
        if mark and not mark.kwargs.get("emulated") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True, scope="session")
def process() -> Iterator[None]:
    torch.set_num_threads(1)  # tests are small: more threads only get in each other's way
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    show_messages()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ptlf.training.arithmetic.MIN_FLOPS", float("inf"))  # nothing is timed: float32, everywhere alike
        # Waiting for the disk proves nothing here; what must reach it is tested with an fsync of the test's own.
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr("ptlf.evaluation.gallery.POINTS", 60)  # t-SNE of more takes seconds
        yield


@pytest.fixture
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take most of a page's time: they are not drawn, but for a test that asks for `pictures`."""
    if "pictures" not in request.fixturenames:
        empty = Markup('<svg role="img"></svg>')
        monkeypatch.setattr("ptlf.report.page.pictures_as_svg", lambda figure, _: [(p, empty) for p in figure.pictures])
        monkeypatch.setattr("ptlf.report.page.save_picture", lambda canvas, folder, name: None)


@pytest.fixture
def pictures() -> None:
    """See `no_pictures`."""


def tiny_encoder() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 8, 2), (8, 16, 2), (16, 16, 1)):
        conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU()]
    encoder = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    encoder.normalisation = (0.5,) * 3, (0.5,) * 3  # that of the digits' views
    return encoder


def dropping_encoder() -> nn.Module:
    return nn.Sequential(tiny_encoder(), nn.Dropout(0.3))


def smooth_encoder() -> nn.Module:
    """Without a kink, at which rounding would choose another gradient."""
    return nn.Sequential(*(nn.Softplus() if isinstance(layer, nn.ReLU) else layer for layer in tiny_encoder()))


def tiny_resnet() -> nn.Module:
    return ResNet(BasicBlock, (1, 1), width=4)


def paint(folder: Path, count: int, seed: int = 0, size: int = 8) -> Path:
    """Noise of a colour of its own in each file: 00.png, 01.png, ..."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    for number in range(count):
        pixels = random.integers(0, 90, (size, size, 3)) + random.integers(0, 160, 3)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:02}.png")
    return folder


def maps() -> nn.Module:
    return nn.Conv2d(3, 4, 3)


class nothing_to_freeze(nn.Module):
    """Vectors without a convolution or a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, images):
        return images.mean((2, 3)) * self.scale


def tiny_config(name: str = "digits/simsiam/finetune", **dotted: Any) -> Config:
    """Two tasks of the digits, two epochs, three convolutions, no gallery; `training__epochs=1` overrides."""
    small = {
        "stream.groups": [[0, 1], [2, 3]], "encoder.name": "conftest:tiny_encoder", "training.epochs": 2,
        "training.batch": 128, "evaluation.gallery": False, "device": "cpu",
    }  # fmt: skip
    settings = {**small, **{key.replace("__", "."): value for key, value in dotted.items()}}
    overrides = merge(Config, {}, *(nested(key, value) for key, value in settings.items()))
    return from_dict(merge(Config, recipe(name), overrides))


@pytest.fixture
def tiny() -> Callable[..., Config]:
    return tiny_config


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run in a folder, the same for all tests of a process: read it, and change only a copy of it."""
    config = tiny_config("digits/simsiam/ptlf", encoder__name="resnet18-mini", encoder__width=4, training__epochs=1)
    run = Run(config, tmp_path_factory.mktemp("finished") / "run")
    run.train()
    return run


@pytest.fixture
def run_copy(finished_run: Run, tmp_path: Path) -> Path:
    """The finished run's folder, copied to `tmp_path/run` for a test that changes it."""
    assert finished_run.folder is not None
    return shutil.copytree(finished_run.folder, tmp_path / "run")


class Done(NamedTuple):
    code: int
    out: str
    err: str


def run_cli(*words: object, code: int | None = 0) -> Done:
    """`ptlf WORDS` in this process; it must end with this code (None: with any)."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            ended = main([str(word) for word in words])
        except SystemExit as exit_:
            ended = exit_.code if isinstance(exit_.code, int) else 0 if exit_.code is None else 1
    assert code is None or ended == code, f"ended with {ended}: {out.getvalue()}{err.getvalue()}"
    return Done(ended, out.getvalue(), err.getvalue())


class StopsAt(Watcher):
    """Sends the process a signal at the run's n-th step."""

    def __init__(self, number: int) -> None:
        self.number = number

    def step(self, views: int) -> None:
        self.number -= 1
        if self.number == 0:
            os.kill(os.getpid(), signal.SIGTERM)


class StopsIn(Watcher):
    """Sends the process a signal after the first part of the phase with this name; nothing may be done after it."""

    def __init__(self, name: str) -> None:
        self.name, self.sent = name, False

    @contextmanager
    def phase(self, name: str, of: int | None = None, unit: str = "images") -> Iterator[Advance]:
        def advance(amount: int) -> None:
            assert not self.sent
            if name == self.name:
                self.sent = True
                os.kill(os.getpid(), signal.SIGTERM)

        yield advance


class StopsInItsLastMoments(Watcher):
    """Sends the process a signal when a run has nothing left to train."""

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
