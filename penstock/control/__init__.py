"""Pure policies of the control plane decide how many replicas there should be, and which revision serves. Imports
core only; time is an argument."""

from penstock.control.autoscaler import Autoscaler, AutoscalerConfig, AutoscalerState, Signals
from penstock.control.release import ReleaseConfig, Releases, ReleaseState

__all__ = [
    "Autoscaler",
    "AutoscalerConfig",
    "AutoscalerState",
    "ReleaseConfig",
    "ReleaseState",
    "Releases",
    "Signals",
]
