"""Whole runs on two tiny tasks: what freezes, what a run leaves behind, repeatability."""

import json

import numpy as np
import pytest
import torch
from conftest import StopsAt, tiny_encoder
from faults import lasting
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from ptlf.core.errors import UserError
from ptlf.run import evaluator
from ptlf.run.config import from_dict, read_yaml
from ptlf.run.evaluate import evaluate_run
from ptlf.run.folder import restore_encoder
from ptlf.run.loop import Run
from ptlf.run.results import epoch_lines
from ptlf.stream.packing import pack_folder
from ptlf.training.process import Stopped
from ptlf.training.trainer import Trainer
from ptlf.views.operations import CIFAR_MEAN, CIFAR_STD


def test_freezing_is_written_down_and_saves(tiny) -> None:
    results = Run(tiny("digits/simsiam/ptlf", training__epochs=3, freezing__final=0.67)).train()
    (entry,) = results["freezing"]
    assert entry["task"] == 2
    assert set(entry["ratios"]) == set(results["units"]) == {"0", "3", "6"}
    assert all(0 <= ratio <= 1 for ratio in entry["ratios"].values())
    assert all(0 < count <= fan_in for count, fan_in in zip(entry["directions"].values(), (27, 72, 144), strict=True))
    by_ratio = sorted(entry["ratios"], key=lambda name: -entry["ratios"][name])
    assert entry["order"] == by_ratio[:2]
    assert [(event["epoch"], len(event["frozen"])) for event in entry["events"]] == [(2, 1), (3, 1)]
    epochs = epoch_lines(results)
    assert [line["frozen"] for line in epochs] == [0, 0, 0, 0, 1, 2]
    assert epochs[5]["backward_flops"] < epochs[4]["backward_flops"] < epochs[3]["backward_flops"]
    assert epochs[5]["kept_bytes"] < epochs[3]["kept_bytes"]
    assert results["cost"]["correlation_seconds"] > 0


def test_a_step_is_looked_at_once(tiny, monkeypatch) -> None:
    """In three tasks: a step with nothing frozen, and one with a frozen unit."""
    measured = []
    original = Trainer.cost_of_step

    def cost_of_step(self, *arguments):
        measured.append(original(self, *arguments))
        return measured[-1]

    monkeypatch.setattr(Trainer, "cost_of_step", cost_of_step)
    settings = {"stream__groups": [[0, 1], [2, 3], [4, 5]], "freezing__policy": "ascending", "freezing__final": 0.34}
    results = Run(tiny("digits/simsiam/ptlf", training__epochs=2, **settings)).train()
    assert len(measured) == 2
    bytes_kept = [line["kept_bytes"] for line in epoch_lines(results)]
    assert bytes_kept == [look.kept_bytes for look in (measured[0], measured[0], *measured, *measured)]


def test_layers_that_never_train_are_no_units(tiny) -> None:
    encoder = tiny_encoder()
    encoder[0].weight.requires_grad_(False)
    config = tiny("digits/simsiam/ptlf", freezing__final=0.5)
    results = Run(config, encoder=encoder).train()
    assert results["units"] == ["3", "6"]
    assert len(results["freezing"][0]["order"]) == 1


def test_ratios_are_computed_as_often_and_of_as_many_units_as_needed(tiny) -> None:
    config = tiny("digits/simsiam/ptlf", training__epochs=3, freezing__final=0.67, freezing__update="per-epoch")
    (entry,) = Run(config).train()["freezing"]
    first, (second, third) = entry["ratios"], entry["ratios_by_epoch"].values()
    assert set(entry["ratios_by_epoch"]) == {"2", "3"}
    assert second.keys() == first.keys()
    assert third.keys() == first.keys() - {entry["order"][0]}  # the unit frozen in epoch 2 is not asked again
    for later, before in ((second, first), (third, second)):
        assert all(later[name] != before[name] for name in later)
    assert entry["order"] == [max(ratios, key=lambda name: ratios[name]) for ratios in (second, third)]
    config = tiny("digits/simsiam/ptlf-cost", training__epochs=3, freezing__final=0.34)
    (entry,) = Run(config).train()["freezing"]
    assert set(entry["order"]) <= set(entry["ratios"]) < {"0", "3", "6"}
    assert entry["ratios"].keys() == entry["directions"].keys()


