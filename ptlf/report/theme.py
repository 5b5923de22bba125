"""Colours by role, for a light and a dark page. Runs differ by hue, dash and marker; ordered things by lightness."""

Theme = dict[str, str]

# The baseline is grey; the others keep their distance for the three kinds of colour blindness.
RUNS = 8
STEPS = 11  # of a heat map's ramp
ROLES = {  # light, dark
    "page": ("#ffffff", "#161615"),
    "card": ("#f7f7f5", "#1f1f1d"),
    "ink": ("#1a1a19", "#f2f1ec"),
    "soft": ("#5c5b57", "#a9a8a1"),
    "line": ("#dddcd6", "#3a3a37"),
    "empty": ("#ecebe6", "#2b2b28"),
    "frozen": ("#1f5fa8", "#6fb1f5"),
    "good": ("#12764b", "#4cc38a"),
    "bad": ("#b4371b", "#ff8a6b"),
    "run0": ("#6b6a66", "#a3a29b"),
    "run1": ("#1668c1", "#62aaf7"),
    "run2": ("#bf4a00", "#ff9d5c"),
    "run3": ("#0b7a56", "#46c79b"),
    "run4": ("#a8408c", "#e58fce"),
    "run5": ("#8a6d00", "#d9b93a"),
    "run6": ("#5a45b0", "#a99bf5"),
    "run7": ("#0f7a8e", "#5fcbe0"),
}
HEAT_LIGHT = ["#f0f5fb", "#d3e3f5", "#a5c8eb", "#69a3dc", "#3479bf", "#174f8f"]
HEAT_DARK = ["#22282e", "#25405c", "#2a5f94", "#3f86c9", "#74b0ea", "#b9d9f8"]
TASK_LIGHT = ["#2b1d63", "#3b4f9e", "#1c7f9c", "#1e9f78", "#7db33a", "#d9b400"]
TASK_DARK = ["#8f83ea", "#6c9bf2", "#4fc0d6", "#5bd8a4", "#b5e06a", "#fff08a"]
# From the eighth on colours come again, with another dash and marker.
DASHES = ("4 3", "", "7 2", "2 2", "8 2 2 2", "", "5 3", "3 1", "5 2", "", "", "", "4 2", "", "")
MARKERS = (
    *("circle", "circle", "square", "diamond", "triangle", "square", "diamond", "triangle"),
    *("triangle", "diamond", "square", "circle", "circle", "triangle", "circle"),
)


def ramp(stops: list[str], share: float) -> str:
    """The colour at `share` in [0, 1] of the way along the stops."""
    place = min(max(share, 0.0), 1.0) * (len(stops) - 1)
    index = min(int(place), len(stops) - 2)
    pairs = zip(channels(stops[index]), channels(stops[index + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - index)):02x}" for a, b in pairs)


def channels(colour: str) -> list[int]:
    return [int(colour[place : place + 2], 16) for place in (1, 3, 5)]


def luminance(colour: str) -> float:
    """Relative luminance (WCAG), from 0 for black to 1 for white."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in channels(colour))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    lighter, darker = sorted((luminance(first), luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def colours(dark: bool, tasks: int) -> Theme:
    """Every role: those above, heat0.., on0.. (text upon heat), task0..."""
    theme = {role: pair[dark] for role, pair in ROLES.items()}
    for step in range(STEPS):
        heat = ramp(HEAT_DARK if dark else HEAT_LIGHT, step / (STEPS - 1))
        theme[f"heat{step}"] = heat
        theme[f"on{step}"] = max("#ffffff", "#10151c", key=lambda text: contrast(text, heat))
    for task in range(tasks):
        theme[f"task{task}"] = ramp(TASK_DARK if dark else TASK_LIGHT, task / max(tasks - 1, 1))
    return theme


def heat_step(value: float, low: float, high: float) -> int:
    return round(min(max((value - low) / ((high - low) or 1), 0.0), 1.0) * (STEPS - 1))
