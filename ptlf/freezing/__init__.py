"""Layer freezing for any PyTorch module: find units, rank them by task correlation, freeze and thaw them."""

from ptlf.freezing.correlation import correlation_ratios
from ptlf.freezing.cost import format_bytes
from ptlf.freezing.freezer import Freezer
from ptlf.freezing.kernels import replaced_forward
from ptlf.freezing.policies import POLICIES, Context, Policy, PolicyConfig
from ptlf.freezing.progressive import ProgressiveFreezing
from ptlf.freezing.schedule import FreezeSchedule
from ptlf.freezing.units import Unit, find_units

__all__ = ["POLICIES", "Context", "FreezeSchedule", "Freezer", "Policy", "PolicyConfig", "ProgressiveFreezing"]
__all__ += ["Unit", "correlation_ratios", "find_units", "format_bytes", "replaced_forward"]
