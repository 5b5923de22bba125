"""Whole runs against a training loop written out by hand: no engine, no registry, no optimizer.

What a run drew (batches, the views' randomness, places in the memory, lam) is given to the loop; all else it works out.
"""

import math
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ptlf.core.batch import Batch
from ptlf.run.loop import Run
from ptlf.training.checkpoint import Position
from ptlf.views import apply_view, draw

pytestmark = pytest.mark.slow

# Shares of the peak rate: an epoch of warm-up, then half a cosine, three steps each.
RATES = (0, 1 / 3, 2 / 3, 1, 0.75, 0.25)
SETTINGS = {
    "training__schedule": "cosine", "training__warmup": 1, "training__optimizer__weight_decay": 0.1,
    "evaluation__enabled": False, "encoder__name": "conftest:smooth_encoder", "objective__projection": 16,
}  # fmt: skip
# Widths, where an objective or method has them, and a penalty that counts.
SMALL = {
    "objective": {"hidden": 16, "bottleneck": 8},
    "method": {"hidden": 16, "weight": 0.3, "strength": 20.0, "damping": 1e-5, "clip": 0.01},
}


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (F.normalize(a, dim=1) * F.normalize(b, dim=1)).sum(1).mean()


def simsiam(heads: nn.Module, z1: Tensor, z2: Tensor) -> Tensor:
    p1, p2 = heads.predictor(z1), heads.predictor(z2)
    return -(cosine(p1, z2.detach()) + cosine(p2, z1.detach())) / 2


def barlow_twins(z1: Tensor, z2: Tensor, redundancy: float) -> Tensor:
    a, b = ((z - z.mean(0)) / z.std(0) for z in (z1, z2))
    weights = torch.full((z1.shape[1],) * 2, redundancy).fill_diagonal_(1)
    return (weights * (a.T @ b / len(a) - torch.eye(z1.shape[1])).square()).sum()


