"""Whether learning helped: the encoder against the one that training began with, paired on labelled images."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn
from torch.nn import functional as F

from ptlf.core.errors import UserError, quoted, warn
from ptlf.encoders import brings_weights
from ptlf.evaluation.metrics import spaced
from ptlf.evaluation.probes import knn_predict
from ptlf.run.build import labelled_images
from ptlf.run.config import Config
from ptlf.run.folder import START, restore_encoder
from ptlf.run.inference import LoadedEncoder, load_encoder, rebuilt
from ptlf.run.results import Json, Z, add_evaluation
from ptlf.stream import Dataset, Images, Stream
from ptlf.stream.arrivals import arrived_names
from ptlf.stream.task import digest

MAX_IMAGES, BATCH = 4000, 256
NEIGHBOURS = (10, 5, 50)  # the first counts; the verdict should not change with the others
TEMPERATURE = 0.1
COPY = 0.98  # cosine of two images' small pixels, from which they count as one
COLOURS = "a histogram of colours"
BELOW = (-math.inf, -1), (-1, 1)  # in halves of the interval: worse, and not shown to be better


@dataclass(frozen=True)
class Verdict:
    """Accuracies in % of nearest neighbours, each image among all others. gains: of the encoder over each, in points,
    with half of the paired 95 % interval; the first is the encoder before training."""

    images: str
    count: int
    accuracy: float
    others: dict[str, float]
    gains: dict[str, tuple[float, float]]
    copies: int = 0  # images that have a near copy among them
    depends_on_k: bool = False

    def sentence(self, folder: Path) -> str:
        (start, (gain, sure)), *simple = self.gains.items()
        each = [f"{g:+.1f} ± {half:.1f} {'over' if g >= 0 else 'against'} {name} ({self.others[name]:.1f})"
                for name, (g, half) in self.gains.items()]  # fmt: skip
        sentence = f"On {self.count:,} images of {self.images}: {self.accuracy:.1f} %, {', '.join(each)}. "
        worse, unclear = ([n for n, (g, half) in simple if low * half <= g < high * half] for low, high in BELOW)
        if gain < -sure:
            undo = f"; `ptlf learn {quoted(folder)} --undo` takes the last task back" * (len(arrived_names(folder)) > 1)
            sentence, worse, unclear = f"{sentence}Worse than {start}: do not use it{undo}", [], []
        elif gain > sure:
            sentence += f"Better than {start}"
        else:
            enough = float(f"{self.count * (sure / gain) ** 2:.1g}") if abs(gain) > sure / 10 else None
            more = f"about {enough:,.0f}" if enough else "many more"
            sentence += f"These images cannot tell whether it is better than {start}, {more} could"
        sentence += f"; not shown to be better than {' and '.join(unclear)}" * bool(unclear)
        advice = "train longer" + ", or start from pretrained weights" * ("untrained" in start)
        sentence += f"; worse than {' and '.join(worse)}: not worth using yet; {advice}" * bool(worse)
        sentence += f". {self.copies} are near copies of others, and do not vote on those" * bool(self.copies)
        return sentence + "; with 5 or 50 neighbours it looks otherwise" * self.depends_on_k + "."


def judge(name: str, images: Images, now: LoadedEncoder, start: LoadedEncoder, start_name: str) -> Verdict:
    """The encoder on these labelled images, beside the one it began as, raw pixels and colours."""
    rows = spaced(np.arange(len(images)), MAX_IMAGES)
    pixels, labels = torch.from_numpy(images.pixels[rows]), torch.from_numpy(images.labels[rows])
    ways = {"now": features(now, pixels), start_name: features(start, pixels)}
    ways |= {"raw pixels": small_pixels(pixels), COLOURS: colours(pixels)}
    groups = near_copies(ways["raw pixels"])
    right = {way: {k: neighbours_agree(x, labels, k, groups) for k in NEIGHBOURS} for way, x in ways.items()}

    def gain(way: str, k: int = NEIGHBOURS[0]) -> tuple[float, float]:
        """Near copies are right or wrong together: the error is that of sums over their groups."""
        difference = 100 * (right["now"][k] - right[way][k])
        mean = difference.mean()
        sums = torch.zeros(len(rows), dtype=torch.double).index_add_(0, groups, difference - mean)
        return float(mean), Z * float(sums.square().sum().sqrt()) / len(rows)

    signs = {(value > sure) - (value < -sure) for value, sure in (gain(start_name, k) for k in NEIGHBOURS)}
    accuracy = {way: 100 * float(each[NEIGHBOURS[0]].mean()) for way, each in right.items()}
    gains, copies = {way: gain(way) for way in ways if way != "now"}, int((groups.bincount()[groups] > 1).sum())
    return Verdict(name, len(rows), accuracy.pop("now"), accuracy, gains, copies, len(signs) > 1)


def neighbours_agree(x: Tensor, labels: Tensor, k: int, groups: Tensor) -> Tensor:
    """Whether each row's nearest rows of other groups, by cosine, name its label (N,), 0 or 1."""
    k = min(k, len(x) - int(groups.bincount().max()))
    return (knn_predict(x.float(), labels, x.float(), k=k, temperature=TEMPERATURE, groups=groups) == labels).double()


