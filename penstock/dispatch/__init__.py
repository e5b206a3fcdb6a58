"""Runs the fleet without I/O: which replica serves a request, which requests wait, and which are retried. Time and
randomness are arguments; `cluster` and `simulator` are the two drivers that carry out the actions. Imports core and
router only."""

from penstock.dispatch.actions import (
    Action,
    Arrived,
    Attempt,
    AttemptEnded,
    Cancel,
    Deliver,
    Eject,
    Fail,
    FirstToken,
    ResyncKVEvents,
    Send,
    SubscribeKVEvents,
    Waits,
    WakeAt,
)
from penstock.dispatch.config import DispatchConfig
from penstock.dispatch.dispatcher import Dispatcher
from penstock.dispatch.replicas import FleetStatus, ReplicaStatus, Role
from penstock.dispatch.requests import WaitingConfig

__all__ = [
    "Action",
    "Arrived",
    "Attempt",
    "AttemptEnded",
    "Cancel",
    "Deliver",
    "DispatchConfig",
    "Dispatcher",
    "Eject",
    "Fail",
    "FirstToken",
    "FleetStatus",
    "ReplicaStatus",
    "ResyncKVEvents",
    "Role",
    "Send",
    "SubscribeKVEvents",
    "WaitingConfig",
    "Waits",
    "WakeAt",
]
