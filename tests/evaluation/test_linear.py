from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import yaml
from conftest import run_cli
from sklearn.linear_model import LogisticRegression
from torch import nn

from ptlf.core.phases import silent
from ptlf.evaluation import EvaluationConfig, Prober
from ptlf.evaluation.probes import Linear, LinearConfig, linear_fit
from ptlf.run.evaluate import evaluate_run
from ptlf.run.loop import Run
from ptlf.stream import StreamConfig
from ptlf.stream.task import Dataset, Images, split
from ptlf.views import View, apply_view, draw, normalise


def noisy_linear(count: int, seed: int, classes: int = 5, dim: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """Random features whose labels are the largest of noisy linear functions, the same for every seed."""
    truth = np.random.default_rng(0).normal(size=(dim, classes))
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, dim))
    labels = np.argmax(x @ truth + 2 * rng.normal(size=(count, classes)), axis=1)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(labels)


@pytest.fixture(scope="module")
def data():
    return noisy_linear(3000, 1), noisy_linear(4000, 2)


def test_linear_probe_is_as_good_as_logistic_regression(data) -> None:
    """Standardised also on features that are small and far from zero, as a random encoder's are."""
    (x, y), (x_test, y_test) = data
    exact = LogisticRegression(C=1e6, max_iter=1000, tol=1e-8).fit(x.numpy(), y.numpy())
    reference = 100 * exact.score(x_test.numpy(), y_test.numpy())
    for standardise in (True, False):
        small = Linear(LinearConfig(standardise=standardise)).fit(0.01 * x + 3, y, 1)
        assert (small(0.01 * x_test + 3, y_test) == pytest.approx(reference, abs=0.5)) == standardise
    assert 60 < reference < 95
    assert Linear(LinearConfig()).fit(x, y, 1)(x_test, y_test) == pytest.approx(reference, abs=0.5)
    found, expected = (weight - weight.mean(0) for weight in (linear_fit(x, y, LinearConfig())[0].numpy(), exact.coef_))
    assert np.linalg.norm(found - expected) < 0.006 * np.linalg.norm(expected)  # 0.02 at the rate it begins with


def test_linear_probe_is_sgd_whose_rate_drops_twice_and_repeats(data) -> None:
    """Against a loop in float64: ten epochs, at a tenth of the rate from the seventh and a hundredth from the ninth."""
    (x, y), _ = data
    config = LinearConfig(epochs=10, batch=700, momentum=0.8, weight_decay=0.01, standardise=False)
    fitted, bias, _ = linear_fit(x, y, config)
    inputs, targets = np.c_[x.double().numpy(), np.ones(len(x))], np.eye(5)[y.numpy()]
    weight, velocity, generator = np.zeros((25, 5)), 0.0, torch.Generator().manual_seed(0)
    for rate in (*[0.1] * 6, *[0.01] * 2, *[0.001] * 2):
        for part in torch.randperm(len(x), generator=generator).split(700):
            powers = np.exp(inputs[part] @ weight)
            wrong = powers / powers.sum(1, keepdims=True) - targets[part]
            velocity = 0.8 * velocity + inputs[part].T @ wrong / len(part) + 0.01 * weight
            weight = weight - rate * velocity
    np.testing.assert_allclose(fitted.T.numpy(), weight[:-1], atol=1e-5)
    np.testing.assert_allclose(bias.numpy(), weight[-1], atol=1e-5)
    before = torch.random.get_rng_state()
    first, second = (linear_fit(x, y, LinearConfig(epochs=2))[0] for _ in range(2))
    assert torch.equal(before, torch.random.get_rng_state()) and torch.equal(first, second)


