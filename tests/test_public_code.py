"""What the public code of LUMP, CaSSLe, PFR and TRGP does, as numbers, so that nobody corrects it back.

docs/paper-notes.md says where each comes from. Beside them: losses, LARS, reservoir, lam and whole steps by hand in
tests/objectives, tests/training and tests/methods; k and forgetting in tests/evaluation; ResNet-18 in tests/encoders.
"""

import numpy as np
import pytest
import torch
from torch import nn

from ptlf.evaluation.metrics import summary
from ptlf.evaluation.probes import KnnTask, KnnTaskConfig
from ptlf.freezing.subspace import leading_eigenvectors
from ptlf.methods import METHODS, Memory
from ptlf.methods.distillation import CassleConfig, PFRConfig
from ptlf.methods.replay import DERConfig
from ptlf.model import Model
from ptlf.objectives import OBJECTIVES, Objective, barlow_twins_loss, byol_loss, moco_loss, simsiam_loss, vicreg_loss
from ptlf.run.config import Config, FreezingConfig, from_dict
from ptlf.run.loop import Run
from ptlf.run.recipes import recipe
from ptlf.training.trainer import learning_rate
from ptlf.views import View, named_views


def settings(stream: str, objective: str, method: str = "finetune") -> Config:
    return from_dict(recipe(f"{stream}/{objective}/{method}"))


def heads(stream: str, objective: str) -> Objective:
    """As a run of the recipe has them on ResNet-18's vectors, without values."""
    with torch.device("meta"):
        return OBJECTIVES[objective](settings(stream, objective).objective, nn.Linear(1, 1), 512, 100)


def layers(head: nn.Module) -> str:
    """Widths of linear layers; B and R for a norm and a ReLU after one."""
    short = {nn.BatchNorm1d: "B", nn.ReLU: "R"}
    linear = [layer for layer in head if isinstance(layer, nn.Linear)]
    after = "".join(f" {layer.out_features}" if layer in linear else short[type(layer)] for layer in head)
    return f"{linear[0].in_features}{after}"


LUMP_PROJECTOR = "512 2048BR 2048B"
PROJECTORS = {
    ("split-cifar10", "simsiam"): LUMP_PROJECTOR,
    ("split-cifar10", "barlow_twins"): LUMP_PROJECTOR,
    ("split-tinyimagenet", "barlow_twins"): LUMP_PROJECTOR,
    ("imagenet100", "barlow_twins"): "512 2048BR 2048BR 2048",  # CaSSLe's: a third layer, and no final norm
    ("imagenet100", "vicreg"): "512 2048BR 2048BR 2048",
    ("imagenet100", "mocov2plus"): "512 2048R 128",
    ("imagenet100", "simclr"): "512 2048R 128",
    ("imagenet100", "byol"): "512 4096BR 256",
}
PREDICTORS = {
    ("split-cifar10", "simsiam"): "2048 512BR 2048",
    ("split-cifar10", "byol"): "256 4096BR 256",
    ("imagenet100", "byol"): "256 8192BR 256",
}


def test_heads() -> None:
    assert {key: layers(heads(*key).projector) for key in PROJECTORS} == PROJECTORS
    assert {key: layers(heads(*key).predictor) for key in PREDICTORS} == PREDICTORS
    moco, byol = (settings("imagenet100", name).objective for name in ("mocov2plus", "byol"))
    assert (moco.queue, moco.temperature, moco.distill_temperature) == (65536, 0.2, 0.2)
    momenta = [(each.momentum_start, each.momentum_end) for each in (moco, byol)]
    assert momenta == [(0.99, 0.999), (0.99, 1.0)]
    barlow = [settings(stream, "barlow_twins").objective for stream in ("split-cifar10", "imagenet100")]
    assert [(each.scale, each.redundancy) for each in barlow] == [(1.0, 5e-3), (0.1, 5e-3)]


