"""Which units are meant: by name or prefix, module, regular expression, number, function, or several of these."""

import re
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from ptlf.freezing.names import unknown_name
from ptlf.freezing.units import Unit

Selector = str | nn.Module | re.Pattern[str] | int | Unit | Callable[[Unit], bool] | Iterable["Selector"]


def select(units: Sequence[Unit], wanted: Selector) -> list[Unit]:
    """The units that are meant, in their own order.

    wanted: a unit's name, or a module path that units lie in ("layer1" means "layer1.0.conv1" and its like, not
    "layer10"); the module itself; a compiled regular expression, searched for in the names; n for the first n units; a
    function of a unit; or an iterable of such. A text, module or expression that means no unit is an error.
    """
    chosen = set(_names(units, wanted))
    return [unit for unit in units if unit.name in chosen]


def with_tied(units: Sequence[Unit], chosen: Sequence[Unit]) -> list[Unit]:
    """The chosen units and all that share a parameter with them, directly or through others, in order of `units`."""
    names, parameters = {unit.name for unit in chosen}, {p for unit in chosen for p in unit.parameters()}
    while tied := [u for u in units if u.name not in names and not parameters.isdisjoint(u.parameters())]:
        names |= {unit.name for unit in tied}
        parameters |= {parameter for unit in tied for parameter in unit.parameters()}
    return [unit for unit in units if unit.name in names]


def _names(units: Sequence[Unit], wanted: Selector) -> list[str]:
    names = [unit.name for unit in units]
    if isinstance(wanted, Unit):
        wanted = wanted.name
    if isinstance(wanted, str):
        found = [wanted] if wanted in names else [name for name in names if name.startswith(f"{wanted}.")]
        if not found:
            raise ValueError(_no_unit(units, wanted))
        return found
    if isinstance(wanted, re.Pattern):
        found = [name for name in names if wanted.search(name)]
        if not found:
            raise ValueError(f"the expression {wanted.pattern!r} is found in no name of a unit: {', '.join(names)}")
        return found
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        if not 0 <= wanted <= len(names):
            raise ValueError(f"there are {len(names)} units, so the first {wanted} cannot be chosen")
        return names[:wanted]
    if isinstance(wanted, nn.Module):  # it is callable too
        inside = set(wanted.modules())
        found = [unit.name for unit in units if unit.layer in inside]
        if not found:
            raise ValueError(f"no unit lies in this {type(wanted).__name__}; the units are {', '.join(names)}")
        return found
    if callable(wanted):
        return [unit.name for unit in units if wanted(unit)]
    if isinstance(wanted, Iterable):
        return [name for item in wanted for name in _names(units, item)]
    kinds = "a name, a prefix, a module, a compiled expression, a number, a function, or several of these"
    raise TypeError(f"units are chosen by {kinds}, not by a {type(wanted).__name__}")


def _no_unit(units: Sequence[Unit], wanted: str) -> str:
    for unit in units:
        held = [unit.norm_name or "", *unit.extra]
        if any(name == wanted or name.startswith(f"{wanted}.") for name in held):
            return f"{wanted!r} is not a unit of its own: it freezes with {unit.name!r}"
    return unknown_name("unit", wanted, [unit.name for unit in units])