class Loop:
    """Tasks of six steps, from where the run starts."""

    def __init__(self, run: Run) -> None:
        self.config, self.view_specs, self.size = run.config, run.components.view_specs, run.components.view_size
        self.model = deepcopy(run.model).train()
        self.encoder, self.heads = self.model.encoder, self.model.objective
        self.predictor = deepcopy(getattr(run.method, "predictor", nn.Identity()))
        self.trained = [p for p in (*self.model.parameters(), *self.predictor.parameters()) if p.requires_grad]
        self.velocity = [torch.zeros_like(p) for p in self.trained]
        self.memory: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by place: image, second view, vector of the first
        self.queue = deepcopy(getattr(run.model.objective, "queue", None))  # (2, K, D), the newest keys last
        self.weights = list(self.encoder.parameters())
        self.importance = [torch.zeros_like(p) for p in self.weights]
        self.anchor = [p.detach().clone() for p in self.weights]

    def train(self, batches: list[Batch]) -> None:
        for task in range(len(batches) // 6):
            self.old = deepcopy(self.model)
            self.path = [torch.zeros_like(p) for p in self.weights]
            for step in range(6):
                self.step(task, step, batches[6 * task + step])
            for path, importance, anchor, p in zip(self.path, self.importance, self.anchor, self.weights, strict=True):
                importance += path / ((p.detach() - anchor) ** 2 + getattr(self.config.method, "damping", 1.0))
                anchor.copy_(p.detach())

    def step(self, task: int, step: int, batch: Batch) -> None:
        method, training = self.config.method, self.config.training
        pairs = zip(batch.uniforms, self.view_specs, strict=True)
        views = mixed = [apply_view(batch.images, u, view, self.size) for u, view in pairs]
        if self.memory:
            places = batch.draws["picks"].tolist()
            images, seconds, vectors = (torch.stack([self.memory[i][part] for i in places]) for part in range(3))
            fresh = apply_view(images, batch.draws["memory_uniforms"], self.view_specs[0], self.size)
        if method.name == "lump" and self.memory:
            lam = float(batch.draws["lam"])
            assert 0 < lam < 1
            mixed = [lam * views[0] + (1 - lam) * fresh, lam * views[1] + (1 - lam) * seconds]
        features = [self.encoder(view) for view in mixed]
        z = [self.heads.projector(f) for f in features]
        loss = self.objective(z, mixed)
        if method.name in ("cassle", "pfr") and task > 0:
            vectors, head = (z, self.old.objective.projector) if method.name == "cassle" else (features, nn.Identity())
            targets = [head(self.old.encoder(view)).detach() for view in mixed]
            pairs = zip(vectors, targets, strict=True)
            loss = loss - method.weight * sum(cosine(self.predictor(new), old) for new, old in pairs) / 2
        if method.name == "der":
            if self.memory:
                loss = loss + 0.4 * (self.encoder(fresh) - vectors).square().mean()
            else:
                self.encoder(views[0])
        if method.name == "si":
            parts = zip(self.importance, self.weights, self.anchor, strict=True)
            loss = loss + method.strength * sum((i * (p - anchor) ** 2).sum() for i, p, anchor in parts)
        rate = RATES[step] * training.lr * 128 / 256
        gradients = torch.autograd.grad(loss, self.trained, allow_unused=True)
        if method.name == "si":
            assert max(float(g.abs().max()) for g in gradients) > method.clip
            gradients = [g.clamp(-method.clip, method.clip) for g in gradients]
            for path, g in zip(self.path, gradients, strict=False):  # the encoder's come first
                path += rate * g**2
        with torch.no_grad():
            for p, g, velocity in zip(self.trained, gradients, self.velocity, strict=True):
                if g is not None:
                    velocity.copy_(0.9 * velocity + g + 0.1 * p)
                    p -= rate * velocity
        self.follow(step)
        for position, place in enumerate(batch.draws["slots"].tolist() if "slots" in batch.draws else ()):
            if place < self.config.memory.size:
                self.memory[place] = batch.images[position], views[1][position], features[0][position].detach()

    def objective(self, z: list[Tensor], mixed: list[Tensor]) -> Tensor:
        name = self.config.objective.name
        if name == "simsiam":
            return simsiam(self.heads, *z)
        if name == "barlow_twins":
            return barlow_twins(*z, self.config.objective.redundancy)
        teacher = self.heads.teacher
        with torch.no_grad():
            t1, t2 = (F.normalize(teacher.projector(teacher.encoder(view)), dim=1) for view in mixed)
        if name == "byol":
            p1, p2 = (F.normalize(self.heads.predictor(v), dim=1) for v in z)
            return ((p1 - t2) ** 2).sum(1).mean() + ((p2 - t1) ** 2).sum(1).mean()
        self.keys = torch.stack((t1, t2))
        parts = []
        for q, own, others in ((z[0], t2, self.queue[1]), (z[1], t1, self.queue[0])):
            q = F.normalize(q, dim=1)
            logits = torch.cat([(q * own).sum(1, keepdim=True), q @ others.T], 1) / 0.2
            parts.append((logits.logsumexp(1) - logits[:, 0]).mean())
        return (parts[0] + parts[1]) / 2

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """The momentum network, and the queue of its keys."""
        if self.heads.teacher is None:
            return
        start, end = self.config.objective.momentum_start, self.config.objective.momentum_end
        kept = end - (end - start) * (1 + math.cos(math.pi * step / 6)) / 2
        for name in ("encoder", "projector"):
            new = getattr(self.model if name == "encoder" else self.heads, name)
            for mine, theirs in zip(getattr(self.heads.teacher, name).parameters(), new.parameters(), strict=True):
                mine.copy_(kept * mine + (1 - kept) * theirs)
        if self.queue is not None:
            self.queue = torch.cat([self.queue, self.keys], 1)[:, -self.queue.shape[1] :]

    def state(self) -> dict[str, Tensor]:
        heads = {} if self.queue is None else {"objective.queue": self.queue}
        own = self.predictor.state_dict(prefix="predictor.")
        if self.config.method.name == "si":
            own = {f"importance.{number}": value for number, value in enumerate(self.importance)}
        tensors = {**self.model.state_dict(), **heads, **own}
        return {name: value.double() for name, value in tensors.items() if name not in COUNTERS}


COUNTERS = {"objective.pointer", "objective.teacher.step", "objective.teacher.steps"}


def state(model: nn.Module, method: nn.Module) -> dict[str, Tensor]:
    """A copy, with the newest of the queue's keys last."""
    tensors = {name: value.double() for name, value in {**model.state_dict(), **method.state_dict()}.items()}
    if "objective.queue" in tensors:
        tensors["objective.queue"] = tensors["objective.queue"].roll(-int(tensors["objective.pointer"]), 1)
    return tensors


def noted(run: Run) -> list[Batch]:
    """The batches of the run's steps, as they come to be."""
    batches: list[Batch] = []
    body = run.trainer.engine.body

    def step(batch: Batch) -> dict[str, Tensor]:
        batches.append(replace(batch))
        return body(batch)

    run.trainer.engine.body = step
    return batches


# Each with a rate at which rounding does not grow from step to step.
PAIRS = [("simsiam", method, 0.03) for method in ("finetune", "lump", "cassle", "pfr", "der", "si")]
PAIRS += [("barlow_twins", "finetune", 0.001), ("barlow_twins", "lump", 0.001), ("mocov2plus", "lump", 0.03)]
PAIRS += [("byol", "finetune", 0.03), ("byol", "lump", 0.03)]


@pytest.mark.parametrize(("objective", "method", "lr"), PAIRS)
def test_a_run_equals_a_loop_by_hand(tiny, objective: str, method: str, lr: float) -> None:
    """All weights, norms' statistics, the momentum network and its queue, in how far they moved."""
    config = tiny(f"digits/{objective}/{method}", training__lr=lr, **SETTINGS)
    for part, sizes in SMALL.items():
        for name in sizes.keys() & vars(getattr(config, part)).keys():
            setattr(getattr(config, part), name, sizes[name])
    run = Run(config)
    loop, batches = Loop(run), noted(run)
    start = state(run.model, run.method)
    run.train()
    assert [len(batch) for batch in batches] == [128, 128, 34] * 2 + [128, 128, 30] * 2
    loop.train(batches)
    found, expected = state(run.model, run.method), loop.state()
    for name, value in expected.items():
        moved, wanted = found[name] - start[name], value - start[name]
        limit = 1e-6 + 0.01 * float(moved.abs().max())
        torch.testing.assert_close(moved, wanted, rtol=0, atol=limit, msg=lambda text, name=name: f"{name}: {text}")


def test_every_epoch_sees_the_tasks_images_once(tiny) -> None:
    run = Run(tiny(**SETTINGS))
    batches = noted(run)
    run.train()
    for epoch in range(4):
        seen = torch.cat([batch.images for batch in batches[3 * epoch : 3 * epoch + 3]]).numpy()
        task = run.stream.data.train.pixels[run.stream.tasks[epoch // 2].train]
        assert sorted(map(np.ndarray.tobytes, seen)) == sorted(map(np.ndarray.tobytes, task))


def ratios_by_hand(
    run: Run, model: nn.Module, frozen: list[str], past: Tensor, generator: torch.Generator
) -> dict[str, float]:
    """||G B|| / ||G|| of the units not frozen: B of the past's patches, G of the second task's loss on plain views."""
    encoder, settings, task = model.encoder, run.config.freezing, run.stream.tasks[1].train
    layers = {name: encoder[int(name)] for name in ("0", "3", "6") if name not in frozen}
    bases = {}
    model.eval()
    for name, layer in layers.items():
        with torch.no_grad():
            inputs = encoder[: int(name)]((past.permute(0, 3, 1, 2) / 255 - 0.5) / 0.5)
        patches = F.unfold(inputs, layer.kernel_size, padding=layer.padding, stride=layer.stride)  # (N, m, L)
        columns = patches.permute(1, 0, 2).flatten(1).double().numpy()
        vectors, energy, _ = np.linalg.svd(columns @ columns.T)
        bases[name] = vectors[:, : 1 + int(np.argmax(np.cumsum(energy) >= settings.threshold * energy.sum()))]
    model.train()
    for name in frozen if not settings.batch_statistics else ():
        encoder[int(name) + 1].eval()
    gradients = {name: np.zeros(layer.weight.shape) for name, layer in layers.items()}
    for _ in range(settings.batches):
        chosen = task[torch.randperm(len(task), generator=generator)[: run.config.training.batch]]
        images, uniforms = torch.from_numpy(run.stream.data.train.pixels[chosen]), draw(len(chosen), generator)
        made = zip(uniforms, run.components.view_specs, strict=True)
        views = [apply_view(images, u, view, run.components.view_size) for u, view in made]
        loss = simsiam(model.objective, *(model.objective.projector(encoder(view)) for view in views))
        for name, layer in layers.items():
            gradients[name] += torch.autograd.grad(loss, layer.weight, retain_graph=True)[0].double().numpy()
    flat = {name: gradient.reshape(len(gradient), -1) for name, gradient in gradients.items()}
    return {name: float(np.linalg.norm(g @ bases[name]) / np.linalg.norm(g)) for name, g in flat.items()}


@pytest.mark.parametrize("batch_statistics", [False, True])
def test_ratios_of_a_run_equal_those_by_hand(tiny, batch_statistics: bool) -> None:
    """Before every epoch: the past as it was when the task began, the new task's gradient in train mode."""
    config = tiny(
        "digits/simsiam/ptlf", training__epochs=3, evaluation__enabled=False, objective__projection=16,
        freezing__final=0.67, freezing__update="per-epoch", freezing__threshold=0.9, freezing__batches=2,
        freezing__batch_statistics=batch_statistics,
    )  # fmt: skip
    run = Run(config)
    twin, original = deepcopy(run.model), run.evaluator.correlate
    past: list[Tensor] = []
    expected: list[dict[str, float]] = []

    def correlate(at: Position, indices: np.ndarray):
        past.append(run.method.memory.images[: len(run.method.memory)].clone())
        twin.load_state_dict(run.model.state_dict())
        generator = torch.Generator()
        generator.set_state(run.components.random["correlation"].get_state())
        expected.append(ratios_by_hand(run, twin, list(run.freezing.freezer.frozen), past[0], generator))
        run.model.eval()  # as a probe may leave it
        before = state(run.model, run.method)
        ratios = original(at, indices)
        assert all(torch.equal(value, before[name]) for name, value in state(run.model, run.method).items())
        return ratios

    run.evaluator.correlate = correlate
    (entry,) = run.train()["freezing"]
    assert not torch.equal(past[0], past[1])
    found = [entry["ratios"], *entry["ratios_by_epoch"].values()]
    assert [len(ratios) for ratios in found] == [3, 3, 2]
    for ratios, by_hand in zip(found, expected, strict=True):
        assert ratios == pytest.approx(by_hand, abs=1e-4)
