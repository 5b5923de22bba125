"""How sure an accuracy is, from the number of test images alone; and whether training improved it at all."""

from collections.abc import Sequence

from ptlf.run.results import Json

Z = 1.96  # of 95 %
RANDOM, GIVEN, BEFORE = "random encoder", "given encoder", "encoder before training"


def wilson(percent: float, images: float) -> tuple[float, float]:
    """Wilson's interval at 95 % for a share of `images` images, in per cent."""
    share = min(max(percent / 100, 0.0), 1.0)
    centre = (share + Z**2 / (2 * images)) / (1 + Z**2 / images)
    half = Z / (1 + Z**2 / images) * (share * (1 - share) / images + Z**2 / (4 * images**2)) ** 0.5
    return 100 * (centre - half), 100 * (centre + half)


def half_width(percent: float, images: float) -> float:
    low, high = wilson(percent, images)
    return (high - low) / 2


def images_of_mean(counts: Sequence[int]) -> float | None:
    """As how many test images the mean of accuracies on so many each counts: of T like ones, T times as many."""
    known = [count for count in counts if count]
    return len(known) ** 2 / sum(1 / count for count in known) if known else None


def images_behind(results: Json, probe: str, key: str) -> float | None:
    """Behind `accuracy` or `untrained_accuracy` of a probe; None where the record does not say."""
    values, counts = results["probes"].get(probe, {}), results.get("test_images")
    row = values.get("untrained") if key == "untrained_accuracy" else (values.get("matrix") or [None])[-1]
    if not row or not counts or len(counts) != len(row):
        return None
    return images_of_mean([count for count, value in zip(counts, row, strict=True) if value is not None])


def start_of(results: Json) -> str:
    """What the encoder was before training: its weights may have been given with a file or by the user's own code."""
    return GIVEN if results.get("encoder_weights") else BEFORE if results.get("own_encoder") else RANDOM


def worsened(probe: str, values: Json, start: str, images: float | None) -> str:
    """What to say if the encoder was better before training by these figures of a probe, on as many test images; else,
    and where their 95 % intervals overlap, nothing."""
    before, after = values.get("untrained_accuracy"), values.get("accuracy")
    if before is None or after is None or after >= before:
        return ""
    if images is not None and wilson(after, images)[1] >= wilson(before, images)[0]:
        return ""
    return f"training made {probe} worse: {before:.2f} % before ({start}), {after:.2f} % after"


def neighbours_used(values: Json) -> str:
    """The k that was used, of a probe with one, as ", k = 20", and why where it is not the one of the settings."""
    asked, used = values["settings"].get("k"), [row["k"] for row in values.get("used_by_task") or [] if "k" in row]
    if asked is None:
        return ""
    rule = "number of tasks seen so far, at most 200" if by_tasks_seen(values) else ""
    if not used or {asked} == set(used):
        return f", k = {rule or asked}"
    span = str(used[0]) if len(set(used)) == 1 else f"{min(used)} to {max(used)}"
    return f", k = {span} ({rule or f'{asked} was set; the smallest class has fewer images'})"


def by_tasks_seen(values: Json) -> bool:
    """Whether the k of this probe is the number of tasks seen, so that it differs from task to task."""
    return values["settings"].get("k") == "min(200, tasks seen)"
