import numpy as np
import pytest
from pictures import tree

from ptlf.core.errors import UserError
from ptlf.stream import STREAMS, Dataset, Images, StreamConfig, open_stream
from ptlf.stream.packing import pack_folder
from ptlf.stream.task import StreamEntry, split, unlabelled_stream


def fake(classes: int = 6, per_class: int = 4, folders: str = "classes", test: bool = True) -> Dataset:
    labels = np.arange(classes * per_class) % classes
    images = Images(np.zeros((len(labels), 4, 4, 3), np.uint8), labels)
    return Dataset("fake", tuple("abcdefghij"[:classes]), images, images if test else None, folders)


def test_digits_is_five_tasks_of_two_classes(tmp_path) -> None:
    stream = open_stream(StreamConfig(name="digits"), STREAMS["digits"], tmp_path, seed=0)
    assert [task.classes for task in stream.tasks] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    assert stream.class_order == tuple("0123456789")
    assert stream.data.train.pixels.dtype == np.uint8
    assert len(stream.data.train) + len(stream.data.test) == 1797
    every = np.concatenate([task.train for task in stream.tasks])
    assert sorted(every) == list(range(len(stream.data.train)))
    for task, found in zip(stream.tasks, stream.eval_splits, strict=True):
        assert set(stream.data.test.labels[found.test]) == set(task.classes)


def test_orders_and_groups_of_classes(tmp_path) -> None:
    natural = split(fake(), StreamConfig(tasks=3), seed=1)
    seeded = [split(fake(), StreamConfig(tasks=3, class_order="seeded"), seed=s).class_order for s in (1, 1, 2)]
    given = split(fake(), StreamConfig(tasks=2, class_order=["f", 4, "d", "c", "b", 0]), seed=1)
    assert natural.class_order == tuple("abcdef")
    assert seeded[0] == seeded[1] != seeded[2]
    assert sorted(seeded[0]) == list("abcdef")
    assert given.class_order == tuple("fedcba")
    assert given.tasks[0].classes == (5, 4, 3)
    stream = split(fake(), StreamConfig(groups=[["a"], ["b", "f", 2]]), seed=0)
    assert [task.classes for task in stream.tasks] == [(0,), (1, 5, 2)]
    source = StreamEntry("of ten", tasks=2, classes=4, embedded=lambda config: fake())
    stream = open_stream(StreamConfig(name="four", groups=[["a"], ["f"]]), source, tmp_path, seed=0)
    assert [task.classes for task in stream.tasks] == [(0,), (5,)]
    assert len(open_stream(StreamConfig(name="four"), source, tmp_path, seed=0).class_order) == 4


def test_per_class_takes_the_first_images_of_each_and_joint_is_one_task() -> None:
    stream = split(fake(), StreamConfig(tasks=3, per_class=2), seed=0)
    assert [task.train.tolist() for task in stream.tasks] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert [len(split.test) for split in stream.eval_splits] == [4, 4, 4]
    stream = split(fake(), StreamConfig(tasks=3), seed=0).joint()
    assert len(stream.tasks) == 1
    assert list(stream.tasks[0].train) == list(range(24))
    assert [split.since for split in stream.eval_splits] == [0, 0, 0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": 4}, "4 tasks do not divide the 6 classes of fake; choose stream.tasks from 1, 2, 3, 6"),
        ({"tasks": 2, "class_order": ["a", "b"]}, "stream.class_order has 2 classes, the stream takes 6; missing: c"),
        ({"tasks": 2, "class_order": list("abcdea")}, "stream.class_order names a more than once"),
        ({"tasks": 2, "class_order": list("abcdex")}, "stream.class_order names 'x', which is not a class"),
        ({"tasks": 2, "class_order": [0, 1, 2, 3, 4, 6]}, "stream.class_order names 6, which is not a class"),
        ({"tasks": 2, "class_order": "sorted"}, "stream.class_order must be natural, seeded or a list"),
        ({"classes": 7, "tasks": 7}, "stream.classes is 7, the data set has 6"),
        ({"groups": [["a"], ["a", "b"]]}, "stream.groups names a more than once"),
        ({"groups": [["a"], []]}, "stream.groups must name at least one class per task"),
        ({"groups": [["z"]]}, "stream.groups names 'z', which is not a class"),
    ],
)
def test_impossible_splits_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(UserError) as error:
        split(fake(), StreamConfig(**settings), seed=0)
    assert str(error.value).startswith(message)


def test_a_folder_per_task_has_one_exam_or_none() -> None:
    data = fake(folders="tasks", test=False)
    assert unlabelled_stream(data, StreamConfig(), None).eval_splits == ()
    stream = unlabelled_stream(data, StreamConfig(), fake(2))
    assert [len(task.train) for task in stream.tasks] == [4] * 6
    assert len(stream.eval_splits) == 1
    assert stream.eval_splits[0].bank_images is not data.train
    with pytest.raises(UserError, match="6 task folders"):
        unlabelled_stream(data, StreamConfig(tasks=3), None)
    with pytest.raises(UserError, match="no test images"):
        unlabelled_stream(data, StreamConfig(), fake(2, test=False))


def test_folder_stream_needs_a_pack_and_tasks(tmp_path) -> None:
    with pytest.raises(UserError, match=r"needs stream\.pack"):
        open_stream(StreamConfig(name="folder"), STREAMS["folder"], tmp_path, 0)
    source = tree(tmp_path / "source", "a", "b", files=5)
    pack_folder(source, tmp_path, "mine", size=8, workers=1, test_fraction=0.2, progress=False)
    with pytest.raises(UserError, match=r"needs stream\.tasks"):
        open_stream(StreamConfig(name="folder", pack="mine"), STREAMS["folder"], tmp_path, 0)
    stream = open_stream(StreamConfig(name="folder", pack="mine", tasks=2), STREAMS["folder"], tmp_path, 0)
    assert [len(task.train) for task in stream.tasks] == [4, 4]
    assert [len(split.test) for split in stream.eval_splits] == [1, 1]
