"""The wheel holds what a run needs, and no more; it runs where there is no clone."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml

import ptlf

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "data", "*.egg-info")


def run(*words: str, **options) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """With the sdist beside it, made of a copy: building writes beside the sources."""
    pytest.importorskip("build")
    place = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT, place / "sources", ignore=LEFT_OUT)
    run("-m", "build", "--no-isolation", "--outdir", str(place / "dist"), str(place / "sources"))
    (found,) = (place / "dist").glob("*.whl")
    return found


def test_the_wheel_has_the_package_and_nothing_else_and_runs_without_a_clone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if not name.startswith(f"ptlf-{ptlf.__version__}.dist-info/")}
        about = message_from_bytes(file.read(f"ptlf-{ptlf.__version__}.dist-info/METADATA"))
    assert names == {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "ptlf").rglob("*.*") if path.suffix != ".pyc"
    }
    assert {"ptlf/py.typed", "ptlf/report/templates/page.html"} <= names
    assert about["Version"] == ptlf.__version__
    assert {"all", "export", "lightning", "test", "timm", "trackers"} <= set(about.get_all("Provides-Extra"))
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        inside = {name.partition("/")[2] for name in file.getnames()}
    assert names | {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml"} <= inside
    assert not {"tests", "results", "benchmarks", "reproduction"} & inside
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
        scripts = file.read(f"ptlf-{ptlf.__version__}.dist-info/entry_points.txt").decode()
    assert re.search(r"^ptlf = ptlf\.cli:main$", scripts, re.MULTILINE)
    (tmp_path / "work").mkdir()
    where = {"cwd": tmp_path / "work", "env": {**os.environ, "PYTHONPATH": str(tmp_path / "site")}}
    assert run("-m", "ptlf", "--version", **where) == f"ptlf {ptlf.__version__}\n"
    small = ["--training.epochs", "1", "--stream.groups", "[[0, 1], [2, 3]]", "--device", "cpu"]
    commands = [["train", "--out", "run", *small], ["report", "run", "--out", "page.html"], ["completion", "bash"]]
    code = f"import ptlf.cli; print(ptlf.__file__); assert not any(map(ptlf.cli.main, {commands}))"
    out = run("-c", code, **where)
    assert out.startswith(str(tmp_path / "site"))
    assert "digits/simsiam/ptlf" in out
    assert "digits" in (tmp_path / "work" / "page.html").read_text()


def test_one_version_and_one_name_for_each_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    assert "version" not in project and project["dynamic"] == ["version"]
    assert str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]) == ptlf.__version__
    assert f"\n## {ptlf.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    code = "".join(path.read_text() for path in (ROOT / "ptlf").rglob("*.py"))  # of documents, test_docs
    named = {extra for found in re.findall(r"ptlf\[([a-z,]+)\]'", code) for extra in found.split(",")}
    assert named <= extras, "an extra that is not there"
    (every,) = project["optional-dependencies"]["all"]
    assert extras - set(re.findall("[a-z]+", every)) <= {"all", "docs", "test"}
