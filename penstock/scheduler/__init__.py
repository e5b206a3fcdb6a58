"""Which tokens to compute next, for whom. Knows no clock, socket, tensor or text: time comes in as an argument."""

from penstock.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
