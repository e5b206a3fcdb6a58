"""The scheduler decides which tokens to compute next, for which requests. Knows no clock, socket, tensor or text."""

from penstock.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