def test_linear_probe_of_cassles_scripts() -> None:
    rates = {"barlow_twins": 0.1, "mocov2plus": 3.0, "byol": 3.0, "simclr": 1.0, "simsiam": 30.0, "vicreg": 0.3}
    for objective, rate in rates.items():
        probe = settings("imagenet100", objective).probes["linear"]
        assert (probe.lr, probe.epochs, probe.batch, probe.weight_decay) == (rate, 100, 256, 0.0), objective
        assert (probe.enabled, probe.augment, probe.standardise) == (True, True, False), objective
        probe = settings("split-cifar10", objective).probes["linear"]
        assert (probe.lr, probe.augment, probe.standardise) == (0.1, False, True), objective


def test_views_of_cassles_scripts() -> None:
    """Colours, least area of a crop, and chances of blur and solarisation, by view."""
    weak, moco, strong = (0.4, 0.4, 0.2, 0.1), (0.4, 0.4, 0.4, 0.1), (0.8, 0.8, 0.8, 0.2)
    barlow = [(weak, 0.08, 1.0, 0.0), (weak, 0.08, 0.1, 0.2)]
    expected = {
        "barlow_twins": barlow,
        "byol": barlow,
        "mocov2plus": [(moco, 0.08, 0.5, 0.0)] * 2,
        "simclr": [(strong, 0.08, 0.5, 0.0)] * 2,
        "vicreg": [(weak, 0.2, 0.5, 0.1)] * 2,
    }
    for objective, wanted in expected.items():
        views = named_views(settings("imagenet100", objective).views.name, 224)
        found = [
            ((view.brightness, view.contrast, view.saturation, view.hue), view.crop_scale[0], view.blur, view.solarise)
            for view in views
        ]
        assert found == wanted, objective
        assert {(view.jitter, view.grey, view.flip) for view in views} == {(0.8, 0.2, 0.5)}
        assert {(view.mean, view.std) for view in views} == {((0.485, 0.456, 0.406), (0.228, 0.224, 0.225))}


def test_cassle_warms_up_by_epoch_from_0_003() -> None:
    training = settings("imagenet100", "barlow_twins").training
    rates = [learning_rate(training, epoch + 0.7) for epoch in range(10)]
    assert rates == pytest.approx(np.linspace(0.003, 0.4, 10))
    assert learning_rate(training, 10) == 0.4 and learning_rate(training, 400) == pytest.approx(0)
    assert settings("split-cifar10", "simsiam").training.warmup_start is None


def unit(v: np.ndarray) -> np.ndarray:
    return v / np.linalg.norm(v, axis=1, keepdims=True)


def test_losses_by_their_formulas() -> None:
    """Those that tests/objectives does not compute by hand."""
    p1, p2, z1, z2 = np.random.default_rng(0).normal(size=(4, 6, 5))
    tensors = [torch.from_numpy(v) for v in (p1, p2, z1, z2)]
    cosines = [np.mean(np.sum(unit(a) * unit(b), axis=1)) for a, b in ((p1, z2), (p2, z1))]
    assert simsiam_loss(*tensors).item() == pytest.approx(-sum(cosines) / 2)
    squares = [np.mean(np.sum((unit(a) - unit(b)) ** 2, axis=1)) for a, b in ((p1, z2), (p2, z1))]
    assert byol_loss(*tensors).item() == pytest.approx(sum(squares))
    queries, keys, queue = unit(p1), unit(z2), unit(p2)
    logits = np.c_[np.sum(queries * keys, axis=1), queries @ queue.T] / 0.2
    expected = np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[:, 0])
    assert moco_loss(*map(torch.from_numpy, (queries, keys, queue))).item() == pytest.approx(expected)


def test_what_cassles_code_does_otherwise_in_vicreg_and_barlow_twins() -> None:
    """It sums VICReg's two variance terms, which are averaged here, and standardises with the biased deviation."""
    z1, z2 = 0.1 * np.random.default_rng(1).normal(size=(2, 256, 8))
    first, second = torch.from_numpy(z1), torch.from_numpy(z2)
    hinges = [np.mean(np.maximum(0, 1 - np.sqrt(z.var(axis=0, ddof=1) + 1e-4))) for z in (z1, z2)]
    assert vicreg_loss(first, second, 0, 25, 0).item() == pytest.approx(25 * sum(hinges) / 2)
    scaled = [(z - z.mean(axis=0)) / z.std(axis=0) for z in (z1, z2)]
    c = scaled[0].T @ scaled[1] / 256
    theirs = np.sum((1 - np.diag(c)) ** 2) + 5e-3 * (np.sum(c**2) - np.sum(np.diag(c) ** 2))
    ours = barlow_twins_loss(first, second).item()
    assert 1e-5 < abs(ours / theirs - 1) < 0.01


