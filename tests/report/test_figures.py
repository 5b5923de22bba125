"""Colours that can be told apart, pictures as files, and what is drawn where."""

import base64
import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import made_up
import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as Canvas
from PIL import Image
from test_page import GALLERY

from ptlf.cli import main
from ptlf.evaluation import summary
from ptlf.report import figures
from ptlf.report.drawing import STEPS, coded, end_of, look, page_svg, style, themed
from ptlf.report.measures import main_measures
from ptlf.report.runs import RUN_COLOURS, Comparison, Group, RunRecord, read_comparison, read_run, tile_pixels
from ptlf.report.sections import cost_section, learning_section

COLOURS = themed(False, 20)


@pytest.fixture(autouse=True)
def our_style() -> Iterator[None]:
    with style(COLOURS):
        yield


def compare(root: Path, *runs: dict) -> Comparison:
    return read_comparison([made_up.write(root / str(number), run) for number, run in enumerate(runs)])


def luminance(colour: str) -> float:
    """Relative luminance (WCAG), from 0 for black to 1 for white."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    lighter, darker = sorted((luminance(first), luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_colours_can_be_seen_and_told_apart_and_are_ordered_in_grey(dark: bool) -> None:
    theme = themed(dark, 20)
    for role in ("ink", "soft", *[f"run{n}" for n in range(RUN_COLOURS)]):
        assert contrast(theme[role], theme["page"]) >= 4.5, role
    for step in range(STEPS):
        assert contrast(theme[f"on{step}"], theme[f"heat{step}"]) >= 4.5, step
    assert contrast(theme["frozen"], theme["empty"]) >= 3
    assert contrast(theme["task19" if not dark else "task0"], theme["page"]) >= 1.8
    for family, count in (("task", 20), ("heat", STEPS)):
        grey = [luminance(theme[f"{family}{n}"]) for n in range(count)]
        assert grey in (sorted(grey), sorted(grey, reverse=True)) and len(set(grey)) == count


def test_runs_look_different_as_long_as_there_are_looks() -> None:
    looks = [look(Group([], place=place), COLOURS) for place in range(15)]
    assert len({str(one) for one in looks}) == 15
    for again, first in zip(looks[8:], looks[1:], strict=False):
        assert [again[key] == first[key] for key in ("color", "linestyle", "marker")] == [True, False, False]


def test_pictures_as_files_leave_matplotlib_as_it_was(tmp_path: Path) -> None:
    made_up.write(tmp_path / "runs" / "one", made_up.results(), GALLERY)
    before = dict(matplotlib.rcParams)
    assert main(["report", str(tmp_path / "runs"), "--figures", str(tmp_path / "figures")]) == 0
    assert dict(matplotlib.rcParams) == before
    assert not (tmp_path / "runs" / "report.html").exists()
    names = {path.stem for path in (tmp_path / "figures").iterdir()}
    of_the_run = {f"{what}-one" for what in ("freezing", "ratios", "matrix-knn_task", "neighbours")}
    assert {"answer-knn_task-accuracy", "cost-seconds", "loss-ssl", *of_the_run} <= names
    for name in names:
        root = ElementTree.parse(tmp_path / "figures" / f"{name}.svg").getroot()
        assert "var(" not in (tmp_path / "figures" / f"{name}.svg").read_text()  # no style sheet comes with it
        image = Image.open(tmp_path / "figures" / f"{name}.png")
        width, height = (float(root.attrib[side].removesuffix("pt")) for side in ("width", "height"))
        assert image.size == pytest.approx((width / 72 * 300, height / 72 * 300), abs=2)
        assert np.asarray(image.convert("L")).std() > 5, name


def test_a_picture_on_the_page_has_colours_of_the_style_sheet_and_ids_of_its_own(tmp_path: Path) -> None:
    comparison, codes = compare(tmp_path, *made_up.pair()), coded(3)
    found = [(group, figures.by_task(group, "knn_task", "accuracy")) for group in comparison.groups]
    with style(codes):
        one, other = (page_svg(figures.over_tasks(found, 100.0, codes), name, "<a>", codes) for name in "ab")
    for text in (one, other):
        assert 'aria-label="&lt;a&gt;"' in text and "<text" in text and "font-family" not in text
        assert "var(--run1)" in text and "#fe" not in text and "metadata" not in text
    ids = [{part.split('"')[0] for part in text.split(' id="')[1:]} for text in (one, other)]
    assert ids[0] and not ids[0] & ids[1]


def test_costs_in_the_answer_are_relative_to_the_baseline(tmp_path: Path) -> None:
    comparison = compare(tmp_path, *made_up.pair())
    costs = [measure for measure in main_measures(comparison, comparison.probes) if measure.cost]
    for measure, ratio in zip(costs, (0.25, 0.6, 0.5), strict=True):
        (axes,) = figures.answer(comparison, measure, COLOURS).axes
        bars = [np.ptp(line.get_xdata()) for line in axes.lines if line.get_linewidth() == 3]
        assert bars[1] / bars[0] == pytest.approx(ratio), measure.title
        assert [text.get_text() for text in axes.texts][1] == f"{ratio:.2f}×"
        assert axes.get_xlim()[0] == 0
    labels = [end_of(f"lump + cost_aware freezing (final {share})", 21) for share in (0.4, 0.6)]
    assert labels[0] != labels[1] and {len(label) for label in labels} == {21}


@pytest.fixture
def frozen_in_epochs_3_and_5(tmp_path: Path) -> Comparison:
    """Of task 2, of 2 tasks of 6 epochs."""
    results = made_up.results(tasks=2, units=4)
    first, second, *_ = results["units"]
    events = [{"epoch": 3, "frozen": [first]}, {"epoch": 5, "frozen": [second]}]
    results["freezing"][0] |= {"order": [first, second], "events": events}
    return compare(tmp_path, results)


def test_maps_and_costs_show_the_epoch_of_a_freeze(frozen_in_epochs_3_and_5: Comparison) -> None:
    (group,) = frozen_in_epochs_3_and_5.groups
    first, second, third, _ = group.first["units"]
    bars = [figures.frozen_bars(group, 2, unit, 6, 6) for unit in (first, second, third)]
    assert bars == [[(8, 4, "frozen")], [(10, 2, "frozen")], []]
    two = Group([*group.runs, RunRecord(Path(), made_up.results(tasks=2, units=4) | {"freezing": []})])
    assert figures.frozen_bars(two, 2, first, 6, 6) == [(8, 4, "heat6")]  # in one of two seeds
    (axes,) = figures.freezing_map(group, COLOURS).axes
    assert axes.get_xlim() == (0, 12) and len(axes.collections) == 4
    (figure,) = cost_section(frozen_in_epochs_3_and_5).figures
    assert [picture.name for picture in figure.pictures] == ["cost-seconds", "cost-kept_bytes", "cost-backward_flops"]
    for picture in figure.pictures:
        (line,) = picture.draw(COLOURS).axes[0].lines  # type: ignore[union-attr]
        marked = [line.get_xdata()[place] for place in line.get_markevery()]
        assert marked == [9, 11] and line.get_marker() == "v"  # of the stream
        assert line.axes.get_ylim()[0] == 0


BROKEN = [
    {"queries": [7]}, {"tiles": [[9, 0]]}, {"point_groups": [0]}, {"sprite": GALLERY["sprite"] | {"columns": 2}},
    {"sprite": GALLERY["sprite"] | {"image": "data:image/png;base64,AAAA"}}, {"queries": []}, {"labels": []},
    {"looks": {"after": GALLERY["looks"]["after"]}}, {"looks": {"before": {"neighbours": [[], []], "points": []}}},
    {"looks": {"before": {"neighbours": [[0], [1]], "points": [[0.5]] * 3}}},
]  # fmt: skip


def test_a_gallery_is_checked_and_its_tiles_cut(tmp_path: Path) -> None:
    for number, change in enumerate(BROKEN):
        run = read_run(made_up.write(tmp_path / str(number), made_up.results(), GALLERY | change))
        assert run.gallery is None and "gallery.json is damaged" in run.gallery_problem, change
    assert read_run(made_up.write(tmp_path / "whole", made_up.results(), json.loads(json.dumps(GALLERY)))).gallery
    pixels = np.arange(2 * 3 * 4 * 4 * 3, dtype=np.uint8).reshape(8, 12, 3)  # two rows of three
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    image = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    tiles = tile_pixels({"image": image, "size": 4, "columns": 3, "width": 12, "height": 8}, 5)
    for number, tile in enumerate(tiles):
        top, left = (4 * place for place in divmod(number, 3))
        assert np.array_equal(tile, pixels[top : top + 4, left : left + 4]), number
    assert len(tiles) == 5


def test_images_of_another_class_are_faded_and_underlined(tmp_path: Path) -> None:
    made_up.write(tmp_path / "run", made_up.results(), GALLERY | {"chance": 0.3})
    (group,) = read_comparison([tmp_path]).groups
    (axes,) = figures.nearest_images(group, COLOURS).axes
    faded = [image.get_alpha() for image in axes.images]
    assert faded == [None, 0.4, 0.4, 0.4, 0.4, None, None, 0.4, None, 0.4] and len(axes.lines) == 6
    assert axes.get_title("left") == "Same class, of 4: 1 by chance, 1 ± 4 before, 1 ± 4 trained"
    first, second = figures.feature_map(group, COLOURS).axes
    assert [len(axes.lines) for axes in (first, second)] == [3, 3]


def test_one_epoch_is_a_mark(tmp_path: Path) -> None:
    results = made_up.results(tasks=1, training__epochs=1)
    results["cost"]["per_epoch"]["loss"] = {"ssl": [-0.00804079]}
    comparison = compare(tmp_path, results)
    for figure in (*learning_section(comparison).figures, *cost_section(comparison).figures):
        for picture in figure.pictures:
            assert picture.draw(COLOURS).axes[0].lines[0].get_marker() == "o", picture.name  # type: ignore[union-attr]


def test_bands_of_accuracy_end_at_100(tmp_path: Path) -> None:
    """Two seeds whose mean plus deviation is 98.5 + 2.1 in the first task and 90 in the second."""
    runs = []
    for seed, value in enumerate((97.0, 100.0)):
        runs.append(made_up.results(tasks=2, seed=seed))
        runs[-1]["probes"]["knn_task"] |= summary([[value] * 2]) | {"accuracy_by_task": [value, 90.0]}
    comparison = compare(tmp_path, *runs)
    (group,) = comparison.groups
    (axes,) = figures.over_tasks([(group, figures.by_task(group, "knn_task", "accuracy"))], 100.0, COLOURS).axes
    (band,), (line,) = axes.collections, axes.lines
    heights = band.get_paths()[0].vertices[:, 1]
    assert list(line.get_ydata()) == [98.5, 90.0]
    assert (heights.max(), heights.min()) == (100.0, 90.0)
    (axes,) = figures.answer(comparison, main_measures(comparison, ["knn_task"])[0], COLOURS).axes
    (whisker,) = axes.containers[0].lines[2][0].get_segments()
    assert whisker[:, 0] == pytest.approx([98.5 - np.std([97, 100], ddof=1), 100.0])


def ticks(canvas: Canvas, axis: str) -> list[str]:
    return [label.get_text() for label in getattr(canvas.axes[0], f"get_{axis}ticklabels")()]


def test_a_matrix_names_rows_and_columns_and_shows_every_accuracy(tmp_path: Path) -> None:
    results = made_up.results(tasks=2)
    results["reference"] = {"probes": {"knn_task": {"before": 1.0, "after": [2.0, 3.0]}}}  # far below the others
    draw: Callable[[Group], Canvas] = partial(figures.matrix, "knn_task", (50.0, 99.0), colours=COLOURS)
    for arrived, rows in (
        (0, ["beginning", "task 1", "task 2"]),
        (2, ["beginning", "task 1, monday", "task 2, tuesday"]),
    ):
        results |= {"arrived": arrived, "tasks": ["monday", "tuesday"]}
        canvas = draw(Group([RunRecord(tmp_path, results)]))
        assert [ticks(canvas, "y"), ticks(canvas, "x")] == [rows, ["1", "2", "before"]]
    values = results["probes"]["knn_task"]
    cells = [*values["untrained"], *[v for row in values["matrix"] for v in row if v is not None], 1.0, 2.0, 3.0]
    assert [text.get_text() for text in canvas.axes[0].texts] == [f"{value:.1f}" for value in cells]