@pytest.mark.parametrize("policy", ["cost_aware", "ascending", "random"])
def test_a_run_whose_units_stay_frozen_resumes_bit_exactly(tiny, tmp_path, policy: str) -> None:
    settings = {"freezing__policy": policy, "freezing__final": 0.67, "freezing__thaw": "needed", "training__epochs": 3}
    settings |= {"stream__groups": [[0, 1], [2, 3], [4, 5]], "stream__per_class": 40, "training__batch": 40}
    config = tiny("digits/simsiam/ptlf", **settings)
    alone = Run(config, tmp_path / "alone").train()
    counts = [line["frozen"] for line in epoch_lines(alone)]
    assert counts[:6] == [0, 0, 0, 0, 1, 2]
    assert counts[8] == 2
    if policy == "ascending":
        assert counts[6:] == [2, 2, 2]
        assert alone["freezing"][1]["events"] == [{"epoch": 1, "frozen": ["0", "3"]}]
    steps = sum(line["steps"] for line in epoch_lines(alone))
    for number in (steps // 3 + 2, steps // 3 + 1, 3):  # in the second task, then twice in the third
        with pytest.raises(Stopped):
            Run(config, tmp_path / "stopped").train(StopsAt(number), resume=True)
    assert lasting(Run(config, tmp_path / "stopped").train(resume=True)) == lasting(alone)
    weights = [tmp_path / folder / "encoder.safetensors" for folder in ("alone", "stopped")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_lump_and_ptlf_see_the_same_batches(tiny) -> None:
    """Freezing draws from generators of its own: until it freezes something, nothing differs."""
    lump = Run(tiny("digits/simsiam/lump", training__epochs=3)).train()
    ptlf = Run(tiny("digits/simsiam/ptlf", training__epochs=3, freezing__final=0.34)).train()
    losses = [[line["loss"]["ssl"] for line in epoch_lines(r)] for r in (lump, ptlf)]
    assert losses[0][:5] == losses[1][:5]
    assert losses[0][5] != losses[1][5]


def test_what_a_run_leaves_behind(tiny, tmp_path) -> None:
    folder = tmp_path / "run"
    run = Run(tiny("digits/simsiam/lump", evaluation__gallery=True), folder)
    returned = run.train()
    written = {"config.yaml", "results.json", "metrics.jsonl", "encoder.safetensors", "gallery.json", "checkpoints"}
    written |= {"evaluations.json"}
    assert {path.name for path in folder.iterdir()} == written
    results = json.loads((folder / "results.json").read_text())
    assert results == json.loads(json.dumps(returned))
    assert results["class_order"] == ["0", "1", "2", "3"]
    assert results["config"]["method"] == {"name": "lump", "alpha": 0.4, "mix_first_task": True}
    assert results["probes"]["knn_task"]["settings"]["k"] == "min(200, tasks seen)"
    assert results["probes"]["knn_class"]["matrix"][0][1] is None
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["task"], line["epoch"]) for line in lines] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    saved = load_file(folder / "encoder.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in run.model.encoder.state_dict().items())
    config = from_dict(read_yaml(folder / "config.yaml"))
    assert config == run.config
    probes, eval_splits, _ = evaluate_run(folder, config)
    assert eval_splits == ["0, 1", "2, 3"]
    for key in ("accuracy", "untrained"):
        assert probes["knn_class"][key] == results["probes"]["knn_class"][key]
    for place, told in ((tmp_path, "holds other runs; choose a folder of its own"), (folder, "already holds a run")):
        with pytest.raises(UserError, match=told):
            Run(run.config, place).train()


@pytest.mark.parametrize("name", ["digits/simsiam/ptlf", "digits/barlow_twins/finetune"])
def test_the_same_seed_gives_the_same_bits(tiny, name: str) -> None:
    runs = [Run(tiny(name, seed=seed)) for seed in (1, 1, 2)]
    results = [run.train() for run in runs]
    weights = [torch.cat([p.flatten() for p in run.model.encoder.parameters()]) for run in runs]
    assert results[0]["probes"] == results[1]["probes"]
    assert results[0]["freezing"] == results[1]["freezing"]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_random_sources_do_not_depend_on_the_global_generator_nor_on_where_images_are(tiny) -> None:
    before = torch.random.get_rng_state()
    first = Run(tiny()).train()["probes"]
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(99)
    for resident in (True, False):
        assert Run(tiny(stream__resident=resident)).train()["probes"] == first


def test_encoders_are_tested_on_normalised_images(tiny) -> None:
    run = Run(tiny(views__name="lump", encoder__name="resnet18-mini"))
    seen: list[torch.Tensor] = []
    run.model.encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    run.components.prober.rows(run.model.encoder, 0)
    split, data = run.stream.eval_splits[0], run.stream.data
    for found, images in zip(seen, (data.train.pixels[split.bank], data.test.pixels[split.test]), strict=True):
        expected = (images / 255 - CIFAR_MEAN) / CIFAR_STD
        np.testing.assert_allclose(found.permute(0, 2, 3, 1), expected, atol=1e-5)


def pictures(root, folders: dict[str, int]) -> None:
    torch.manual_seed(0)
    for number, (name, count) in enumerate(folders.items()):
        (root / name).mkdir(parents=True)
        for index in range(count):
            noise = (torch.rand(12, 12, 3) * 100 + 30 * number).to(torch.uint8).numpy()
            Image.fromarray(noise).save(root / name / f"{index}.png")


def test_both_folder_streams(tiny, tmp_path) -> None:
    pictures(tmp_path / "classes", {"ant": 15, "bee": 15, "cat": 15, "dog": 15})
    pictures(tmp_path / "tasks", {"monday": 12, "tuesday": 12})
    pack_folder(tmp_path / "classes", tmp_path, "pets", size=12, test_fraction=0.2, workers=1, progress=False)
    pack_folder(tmp_path / "tasks", tmp_path, "days", size=12, folders="tasks", workers=1, progress=False)
    common = {"stream__name": "folder", "data_root": str(tmp_path), "training__batch": 8, "probes__knn_class__k": 3}
    grouped = Run(tiny(**common, stream__pack="pets", stream__groups=[["dog", "ant"], ["bee"], ["cat"]])).train()
    assert grouped["class_order"] == ["dog", "ant", "bee", "cat"]
    assert len(grouped["probes"]["knn_class"]["matrix"]) == 3
    days = {**common, "stream__pack": "days", "stream__groups": None}
    plain = Run(tiny(**days)).train()
    assert plain["probes"] == {} and plain["tasks"] == ["monday", "tuesday"]
    labelled = Run(tiny(**days, stream__labelled="pets")).train()
    assert [len(row) for row in labelled["probes"]["knn_class"]["matrix"]] == [1, 1]
    with pytest.raises(UserError, match="a folder per task has none"):  # no labels are made up for it
        Run(tiny("digits/supervised/finetune", **days))
    with pytest.raises(UserError, match=r"has a folder per task; leave out stream\.classes"):
        Run(tiny(**days, stream__classes=1))


def test_weights_and_statistics_that_are_not_finite_stop_the_run_but_not_a_mask_with_infinities(tiny) -> None:
    run = Run(tiny("digits/simsiam/cassle"))
    run.model.encoder.register_buffer("mask", torch.full((2,), float("-inf")))
    run.snapshots.check_finite()
    for values in (run.model.encoder[1].running_var, next(run.method.predictor.parameters()).data):
        before = values[0].clone()
        values[0] = float("inf")
        with pytest.raises(UserError, match="weights are no longer finite"):
            run.snapshots.check_finite()
        values[0] = before


class Aliased(nn.Module):
    """A layer by two names, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.features = nn.Sequential(self.conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.features(images)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 1}


def test_an_encoder_with_two_names_for_a_layer_is_saved_and_read(tiny, tmp_path) -> None:
    encoder = Aliased()
    Run(tiny(), str(tmp_path / "run"), encoder=encoder).train()
    read = Aliased()
    restore_encoder(tmp_path / "run", read)
    assert torch.equal(read.conv.weight, encoder.conv.weight)
    with pytest.raises(UserError, match=r"is not of an encoder like this one: 'conv\.bias' has the"):
        restore_encoder(tmp_path / "run", nn.Linear(2, 2))


def test_a_run_whose_encoder_cannot_be_saved_has_failed(tiny, tmp_path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("ptlf.run.snapshots.save_encoder", full)
    with pytest.raises(OSError, match="disk full"):
        Run(tiny(), tmp_path / "run").train()
    assert json.loads((tmp_path / "run" / "results.json").read_text())["status"] == "failed"


def test_a_run_without_tests_is_evaluated_later(tiny, tmp_path) -> None:
    config = tiny(evaluation__enabled=False)
    Run(config, tmp_path / "run").train()
    probes, *_ = evaluate_run(tmp_path / "run", config)
    assert probes["knn_task"]["accuracy"] > 0
    assert not config.evaluation.enabled


def test_a_ratio_of_less_than_a_unit_is_said_to_freeze_nothing(tiny, capsys) -> None:
    for final in (0.1, 0.4):
        Run(tiny("digits/simsiam/ptlf", freezing__final=final))
        said = "freezing.final 0.1 of 3 units is less than one: nothing will freeze" in capsys.readouterr().err
        assert said == (final == 0.1)


def test_another_number_of_threads_is_told_on_resuming(tiny, tmp_path, monkeypatch, capsys) -> None:
    config = tiny(evaluation__enabled=False)
    with pytest.raises(Stopped):
        Run(config, tmp_path / "run").train(StopsAt(2))
    capsys.readouterr()
    with pytest.raises(Stopped):
        Run(config, tmp_path / "run").train(StopsAt(1), resume=True)
    assert "threads" not in capsys.readouterr().err
    now = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: now + 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    asked = list[int]()
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    with pytest.raises(Stopped):
        Run(config, tmp_path / "run").train(StopsAt(1), resume=True)
    assert asked == [now, now + 2] and "threads" not in capsys.readouterr().err  # the run's, and the caller's again
    monkeypatch.setenv("OMP_NUM_THREADS", str(now + 4))
    monkeypatch.setattr(torch, "get_num_threads", lambda: now + 4)
    Run(config, tmp_path / "run").train(resume=True)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "thread" in line]
    assert line.startswith(f"ptlf: warning: the checkpoint is of {now + 2} CPU threads, ")
    assert f"now there are {now + 4}:" in line and line.endswith(f"set OMP_NUM_THREADS={now + 2} for the same bits")


def test_features_are_measured_on_images_of_all_of_a_task(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tiny("digits/simsiam/finetune", training__epochs=1))
    indices = run.stream.tasks[0].train
    monkeypatch.setattr(evaluator, "SAMPLE", round(0.6 * len(indices)))
    gathered, source = [], run.trainer.source
    monkeypatch.setattr(source, "gather", lambda part: gathered.append(part) or type(source).gather(source, part))
    monkeypatch.setattr(run.trainer, "sources", lambda images: source)
    (found,) = run.evaluator.measure_features(0)
    assert torch.cat(gathered).max() >= indices[-3] and found["images"] == evaluator.SAMPLE
    gathered.clear()
    run.warn_of_harm(indices[:200])  # of which 128 are used
    assert torch.cat(gathered).max() >= indices[197]
