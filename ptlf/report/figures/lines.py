"""Lines: measures over the tasks, and losses and costs over all epochs with the freeze events."""

from collections.abc import Callable, Sequence

from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from ptlf.report.drawing import Colours, frame, look, run_keys
from ptlf.report.runs import Comparison, Group, means
from ptlf.run.results import Json

Series = dict[int, tuple[float, float]]  # by task or epoch: mean over seeds, standard deviation
Lines = Sequence[tuple[Group, Series]]


def by_task(group: Group, probe: str, what: str) -> Series:
    """`accuracy` or `forgetting` after each task. All tasks at once stand beside the others' end."""
    found = [run.results["probes"].get(probe, {}).get(f"{what}_by_task") or [] for run in group.runs]
    series = means([pair for values in found for pair in enumerate(values, start=1)])
    return {len(group.first["eval_splits"]): series[1]} if group.joint and series else series


def known_by_task(group: Group, probe: str) -> Series:
    """Accuracy on what the encoder knew before: 0 is before the first task, n after task n."""
    found = [run.known.get(probe) for run in group.runs]
    return means([pair for one in found if one for pair in enumerate([one["before"], *one["after"]])])


def features_by_task(group: Group, key: str) -> Series:
    return means([(entry["task"], entry[key]) for run in group.runs for entry in run.results.get("features") or []])


def over_tasks(lines: Lines, highest: float | None, colours: Colours) -> Canvas:
    """A line per run, with a band of one standard deviation where there are seeds. highest: of the values, if any."""
    known = [(group, series) for group, series in lines if series]
    canvas, axes = frame(colours, 150.0, keys=run_keys([group for group, _ in known], colours))
    for group, series in known:
        axes.plot(list(series), [mean for mean, _ in series.values()], **look(group, colours))
        if any(spread for _, spread in series.values()):
            upper = [min(mean + spread, highest or mean + spread) for mean, spread in series.values()]
            lower = [mean - spread for mean, spread in series.values()]
            axes.fill_between(list(series), lower, upper, color=look(group, colours)["color"], alpha=0.15, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
    axes.set_xlabel("after task")
    return canvas


def over_epochs(
    comparison: Comparison, title: str, value: Callable[[Json], float | None], zero: bool, colours: Colours
) -> Canvas | None:
    """The value of every epoch of the stream, with a triangle where units froze. zero: the axis begins there."""
    epochs = comparison.epochs[-1]
    found = [(group, mean_line(group, value, epochs)) for group in with_epochs(comparison)]
    lines = [(group, series) for group, series in found if series]
    if not lines:
        return None
    canvas, axes = frame(colours, 100.0, title=title, keys=run_keys([group for group, _ in lines], colours))
    tasks = max(len(group.first["tasks"]) for group, _ in lines)
    shaded = [(start * epochs + 0.5, epochs) for start in range(0, tasks, 2)]
    axes.broken_barh(shaded, (0, 1), transform=axes.get_xaxis_transform(), color=colours["empty"], alpha=0.45)
    for group, series in lines:
        style, froze = look(group, colours), freeze_events(group, epochs)
        if len(series) > 1:  # a line of one epoch is not seen without its marker
            style |= {"marker": "v", "markevery": [n for n, place in enumerate(series) if place in froze]}
        axes.plot(list(series), list(series.values()), **style)
    axes.set_xlim(0.5, tasks * epochs + 0.5)
    axes.set_xticks([(task + 0.5) * epochs + 0.5 for task in range(tasks)], [str(task + 1) for task in range(tasks)])
    axes.set_xlabel("task")
    if zero:
        axes.set_ylim(0.0, axes.dataLim.y1 * 1.08 or 1.0)
    return canvas


def with_epochs(comparison: Comparison) -> list[Group]:
    """Runs on all tasks at once are left out beside others: an epoch of theirs is the whole stream."""
    known = [group for group in comparison.groups if group.runs[0].epochs]
    return [group for group in known if not group.joint] or known


def mean_line(group: Group, value: Callable[[Json], float | None], epochs: int) -> dict[int, float]:
    """By epoch of the stream, the mean over seeds of finite values. `epochs` of a task are drawn, which may be more
    than the group has."""
    found = [((line["task"] - 1) * epochs + line["epoch"], value(line)) for run in group.runs for line in run.epochs]
    return {place: mean for place, (mean, _) in means([p for p in found if not isinstance(p[1], str)]).items()}


def freeze_events(group: Group, epochs: int) -> list[int]:
    """The epochs of the stream in which units froze."""
    entries = group.first["freezing"]
    return [(entry["task"] - 1) * epochs + event["epoch"] for entry in entries for event in entry["events"]]
