"""What the documents show is run, what they link to is there, and the site builds.

Every fenced block of shell or Python is run, in the order of its page, in a folder with `photos/` (a folder per day)
and `labelled/` (a folder per class), but for the page that makes them itself. A block that cannot be run everywhere
says so in its first line, `# needs A and B`: a package, with which it is run where there is one, or something of
OUTSIDE. Its commands must still parse. Runs on the digits are shortened.
"""

import ast
import contextlib
import importlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import tiny_config
from PIL import Image
from test_architecture import TREES
from torch.distributed.run import get_args_parser

import ptlf
from ptlf.cli import main
from ptlf.commands.parser import make_parser
from ptlf.core.settings import describe
from ptlf.integrations.trackers import TRACKERS
from ptlf.methods import METHODS
from ptlf.objectives import OBJECTIVES
from ptlf.run.config import Config
from ptlf.run.recipes import resolve_config

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OUTSIDE = ("a GPU", "a network", "CIFAR-10", "Slurm")
COLOURS = {"apple": (200, 40, 30), "leaf": (40, 160, 50), "sky": (60, 110, 220)}
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    language: str
    code: str

    @property
    def needs(self) -> list[str]:
        found = re.match(r"# needs (.+)\n", self.code)
        return found[1].split(" and ") if found else []

    @property
    def runs(self) -> bool:
        outside = [need for need in self.needs if need in OUTSIDE]
        return not outside and all(importlib.util.find_spec(need) for need in self.needs)

    @property
    def commands(self) -> list[list[str]]:
        if self.language != "sh":
            return []
        lines = [shlex.split(line, comments=True) for line in self.code.replace("\\\n", " ").splitlines()]
        return [words for words in lines if words]


def blocks(path: Path) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(path.read_text())]


def test_what_could_be_run_is_in_blocks_of_its_kind() -> None:
    """And what a block needs is known, or a package."""
    packages = {re.split(r"[<>=;\[ ]", line)[0] for lines in EXTRAS.values() for line in lines}
    for path in PAGES:
        found = blocks(path)
        assert len(re.findall(r"^ *```", path.read_text(), re.MULTILINE)) == 2 * len(found), path
        for block in found:
            assert block.language in ("sh", "python", "text", "toml", "yaml"), (path, block)
            if block.language == "text":
                runs = re.search(r"^(ptlf|pip|make|python|torchrun|import|from) ", block.code, re.MULTILINE)
                assert not runs, (path, block)
            assert set(block.needs) <= {*OUTSIDE, *packages}, (path, block.needs)


# --- run


