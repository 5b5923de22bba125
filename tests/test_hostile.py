"""A run's folder is data: names of code in it are not followed, nor links to write; only regular files are opened."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import paint, run_cli
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ptlf.cli import main
from ptlf.core.errors import UserError
from ptlf.core.phases import Watcher
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


LEARN = ["--training.epochs", "1", "--training.batch", "4", "--objective.projection", "16", "--size", "8"]
LEARN += ["--device", "cpu", "--encoder.name", "conftest:tiny_encoder", "--evaluation.gallery", "false"]


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run`, which has learnt mon; `days` with mon and tue; `labelled` with a folder per class."""
    folder = tmp_path_factory.mktemp("learnt")
    for seed, name in enumerate(("days/mon", "days/tue", "labelled/a", "labelled/b")):
        paint(folder / name, 6, seed)
    run_cli("learn", folder / "run", folder / "days" / "mon", *LEARN)
    return folder


@pytest.fixture
def here(learnt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy to work in. What hangs is ended."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError

    shutil.copytree(learnt, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield tmp_path
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


RESUME, REPORT = "train --trust-code --resume run", "report run"
NEXT, EMBED = "learn --trust-code run days/tue", "embed --trust-code run days/tue --out f.npz"
EVALUATE = "evaluate --trust-code run --stream.labelled labelled --evaluation.reference_test 0.5"
PACK = "data pack labelled --name set --size 8 --data-root ."
ALWAYS = ("run/.lock", "run/metrics.jsonl", "run/.config.yaml.part", "run/.results.json.part")
WRITTEN = [
    *((name, f"{RESUME} --log tensorboard") for name in (*ALWAYS, "run/.metrics.jsonl.part", "run/tensorboard")),
    *((name, RESUME) for name in ("run/.encoder.safetensors.part", "run/checkpoints/.after-task01.ckpt.part")),
    *((name, NEXT) for name in (*ALWAYS, "run/checkpoints", "run/tasks", "run/tasks/.incoming", "run/tensorboard")),
    *((name, NEXT) for name in ("run/tasks/.incoming/.0002-tue.lock", "run/checkpoints/.after-task02.ckpt.part")),
    *((name, REPORT) for name in ("run/.report.html.part", "run/report.html")),
    *((name, EVALUATE) for name in ("run/evaluations.json", "run/.evaluations.json.part")),
    *((f".set.{end}", PACK) for end in ("lock", "partial", "old")),
    ("set", f"{PACK} --overwrite"), (".f.npz.part", EMBED), ("f.npz", EMBED),
]  # fmt: skip


@pytest.mark.parametrize("to", ["a file", "a folder", "nothing"])
@pytest.mark.parametrize(("name", "words"), WRITTEN)
def test_nothing_is_written_through_a_link(here: Path, name: str, words: str, to: str) -> None:
    """Nor into a file with a second name: archives keep both."""
    (here / "mine").mkdir()
    (here / "mine" / "thesis.tex").write_text("all I know")
    target = {"a file": here / "mine" / "thesis.tex", "a folder": here / "mine", "nothing": here / "mine" / "new"}[to]
    place = here / name
    if place.is_dir():
        shutil.rmtree(place)
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(target)
    if words.startswith(RESUME):
        (here / "run" / "results.json").unlink()
    ended = run_cli(*words.split(), code=None)
    assert ended.code in (0, 2), ended
    assert {path.name: path.read_text() for path in (here / "mine").iterdir()} == {"thesis.tex": "all I know"}
    if to == "a file":
        place.unlink(missing_ok=True) if not place.is_dir() or place.is_symlink() else shutil.rmtree(place)
        place.parent.mkdir(exist_ok=True)
        os.link(target, place)
        assert run_cli(*words.split(), code=None).code in (0, 2)
        assert target.read_text() == "all I know"


OPENED = [
    *((f"run/{name}", RESUME) for name in ("config.yaml", "metrics.jsonl", ".lock", "checkpoints/after-task01.ckpt")),
    *((f"run/{name}", NEXT) for name in ("results.json", "checkpoints/after-task01.ckpt", "tasks/0001-mon/pack.json")),
    *((f"run/tasks/0001-mon/{name}", NEXT) for name in ("train.npy", "train.sha256")),
    *((f"days/tue/{name}", NEXT) for name in ("00.png", "pack.json", "x.parquet")),
    *((f"run/{name}", REPORT) for name in ("results.json", "gallery.json", "report.html", "evaluations.json")),
    *((f"run/{name}", "watch run --once") for name in (".lock", "results.json", "metrics.jsonl")),
    *((f"run/{name}", EVALUATE) for name in ("encoder.safetensors", "evaluations.json")),
    *((name, f"embed --trust-code run {name} --out f.npz") for name in ("x.npz", "x.npy", "x.png", "x.parquet")),
    *((name, EMBED) for name in ("f.npz", "run/encoder.safetensors")),
    ("w.pt", "learn other days/tue --encoder.weights w.pt"), ("c.yaml", "train -c c.yaml --out other"),
    ("labelled/a/00.png", PACK), ("labelled/a/00.png", f"{PACK} --on-error skip"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["a FIFO", "/dev/zero", "a folder"])
@pytest.mark.parametrize(("name", "words"), OPENED)
def test_only_regular_files_are_opened(here: Path, name: str, words: str, kind: str) -> None:
    place = here / name
    place.unlink(missing_ok=True)
    if kind == "a FIFO":
        os.mkfifo(place)
    elif kind == "a folder":
        place.mkdir()
    else:
        place.symlink_to(kind)
    if "resume" in words and "results" not in name:
        (here / "run" / "results.json").unlink()
    ended = run_cli(*words.split(), code=None)
    assert ended.code in (0, 2), ended
    assert ended.code == 0 or ended.err.count("ptlf: ") - ended.err.count("ptlf: warning: ") == 1, ended


class At(Watcher):
    """Does something in the first step."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = [work]

    def step(self, views: int) -> None:
        while self.work:
            self.work.pop()()


def another_run() -> None:
    os.rename("run", "moved")
    shutil.copytree("moved", "run", ignore=shutil.ignore_patterns(".lock", "0002*"))


def linked() -> None:
    os.unlink("run/metrics.jsonl")
    os.symlink(os.path.abspath("labelled/a/00.png"), "run/metrics.jsonl")


DURING: dict[str, tuple[Callable[[], object], str]] = {  # what happens, and where the run is afterwards
    "its lock is removed": (lambda: os.unlink("run/.lock"), "run"),
    "it is renamed": (lambda: os.rename("run", "moved"), "moved"),
    "another takes its place": (another_run, "moved"),
    "it is removed": (lambda: shutil.rmtree("run"), ""),
}
MENDED: list[Callable[[], object]] = [
    lambda: os.unlink("run/metrics.jsonl"), linked, lambda: shutil.rmtree("run/checkpoints")
]  # fmt: skip


def contents(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


@pytest.mark.parametrize("what", DURING)
def test_a_folder_that_is_another_is_not_written(here: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    happen, place = DURING[what]
    after: list[dict[str, bytes]] = []
    watcher = At(lambda: (happen(), after.append(contents("run"))))
    monkeypatch.setattr("ptlf.learner.Live", lambda name: watcher)
    told = run_cli(*NEXT.split(), code=2).err
    assert "run/.lock was removed or replaced, perhaps with its folder, while this process used the folder" in told
    assert place == "run" or contents("run") == after[0]
    if place:
        run_cli("learn", "--trust-code", place)
        assert len((Path(place) / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("happen", MENDED)
def test_what_is_lost_of_a_record_is_written_again(here: Path, monkeypatch: pytest.MonkeyPatch, happen) -> None:
    before = contents("labelled")
    monkeypatch.setattr("ptlf.learner.Live", lambda name: At(happen))
    run_cli(*NEXT.split())
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 2 and any(Path("run/checkpoints").iterdir())
    assert contents("labelled") == before


@pytest.mark.parametrize("end", ["npz", "parquet"])
def test_features_replace_features_alone(here: Path, end: str) -> None:
    out, odd = here / f"f.{end}", os.fsdecode(os.fsencode(here / "days" / "tue") + b"/caf\xe9.png")
    os.rename("days/tue/00.png", odd)
    for _ in range(2):
        run_cli("embed", "--trust-code", "run", "days/tue", "--out", out)
    for data in (b"junk", b""):
        out.write_bytes(data)
        assert "holds no features" in run_cli("embed", "--trust-code", "run", "days/tue", "--out", out, code=2).err
        assert out.read_bytes() == data
    np.savez(here / "images.npz", images=np.zeros((3, 8, 8, 3), np.uint8))
    before = (here / "images.npz").read_bytes()
    run_cli("embed", "--trust-code", "run", "images.npz", "--out", "images.npz", code=2)
    assert (here / "images.npz").read_bytes() == before


def test_a_page_replaces_a_page_alone(here: Path) -> None:
    (here / "p.html").write_text("<html>mine")
    assert "is no page of `ptlf report`" in run_cli("report", "run", "--out", "p.html", code=2).err
    run_cli("report", "run", "--out", "q.html")
    run_cli("report", "run", "--out", "q.html")


def test_no_image_starts_another_program(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (8, 8)).save("x.eps")
    os.rename("x.eps", "days/tue/x.jpg")
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", None)
    assert "x.jpg: not an image in a known format" in run_cli(*NEXT.split(), "--on-error", "skip").err


@pytest.mark.parametrize("column", ["path", "text"])
def test_a_table_names_files_beside_it_alone(here: Path, column: str) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    shutil.copy("days/mon/00.png", "days/tue/in.png")
    os.symlink(here / "days/mon/00.png", "days/tue/link.png")
    Path("days/tue/notes").mkdir()
    for name, code in {"in.png": 0, "../mon/00.png": 2, str(here / "days/mon/00.png"): 2, "link.png": 2}.items():
        values = [{"bytes": None, "path": name}] if column == "path" else [name]
        parquet.write_table(arrow.table({"image": arrow.array(values * 2)}), "days/tue/t.parquet")
        run_cli("embed", "--trust-code", "run", "days/tue/t.parquet", "--out", "f.npz", code=code)


CARDS: list[dict[str, Any]] = [
    {"image_size": 10**12}, {"view_size": 10**9}, {"mean": [1e308] * 3}, {"mean": [float("nan")] * 3}, {"mean": None},
    {"std": [1e-300] * 3}, {"std": [0, 0, 0]}, {"mean": [0.5]}, {"mean": ["a"] * 3}, {"fit": "evil"}, {"encoder": [1]},
]  # fmt: skip
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "numbers that are not finite": lambda weight: weight / 0, "int32 where float32": lambda weight: weight.int(),
    "bool where float32": lambda weight: weight > 0, "complex64 where": lambda weight: weight.to(torch.complex64),
}  # fmt: skip


@pytest.mark.parametrize("card", CARDS, ids=str)
def test_a_card_is_checked_when_it_is_read(here: Path, card: dict[str, Any]) -> None:
    file = here / "run" / "encoder.safetensors"
    with safe_open(file, "pt") as opened:
        there = json.loads(opened.metadata()["ptlf"])
    save_file(load_file(file), file, {"ptlf": json.dumps(there | card)})
    (here / "run" / "results.json").unlink()
    run_cli("embed", "--trust-code", "run", "days/tue", "--out", "f.npz", code=2)
    assert not (here / "f.npz").exists()


@pytest.mark.parametrize("told", [*KINDS, "variances below 0"])
def test_weights_are_checked_when_they_are_read(here: Path, told: str) -> None:
    state = load_file(here / "run" / "encoder.safetensors")
    change = KINDS.get(told, lambda value: value - 9)
    name = "0.weight" if told in KINDS else "1.running_var"
    torch.save({**state, name: change(state[name])}, "w.pt")
    assert told in run_cli("learn", "other", "days/tue", *LEARN, "--encoder.weights", "w.pt", code=2).err
    assert not Path("other").exists()
    torch.save({name: value.half() if value.is_floating_point() else value for name, value in state.items()}, "w.pt")
    run_cli("learn", "other", "days/tue", *LEARN, "--encoder.weights", "w.pt")


@pytest.mark.parametrize("jump", [-3600.0, -3 * 86400.0])
def test_a_clock_that_jumps_back_spoils_no_record(here: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    added = [0.0]
    for name in ("time", "monotonic", "perf_counter"):
        now = getattr(time, name)
        monkeypatch.setattr(time, name, lambda now=now: now() + added[0])
    monkeypatch.setattr("ptlf.learner.Live", lambda name: At(lambda: added.__setitem__(0, jump)))
    run_cli(*NEXT.split())
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert all(0 < line["seconds"] < 60 for line in lines) and "task 2/2" in run_cli("watch", "run", "--once").out


def test_thirty_times_ctrl_c_leave_no_traceback(here: Path) -> None:
    words = [sys.executable, "-m", "ptlf", *NEXT.split()[:-1], str(paint(here / "many", 2000, 9))]
    path = {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=os.environ | path)
    while not (here / "run" / ".lock").exists() and process.poll() is None:
        time.sleep(0.02)
    for _ in range(30):
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    told = process.communicate(timeout=60)[1]
    assert process.returncode in (130, -signal.SIGINT) and "ptlf: stopped" in told
    assert "Traceback" not in told and "KeyboardInterrupt" not in told
