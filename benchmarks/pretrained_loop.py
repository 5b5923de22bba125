"""A pretrained encoder on new domains by a plain loop, for many settings: what to freeze, and how to train the rest.

    python benchmarks/pretrained_loop.py DOMAINS --encoder FILE.onnx --jobs depth|orders|search --out FILE.jsonl

`search` draws settings at random, `depth` varies how many layers are frozen around those of `ptlf learn`, `orders`
compares a prefix with the orders by correlation ratios at the same depth. DOMAINS is as for benchmarks/pretrained.py.
Every line of FILE.jsonl is one training, with accuracies in %: `knn` and `linear` on the new images, `knew` and
`knew_linear` on photos.npz. Layers are frozen by `requires_grad_(False)`, so nothing is said of costs. Trainings that
FILE.jsonl holds are not repeated.
"""

import argparse
import copy
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.pretrained import KNOWN, accuracies
from ptlf.encoders import ENCODERS
from ptlf.evaluation.metrics import effective_rank, spread
from ptlf.freezing import POLICIES, Context, Unit, correlation_ratios, find_units
from ptlf.freezing.cost import measure_savings
from ptlf.objectives import barlow_twins_loss, mlp, simclr_loss, simsiam_loss, vicreg_loss
from ptlf.run.build import make_encoder
from ptlf.views import View, draw, make_views

