"""Self-supervised continual learning, made cheap by progressive task-correlated layer freezing."""

from importlib import import_module
from typing import Any

__version__ = "0.3.0"

_LAZY = {
    "FreezeSchedule": "ptlf.freezing",
    "Freezer": "ptlf.freezing",
    "correlation_ratios": "ptlf.freezing",
    "find_units": "ptlf.freezing",
    "Config": "ptlf.run.config",
    "Learner": "ptlf.learner",
    "Run": "ptlf.run.loop",
    "load_encoder": "ptlf.run.inference",
    "pack_images": "ptlf.stream.packing",
    "search": "ptlf.run.vectors",
}
__all__ = ["__version__", *_LAZY]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """The public names load their module on first use, so that `ptlf --help` does not wait for torch."""
    if name not in _LAZY:
        raise AttributeError(f"module 'ptlf' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
