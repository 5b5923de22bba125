"""Whether learning helped: the encoder against the one that training began with, paired on labelled images."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ptlf.encoders import brings_weights
from ptlf.evaluation.metrics import spaced
from ptlf.evaluation.probes import knn_predict
from ptlf.run.build import labelled_images, make_stream
from ptlf.run.config import Config
from ptlf.run.folder import START, restore_encoder
from ptlf.run.inference import LoadedEncoder, load_encoder, rebuilt
from ptlf.stream import Dataset, Images

MAX_IMAGES, BATCH = 4000, 256
NEIGHBOURS = (10, 5, 50)  # the first counts; the verdict should not change with the others
TEMPERATURE = 0.1
SURE = 1.96  # standard errors of a 95 % interval


@dataclass(frozen=True)
class Verdict:
    """Accuracies in % of nearest neighbours, each image among all others. gains: of the encoder over each, in points,
    with half of the paired 95 % interval."""

    images: str
    count: int
    accuracy: float
    others: dict[str, float]
    gains: dict[str, tuple[float, float]]
    depends_on_k: bool = False

    def sentence(self, folder: Path) -> str:
        each = [
            f"{name} {self.others[name]:.1f} ({gain:+.1f} ± {sure:.1f})" for name, (gain, sure) in self.gains.items()
        ]
        start, (gain, sure) = next(iter(self.gains.items()))
        told = f"{self.accuracy:.1f} % of {self.count:,} images of {self.images}; {', '.join(each)}. "
        if gain > sure:
            told += f"Better than {start}"
        elif gain < -sure:
            return f"{told}Worse than {start}; `ptlf learn {folder} --undo` takes the last task back."
        else:
            enough = float(f"{self.count * (sure / gain) ** 2:.1g}") if abs(gain) > sure / 10 else None
            more = f"about {enough:,.0f}" if enough else "many more"
            told += f"Better or worse than {start}: these images cannot tell, {more} could"
        if lost := [name for name, (gain, sure) in self.gains.items() if name != start and gain < sure]:
            told += f"; not shown to be better than {' and '.join(lost)}"
        return told + ("; with 5 or 50 neighbours it looks otherwise." if self.depends_on_k else ".")


def judge(name: str, images: Images, now: LoadedEncoder, start: LoadedEncoder, start_name: str) -> Verdict:
    """The encoder on these labelled images, beside the one it began as, raw pixels and colours."""
    rows = spaced(np.arange(len(images)), MAX_IMAGES)
    pixels, labels = torch.from_numpy(images.pixels[rows]), torch.from_numpy(images.labels[rows])
    ways = {"now": features(now, pixels), start_name: features(start, pixels)}
    ways |= {"raw pixels": small_pixels(pixels), "colours": colours(pixels)}
    right = {way: {k: neighbours_agree(x, labels, k) for k in NEIGHBOURS} for way, x in ways.items()}

    def gain(way: str, k: int = NEIGHBOURS[0]) -> tuple[float, float]:
        difference = 100 * (right["now"][k] - right[way][k])
        return float(difference.mean()), SURE * float(difference.std()) / len(difference) ** 0.5

    signs = {
        int(np.sign(value) if abs(value) > sure else 0) for value, sure in (gain(start_name, k) for k in NEIGHBOURS)
    }
    accuracy = {way: 100 * float(each[NEIGHBOURS[0]].mean()) for way, each in right.items()}
    gains = {way: gain(way) for way in ways if way != "now"}
    return Verdict(name, len(rows), accuracy.pop("now"), accuracy, gains, len(signs) > 1)


def neighbours_agree(x: Tensor, labels: Tensor, k: int) -> Tensor:
    """Whether each row's nearest other rows, by cosine, name its label (N,), 0 or 1."""
    how: dict[str, Any] = {"k": min(k, len(x) - 1), "temperature": TEMPERATURE, "among_others": True}
    return (knn_predict(x.float(), labels, x.float(), **how) == labels).double()


@torch.no_grad()
def features(encoder: LoadedEncoder, pixels: Tensor) -> Tensor:
    return torch.cat([encoder.module(encoder.prepare(p.numpy())).float().cpu() for p in pixels.split(BATCH)])


def small_pixels(pixels: Tensor) -> Tensor:
    small = F.adaptive_avg_pool2d(pixels.permute(0, 3, 1, 2).float(), 8).flatten(1)
    return small - small.mean(1, keepdim=True)


def colours(pixels: Tensor) -> Tensor:
    """A histogram of 6 x 6 x 6 colours; square roots, so that cosine compares shares."""
    bins = (pixels.long() * 6 // 256).flatten(1, 2) @ torch.tensor([36, 6, 1])
    return torch.stack([row.bincount(minlength=216) for row in bins]).float().sqrt()


def start_encoder(
    encoder: LoadedEncoder, folder: Path, config: Config, module: nn.Module | None
) -> LoadedEncoder | None:
    """As it was before training; None if its weights came from a file and are not kept."""
    before, kept = rebuilt(encoder.card, folder, module, config.seed), (folder / START).is_file()
    if module is None and config.encoder.weights is not None:
        if not kept:
            return None
        restore_encoder(folder, before, START)
    return replace(encoder, module=before.to(encoder.device).eval())


def name_start(config: Config) -> str:
    return "the given encoder" if brings_weights(config.encoder) else "the untrained encoder"


def both_splits(data: Dataset) -> Images:
    parts = [part for part in (data.train, data.test) if part is not None]
    return Images(np.concatenate([p.pixels for p in parts]), np.concatenate([p.labels for p in parts]))


def verdicts(folder: Path, config: Config, make_module: Callable[[], nn.Module | None]) -> list[Verdict]:
    """After a task: on what the encoder knew before, and on the labelled images of the tasks."""
    now = load_encoder(folder, make_module(), config.device, trust_code=True)
    start = start_encoder(now, folder, config, make_module())
    if start is None:
        return []
    judged, name = [], name_start(config)
    for task in make_stream(config, folder).tasks:
        if len(task.classes) > 1:
            judged.append(judge(task.name, task.images, now, start, name))
    if config.evaluation.reference is not None:
        known = labelled_images(config, config.evaluation.reference, now.card["image_size"], now.fit)
        judged.append(judge("what it knew", both_splits(known), now, start, name))
    return judged
