"""What a recipe for the user's own images chooses, that it says so, and that all refusals come at once."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import paint, run_cli
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

import ptlf
from ptlf.core.errors import Refusals, UserError
from ptlf.core.settings import as_dict
from ptlf.encoders import ENCODERS
from ptlf.run import fitting
from ptlf.run.config import Config, from_dict
from ptlf.run.fitting import EPOCHS, FLOPS_PER_PIXEL, Machine
from ptlf.run.loop import Run
from ptlf.run.recipes import resolve_config
from ptlf.stream.arrivals import arrivals
from ptlf.stream.packing import pack_folder

CORES, GPU = Machine(gpu=False, cores=2), Machine(gpu=True, cores=8)
SIZE = 8
SMALL = [
    "--size", str(SIZE), "--objective.projection", "16", "--device", "cpu",
    "--evaluation.gallery", "false", "--training.epochs", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed: `classes`, 14 of them with 5 to 18 images, and `days`, three tasks of 12, 20 and 40 images."""
    root = tmp_path_factory.mktemp("data")
    for number in range(14):
        paint(root / "class-pictures" / f"c{number:02}", 5 + number, number)
    for number, count in enumerate((12, 20, 40)):
        paint(root / "day-pictures" / f"day{number}", count, 50 + number)
    pack_folder(root / "class-pictures", root, "classes", size=SIZE, test_fraction=0.2, progress=False)
    pack_folder(root / "day-pictures", root, "days", size=SIZE, folders="tasks", progress=False)
    return root


@pytest.fixture(autouse=True)
def here(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTLF_DATA", str(root))
    monkeypatch.setattr(fitting, "this_machine", lambda device: CORES)


def resolved(*words: str, pack: str = "classes") -> tuple[Config, list[str]]:
    told: list[str] = []
    words = ("--stream.pack", pack, *words)
    return resolve_config("folder/simsiam/ptlf", None, words, tell=told.append), told


def test_classes_that_five_does_not_divide(root: Path) -> None:
    config, (line,) = resolved()
    names = [f"c{number:02}" for number in range(14)]
    # 14 classes in 5 tasks, as equal as can be, in their order
    assert config.stream.groups == [names[0:3], names[3:6], names[6:9], names[9:12], names[12:14]]
    assert config.stream.tasks is None
    run = Run(config)  # nothing is refused
    smallest = min(len(task.train) for task in run.stream.tasks)
    assert smallest == 15
    assert line == (
        "chosen for 134 images of 8 px on 2 CPU cores: --stream.groups [5 tasks of 3+3+3+3+2 classes] "
        "--encoder.name resnet18-mini --training.batch 8 --training.epochs 200; each can be given with a value of "
        "your own"
    )


def test_what_is_given_stays(root: Path) -> None:
    words = ["--stream.tasks", "7", "--encoder", "resnet18", "--training.batch", "6", "--training.epochs", "3"]
    config, told = resolved(*words)
    assert told == []
    assert (config.stream.tasks, config.stream.groups, config.encoder.name) == (7, None, "resnet18")
    assert (config.training.batch, config.training.epochs, config.evaluation.batch) == (6, 3, 512)
    for start in range(0, len(words), 2):
        config, (line,) = resolved(*words[start : start + 2])
        assert words[start] not in line
        name, value = words[start].removeprefix("--"), words[start + 1]
        section, _, key = f"{name}.name".partition(".")
        assert str(as_dict(config)[section][key.removesuffix(".name")]) == value
    config, _ = resolved("--stream.class_order", "seeded")  # groups would not go with it; 2 is what divides 14
    assert (config.stream.tasks, config.stream.groups) == (2, None)
    config, _ = resolved("--stream.classes", "10")
    assert (config.stream.tasks, config.stream.groups) == (5, None)
    config, _ = resolved("--training.warmup", "150")
    assert config.training.epochs == 300, "more than the warmup"


def test_a_folder_per_task(root: Path) -> None:
    config, (line,) = resolved(pack="days")
    assert (config.stream.tasks, config.stream.groups) == (None, None)
    assert config.training.batch == 8  # a power of two, at most the smallest task's 12 images
    assert "stream." not in line
    Run(config)


def test_the_file_of_a_run_leaves_nothing_to_choose(root: Path, tmp_path: Path, monkeypatch) -> None:
    config, _ = resolved(pack="days")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(as_dict(config)))
    monkeypatch.setattr(fitting, "this_machine", lambda device: GPU)
    monkeypatch.setattr(fitting, "open_pack", lambda *words: pytest.fail("the pack need not be there"))
    told: list[str] = []
    assert resolve_config("", tmp_path / "config.yaml", [], tell=told.append) == config
    assert told == []


def test_what_is_left_alone() -> None:
    """A set that is not there is refused where it is opened; other streams have their protocol."""
    config, told = resolved(pack="nowhere")
    assert told == []
    with pytest.raises(UserError, match="no packed data set 'nowhere'"):
        Run(config)
    config = resolve_config("split-cifar10/simsiam/ptlf", None, [], tell=told.append)
    assert (config.training.batch, config.training.epochs, config.encoder.name, told) == (256, 200, "resnet18", [])