MEAN, STD = (0.482, 0.459, 0.408), (1 / 255, 1 / 255, 1 / 255)  # of the network's inputs
COLOURS = {
    0: {},
    1: {"jitter": 0.8, "brightness": 0.2, "contrast": 0.2, "saturation": 0.1, "hue": 0.02},
    2: {"jitter": 0.8, "brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
}
SPACE = {
    "obj": ["barlow", "barlow", "simsiam", "vicreg", "simclr", "simclr", "diet"], "lr": [3e-5, 1e-4, 3e-4],
    "head_lr": [1e-3, 3e-3], "bs": [64, 128, 256], "epochs": [10, 20, 40], "depth": [0, 0.5, 0.75, 0.75, 0.9],
    "crop": [0.2, 0.4, 0.6], "colour": [0, 1, 2], "flip": [0, 0.5], "grey": [0, 0.2], "anchor": [0, 0, 0.2, 0.5],
    "proj": [256, 1024, 2048], "layers": [2, 3], "warm": [0, 2], "wd": [1e-4, 1e-2], "temp": [0.1, 0.2, 0.5],
}  # fmt: skip
LEARN = {
    "obj": "vicreg", "lr": 3e-5, "head_lr": 1e-3, "bs": 64, "epochs": 40, "depth": 0.5, "crop": 0.6, "colour": 1,
    "flip": 0.5, "grey": 0.2, "anchor": 0.1, "proj": 1024, "layers": 3, "warm": 0, "wd": 1e-2, "temp": 0.2,
}  # fmt: skip
ORDERS = {"first": "ascending", "random": "random", "ratios": "correlation", "cost": "cost_aware"}
REPLAY = 192  # images of photos.npz that ratios are computed with
Settings = dict[str, Any]


def jobs(kind: str, domains: list[str]) -> Iterator[tuple[Settings, str, int]]:
    """Settings, domain and seed of each training."""
    if kind == "search":
        generator = random.Random(7)
        for number in range(2000):
            settings = {name: generator.choice(values) for name, values in SPACE.items()}
            yield from ((settings, domain, number) for domain in domains)
    elif kind == "orders":
        shorter = {**LEARN, "days": 1, "epochs": 20}
        orders = [*itertools.product((0.5, 0.75), ("first", "ratios", "cost")), (0, "first")]
        for seed, (depth, which) in itertools.product(range(3), orders):
            yield from (({**shorter, "depth": depth, "which": which}, domain, seed) for domain in domains)
    else:
        changes = [{}, {"depth": 0}, {"depth": 0.25}, {"depth": 0.75}, {"depth": 0.9}]
        changes += [{"which": "last"}, {"which": "random"}]
        for seed in range(3):
            yield from (({**LEARN, "days": 2, **change}, domain, seed) for change in changes for domain in domains)


def views_of(settings: Settings) -> tuple[View, View]:
    crop, colours = (settings["crop"], 1.0), COLOURS[settings["colour"]]
    view = View(crop_scale=crop, flip=settings["flip"], grey=settings["grey"], mean=MEAN, std=STD, **colours)
    return view, view


def frozen(settings: Settings, encoder: nn.Module, seed: int, replay: Tensor, loss: Callable[[], Tensor]) -> list[Unit]:
    """The units to freeze. replay: normalised images of what the encoder knew; loss: of a batch of new ones."""
    units, which = find_units(encoder, replay[:2]), settings.get("which", "first")
    names, count = [unit.name for unit in units], round(settings["depth"] * len(units))
    if which == "last":
        return units[len(units) - count :]
    policy, context = POLICIES[ORDERS[which]](), Context(names, remaining=count)
    context.generator = torch.Generator().manual_seed(seed)
    if policy.needs_ratios:
        context.ratios = correlation_ratios(encoder, replay, loss, units=units)
    if policy.needs_savings:
        context.savings = measure_savings(encoder, units, replay[:2])
    chosen = policy.choose(count, names, [], context)
    return [unit for unit in units if unit.name in chosen]


def anchor(settings: Settings, loss: Tensor, h: Tensor, old: Tensor, pull: Tensor | None) -> tuple[Tensor, Tensor]:
    """The pull on the features towards the old ones, as a share of the loss's; and the loss's running mean."""
    norm = torch.autograd.grad(loss, h, retain_graph=True)[0].norm()
    pull = norm if pull is None else pull.lerp(norm, 0.1)
    lengths = h.detach().norm(dim=1)
    scale = pull / (lengths.reciprocal().norm() / len(lengths))
    return settings["anchor"] * scale * (1 - F.cosine_similarity(h, old).mean()), pull


def train(settings: Settings, encoder: nn.Module, images: Tensor, known: Tensor, seed: int) -> list[int]:
    """Returns the numbers of the frozen units. known: images of what the encoder knew."""
    torch.manual_seed(seed)
    generator, c, device = torch.Generator().manual_seed(seed), settings, images.device
    encoder.train()
    dim = encoder(torch.zeros(2, 3, 64, 64, device=device)).shape[1]
    projector, predictor = mlp(dim, *[c["proj"]] * c["layers"]), mlp(c["proj"], 512, c["proj"])
    classifier = nn.Linear(dim, len(images))
    heads = nn.ModuleList([projector, predictor, classifier]).to(device)

    def views_and_loss(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        uniforms = draw(len(rows), generator).to(device)
        views = torch.cat(make_views(images[rows], uniforms, views_of(c), images.shape[1]))
        h = encode(encoder, views)
        z1, z2 = (projector(part) for part in h.chunk(2))
        if c["obj"] == "diet":
            smoothing = 0.8 if c["proj"] > 1000 else 0.3
            return views, h, F.cross_entropy(classifier(h), torch.cat([rows, rows]), label_smoothing=smoothing)
        if c["obj"] == "simsiam":
            return views, h, simsiam_loss(predictor(z1), predictor(z2), z1, z2)
        if c["obj"] == "simclr":
            return views, h, simclr_loss(z1, z2, c["temp"])
        return views, h, {"barlow": barlow_twins_loss, "vicreg": vicreg_loss}[c["obj"]](z1, z2)

    def encode(network: nn.Module, views: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=c["bf16"]):
            return network(views).float()

    def loss() -> Tensor:
        rows = torch.randint(len(images), (c["bs"],), generator=generator).to(device)
        return views_and_loss(rows)[2]

    replay = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))[:REPLAY].to(device)]
    numbers = {unit.name: number for number, unit in enumerate(find_units(encoder, normalised(replay[:2])))}
    chosen = frozen(c, encoder, seed, normalised(replay), loss)
    for unit in chosen:
        for parameter in unit.parameters():
            parameter.requires_grad_(False)
    trained = [p for p in encoder.parameters() if p.requires_grad]
    groups = [{"params": trained, "base": c["lr"]}, {"params": list(heads.parameters()), "base": c["head_lr"]}]
    optimizer = torch.optim.AdamW(groups, weight_decay=c["wd"])
    for day in torch.randperm(len(images), generator=generator).to(device).chunk(c.get("days", 1)):
        teacher, pull = copy.deepcopy(encoder).eval().requires_grad_(False), None
        per = len(day) // c["bs"]
        for step in range(c["epochs"] * per):
            if step % per == 0:
                order = day[torch.randperm(len(day), generator=generator).to(device)]
            rate = 0.5 * (1 + math.cos(math.pi * step / (c["epochs"] * per))) * min(1, (step + 1) / per)
            for group, on in zip(optimizer.param_groups, (step >= c["warm"] * per, True), strict=True):
                group["lr"] = group["base"] * rate * on
            views, h, loss_value = views_and_loss(order[step % per * c["bs"] :][: c["bs"]])
            if c["anchor"]:
                with torch.no_grad():
                    old = encode(teacher, views)
                extra, pull = anchor(c, loss_value, h, old, pull)
                loss_value = loss_value + extra
            optimizer.zero_grad()
            loss_value.backward()
            optimizer.step()
    return [numbers[unit.name] for unit in chosen]


