"""The protocol of guards. A guard finds things in text; the rule around the guard says what to do about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.core.identity import Principal
from penstock.core.request import Tier
from penstock.gateway.guards.detector import Detector


class GuardFailed(Exception):
    """A guard could not tell: it broke, took too long, or got an answer that it cannot read."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A text to be reviewed as a whole. `untrusted` is the part of it that no operator wrote: what users said and
    what tools brought in."""

    text: str
    untrusted: str


@dataclass(frozen=True, slots=True)
class Review:
    """What a guard holds against a text. `reason` is for logs, and quotes nothing of the text."""

    label: str
    reason: str
    score: float = 1.0


class Asker(Protocol):
    """The caller whose request is reviewed. A guard that asks a model does so in the caller's name."""

    @property
    def principal(self) -> Principal: ...
    @property
    def tier(self) -> Tier: ...


class Guard(Protocol):
    """Finds things in passing text, or reviews a text as a whole; most do one of the two.

    A guard with detectors never makes a reader wait for more than the longest of their matches. One that reviews
    makes the reader wait for the whole answer, unless its rule only flags.
    """

    @property
    def detectors(self) -> tuple[Detector, ...]: ...

    @property
    def reviews(self) -> bool: ...

    async def review(self, subject: Subject, asker: Asker) -> Review | None:
        """What the guard holds against a text; None for nothing. Raises GuardFailed when the guard cannot decide."""
        ...


class PatternGuard:
    """A guard that is nothing but detectors."""

    reviews = False

    def __init__(self, detectors: tuple[Detector, ...]) -> None:
        self.detectors = detectors

    async def review(self, subject: Subject, asker: Asker) -> Review | None:
        return None