class Corner(nn.Module):
    """The vector of an image: its first three pixels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, 0, :3].flatten(1)


def test_an_augmented_probe_encodes_new_crops_of_the_bank_in_every_epoch() -> None:
    """The same ones every time, in batches of any size. The row within tasks is not augmented."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 12, 12, 3), np.uint8)
    images = Images(pixels, np.arange(40) % 2)
    stream = split(Dataset("noise", ("0", "1"), images, images), StreamConfig(tasks=1), seed=0)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    config = LinearConfig(enabled=True, augment=True, epochs=2, standardise=False, lr=1.0, batch=16)

    def prober(batch: int, probe: LinearConfig = config) -> Prober:
        prepare = partial(normalise, mean=mean, std=std, size=8)
        return Prober(stream, EvaluationConfig(batch=batch), {"linear": probe}, prepare, torch.device("cpu"))

    (split_of,), banks = prober(7).banks(0)
    bank, view = torch.from_numpy(pixels[split_of.bank]), View(crop_scale=(0.08, 1.0), mean=mean, std=std)
    crops = []
    for epoch in range(2):
        crops += [prober(7).encode(Corner(), banks, silent, epoch)[0][0]]
        uniforms = draw(len(bank), torch.Generator().manual_seed(epoch), 1)[0]
        rounding = 0.51 / 255 / min(std)  # crops have 256 levels, as Pillow's do
        torch.testing.assert_close(crops[-1], Corner()(apply_view(bank, uniforms, view, 8)), rtol=0, atol=rounding)
    assert not torch.allclose(crops[0], crops[1], atol=0.1)
    (still, labels), (asked, truth) = (
        prober(64).features(Corner(), images, chosen) for chosen in (split_of.bank, split_of.test)
    )
    weight, bias, _ = linear_fit(still, labels, config, crops.__getitem__)
    expected = 100 * float(((asked @ weight.T + bias).argmax(1) == truth).double().mean())
    assert [prober(batch).rows(Corner(), 0)["linear"] for batch in (7, 7, 64)] == [[pytest.approx(expected)]] * 3
    plain = prober(7, replace(config, augment=False))
    assert plain.rows(Corner(), 0)["linear_task"] == prober(7).rows(Corner(), 0)["linear_task"]
    assert prober(7).settings()["linear"]["augment"] is True
    assert "augment" not in {**prober(7).settings()["linear_task"], **plain.settings()["linear"]}


def test_augmented_features_are_scaled_by_those_of_the_bank(data) -> None:
    (x, y), _ = data
    fitted = [
        linear_fit(x, y, LinearConfig(epochs=3), made)[0] for made in (None, lambda epoch: x, lambda epoch: 2 * x)
    ]
    assert torch.equal(fitted[0], fitted[1]) and not torch.allclose(fitted[0], fitted[2])


def test_only_the_classes_that_occur_have_an_output_and_constant_features_do_no_harm() -> None:
    x, y = noisy_linear(300, 4, classes=2)
    x[:, 0] = 7.0
    names = torch.tensor([7, 4])
    weight, bias, classes = linear_fit(x, names[y], LinearConfig())
    assert classes.tolist() == [4, 7] and weight.isfinite().all() and bias.isfinite().all()
    assert Linear(LinearConfig()).fit(x, names[y], 1)(x, names[y]) > 75


def test_a_run_records_the_probes_and_evaluate_repeats_them(tiny, tmp_path) -> None:
    run = Run(tiny(probes__linear__enabled=True), tmp_path / "run")
    probes = run.train()["probes"]
    assert list(probes) == ["knn_task", "knn_class", "linear_task", "linear", "knn_task_k200"]
    for name, bank in (("linear", "all classes seen"), ("linear_task", "own task")):
        assert bank in probes[name]["settings"]["bank"]
        assert [value is None for value in probes[name]["matrix"][0]] == [False, True]
        assert probes[name]["untrained_accuracy"] > 0
    assert probes["linear"]["settings"]["lr"] == 0.1
    assert probes["linear_task"]["accuracy"] > probes["linear"]["accuracy"] > 40  # of two classes, and of four
    chosen = {"linear": ["linear_task", "linear"], "knn_class": ["knn_class"]}
    for probe, rows in chosen.items():
        again, *_ = evaluate_run(tmp_path / "run", run.config, [probe])
        assert list(again) == rows
        assert all(values["accuracy"] == probes[name]["accuracy"] for name, values in again.items())
    both, *_ = evaluate_run(tmp_path / "run", run.config, ["linear", "knn_task"])
    assert list(both) == ["linear_task", "linear", "knn_task", "knn_task_k200"]


def test_the_command_takes_a_probe_and_knows_one_that_is_gone(run_copy) -> None:
    shown = run_cli("evaluate", run_copy, "--probe", "linear", "knn_task", "--probes.linear.epochs", 2).out
    assert "linear_task: accuracy in %, 144 test images, bank:" in shown
    assert "knn_task: accuracy" in shown
    assert "knn_class" not in shown
    assert "unknown probe 'knn'; did you mean" in run_cli("evaluate", run_copy, "--probe", "knn", code=2).err
    path = run_copy / "config.yaml"
    settings = yaml.safe_load(path.read_text())
    settings["probes"]["ridge"] = {"enabled": True, "penalty": 1e-3}
    path.write_text(yaml.safe_dump(settings))
    for words in ([], ["--probe", "ridge"]):
        error = run_cli("evaluate", run_copy, *words, code=2).err
        assert "probe 'ridge'" in error and "linear" in error, words
