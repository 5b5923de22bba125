"""A member of every family, added from outside the package: it needs a registration, and nothing else."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import plugin_members
import pytest
from conftest import run_cli
from test_every_key import value_at

from ptlf.commands.parser import make_parser
from ptlf.core.errors import UserError
from ptlf.core.registry import Registry
from ptlf.core.settings import nested
from ptlf.encoders import ENCODERS
from ptlf.evaluation import PROBES
from ptlf.methods import METHODS
from ptlf.objectives import OBJECTIVES
from ptlf.run.config import POLICIES
from ptlf.run.loop import Run
from ptlf.run.recipes import recipe_names
from ptlf.stream import STREAMS
from ptlf.training.optimizers import OPTIMIZERS

pytestmark = pytest.mark.slow

# The family, the member's name in it, and in its module.
MEMBERS: list[tuple[Registry[Any], str, str]] = [
    (STREAMS, "stripes", "STRIPES"), (OBJECTIVES, "align", "Align"), (METHODS, "shrink", "Shrink"),
    (POLICIES, "descending", "Descending"), (ENCODERS, "tiny", "TINY"), (OPTIMIZERS, "rmsprop", "RMSprop"),
    (PROBES, "centroid", "Centroid"),
]  # fmt: skip
# A value for each member's own key, by dotted key.
KEYS = {
    "stream.contrast": 80, "objective.spread": 2.0, "method.shrink": 0.1, "freezing.policy.skip": 1,
    "encoder.channels": 4, "training.optimizer.alpha": 0.5, "probes.centroid.power": 1.0,
}  # fmt: skip
CHOSEN = {
    "encoder": "tiny", "freezing.policy": "descending", "freezing.final": 0.5, "training.optimizer": "rmsprop",
    "training.lr": 0.01, "training.epochs": 2, "training.batch": 16, "probes.centroid.enabled": "true", "device": "cpu",
}  # fmt: skip
RECIPE = "stripes/align/shrink"


def words(settings: dict[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for family, name, attribute in MEMBERS:
        monkeypatch.setitem(family, name, getattr(plugin_members, attribute))


@pytest.mark.usefixtures("registered")
def test_registered_members_train_compare_and_show_up(tmp_path) -> None:
    common = {key: value for key, value in KEYS.items() if key.split(".")[0] not in ("objective", "method")}
    sweep = ["sweep", RECIPE, "stripes/simsiam/lump", "--out", tmp_path, *words(CHOSEN), *words(common)]
    assert "centroid accuracy, %" in run_cli(*sweep).out
    run = tmp_path / "stripes-align-shrink-seed0"
    results = json.loads((run / "results.json").read_text())
    assert results["name"] == f"{RECIPE} + descending freezing"
    assert {key: value_at(results["config"], key) for key in common} == common
    assert results["probes"]["centroid"]["settings"]["power"] == 1.0
    assert len(results["probes"]["centroid"]["matrix"]) == 2
    assert results["freezing"][0]["order"] == ["0"]  # the last unit is skipped
    assert set(results["cost"]["per_epoch"]["loss"]) == {"ssl", "length"}
    page = (tmp_path / "report.html").read_text()
    assert "align/shrink" in page and "centroid" in page
    assert "centroid: accuracy in %" in run_cli("evaluate", "--trust-code", run, "--probe", "centroid").out


@pytest.mark.usefixtures("registered")
def test_registered_members_are_listed_with_their_keys_and_recipes() -> None:
    about = {"streams": "stripes, 2 tasks x 2 classes", "encoders": "two convolutions", "recipes": RECIPE}
    about |= {"methods": "The objective, and short features.", "policies": "From the output downwards."}
    assert all(words in run_cli("list", family).out for family, words in about.items())
    assert {name for _, name, _ in MEMBERS} <= {line.split()[0] for line in run_cli("list").out.splitlines()}
    keys = make_parser().verbs["train"].format_help()
    assert all(f"\n  --{key} " in keys for key in KEYS)
    assert "align: weight of the term that keeps features apart" in keys
    assert {"stripes/align/lump", "stripes/supervised/shrink", "split-cifar10/align/ptlf"} <= set(recipe_names())
    assert "stripes/align/cassle" not in recipe_names()  # which needs an objective that can distill


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("method", METHODS)
def test_a_registered_objective_trains_with_every_method(method: str, tiny) -> None:
    config = tiny("digits/align/finetune", method__name=method, stream__per_class=20, training__batch=16)
    if method == "pnn":
        config.encoder.name = "conftest:tiny_resnet"
    with pytest.raises(UserError, match="objective 'align' cannot") if method == "cassle" else nullcontext():
        assert Run(config).train()["status"] == "finished"


def test_a_member_goes_by_module_and_attribute_and_others_are_refused() -> None:
    for family, name, attribute in MEMBERS:
        assert family.find(f"plugin_members:{attribute}") is getattr(plugin_members, attribute)
        for wanted, problem in {
            "plugin_members:Nothing": rf"{family.noun} 'plugin_members:Nothing' cannot be imported: .*no attribute",
            name: f"unknown {family.noun} '{name}'",
        }.items():
            with pytest.raises(UserError, match=problem):
                family.find(wanted)
        with pytest.raises(UserError, match=f"{family.noun} '{name}' must be an? .* of {family.kind.__name__}"):
            family[name] = 3
        assert name not in family


def test_a_run_of_members_by_module_and_attribute(tmp_path) -> None:
    module, run = "plugin_members:", tmp_path / "run"
    probe = f"probes.{module}Centroid"
    assert nested(f"{probe}.k", 1) == {"probes": {f"{module}Centroid": {"k": 1}}}
    sections = ("stream", "objective", "method", "freezing.policy", "encoder", "training.optimizer")
    members = {section: f"{module}{attribute}" for section, (_, _, attribute) in zip(sections, MEMBERS, strict=False)}
    keys = {key: value for key, value in {**CHOSEN, **KEYS}.items() if not key.startswith("probes")}
    run_cli("train", "--out", run, *words({**keys, **members, f"{probe}.enabled": "true", f"{probe}.power": 1.0}))
    results = json.loads((run / "results.json").read_text())
    assert results["config"]["objective"] == {"name": f"{module}Align", "spread": 2.0}
    assert results["freezing"][0]["order"] == ["0"]
    tested = run_cli("evaluate", "--trust-code", run, "--probe", f"{module}Centroid")
    assert "centroid: accuracy in %" in tested.out


def distribution(folder: Path, name: str, module: str, points: str) -> None:
    (folder / f"{name}.py").write_text(module)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)


def test_installed_packages_register_theirs_through_entry_points(tmp_path) -> None:
    points = "".join(f"[{family.group}]\n{name} = stripy:{attribute}\n" for family, name, attribute in MEMBERS)
    distribution(tmp_path, "stripy", Path(plugin_members.__file__).read_text(), points)
    broken = "[ptlf.methods]\nlost = torn:Lost\nlump = torn:Lump\n[ptlf.policies]\nnumber = torn:NUMBER\n"
    distribution(tmp_path, "torn", "NUMBER = 3\n", broken)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "ptlf", "list"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert {name for _, name, _ in MEMBERS} <= {line.split()[0] for line in done.stdout.splitlines()}
    start = "ptlf: warning: "
    warnings = [line.removeprefix(start) for line in done.stderr.splitlines() if line.startswith(start)]
    assert sorted(warnings) == [
        "freezing policy 'number' of package torn is left out: "
        "freezing policy 'number' must be a subclass of Policy, not 3",
        "method 'lost' of package torn is left out: AttributeError: module 'torn' has no attribute 'Lost'",
        "method 'lump' of package torn is left out: there is another method of that name",
    ]
