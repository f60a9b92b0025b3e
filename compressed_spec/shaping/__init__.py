"""Which tree to draft: fixed, optimal for measured acceptance, dynamic, or the one that pays."""

from compressed_spec.shaping.agreed import AgreedShaper
from compressed_spec.shaping.auto import AutoShaper
from compressed_spec.shaping.base import FixedShaper, RoundOutcome, RoundState, Shaper
from compressed_spec.shaping.calibration import Calibration, read_calibration
from compressed_spec.shaping.costs import CostModel
from compressed_spec.shaping.dynamic import DynamicShaper
from compressed_spec.shaping.names import AutoTree, parse_shape
from compressed_spec.shaping.optimal import optimal_topology
from compressed_spec.shaping.profile import profile_costs

__all__ = [
    "AgreedShaper",
    "AutoShaper",
    "AutoTree",
    "Calibration",
    "CostModel",
    "DynamicShaper",
    "FixedShaper",
    "RoundOutcome",
    "RoundState",
    "Shaper",
    "optimal_topology",
    "parse_shape",
    "profile_costs",
    "read_calibration",
]
