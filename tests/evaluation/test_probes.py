"""Which images an accuracy is of, and how many neighbours vote."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_knn import naive
from torch import nn

from ptlf.evaluation import PROBES, EvaluationConfig, Prober
from ptlf.evaluation.probes import KnnClassConfig, KnnTaskConfig, LinearConfig
from ptlf.stream import Stream, StreamConfig
from ptlf.stream.task import Dataset, Images, split

TASKS, CLASSES = 3, 6


def noise(each: int, seed: int) -> Images:
    """So many images of every class, which differ in nothing."""
    pixels = np.random.default_rng(seed).integers(0, 256, (each * CLASSES, 2, 2, 3), np.uint8)
    return Images(pixels, np.arange(CLASSES).repeat(each))


@pytest.fixture
def stream() -> Stream:
    names = tuple(str(number) for number in range(CLASSES))
    return split(Dataset("noise", names, noise(12, 4), noise(40, 5)), StreamConfig(tasks=TASKS), seed=0)


def centred(images: torch.Tensor) -> torch.Tensor:
    return images - 127.5


def make_prober(stream: Stream, tasks: str = "all", **probes) -> Prober:
    settings = {name: probe.Config() for name, probe in PROBES.items()}
    settings = {**settings, "knn_class": KnnClassConfig(k=5), **probes}
    return Prober(stream, EvaluationConfig(batch=7, tasks=tasks), settings, centred, torch.device("cpu"))


@pytest.mark.parametrize("tasks", ["last:1", "last:2", "sample:2"])
def test_classes_that_are_not_tested_stay_in_the_bank_of_all_classes_seen(stream: Stream, tasks: str) -> None:
    """A limit leaves out test images, and changes no accuracy on the others: of every probe."""
    limited, prober = (make_prober(stream, limit, linear=LinearConfig(enabled=True)) for limit in (tasks, "all"))
    for after in range(TASKS):
        found, expected = limited.rows(nn.Flatten(), after), prober.rows(nn.Flatten(), after)
        for name, row in found.items():
            tested = [value is not None for value in row]
            assert any(tested) and (after < 2 or not all(tested))
            assert row == [value if used else None for value, used in zip(expected[name], tested, strict=True)], name
        assert limited.used(after)["knn_class"] == prober.used(after)["knn_class"]


def test_labelled_images_without_test_images_are_in_that_bank_too(stream: Stream) -> None:
    fewer = replace(stream, eval_splits=(stream.eval_splits[0], stream.eval_splits[2]))
    rows, expected = (make_prober(each).rows(nn.Flatten(), TASKS - 1)["knn_class"] for each in (fewer, stream))
    assert rows == [expected[0], expected[2]]
    before = make_prober(fewer).rows(nn.Flatten(), 0)["knn_class"]
    assert before == [make_prober(stream).rows(nn.Flatten(), 0)["knn_class"][0], None]
    fewer = replace(stream, eval_splits=stream.eval_splits[:2])  # and in that of all tasks at once
    banks = [make_prober(each).rows(nn.Flatten(), len(each.tasks) - 1)["knn_class"] for each in (fewer, fewer.joint())]
    assert banks == [make_prober(stream).rows(nn.Flatten(), TASKS - 1)["knn_class"][:2]] * 2


def by_hand(stream: Stream, task: int, k: int) -> float:
    """knn_task of the task's split."""
    split, (bank, test) = stream.eval_splits[task], (stream.data.train, stream.data.test)
    known, asked = (
        images.pixels[chosen].reshape(len(chosen), -1) - 127.5
        for images, chosen in ((bank, split.bank), (test, split.test))
    )
    votes = naive(known, bank.labels[split.bank], asked, k, 0.1, CLASSES)
    return 100 * float((votes.argmax(1) == test.labels[split.test]).mean())


def test_knn_task_takes_as_many_neighbours_as_tasks_were_seen(stream: Stream) -> None:
    prober = make_prober(stream)
    assert all(by_hand(stream, task, 1) != by_hand(stream, task, 3) for task in range(TASKS))
    for after in range(TASKS):
        expected = [by_hand(stream, task, k=after + 1) for task in range(after + 1)]
        row = prober.rows(nn.Flatten(), after)["knn_task"]
        assert row == pytest.approx([*expected, *[None] * (TASKS - after - 1)])
    assert [prober.used(task)["knn_task"]["k"] for task in range(TASKS)] == [1, 2, 3]
    untrained = prober.rows(nn.Flatten(), TASKS)["knn_task"]
    assert untrained == pytest.approx([by_hand(stream, task, k=3) for task in range(TASKS)])