def save_photograph(rng: np.random.Generator, path: Path, colour: tuple[int, int, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = rng.integers(33, 60, 2)
    noise = rng.normal(0, 40, (height, width, 3)) + np.array(colour)
    Image.fromarray(noise.clip(0, 255).astype(np.uint8)).save(path)


@pytest.fixture
def photographs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder that the test then runs in."""
    rng = np.random.default_rng(0)
    for index in range(0 if path.name == "your-images.md" else 16):
        for day, colour in zip(("monday", "tuesday", "wednesday"), COLOURS.values(), strict=True):
            save_photograph(rng, tmp_path / "photos" / day / f"{index}.png", colour)
        for name, colour in COLOURS.items():
            save_photograph(rng, tmp_path / "labelled" / name / f"{index}.png", colour)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PTLF_DATA", str(tmp_path / "data"))


def shortened(words: list[str]) -> list[str]:
    """The command on two tasks of the digits with at most two seeds, or with a small network on new photographs; one
    epoch, one repeat."""
    verb, *rest = words
    digits = any(word.startswith("digits/") for word in rest) or "--recipe" not in rest
    if verb in ("train", "sweep", "benchmarks/frontier.py") and "--resume" not in rest and digits:
        fewer = ["--seeds", "0", "1"] if "--seeds" in rest else []
        small = ["--training.epochs", "1", "--stream.groups", "[[0,1],[2,3]]", "--stream.per_class", "30"]
        return [*words, *fewer, *small, "--training.batch", "32", "--evaluation.gallery", "false"]
    if verb == "learn" and "--training.epochs" not in rest and not Path(rest[0]).exists():
        return [*words, "--encoder.name", "resnet18-mini", "--training.epochs", "1", "--training.batch", "16"]
    if verb == "benchmarks/freezing.py":
        return [*words, "--repeats", "1"]
    return words


def run_command(words: list[str]) -> None:
    """In this process: what `torchrun` and submitit would start is run as it is. Tests of their own start them."""
    if words[0] == "torchrun":
        launch = get_args_parser().parse_args(words[1:])
        assert launch.module and launch.training_script == "ptlf"
        words = ["ptlf", *launch.training_script_args]
    if "--cluster" in words:
        parse(words[1:])
        words = words[: words.index("--cluster")]
    if words[0] == "python":
        name, *rest = words[2:] if words[1] == "-m" else shortened(words[1:])
        module = importlib.import_module(
            f"{name}.__main__" if words[1] == "-m" else name.removesuffix(".py").replace("/", ".")
        )
        assert module.main(rest) == 0, words
    else:
        assert words[0] == "ptlf", f"a test cannot run {words}; mark its block with `# needs ...`"
        assert main(shortened(words[1:])) == 0, words


def run_page(path: Path) -> list[str]:
    """Its blocks in their order, in this process; what the programs print. What they register is forgotten."""
    printed, known = [], dict(TRACKERS)
    for block in blocks(path):
        if block.language == "python" and block.runs:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block.code, "block", "exec"), {"__name__": "__main__"})
            printed.append(out.getvalue())
        for words in block.commands if block.runs else []:
            run_command(words)
    for name in TRACKERS.keys() - known.keys():
        del TRACKERS[name]
    return printed


# What the programs of a page print, one after the other.
PRINTED = {
    "README.md": ["activation memory"],
    "guide.md": [r"task 1: frozen \(\)\n.*'.*'.*'.*'"],  # two of three units
    "freezer.md": [r"\n1 of 3 units frozen\n\Z"],
    "your-images.md": [
        "",
        r"\n\(\d\d, 64\)\n\Z",
        r"\('red', 'green', 'blue'\) \{'train': 24, 'test': 6\}\n\Z",
        r"\A(100|[5-9]\d\.?\d*)%",  # of six digits
        r"\Atorch.Size\(\[3, 3, 32, 32\]\)\n\(3, 64\)\n\Z",
        r"\A\(1\d\d, 64\) 32 \[0.4914, 0.4822, 0.4465\]\n\Z",
    ],
    "pretrained.md": [r"\n\(16, 16\)\n"],
}
RUN = [path for path in PAGES if any(block.runs for block in blocks(path) if block.language in ("sh", "python"))]


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.relative_to(ROOT).as_posix())
@pytest.mark.usefixtures("photographs", "no_pictures")
def test_every_block_of_a_page_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, pattern in zip(run_page(path), PRINTED.get(path.name, ()), strict=False):
        assert re.search(pattern, text), (text, pattern)
    out = capsys.readouterr().out
    assert path.name != "pretrained.md" or ("encoder.weights runs/known" in out and "what it knew before" in out)


@pytest.mark.slow
def test_the_objective_of_the_contributors_page_trains_with_its_method(monkeypatch: pytest.MonkeyPatch) -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(ROOT / "CONTRIBUTING.md"):
        if block.language == "python":
            exec(block.code, scope)
    monkeypatch.setitem(OBJECTIVES, "mine", scope["Mine"])
    monkeypatch.setitem(METHODS, "slow", scope["Slow"])
    run = ptlf.Run(tiny_config("digits/mine/slow", objective__spread=0.5))
    run.train()
    assert run.method.state_dict()["mean"].any()


def test_what_is_not_run_parses_and_names_settings_that_exist() -> None:
    """Commands with their settings, on top of each of their recipes; programs as Python; make's targets; extras."""
    targets = (ROOT / "Makefile").read_text()
    for block in (block for path in PAGES for block in blocks(path) if not block.runs):
        if block.language == "python":
            compile(block.code, "block", "exec")
        for words in block.commands:
            if words[0] in ("ptlf", "torchrun"):
                parse(words[words.index("ptlf") + 1 :])
            elif words[0] == "python":
                assert (ROOT / words[2 if words[1] == "-m" else 1]).exists(), words
            else:
                assert words[0] in (".", "python3", "pip") or f"\n{words[1]}:" in targets, words
    for path in PAGES:
        for extra in re.findall(r"ptlf\[([\w,]+)\]", path.read_text()):
            assert set(extra.split(",")) <= EXTRAS.keys(), (path.name, extra)
    keys = {key for key, _, _ in describe(Config)}
    keys |= {key.rpartition(".")[0] for key in keys}
    for path in PAGES:
        named = re.findall(r"--([a-z_]+\.[a-z_.]*[a-z_])\b", FENCE.sub("", path.read_text()))
        assert path.name == "CHANGELOG.md" or set(named) <= keys, (path, set(named) - keys)


def parse(words: list[str]) -> None:
    arguments, settings = make_parser().parse_known_args(words)
    assert arguments.takes_overrides or not settings, words
    for recipe in getattr(arguments, "recipes", None) or [getattr(arguments, "recipe", None)]:
        resolve_config(recipe, None, settings)


# --- links


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them: lower case, without punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


def test_links_lead_to_files_and_headings() -> None:
    """In the repository. Of a page that is made, a sentence with its name mentions `make docs`."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a checkout of the repository")
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = done.stdout.splitlines()
    there = {*files, *(str(folder) for file in files for folder in Path(file).parents)}
    for path in PAGES:
        text = FENCE.sub("", path.read_text())
        for address in re.findall(r"\]\(([^)\s]+)\)", text):
            target, _, anchor = address.partition("#")
            file = path.parent / target if target else path
            if "://" in address:
                continue
            if path.parent == ROOT / "docs" and target in ("commands.md", "settings.md"):
                name = Path(target).stem
                made = re.search(rf"`make docs`[^.]*\b{name}\b|\b{name}\b[^.]*`make docs`", text)
                assert made and not anchor, (path, address)
            else:
                assert os.path.relpath(file, ROOT) in there, (path, address)
                assert not anchor or anchor in anchors(file.read_text()), (path, address)


def test_what_the_contributors_page_names_exists() -> None:
    """Paths from the root or below `ptlf/`, `NAME` in or of `path`, and `Class.attribute`."""
    text = FENCE.sub("", (ROOT / "CONTRIBUTING.md").read_text()).replace("commands/FILE.py", "")
    paths = set(re.findall(r"`[^`\n]*?\b([\w/]+(?:\.py|/))(?=[`) ])", text))
    files = {path: next(p for p in (ROOT / path, ROOT / "ptlf" / path, Path()) if p.exists()) for path in paths}
    assert len(files) > 20 and Path() not in files.values(), files
    for name, path in re.findall(r"`(\w+)` (?:in|of) `([\w/]+\.py)`", text):
        assert re.search(rf"^(def |class )?{name}\b", files[path].read_text(), re.MULTILINE), (name, path)
    classes = {n.name: ast.unparse(n) for tree in TREES.values() for n in tree.body if isinstance(n, ast.ClassDef)}
    for owner, name in re.findall(r"`([A-Z]+[a-z]\w*)\.(\w+)", text):
        assert re.search(rf"^    (def )?{name}\b|self\.{name}\b", classes[owner], re.MULTILINE), (owner, name)


# --- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocstrings")
    out = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return out


@pytest.mark.slow
def test_the_site_is_complete_and_loads_nothing_from_elsewhere(site: Path) -> None:
    """mkdocs --strict has checked the links."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    for path in pages:
        text = re.sub(r'<link[^>]* rel="(prev|next|canonical)"[^>]*>', "", path.read_text())
        assert not re.search(r"""<link[^>]* href=["']?(https?:)?//|\bsrc=["']?(https?:)?//""", text), path.name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )['\"]?(https?:)?//", sheet.read_text()), sheet
    commands = (site / "commands.html").read_text()
    for verb in ("train", "learn", "sweep", "embed", "data pack"):
        assert f'id="ptlf-{verb.replace(" ", "-")}"' in commands
    settings = (site / "settings.html").read_text().replace("<wbr>", "")
    for key, _, _ in describe(Config):
        assert f"<code>{key}</code>" in settings, key
    api = (site / "api.html").read_text()
    for name in set(ptlf.__all__) - {"__version__"}:
        assert f"ptlf.{name}" in api, name
    assert "bytes that each unit saves" in api  # from a docstring


# --- the notebook


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of its own; the last cell shows the learner's report."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(ROOT / "examples" / "freezer.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), "commit it without outputs"
    manager = nbclient.client.KernelManager(kernel_name="python3")
    manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    nbclient.NotebookClient(notebook, km=manager, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    shown = [output for cell in cells for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in shown) == 2
    out = "".join(output.text for output in shown if output.output_type == "stream")
    assert "warning" not in out.lower()
    assert "activation memory" in out and "(100, 64)" in out
    (report,) = cells[-1].outputs
    assert "<iframe srcdoc=" in report.data["text/html"] and "digits-2-and-3" in report.data["text/html"]
