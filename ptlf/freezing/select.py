"""Which units are meant: by name or prefix, module, regular expression, number, function, or several of these."""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from ptlf.freezing.units import Unit

Selector = str | nn.Module | re.Pattern[str] | int | Unit | Callable[[Unit], bool] | Iterable["Selector"]


def select(units: Sequence[Unit], wanted: Selector) -> list[Unit]:
    """The units that are meant, in their own order.

    wanted: a unit's name, or a module path that units lie in ("layer1" means "layer1.0.conv1", not "layer10"); the
    module itself; a compiled regular expression to find in the names; n for the first n units; a function of a unit;
    or an iterable of such. A text, module or expression that means no unit is an error.
    """
    names = [unit.name for unit in units]
    if isinstance(wanted, Unit):
        wanted = wanted.name
    if isinstance(wanted, int):
        if not 0 <= wanted <= len(names):
            raise ValueError(f"there are {len(names)} units, so the first {wanted} cannot be chosen")
        return list(units[:wanted])
    if isinstance(wanted, str):
        found = [unit for unit in units if unit.name == wanted]
        found = found or [unit for unit in units if unit.name.startswith(f"{wanted}.")]
        close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
        known = f"did you mean {close[0]!r}?" if close else f"the units are {', '.join(names)}"
        missing = f"unknown unit {wanted!r}; {known}"
        for unit in units:
            if any(f"{name}.".startswith(f"{wanted}.") for name in (unit.norm_name or "", *unit.extra)):
                missing = f"{wanted!r} is not a unit of its own: it freezes with {unit.name!r}"
    elif isinstance(wanted, re.Pattern):
        found = [unit for unit in units if wanted.search(unit.name)]
        missing = f"the expression {wanted.pattern!r} is found in no name of a unit: {', '.join(names)}"
    elif isinstance(wanted, nn.Module):  # it is callable too
        inside = set(wanted.modules())
        found = [unit for unit in units if unit.layer in inside]
        missing = f"no unit lies in this {type(wanted).__name__}; the units are {', '.join(names)}"
    elif callable(wanted):
        return [unit for unit in units if wanted(unit)]
    else:
        chosen = {unit.name for item in wanted for unit in select(units, item)}
        return [unit for unit in units if unit.name in chosen]
    if not found:
        raise ValueError(missing)
    return found


def with_tied(units: Sequence[Unit], chosen: Sequence[Unit]) -> list[Unit]:
    """The chosen units and all that share a parameter with them, directly or through others, in order of `units`."""
    names, parameters = {unit.name for unit in chosen}, {p for unit in chosen for p in unit.parameters()}
    while tied := [u for u in units if u.name not in names and not parameters.isdisjoint(u.parameters())]:
        names |= {unit.name for unit in tied}
        parameters |= {parameter for unit in tied for parameter in unit.parameters()}
    return [unit for unit in units if unit.name in names]
