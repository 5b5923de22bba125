"""The command as a user meets it: overrides, files, listings, and one clear sentence for every kind of bad input."""

import errno
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import QUICK, run_cli
from PIL import Image

from ptlf.cli import main
from ptlf.commands.parser import make_parser, parse_words
from ptlf.encoders import ENCODERS
from ptlf.report.intervals import interval
from ptlf.run.recipes import VARIANTS, resolve_config


def refused(*words: str) -> str:
    """The one sentence on stderr, below any progress bar; exit code 2."""
    lines = run_cli(*words, code=2).err.strip().splitlines()
    bars = ("packing ", "verifying ")
    assert [line.startswith("ptlf: ") for line in lines if not line.startswith(bars)] == [True], lines
    return lines[-1]


def test_train_evaluate_and_repeat(capsys, tmp_path) -> None:
    assert main(["train", "--recipe", "digits/simsiam/lump", "--out", str(tmp_path / "a"), *QUICK]) == 0
    shown = capsys.readouterr().out
    for words in ("task 2 of 2 learnt", "nothing (encoder before training)", "knn_class accuracy, %", "results.json"):
        assert words in shown
    assert main(["evaluate", "--trust-code", str(tmp_path / "a"), "--probes.knn_class.k", "7"]) == 0
    assert "k = 7" in capsys.readouterr().out
    again = ["train", "--trust-code", "-c", str(tmp_path / "a" / "config.yaml"), "--out", str(tmp_path / "b")]
    assert main(again) == 0
    first, second = (json.loads((tmp_path / run / "results.json").read_text()) for run in "ab")
    assert first["config"] == second["config"]
    assert first["probes"] == second["probes"]


def test_command_line_over_file_over_recipe(tmp_path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"training": {"epochs": 7, "lr": 0.5}}))
    config = resolve_config("digits/simsiam/lump", file, ["--training.epochs", "3", "--seed=4"])
    assert (config.training.epochs, config.training.lr, config.training.batch, config.seed) == (3, 0.5, 64, 4)
    config = resolve_config(None, file, [])
    assert (config.recipe, config.training.epochs, config.encoder.name) == ("digits/simsiam/ptlf", 7, "resnet18-mini")
    file.write_text("recipe: digits/simsiam/ptlf\n")
    words = ["train", "-c", str(file), "--out", str(tmp_path / "run")]
    assert "leave one of them out" in refused(*words, "--recipe", "digits/simsiam/lump")


def test_sweep_compares_and_skips_what_is_done(capsys, tmp_path) -> None:
    words = ["sweep", "digits/simsiam/lump", "digits/simsiam/ptlf", "--out", str(tmp_path), *QUICK]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "digits/simsiam/ptlf" in shown
    assert "×" in next(line for line in shown.splitlines() if "backward FLOPs" in line)
    before = (tmp_path / "digits-simsiam-lump-seed0" / "results.json").stat().st_mtime_ns
    assert main(words) == 0
    assert "already finished" in capsys.readouterr().out
    assert (tmp_path / "digits-simsiam-lump-seed0" / "results.json").stat().st_mtime_ns == before
    rate = json.loads((tmp_path / "digits-simsiam-lump-seed0" / "results.json").read_text())["config"]["training"]["lr"]
    why = f"holds a run with other settings (training.lr was {rate} and is 0.01); choose another --out"
    assert why in refused(*words, "--training.lr", "0.01")
    assert main([*words, "--evaluation.batch=77", "--checkpoint.keep_tasks=9"]) == 0
    assert "2 runs: 2 done" in capsys.readouterr().out


def test_a_sweep_of_several_seeds_ends_with_their_means(tmp_path) -> None:
    """A recipe or seed that is named twice counts once."""
    recipes = ["digits/simsiam/finetune", "digits/simsiam/lump", "digits/simsiam/finetune"]
    words = ["sweep", *recipes, "--seeds", "0", "1", "1", "--baseline", "lump", "--out", tmp_path, *QUICK]
    before, _, shown = run_cli(*words).out.partition("Summary, means of 2 seeds")
    assert "4 runs: " in before
    line = next(line for line in shown.splitlines() if "knn_class accuracy, %" in line)
    for method in ("finetune", "lump"):
        files = [tmp_path / f"digits-simsiam-{method}-seed{seed}" / "results.json" for seed in (0, 1)]
        values = [json.loads(file.read_text())["probes"]["knn_class"]["accuracy"] for file in files]
        found = interval(values)
        assert found is not None and f"{found.mean:.2f} ±{found.half:.2f}" in line
    assert "seed 1" not in shown.partition("report:")[0]
    steps = next(line for line in shown.splitlines() if "backward FLOPs" in line)
    assert steps.split("│")[2].count("×") == 1  # relative to lump, though that was named last
    assert steps.split("│")[3].count("×") == 0


