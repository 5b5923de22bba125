"""The gallery: nearest means nearest, the file stays small, and looking changes nothing."""

import base64
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from ptlf.evaluation import EvaluationConfig
from ptlf.evaluation import gallery as module
from ptlf.evaluation.gallery import Gallery, flat_map, in_turn, pick_queries, sprite
from ptlf.run.loop import Run
from ptlf.run.results import epoch_lines
from ptlf.stream.task import Dataset, EvalSplit, Images, Stream, Task


def make_stream(count: int = 40, *, labelled: bool = True) -> Stream:
    generator = np.random.default_rng(0)
    labels = np.arange(count) % 4
    pixels = generator.integers(0, 60, (count, 6, 6, 3)) + 40 * labels[:, None, None, None]
    images = Images(pixels.astype(np.uint8), labels)
    kind = "classes" if labelled else "tasks"
    data = Dataset("made", ("a", "b", "c", "d"), images, images if labelled else None, kind)
    places = [np.flatnonzero(np.isin(labels, pair)) for pair in ((0, 1), (2, 3))]
    classes = ((0, 1), (2, 3)) if labelled else ((), ())
    tasks = tuple(Task(f"task {n}", images, place, classes[n]) for n, place in enumerate(places))
    splits = tuple(EvalSplit(f"split {n}", images, place, images, place, since=n) for n, place in enumerate(places))
    return Stream("made", data, tasks, splits if labelled else (), classes=data.names if labelled else ())


def made(stream: Stream, seed: int = 0) -> Gallery:
    tests, cpu = EvaluationConfig(batch=7), torch.device("cpu")
    gallery = Gallery(stream, lambda x: x.float().permute(0, 3, 1, 2), cpu, config=tests, seed=seed)
    gallery.read()
    return gallery


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 5))


def test_neighbours_are_the_most_similar_others() -> None:
    gallery, network = made(make_stream()), encoder()
    gallery.look("before", network)
    with torch.no_grad():
        features = network(torch.from_numpy(gallery.pixels).float().permute(0, 3, 1, 2)).double().numpy()
    for query, found in zip(gallery.queries, gallery.looks["before"]["neighbours"], strict=True):
        a = features[query]
        cosines = [float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for b in features]
        order = [place for place in np.argsort(cosines)[::-1] if place != query]
        assert found == order[:5]


def test_the_file_says_which_tile_is_which() -> None:
    gallery = made(make_stream())
    gallery.look("before", encoder())
    gallery.look("after", encoder())
    values = json.loads(json.dumps(gallery.as_dict()))
    sheet = values["sprite"]
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(sheet["image"].split(",")[1]))))
    for number, query in zip(values["queries"], gallery.queries, strict=True):
        row, column = divmod(number, sheet["columns"])
        tile = image[row * 6 : row * 6 + 6, column * 6 : column * 6 + 6]
        assert np.array_equal(tile, gallery.pixels[query])
        assert values["tiles"][number] == [gallery.groups[query], gallery.labels[query]]
    points = np.array(values["looks"]["after"]["points"])
    assert points.shape == (40, 2)
    assert (points.min(), points.max()) == (0, 1)
    assert values["point_groups"] == gallery.groups.tolist()


def test_images_follow_from_the_seed_and_are_spread() -> None:
    stream = make_stream(400)
    first, same, other = (made(stream, seed) for seed in (0, 0, 1))
    assert np.array_equal(first.pixels, same.pixels)
    assert not np.array_equal(first.pixels, other.pixels)
    assert np.bincount(first.labels[first.queries]).tolist() == [3, 3, 3, 3]
    labels = np.repeat(np.arange(100), 2)
    picked = labels[pick_queries(labels, 12)].tolist()
    assert len(set(picked)) == 12 and picked[0] == 0 and picked[-1] >= 90
    turns = in_turn([np.arange(100), np.arange(4)], 20)
    assert np.bincount([number for _, number in turns]).tolist() == [16, 4]


def test_a_stream_without_labels_is_coloured_by_task() -> None:
    gallery = made(make_stream(labelled=False))
    gallery.look("after", encoder())
    values = gallery.as_dict()
    assert values["groups"] == values["labels"] == ["task 0", "task 1"]
    assert all(group == label for group, label in values["tiles"])


def test_photographs_stay_small() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (132, 224, 224, 3)).astype(np.uint8)
    sheet = sprite(noise)
    assert sheet["size"] == 48
    assert len(sheet["image"]) < 150_000
    assert sheet["image"].startswith("data:image/jpeg;base64,")


def test_looking_changes_nothing(tiny, tmp_path) -> None:
    runs = [Run(tiny("digits/simsiam/ptlf", evaluation__gallery=x), tmp_path / str(x)) for x in (True, False)]
    one, two = (run.train() for run in runs)
    assert not (tmp_path / "False" / "gallery.json").exists()
    assert one["probes"] == two["probes"]
    assert [e["loss"] for e in epoch_lines(one)] == [e["loss"] for e in epoch_lines(two)]
    weights = zip(*(run.model.state_dict().values() for run in runs), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)
    assert one["cost"]["eval_seconds"] > 0
    assert (tmp_path / "True" / "gallery.json").stat().st_size < 200_000


def test_too_few_images_and_features_without_a_spread_have_no_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POOL", 6)
    gallery = made(make_stream())
    gallery.look("after", encoder())
    assert gallery.as_dict()["looks"]["after"]["points"] == []
    assert len(gallery.looks["after"]["neighbours"][0]) == 5
    for value in (0.5, 0.5 + 3e-7, np.nan, np.inf):  # equal or not finite
        features = np.full((20, 4), 0.5, np.float32)
        features[0, 0] = value
        assert flat_map(features) == [], value
