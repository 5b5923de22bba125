"""A run's folder is data: names of code in it are not followed, whichever command reads it."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from ptlf.cli import main
from ptlf.core.errors import UserError
from ptlf.core.registry import settings_from
from ptlf.encoders import ENCODERS
from ptlf.training.checkpoint import HostCopy, read_checkpoint, write_checkpoint

pytestmark = pytest.mark.usefixtures("no_pictures")
QUICK = [
    "--recipe", "digits/simsiam/lump", "--stream.groups", "[[0, 1]]", "--training.epochs", "1", "--training.batch",
    "128", "--device", "cpu", "--stream.per_class", "70", "--encoder.width", "4", "--objective.projection", "16",
    "--objective.bottleneck", "8", "--evaluation.gallery", "false",
]  # fmt: skip
PLACES = (
    "stream.name", "encoder.name", "objective.name", "method.name", "freezing.policy.name", "freezing.policy",
    "training.optimizer.name", "encoder", "method",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(["train", "--out", str(folder), *QUICK]) == 0
    return folder


@pytest.fixture
def at(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a module that leaves a mark when it is imported, and a run."""
    shutil.copytree(trained, tmp_path / "run")
    marking = f"open({str(tmp_path / 'mark')!r}, 'w').close()\nclass Evil: pass\n"
    (tmp_path / "evil.py").write_text(marking)
    (tmp_path / "run" / "evil.py").write_text(marking)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("evil", None)


def poison(folder: Path, place: str, name: str = "evil:Evil") -> None:
    """The name of code in all files of the run, as if it had been trained so."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    results = json.loads((folder / "results.json").read_text())
    *sections, last = place.split(".")
    for changed in (config, results["config"]):
        for key in sections:
            changed = changed[key]
        changed[last] = name
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "results.json").write_text(json.dumps(results))
    for path in (folder / "checkpoints").iterdir():
        write_checkpoint(path, HostCopy(read_checkpoint(path) | {"settings": config}))


def commands(at: Path) -> dict[str, list[str]]:
    run = str(at / "run")
    return {
        "resume": ["train", "--resume", run],
        "config": ["train", "-c", f"{run}/config.yaml", "--out", str(at / "again")],
        "evaluate": ["evaluate", run],
        "report": ["report", run, "--out", str(at / "page.html")],
        "figures": ["report", run, "--figures", str(at / "figures")],
        "watch": ["watch", run, "--once"],
    }


REFUSING, SHOWING = ("resume", "config", "evaluate"), ("report", "figures", "watch")
CASES = [(place, command) for place in PLACES for command in REFUSING] + [*zip(PLACES, SHOWING * 3, strict=True)]


@pytest.mark.parametrize(("place", "command"), CASES)
def test_no_command_runs_code_of_a_run(at: Path, place: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    poison(at / "run", place)
    code = main(commands(at)[command])
    told = capsys.readouterr().err
    assert not (at / "mark").exists()
    assert "evil" not in sys.modules
    if command in REFUSING:
        assert code == 2
        assert "'evil:Evil' in " in told
        assert "names code, which would run here; if you trust whoever wrote that file, add --trust-code" in told
    else:
        assert code in (0, 2)


def test_recipes_probes_and_sweeps_run_no_code(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("recipe: digits/evil:Evil/lump", "recipe: evil:Evil/simsiam/lump", "probes: {'evil:Evil': {}}"):
        (at / "c.yaml").write_text(text)
        assert main(["train", "-c", str(at / "c.yaml"), "--out", str(at / "out")]) == 2
        assert "names code" in capsys.readouterr().err, text
    (at / "sweep").mkdir()
    poison(at / "run", "encoder.name")
    (at / "run").rename(at / "sweep" / "digits-simsiam-lump-seed0")
    assert main(["sweep", "digits/simsiam/lump", "--out", str(at / "sweep"), *QUICK[2:]]) == 2
    assert "'evil:Evil' in " in capsys.readouterr().err
    assert not (at / "mark").exists()


@pytest.mark.parametrize("command", REFUSING)
def test_trusted_code_runs(at: Path, command: str) -> None:
    """So that the tests above can fail: the module is found, and its mark left."""
    poison(at / "run", "encoder.name")
    main([*commands(at)[command], "--trust-code"])
    assert (at / "mark").exists()


def test_a_name_on_the_command_line_is_the_users_own(at: Path) -> None:
    poison(at / "run", "encoder.name")
    main([*commands(at)["config"], "--encoder.name", "evil:Evil"])
    assert (at / "mark").exists()
    for typed in ("bevil:Evil", "evil:Evils", "x.evil:Evil", "evil:Evil:x", "--method.name=vil:Evil"):
        with settings_from(at / "config.yaml", [typed]), pytest.raises(UserError, match="names code"):
            ENCODERS.find("evil:Evil")
    for typed in ("evil:Evil", "--encoder.name=evil:Evil", "digits/evil:Evil/lump", "--probes.evil:Evil.k"):
        with settings_from(at / "config.yaml", [typed]):
            assert ENCODERS.find("evil:Evil"), typed
