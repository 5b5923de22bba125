import numpy as np
import pytest
import torch
import yaml
from conftest import run_cli
from sklearn.linear_model import LogisticRegression

from ptlf.evaluation.probes import Linear, LinearConfig, linear_fit
from ptlf.run.evaluate import evaluate_run
from ptlf.run.loop import Run


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
    assert "linear_task: accuracy in %, bank:" in shown
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