def test_k_of_200_is_recorded_beside_it_in_one_pass(stream: Stream) -> None:
    """LUMP's code has k = tasks seen since October 2022, and k = 200 before. A k that was asked for stands alone."""
    images, encoder, prober = list[int](), nn.Flatten(), make_prober(stream)
    encoder.register_forward_hook(lambda module, inputs, output: images.append(len(output)))
    rows = prober.rows(encoder, 1)
    assert sum(images) == 2 * (24 + 80)  # training and test images of two tasks
    assert rows["knn_task"][:2] == pytest.approx([by_hand(stream, task, k=2) for task in range(2)])
    assert rows["knn_task_k200"][:2] == pytest.approx([by_hand(stream, task, k=12) for task in range(2)])
    assert rows["knn_task"] != rows["knn_task_k200"]
    assert prober.settings()["knn_task"]["k"] == "min(200, tasks seen)"
    assert prober.settings()["knn_task_k200"]["k"] == 200
    assert list(prober.ahead(nn.Flatten(), [1])) == ["knn_task"]
    assert "knn_task_k200" not in make_prober(stream, knn_task=KnnTaskConfig(k=4)).rows(encoder, 1)


def test_tasks_without_test_images_were_seen_too(stream: Stream) -> None:
    """Also where all of them are tested on a labelled set of its own, and where all are learnt at once."""
    last = replace(stream, eval_splits=stream.eval_splits[2:])
    own = replace(stream, eval_splits=(replace(stream.eval_splits[2], since=0, always=True),))
    expected = [by_hand(stream, 2, k) for k in range(1, TASKS + 1)]
    assert expected[0] != expected[-1]
    found = [make_prober(own).rows(nn.Flatten(), after)["knn_task"] for after in range(TASKS)]
    assert found == [[pytest.approx(value)] for value in expected]
    assert [make_prober(own).used(after)["knn_task"]["k"] for after in range(TASKS)] == [1, 2, 3]
    for known in (last, last.joint(), own.joint(), stream.joint()):
        after = len(known.tasks) - 1
        assert make_prober(known).rows(nn.Flatten(), after)["knn_task"][-1] == pytest.approx(expected[-1])
        assert make_prober(known).used(after)["knn_task"] == {"k": TASKS}
    assert make_prober(last).ahead(nn.Flatten(), [2])["knn_task"] == [pytest.approx(expected[-1])]


def test_the_future_is_the_next_task_as_the_untrained_encoder_is_tested_on_it(stream: Stream) -> None:
    expected = [by_hand(stream, task, k=task + 1) for task in range(TASKS)]
    assert len(set(expected)) == TASKS
    prober = make_prober(stream)
    found = [prober.ahead(nn.Flatten(), [task + 1])["knn_task"] for task in range(TASKS)]
    assert found == [pytest.approx(expected[1:2]), pytest.approx(expected[2:3]), []]
    assert prober.ahead(nn.Flatten(), range(1, TASKS))["knn_task"] == pytest.approx(expected[1:])
    assert make_prober(stream, knn_task=KnnTaskConfig(enabled=False)).ahead(nn.Flatten(), [1]) == {}


def test_no_more_neighbours_than_the_smallest_class_has_images(stream: Stream) -> None:
    """12 images of each class, 24 of each task. A smaller number that was asked for holds after every task."""
    four = make_prober(stream, knn_task=KnnTaskConfig(k=4))
    assert four.rows(nn.Flatten(), 0)["knn_task"][0] == pytest.approx(by_hand(stream, 0, k=4))
    prober = make_prober(stream, knn_task=KnnTaskConfig(k=25), knn_class=KnnClassConfig(k=200))
    assert prober.used(0) == {"knn_task": {"k": 12}, "knn_class": {"k": 12}}
    assert prober.rows(nn.Flatten(), 0)["knn_task"][0] == pytest.approx(by_hand(stream, 0, k=12))
    # A small class counts once it is seen.
    last = stream.eval_splits[-1]
    bank = last.bank[stream.data.train.labels[last.bank] != CLASSES - 1]
    rare = np.concatenate([bank, np.setdiff1d(last.bank, bank)[:3]])
    splits = (*stream.eval_splits[:-1], replace(last, bank=rare))
    tasks = (*stream.tasks[:-1], replace(stream.tasks[-1], train=rare))
    prober = make_prober(replace(stream, tasks=tasks, eval_splits=splits), knn_class=KnnClassConfig(k=9))
    assert [prober.used(task)["knn_class"]["k"] for task in range(TASKS)] == [9, 9, 3]
