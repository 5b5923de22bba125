"""Colours that can be told apart, pictures as files, and the small sums behind the figures."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import made_up
import numpy as np
import pytest
from PIL import Image
from test_page import GALLERY

from ptlf.cli import main
from ptlf.report.drawing import Drawing, Shape
from ptlf.report.figures.accuracy import answer, heat_map, over_tasks
from ptlf.report.figures.axes import Scale, shortened, ticks, words_width
from ptlf.report.figures.cost import height_at, per_epoch, steps, thinned
from ptlf.report.figures.freezing import epoch_overlaps, freezing_map, overlap
from ptlf.report.figures.learning import loss_curves
from ptlf.report.runs import Comparison, Group, RunRecord, read_comparison
from ptlf.report.theme import RUNS, STEPS, colours, contrast, luminance


@pytest.mark.parametrize("dark", [False, True])
def test_colours_can_be_seen_and_told_apart(dark: bool) -> None:
    theme = colours(dark, 20)
    for role in ("ink", "soft", *[f"run{n}" for n in range(RUNS)]):
        assert contrast(theme[role], theme["page"]) >= 4.5, role
    for step in range(STEPS):
        assert contrast(theme[f"on{step}"], theme[f"heat{step}"]) >= 4.5
    assert contrast(theme["frozen"], theme["empty"]) >= 3
    assert contrast(theme["task19" if not dark else "task0"], theme["page"]) >= 1.8


def test_runs_look_different_as_long_as_there_are_looks() -> None:
    looks = [(group.colour, group.dash, group.marker) for group in (Group([], place=place) for place in range(15))]
    assert len(set(looks)) == 15
    for place in range(8, 15):
        first, again = looks[place - 7], looks[place]
        assert first[0] == again[0]
        assert first[1] != again[1]
        assert first[2] != again[2]


@pytest.mark.parametrize("dark", [False, True])
def test_ordered_colours_are_ordered_in_grey(dark: bool) -> None:
    theme = colours(dark, 5)
    for family, count in (("task", 5), ("heat", STEPS)):
        grey = [luminance(theme[f"{family}{n}"]) for n in range(count)]
        assert grey in (sorted(grey), sorted(grey, reverse=True))
        assert len(set(grey)) == count


def test_pictures_as_files(tmp_path: Path) -> None:
    made_up.write(tmp_path / "runs" / "one", made_up.results(), GALLERY)
    assert main(["report", str(tmp_path / "runs"), "--figures", str(tmp_path / "figures")]) == 0
    assert not (tmp_path / "runs" / "report.html").exists()
    names = {path.stem for path in (tmp_path / "figures").iterdir()}
    of_the_run = {f"{what}-digits-simsiam-ptlf" for what in ("freezing", "ratios", "matrix-knn_task", "neighbours")}
    assert {"answer", "cost", *of_the_run} <= names
    for name in names:
        root = ElementTree.parse(tmp_path / "figures" / f"{name}.svg").getroot()
        assert "class" not in {key for element in root.iter() for key in element.attrib}  # no style sheet comes with it
        image = Image.open(tmp_path / "figures" / f"{name}.png")
        width, height = (float(root.attrib[side].removesuffix("pt")) for side in ("width", "height"))
        assert image.size == pytest.approx((width / 72 * 300, height / 72 * 300), abs=2)
        assert np.asarray(image.convert("L")).std() > 5


def shapes(drawing: Drawing, kind: str, **look: object) -> list[Shape]:
    found = [shape for shape in drawing.shapes if shape.kind == kind]
    return [shape for shape in found if all(getattr(shape, name) == value for name, value in look.items())]


def length(shape: Shape) -> float:
    return shape.at[1][0] - shape.at[0][0]


def test_costs_in_the_answer_are_relative_to_the_baseline(tmp_path: Path) -> None:
    folders = [made_up.write(tmp_path / str(number), run) for number, run in enumerate(made_up.pair())]
    drawing = answer(read_comparison(folders), 900)
    assert [shape.words for shape in shapes(drawing, "text") if "×" in shape.words] == ["0.25×", "0.60×", "0.50×"]
    bars = [length(bar) for bar in shapes(drawing, "line", opacity=0.4)][-6:]
    assert [bars[place + 1] / bars[place] for place in (0, 2, 4)] == pytest.approx([0.25, 0.6, 0.5])


@pytest.fixture
def frozen_in_epochs_3_and_5(tmp_path: Path) -> Comparison:
    """Of task 2, of 2 tasks of 6 epochs."""
    results = made_up.results(tasks=2, units=4)
    first, second, *_ = results["units"]
    events = [{"epoch": 3, "frozen": [first]}, {"epoch": 5, "frozen": [second]}]
    results["freezing"][0] |= {"order": [first, second], "events": events}
    return read_comparison([made_up.write(tmp_path / "run", results)])


def test_the_freezing_map_is_filled_from_the_epoch_of_the_freeze_on(frozen_in_epochs_3_and_5: Comparison) -> None:
    drawing = freezing_map(frozen_in_epochs_3_and_5.groups[0], 800)
    rows = shapes(drawing, "rect", fill="empty")[4:]  # of task 2
    for shape, row, epoch in zip(shapes(drawing, "rect", fill="frozen"), rows[:2], (3, 5), strict=True):
        (left, top), (right, _) = shape.at
        assert top == row.at[0][1]
        assert 6 * (left - row.at[0][0]) / length(row) == pytest.approx(epoch - 1)
        assert right == pytest.approx(row.at[1][0])
        assert f"frozen from epoch {epoch}," in shape.title


def test_costs_by_epoch_mark_the_beginning_of_the_epoch_of_the_freeze(frozen_in_epochs_3_and_5: Comparison) -> None:
    drawing = per_epoch(frozen_in_epochs_3_and_5, 800)
    task = shapes(drawing, "rect", fill="empty")[0]
    marks = shapes(drawing, "mark", look="down")
    epochs = [6 * (mark.at[0][0] - task.at[0][0]) / length(task) for mark in marks]
    assert epochs == pytest.approx([8, 10] * (len(marks) // 2))
    assert [mark.title.partition(": ")[0].partition(", ")[2] for mark in marks[:2]] == [
        "task 2, epoch 3",
        "task 2, epoch 5",
    ]


@pytest.mark.parametrize("place", [0.5, 1.0, 1.5, 3.0, 4.25, 6.0, 6.5])
def test_the_height_of_a_line_between_its_points(place: float) -> None:
    points = [(1.0, 10.0), (2.0, 14.0), (6.0, 2.0)]
    assert height_at(points, place) == pytest.approx(np.interp(place, *zip(*points, strict=True)))
    assert height_at(points[:1], place) == 10.0


def test_overlap() -> None:
    assert overlap(["a", "b"], ["b", "c"]) == 0.5
    assert overlap(["a"], ["a", "b", "c", "d"]) == 0.25
    assert overlap([], []) == 1.0


def test_overlap_between_epochs_by_hand() -> None:
    results = made_up.results(tasks=2, units=4, freezing__update="per-epoch")
    results["freezing"] = [
        {
            "task": 2,
            "ratios": {"a": 0.9, "b": 0.8, "c": 0.7, "d": 0.6},
            "order": ["a", "b"],
            "events": [{"epoch": 2, "frozen": ["a"]}, {"epoch": 4, "frozen": ["b"]}],
            # At first a and b; after a froze, c leads b: one of two stays. b freezes all the same, and takes c's place
            # when the ratios are asked again. Then nothing changes.
            "ratios_by_epoch": {
                "4": {"b": 0.5, "c": 0.7, "d": 0.1},
                "10": {"c": 0.3, "d": 0.1},
                "12": {"c": 0.2, "d": 0.4},
            },
        }
    ]
    assert epoch_overlaps(RunRecord(Path(), results)) == {4: [0.5], 10: [0.5], 12: [1.0]}


def test_steps_keep_every_level() -> None:
    series = [(1, 5.0), (2, 5.0), (3, 5.0), (4, 2.0), (5, 2.0), (9, 2.0)]
    assert steps(series) == [(0.5, 5.0), (3.5, 5.0), (3.5, 2.0), (5.5, 2.0), (8.5, 2.0), (9.5, 2.0)]


def test_thinned_lines_keep_their_level_and_ends() -> None:
    series = [(float(place), 1.0 + (place % 100 == 0)) for place in range(4000)]
    short = thinned(series)
    assert len(short) == 400
    assert {value for _, value in short} == {1.0}  # a lone spike is no level
    assert short[0][0] < 10
    assert short[-1][0] > 3990


@pytest.mark.parametrize(("low", "high"), [(0, 1), (99.2, 100), (-3, 7), (0, 12345), (0.913, 1), (5, 5)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert all(low - 1e-9 <= value <= high + 1e-9 for value in found)
    assert len(found) <= 6
    assert low == high or len(found) >= 2


def test_scales_and_words() -> None:
    assert Scale(0, 10, 100, 200)(5) == 150
    assert Scale(3, 3, 100, 200)(3) == 100
    assert shortened("conv1", 100) == "conv1"
    cut = shortened("backbone.encoder.stages.3.blocks.11.convolution", 90)
    assert words_width(cut) <= 90
    assert cut.endswith("ution")
    assert "…" in cut


def test_gallery_is_checked(tmp_path: Path) -> None:
    from ptlf.report.runs import read_run

    for key, value in (("queries", [7]), ("tiles", [[9, 0]]), ("point_groups", [0])):
        broken = {**GALLERY, key: value}
        folder = made_up.write(tmp_path / key, made_up.results(), json.loads(json.dumps(broken)))
        run = read_run(folder)
        assert run.gallery is None
        assert "gallery.json is damaged" in run.gallery_problem


def test_units_keep_the_end_of_their_names_where_they_differ() -> None:
    names = [f"stages.{stage}.0.shortcut.0" for stage in (1, 2, 3)]
    short = [shortened(name, 100, 10.5, head=False) for name in names]
    assert len(set(short)) == 3
    assert all(words.startswith("…") and words_width(words, 10.5) <= 100 for words in short)


def test_one_epoch_is_a_mark_on_an_axis_of_several_values(tmp_path: Path) -> None:
    results = made_up.results(tasks=1, training__epochs=1)
    results["cost"]["per_epoch"]["loss"] = {"ssl": [-0.00804079]}
    comparison = read_comparison([made_up.write(tmp_path / "run", results)])
    for drawing in (loss_curves(comparison, 800), per_epoch(comparison, 800)):
        assert drawing is not None
        key = shapes(drawing, "mark")[0]  # of the legend
        assert [mark for mark in shapes(drawing, "mark") if mark.at[0][1] > key.at[0][1] + 20]
    drawing = loss_curves(comparison, 800)
    values = [shape.words for shape in shapes(drawing, "text") if shape.words.lstrip("−").replace(".", "").isdigit()]
    assert len(values) == len(set(values)) > 1


def test_bands_of_accuracy_end_at_100(tmp_path: Path) -> None:
    """Two seeds whose mean plus deviation is 98.5 + 2.1 in the first task and 90 in the second."""
    runs = []
    for seed, accuracy in enumerate((97.0, 100.0)):
        results = made_up.results(tasks=2, seed=seed)
        results["probes"]["knn_task"] |= {"accuracy_by_task": [accuracy, 90.0], "accuracy": accuracy}
        runs.append(made_up.write(tmp_path / str(seed), results))
    comparison = read_comparison(runs)
    drawing = over_tasks(comparison, "knn_task", "accuracy", 800)
    assert drawing is not None
    (band,) = shapes(drawing, "area")
    (line,) = [shape for shape in shapes(drawing, "line") if shape.stroke == "run1" and len(shape.at) == 2][1:]
    (_, first), (_, second) = line.at  # at 98.5 and 90
    unit = (second - first) / 8.5
    assert min(y for _, y in band.at) == pytest.approx(first - 1.5 * unit)
    whole = answer(comparison, 800)
    whisker = next(shape for shape in shapes(whole, "line") if shape.width == 1.2)
    (left, _), (right, _) = whisker.at
    dot = shapes(whole, "mark")[0].at[0][0]
    assert (right - dot) / (dot - left) == pytest.approx(1.5 / np.std([97, 100], ddof=1))


def test_rows_of_a_run_whose_tasks_arrived_have_their_names(tmp_path: Path) -> None:
    results = made_up.results(tasks=2)
    bounds = (0.0, 100.0)
    for arrived, wanted in ((0, ["task 1", "task 2"]), (2, ["task 1, monday", "task 2, tuesday"])):
        results |= {"arrived": arrived, "tasks": ["monday", "tuesday"]}
        drawing = heat_map("knn_task", bounds, Group([RunRecord(tmp_path, results)]), 500)
        assert [shape.words for shape in shapes(drawing, "text") if shape.words.startswith("task ")] == wanted
    narrow = heat_map("knn_task", bounds, Group([RunRecord(tmp_path, results)]), 343)
    assert "task 1" in [shape.words for shape in shapes(narrow, "text")]  # no room on a phone