def test_what_cannot_work_is_refused_before_the_work(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PTLF_DATA", str(tmp_path / "data"))
    words = ["sweep", "digits/simsiam/lump", "split-cifar10/simsiam/lump", "--out", str(tmp_path / "s")]
    assert "the runs are of different streams" in refused(*words, "--device", "cpu")
    monkeypatch.setattr("ptlf.run.sweep.check_comparable", lambda configs: None)
    assert "cifar10" in refused(*words, "--device", "cpu")
    assert not (tmp_path / "s").exists()
    monkeypatch.chdir(tmp_path)
    Path("0001.jpg").write_text("a photograph")
    assert "argument --out: there is no folder" in refused("report", ".", "--out", "none/x.html")
    assert "a file that ends with .html or .htm, not '0001.jpg'" in refused("report", ".", "--out", "0001.jpg")
    for value in ("nan", "1.5", "-0.1", "much"):
        words = ["data", "pack", ".", "--name", "x", "--size", "8", "--test-fraction", value]
        assert "argument --test-fraction: must be a number" in refused(*words)
    assert Path("0001.jpg").read_text() == "a photograph" and not Path("none").exists()


def test_what_would_be_ignored_is_refused(tmp_path) -> None:
    words = ["sweep", "digits/simsiam/lump", "--out", str(tmp_path / "s"), *QUICK]
    assert "takes --seeds" in refused(*words, "--seed", "7")
    for name in ("nope", "ump", "digits"):
        assert f"unknown baseline '{name}'" in refused(*words, "--baseline", name)
    assert not (tmp_path / "s").exists()
    words = ["evaluate", str(run_folder(tmp_path)), "--encoder.name", "resnet18"]
    assert "changes the probes only; leave out --encoder.name" in refused(*words)


def test_list_names_everything() -> None:
    shown = run_cli("list").out
    for name in ("split-cifar10", "barlow_twins", "multitask", "correlation", "resnet18-mini", "adamw", "knn_class"):
        assert f"\n  {name} " in shown.replace("\n", " \n")
    assert "`ptlf list recipes` names them" in shown
    assert "\n  split-cifar10/barlow_twins/ptlf-deep\n" in run_cli("list", "recipes").out
    for family in ("probes", "views", "methods"):
        heading, *lines = run_cli("list", family).out.splitlines()
        assert heading == f"{family}:" and all(len(line.split()) > 1 for line in lines)
    assert {line.split()[0] for line in lines} >= VARIANTS.keys()
    assert any(line.split()[:3] == ["lump", "LUMP:", "every"] for line in lines)


def test_help_of_every_command(capsys) -> None:
    verbs = [name.split() for name in make_parser().verbs]
    for words in ([], ["data"], *verbs):
        with pytest.raises(SystemExit) as exit_:
            main([*words, "--help"])
        shown = capsys.readouterr().out
        assert exit_.value.code == 0 and (words not in verbs or "--debug" in shown), words
        assert ("--training.epochs" in shown and "passes over each task's images" in shown) == (words == ["train"])


BAD_SETTINGS = {
    "--recipe digits/simsam/lump": "unknown recipe 'digits/simsam/lump'; did you mean 'digits/simsiam/lump'?",
    "--recipe digits/supervised/lump": "there is no recipe 'digits/supervised/lump': objective 'supervised' cannot be ",
    "--training.epochs": "--training.epochs needs a value",
    "epochs=3": "unexpected argument 'epochs=3': settings are given as --key value, such as --training.epochs 2",
    "a/b/c": "unexpected argument 'a/b/c': settings are given as --key value, such as --recipe a/b/c",
    "--training.optimizer adam": "unknown optimizer 'adam'; did you mean 'adamw'?",
    "--method conftest:tiny_encoder": "method 'conftest:tiny_encoder' must be a subclass of Method",
    "--encoder.name nowhere:thing": "encoder 'nowhere:thing' cannot be imported: No module named 'nowhere'",
    "--freezing.initial 0.5": "freezing.initial is 0.5, more than freezing.final, 0.4",
    "--training.batch 4096": "training.batch is 4096, but task 1 has only",
    "--training.warmup 40": "training.warmup is 40 epochs, but a task has only 30",
    "--encoder.name os:getcwd": "encoder 'os:getcwd' must be an instance of EncoderEntry or a function in",
    "--encoder.name platform:node": "encoder 'platform:node' gives str, not a torch module",
    "--encoder.name conftest:maps": "encoder 'conftest:maps' cannot be trained: an encoder must",
    "--encoder.name conftest:nothing_to_freeze": "encoder 'conftest:nothing_to_freeze' has no convolution",
    "--stream.pack photos": "stream 'digits' is embedded and reads no stream.pack",
    "--device tpu": "device must be auto, cpu, cuda or cuda:NUMBER, not 'tpu'",
    "--device cuda": "device is 'cuda', but torch sees no GPU here; use --device cpu",
    "-c nowhere.yaml": "there is no configuration file nowhere.yaml",
    "--stream.name split-cifar10": "no packed data set 'cifar10' in ",
    "--objective.name supervised": "objective 'supervised' cannot be trained with method 'lump'",
}


def test_bad_settings(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("PTLF_DATA", str(tmp_path / "data"))
    for words, message in BAD_SETTINGS.items():
        assert f"ptlf: {message}" in refused("train", "--out", str(tmp_path / "run"), *words.split()), words
        assert not (tmp_path / "run").exists(), words


def test_files_and_folders_that_cannot_be_used(tmp_path) -> None:
    for text in ("a: [1", "- 1\n- 2\n"):
        (tmp_path / "bad.yaml").write_text(text)
        assert "bad.yaml" in refused("train", "--out", str(tmp_path / "run"), "-c", str(tmp_path / "bad.yaml"))
    assert "holds no encoder" in refused("evaluate", str(run_folder(tmp_path)))
    assert "already holds a run" in refused("train", "--out", str(run_folder(tmp_path)), *QUICK)
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused("train", "--out", str(tmp_path / "file" / "run"), *QUICK)
    assert "cannot write" in refused("train", "--out", "/sys/ptlf-run", *QUICK)  # nobody may write there


@pytest.mark.parametrize("place", ["lump-seed0", "frontier/lump-seed0"])
def test_a_folder_of_runs_in_place_of_a_run(tmp_path, monkeypatch, place: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs", place).mkdir(parents=True)
    Path("runs", place, "results.json").write_text("{}")
    Path("photographs").mkdir()
    Image.new("RGB", (4, 4)).save("photographs/one.png")
    commands = ["evaluate runs", "train --resume runs", "export runs --to e.pt2", "watch runs --once"]
    commands += ["embed runs photographs --out f.npz"]
    commands += ["report runs"] * ("/" in place)  # which takes a folder of runs
    for command in commands:
        assert f"runs is no run but holds some; name one of them, as runs/{place}" in refused(*command.split()), command
    assert "there is no configuration file" in refused("evaluate", f"runs/{place}")


def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "unfinished"
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("seed: 1\n")
    return folder


def full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_ends_the_run_with_a_sentence(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in refused("train", "--out", str(tmp_path / "run"), *QUICK)
    assert list((tmp_path / "run").iterdir()) == []


def test_wrong_words() -> None:
    for words, why in {
        "trian": "invalid choice",
        "train": "--out",
        "data list --fast": "unexpected argument '--fast'; see `ptlf data list --help`",
        "list method": "unknown family 'method'; did you mean 'methods'?",
    }.items():
        assert why in refused(*words.split())
    assert "an argument is empty" in refused("train", "--out", "")


BROKEN = """
from ptlf.methods.method import Method
class Backend(Method):
    def end_task(self, task, model): raise OSError("dataset backend broke")
class File(Method):
    def end_task(self, task, model): open("/nowhere/of/the/plugin")
"""


def test_an_error_of_a_plugin_is_not_blamed_on_the_system_or_the_user(capsys, tmp_path, monkeypatch) -> None:
    (tmp_path / "broken_method.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    for name, why in {"Backend": "dataset backend broke", "File": "No such file"}.items():
        with pytest.raises(OSError, match=why):
            main(["train", "--out", name, *QUICK, "--method", f"broken_method:{name}"])
    capsys.readouterr()
    monkeypatch.setattr("ptlf.commands.data.pack_images", lambda *args, **options: Path("images/x/y.png").read_bytes())
    for source, code in {"images": 2, "images.npz": None}.items():  # a file of the user's, and another
        words = ["data", "pack", source, "--name", "x", "--size", "8"]
        with nullcontext() if code else pytest.raises(FileNotFoundError):
            assert main(words) == code
    assert capsys.readouterr().err == "ptlf: images/x/y.png: No such file or directory\n"


@pytest.mark.parametrize("words", [["--debug"], []])
def test_debug_shows_the_traceback_of_every_error(tmp_path, monkeypatch, words: list[str]) -> None:
    monkeypatch.setenv("PTLF_DEBUG", "0" if words else "1")
    done = run_cli("train", *words, "--out", tmp_path / "run", "--encoder.name", "nowhere:thing", code=2)
    trace, _, sentence = done.err.strip().rpartition("\n")
    assert sentence.startswith("ptlf: encoder 'nowhere:thing' cannot be imported")
    assert "Traceback" in trace and "ModuleNotFoundError: No module named 'nowhere'" in trace


def test_options_settings_and_other_words_come_in_any_order() -> None:
    run = {"folder": Path("RUN"), "source": "photos", "name": "x", "overrides": ["--seed", "1", "--device=cpu"]}
    for words in (
        "RUN photos --name x --seed 1 --device=cpu",
        "RUN --seed 1 photos --name x --device=cpu",
        "--seed 1 --device=cpu RUN --name x photos",
        "--name=x --seed 1 RUN --device=cpu -- photos",
    ):
        options, unexpected = parse_words(make_parser(), ["learn", *words.split()])
        assert {key: options[key] for key in run} == run and not unexpected, words
    words = "sweep a/b/c --seeds 0 1 --training.epochs 2 d/e/f --out o --log wandb --device cpu"
    options, _ = parse_words(make_parser(), words.split())
    assert (options["recipes"], options["seeds"]) == (["a/b/c", "d/e/f"], [0, 1])
    assert options["overrides"] == ["--training.epochs", "2", "--device", "cpu", "--log=[wandb]"]
    for word in ("--data-root", "--data_root"):  # either spelling, of options and settings
        options, _ = parse_words(make_parser(), ["data", "verify", "_x", f"{word}=d_1"])
        assert (options["names"], options["data_root"]) == (["_x"], "d_1")
        options, _ = parse_words(make_parser(), ["train", "--trust_code", word, "d_1"])
        assert options["trust_code"] and resolve_config(None, None, options["overrides"]).data_root == "d_1"


def test_the_working_folder_is_on_the_path_only_while_it_is_needed(tmp_path, monkeypatch) -> None:
    code = "def encoder():\n    import conftest, lazy_words\n    return conftest.maps()"
    (tmp_path / "lazy_encoder.py").write_text(code)
    (tmp_path / "lazy_words.py").touch()
    monkeypatch.chdir(tmp_path)
    before = sys.path.copy()
    entry = ENCODERS.find("lazy_encoder:encoder")
    with pytest.raises(ImportError, match="lazy_words"):
        entry.make(entry.Config())
    words = ["train", "--out", "run", *QUICK, "--encoder.name", "lazy_encoder:encoder"]
    assert "'lazy_encoder:encoder' cannot be trained" in refused(*words)  # found, now that more is imported
    assert sys.path == before


class TestData:
    """`ptlf data`: pack, list, verify, and what it refuses."""

    @pytest.fixture(autouse=True)
    def root(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setenv("PTLF_DATA", str(tmp_path / "data"))
        rng = np.random.default_rng(0)
        for name in ("ant", "bee"):
            (tmp_path / "images" / name).mkdir(parents=True)
            for index in range(6):
                pixels = rng.integers(0, 255, (10, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / name / f"{index}.png")

    def pack(self, tmp_path, *words: str) -> list[str]:
        return ["data", "pack", str(tmp_path / "images"), "--name", "pets", "--size", "8", "--workers", "1", *words]

    def test_pack_list_verify_and_train(self, tmp_path) -> None:
        run_cli(*self.pack(tmp_path, "--test-fraction", "0.34"))
        assert "pets: 8 train, 4 test images of 8 px, 2 classes" in run_cli("data", "list").out
        run_cli("data", "verify")
        words = ["train", "--recipe", "folder/simsiam/ptlf", "--out", str(tmp_path / "run"), *QUICK[2:]]
        words += ["--stream.pack", "pets"]
        run_cli(*words, "--stream.tasks", "2", "--training.batch", "4", "--probes.knn_class.k", "2")
        shown = run_cli(*self.pack(tmp_path, "--folders", "tasks", "--overwrite")).out
        assert "  the order of the tasks, by their names: 'ant', 'bee'" in shown

    def test_a_damaged_pack_is_named(self, tmp_path) -> None:
        run_cli(*self.pack(tmp_path))
        images = tmp_path / "data" / "pets" / "train.npy"
        images.write_bytes(images.read_bytes()[:-1] + b"x")
        assert "damaged: pets" in refused("data", "verify")

    def test_other_refusals(self, tmp_path, monkeypatch) -> None:
        (tmp_path / "empty").mkdir()
        assert "unknown data set 'cifar11'; did you mean 'cifar10'?" in refused("data", "get", "cifar11")
        assert "no packed data sets" in refused("data", "verify")
        empty = str(tmp_path / "empty")
        assert empty in refused("data", "pack", empty, "--name", "x", "--size", "8")
        monkeypatch.setattr(os, "fsync", full)
        assert "no space left" in refused(*self.pack(tmp_path))
        assert "no packed data sets" in run_cli("data", "list").out