def near_copies(x: Tensor) -> Tensor:
    """A number (N,) for each row of pixels that those nearly like it share, such as frames of one film; each has its
    own if nearly all rows are alike, which then are no copies but hard to tell apart."""
    unit = F.normalize(x, dim=1)
    pairs = torch.cat([(part @ unit.T > COPY).nonzero() + torch.tensor([start * BATCH, 0])
                       for start, part in enumerate(unit.split(BATCH))]).numpy()  # fmt: skip
    links = coo_matrix((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(len(x), len(x)))
    groups = torch.from_numpy(connected_components(links, directed=False)[1].astype(np.int64))
    return groups if 2 * int(groups.bincount().max()) <= len(x) else torch.arange(len(x))


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
    return concatenated([(part, np.arange(len(part))) for part in parts])


def concatenated(parts: list[tuple[Images, np.ndarray]]) -> Images:
    """At most MAX_IMAGES of each part."""
    chosen = [(images, spaced(rows, MAX_IMAGES)) for images, rows in parts]
    pixels, labels = zip(*((images.pixels[rows], images.labels[rows]) for images, rows in chosen), strict=True)
    return Images(np.concatenate(pixels), np.concatenate(labels))


def labelled_parts(stream: Stream) -> Iterator[tuple[str, Images]]:
    """Labelled sets to judge on: images that were never learnt where there are some, else those of labelled tasks."""
    for split in stream.eval_splits:
        if split.always and split.kept:
            yield split.name, concatenated([(split.bank_images, split.bank), (split.test_images, split.test)])
    own = [split for split in stream.eval_splits if not split.always and split.kept]
    if own:
        yield "the tasks' test sets", concatenated([(split.test_images, split.test) for split in own])
    elif labelled := [(task.images, task.train) for task in stream.tasks if task.classes and task.images.kept]:
        yield "the labelled tasks", concatenated(labelled)


def verdicts(
    folder: Path, config: Config, stream: Stream, make_module: Callable[[], nn.Module | None] = lambda: None
) -> list[Verdict]:
    """On all labelled images that the run knows, and on what the encoder knew before. They are kept for the report."""
    now = load_encoder(folder, make_module(), config.device, trust_code=True)
    if (start := start_encoder(now, folder, config, make_module())) is None:
        return []
    sets = list(labelled_parts(stream))
    if config.evaluation.reference is not None:
        known = labelled_images(config, config.evaluation.reference, now.card["image_size"], now.fit)
        sets.append(("what it knew", both_splits(known)))
    found = []
    for name, images in sets:
        if len(np.unique(images.labels)) > 1:
            found.append(judge(name, images, now, start, name_start(config)))
            keep(folder, len(stream.tasks), name, digest(images, np.arange(len(images))), found[-1])
    return found


def keep(folder: Path, tasks: int, name: str, sha256: str, verdict: Verdict | None, probes: Json | None = None) -> None:
    """Record a test of the encoder after `tasks` tasks, for the run's page."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    test = {"date": date, "tasks": tasks, "images": name, "sha256": sha256, "probes": probes or {}}
    if verdict:
        test |= {"verdict": verdict.sentence(folder), "gains": {way: [*gain] for way, gain in verdict.gains.items()}}
    try:
        add_evaluation(folder, test)
    except UserError as error:
        warn(f"the test is not kept for the report: {error}")