def test_batch_and_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches by the smallest task; epochs that take the machine's seconds."""
    for smallest, on_cores, on_gpu in (
        (2, 2, 2), (3, 2, 2), (17, 16, 16), (100, 16, 16), (130, 32, 32), (400, 64, 64), (9000, 64, 256)
    ):  # fmt: skip
        assert (CORES.batch(smallest), GPU.batch(smallest)) == (on_cores, on_gpu), smallest
    for machine, flops in itertools.product((CORES, GPU), (1e6, 1e8, 1e10, 1e13)):
        found, seconds = machine.epochs(flops, 1000), 6 * flops * 1000 / machine.flops  # of one epoch
        assert found in EPOCHS and (found * seconds <= machine.seconds or found == EPOCHS[0]), (machine, flops)
        longer = [number for number in EPOCHS if number > found]
        assert not longer or longer[0] * seconds > machine.seconds, (machine, flops)
    monkeypatch.setattr(fitting.processes, "world_size", lambda: 3)
    assert (GPU.batch(9000), GPU.batch(4)) == (255, 6)


def test_flops_of_the_networks() -> None:
    for name, expected in FLOPS_PER_PIXEL.items():
        entry = ENCODERS[name]
        with torch.device("meta"):
            encoder, images = entry.make(entry.Config(name=name)).eval(), torch.empty(1, 3, 128, 128)
        with FlopCounterMode(display=False) as counter:
            encoder(images)
        assert expected == pytest.approx(counter.get_total_flops() / 128**2, rel=0.02), name
    assert {machine.network(size) for machine in (CORES, GPU) for size in (8, 32, 64, 65, 224)} == set(FLOPS_PER_PIXEL)


def test_all_refusals_at_once(root: Path, tmp_path: Path) -> None:
    words = ["--stream.pack", "classes", "--stream.tasks", "4", "--training.batch", "256", "--training.warmup", "9"]
    words += ["--training.epochs", "9", "--views.name", "nope", "--freezing.initial", "0.9", "--device", "tpu"]
    told = run_cli("train", "--recipe", "folder/simsiam/ptlf", "--out", tmp_path / "out", *words, code=2).err
    for part in (
        "(1) device must be auto",
        "(2) 4 tasks do not divide the 14 classes",
        "(3) unknown views 'nope'",
        "(4) freezing.initial is 0.9",
        "(5) training.warmup is 9 epochs",
        "(6) training.batch is 256, but task 1 has only",
    ):
        assert part in told
    assert len(told.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError) as caught:
        from_dict({"training": {"batch": 1, "epochs": "many"}, "seed": -1, "colour": "red"})
    assert len(caught.value.problems) == 4
    assert str(caught.value).startswith("(1) training.batch must be at least 2, not 1; (2) training.epochs must be")
    refused = Refusals()
    with refused:
        raise UserError("alone")
    with pytest.raises(UserError, match=r"^alone$"):
        refused.end()
    with pytest.raises(ZeroDivisionError), Refusals():
        _ = 1 / 0


def test_learning_chooses_with_the_first_task_only(root: Path, tmp_path: Path) -> None:
    pictures, run = root / "day-pictures", tmp_path / "run"
    told = run_cli("learn", run, pictures / "day2", *SMALL).out
    assert "chosen for 40 images of 8 px on 2 CPU cores: --encoder.name resnet18-mini --training.batch 16; each" in told
    assert "with a value of your own; they hold for all later tasks, and cannot be changed then" in told
    stored = yaml.safe_load((run / "config.yaml").read_text())
    assert (stored["training"]["batch"], stored["training"]["epochs"]) == (16, 1)
    assert "chosen for" not in run_cli("learn", run, pictures / "day0").out  # smaller than a batch
    assert yaml.safe_load((run / "config.yaml").read_text()) == stored


def test_how_images_become_squares_is_the_runs_own(tmp_path: Path) -> None:
    """Of wide pictures whose sides differ, a run with --fit squash sees all; so do its later tasks and `embed`."""
    wide = np.random.default_rng(0).integers(0, 256, (6, SIZE, 3 * SIZE, 3), np.uint8)
    run, days = tmp_path / "run", [tmp_path / "day1", tmp_path / "day2"]
    for day, images in zip(days, (wide, wide[::-1] // 2), strict=True):
        day.mkdir()
        for number, pixels in enumerate(images):
            Image.fromarray(pixels).save(day / f"{number}.png")
    run_cli("learn", run, days[0], *SMALL, "--fit", "squash")
    told = run_cli("learn", run, days[1], "--fit", "crop", code=2).err
    assert "were packed with --fit squash; leave out --fit crop" in told
    run_cli("learn", run, days[1])
    learner = ptlf.Learner.load(run)
    squashed = np.stack([np.asarray(Image.fromarray(p).resize((SIZE, SIZE), Image.Resampling.BICUBIC)) for p in wide])
    assert [task.fit for task in arrivals(run)] == ["squash", "squash"]
    assert np.array_equal(arrivals(run)[0].images("train"), squashed)
    for found in (learner.embed(days[0]), ptlf.load_encoder(run, device="cpu").embed(days[0])):
        np.testing.assert_allclose(found, learner.embed(squashed), rtol=1e-4, atol=1e-5)