def test_predictors_of_cassle_and_pfr_and_what_goes_in(tiny) -> None:
    with torch.device("meta"):
        model = Model(nn.Linear(1, 512), heads("split-cifar10", "simsiam"))
        predictors = {
            "cassle": METHODS["cassle"](CassleConfig(), model, None, torch.Generator()).predictor,
            "pfr": METHODS["pfr"](PFRConfig(), model, None, torch.Generator()).predictor,
        }
    assert {name: layers(head) for name, head in predictors.items()} == {
        "cassle": "2048 2048BR 2048",
        "pfr": "512 256BR 512",  # PFR's code: half of what goes in
    }
    for objective, normalised in {"mocov2plus": True, "simclr": False, "simsiam": False, "byol": False}.items():
        run, norms = Run(tiny(f"digits/{objective}/cassle", evaluation__enabled=False)), list[torch.Tensor]()
        run.method.task = 1
        run.method.predictor.register_forward_hook(
            lambda head, given, made, norms=norms: norms.append(given[0].norm(dim=1))
        )
        run.trainer.step(run.trainer.load(torch.arange(32), torch.Generator().manual_seed(0), run.method.draw(32)))
        assert len(norms) == 2
        assert torch.allclose(torch.cat(norms), torch.ones(64), atol=1e-5) == normalised, objective


def test_der_replays_as_many_images_as_the_batch_has() -> None:
    """LUMP's code replays a full batch beside an epoch's last, smaller one. Its `alpha` of 0.4 is DER's weight too."""
    assert DERConfig().alpha == settings("split-cifar10", "simsiam", "lump").method.alpha == 0.4
    assert settings("split-cifar10", "simsiam", "si").method.strength == 100
    method = METHODS["der"](DERConfig(), None, Memory(256, 8, 8, View()), torch.Generator().manual_seed(0))
    method.draw(256)
    assert method.draw(16)["picks"].shape == (16,)


def test_directions_that_the_subspace_keeps() -> None:
    """As printed, the energy reaches the threshold; the code of GPM and TRGP keeps one direction fewer."""
    assert (FreezingConfig().threshold, FreezingConfig().reach) == (0.99, True)
    inputs = np.random.default_rng(0).normal(size=(200, 12)) * 0.7 ** np.arange(12)
    gram = torch.from_numpy(inputs.T @ inputs)
    energy = np.linalg.svd(inputs, compute_uv=False) ** 2
    for threshold in (0.965, 0.985, 0.99):
        fewer = int(np.sum(np.cumsum(energy) / energy.sum() < threshold))
        assert leading_eigenvectors(gram, threshold, reach=False).shape == (12, fewer)
        assert leading_eigenvectors(gram, threshold).shape == (12, fewer + 1)


def test_k_and_forgetting_of_both_versions_of_lumps_code() -> None:
    labels = torch.arange(2).repeat(5000)  # a task of Split CIFAR-10
    october, published = KnnTask(KnnTaskConfig()), KnnTask(KnnTaskConfig()).variants()[0]
    assert [october.used(labels, seen)["k"] for seen in (1, 2, 5)] == [1, 2, 5]
    assert [published.used(labels, seen)["k"] for seen in (1, 2, 5)] == [200] * 3
    full = np.array([[90.0, 60, 50], [85, 80, 71], [88, 70, 70]])  # the published code tests tasks before their turn
    found = summary(
        [[float(value) if task <= row else None for task, value in enumerate(full[row])] for row in range(3)]
    )
    assert found["forgetting_just_learned"] == (2 + 10) / 2
    assert found["forgetting"] == (2 + 10) / 2
    assert found["forgetting_all_checkpoints"] == (2 + 10 + 0) / 3 < np.mean(full.max(axis=0) - full[-1]) == 13 / 3
