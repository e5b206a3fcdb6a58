"""Pure policies: how many replicas, which revision, whether to try again. Imports core only; time is an argument."""

from penstock.control.autoscaler import Autoscaler, AutoscalerConfig, AutoscalerState, Signals
from penstock.control.breaker import BreakerConfig, BreakerState, CircuitBreaker
from penstock.control.outliers import OutlierConfig, OutlierDetector, OutlierState
from penstock.control.release import ReleaseConfig, Releases, ReleaseState
from penstock.control.retries import RetryBudget, RetryConfig, RetryPolicy

__all__ = [
    "Autoscaler",
    "AutoscalerConfig",
    "AutoscalerState",
    "BreakerConfig",
    "BreakerState",
    "CircuitBreaker",
    "OutlierConfig",
    "OutlierDetector",
    "OutlierState",
    "ReleaseConfig",
    "ReleaseState",
    "Releases",
    "RetryBudget",
    "RetryConfig",
    "RetryPolicy",
    "Signals",
]