def normalised(images: Tensor) -> Tensor:
    """Stored images (B, H, W, 3) uint8 as the network's input."""
    mean, std = (torch.tensor(value, device=images.device).view(3, 1, 1) for value in (MEAN, STD))
    return (images.permute(0, 3, 1, 2) / 255 - mean) / std


@torch.no_grad()
def label_free(settings: Settings, encoder: nn.Module, start: nn.Module, images: Tensor) -> dict[str, float]:
    """Measures of features that need no labels: effective rank, spread, share of images whose other view is nearest to
    a view, and mean cosine to the features of the encoder at the start."""
    encoder.eval(), start.eval()
    uniforms = draw(len(images), torch.Generator().manual_seed(0)).to(images.device)
    made = make_views(images, uniforms, views_of(settings), images.shape[1])
    one, two = (torch.cat([encoder(part) for part in view.split(400)]).float() for view in made)
    before = torch.cat([start(part) for part in made[0].split(400)]).float()
    nearest = (F.normalize(one, dim=1) @ F.normalize(two, dim=1).T).argmax(1).cpu()
    return {
        "rank": effective_rank(one),
        "spread": spread(one),
        "retrieved": float((nearest == torch.arange(len(one))).double().mean()),
        "moved": 1 - float(F.cosine_similarity(one, before).mean()),
    }


@torch.no_grad()
def features(encoder: nn.Module, images: Tensor) -> np.ndarray:
    encoder.eval()
    return torch.cat([encoder(normalised(part)) for part in images.split(400)]).cpu().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("domains", type=Path)
    parser.add_argument("--encoder", required=True, metavar="FILE.onnx")
    parser.add_argument("--jobs", choices=("depth", "orders", "search"), default="depth")
    parser.add_argument("--only", nargs="+", help="names of domains")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bf16", action="store_true", help="run the encoder in bf16 on a CPU too, as on a GPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bf16 = options.bf16 or device.type == "cuda"
    files = sorted(
        file for file in options.domains.glob("*.npz") if file.stem in (KNOWN, *(options.only or [file.stem]))
    )
    data = {file.stem: dict(np.load(file)) for file in files}
    pixels = {name: torch.from_numpy(each["images"]).to(device) for name, each in data.items()}
    name = f"onnx:{options.encoder}"
    given = make_encoder(ENCODERS.find(name).Config(name=name, channels="bgr"), 0).to(device)

    def test(encoder: nn.Module, name: str) -> dict[str, float]:
        right = accuracies(features(encoder, pixels[name]), data[name]["labels"], data[name]["groups"])
        return {test: 100 * float(np.mean(found)) for test, found in right.items()}

    done = [json.loads(line) for line in options.out.open()] if options.out.exists() else []
    with options.out.open("a") as file:
        for name in () if done else data:
            print(json.dumps({"domain": name, "obj": "untouched", **test(given, name)}), file=file, flush=True)
        for settings, domain, seed in jobs(options.jobs, [name for name in data if name != KNOWN]):
            job = {"domain": domain, "seed": seed, "bf16": bf16, **settings}
            if any(all(line.get(key) == value for key, value in job.items()) for line in done):
                continue
            encoder, began = copy.deepcopy(given), time.monotonic()
            layers = train(settings | {"bf16": bf16}, encoder, pixels[domain], pixels[KNOWN], seed)
            known = dict(zip(("knew", "knew_linear"), test(encoder, KNOWN).values(), strict=True))
            free = label_free(settings, encoder, given, pixels[domain])
            accuracy = {**test(encoder, domain), **known}
            line = {**job, "sec": time.monotonic() - began, **accuracy, **free, "frozen": layers}
            print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    main()
