"""Has compiled code (`decisions.cpp`) decide on requests in the table of limits that processes share. `CallerMeters`
defines the decisions, and makes them where the code is not compiled. Knows no errors."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from ctypes import Structure, c_double, c_int64, c_uint64, c_void_p
from pathlib import Path
from struct import Struct
from typing import Self

from penstock.core.identity import LimitState, RateLimits
from penstock.gateway.ratelimits.meters import Meter
from penstock.gateway.ratelimits.spend import Demand

logger = logging.getLogger(__name__)

_DONE = 1
INTERFACE = 1  # of decisions.cpp; setup.py compiles the number into the library


class TableStruct(Structure):
    """`Table` of decisions.cpp."""

    _fields_ = (
        ("cells", c_void_p),
        ("num_slots", c_int64),
        ("first_column", c_int64),
        ("num_processes", c_int64),
        ("own_process", c_int64),
        ("file", c_int64),  # -1 for the table of a single process, which needs no lock
    )

    @classmethod
    def of(
        cls, memory: memoryview, num_slots: int, first_column: int, num_processes: int, number: int, file: int
    ) -> Self:
        """Describe the table in `memory`, which must outlive the description."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return cls(address, num_slots, first_column, num_processes, number, file)


class _SubjectStruct(Structure):
    """`Subject` of decisions.cpp."""

    _fields_ = (
        ("slot", c_int64),  # -1 for none
        ("key", c_uint64 * 2),
        ("limits", c_double * 3),  # per minute: requests, tokens of prompts, tokens of answers; 0 for none
        ("max_running", c_double),  # below 0 for no limit
    )


# Now, places, requests, tokens of prompts, tokens of answers, and whether limits may refuse.
_ASKED = Struct("=6d")
_LEFT = Struct("=9d")  # limit, rest, and seconds until it is full, for each kind; limit 0 for none


@functools.cache
def _caller_struct(num_subjects: int) -> type[Structure]:
    """Return the layout of a caller with so many subjects. All such callers share it: a type takes kilobytes."""

    class Caller(Structure):
        """`Caller` of decisions.cpp."""

        _fields_ = (
            ("asked", c_double * 6),
            ("left", c_double * 9),
            ("table", c_void_p),
            ("num_subjects", c_int64),
            ("subjects", _SubjectStruct * num_subjects),
        )

    return Caller


class CompiledDecisions:
    """Begins and ends requests of one caller. The code finds everything behind one pointer: arguments cost more than
    the decision."""

    __slots__ = ("_decide", "_memory", "_meters", "_pointer", "_subjects", "_table")

    def __init__(self, library: ctypes.PyDLL, table: TableStruct, meters: Sequence[Meter]) -> None:
        caller = _caller_struct(len(meters))(table=ctypes.addressof(table), num_subjects=len(meters))
        self._table = table  # is kept alive
        self._meters = meters
        self._subjects = caller.subjects
        self._memory = memoryview(caller).cast("B")
        self._pointer = c_void_p(ctypes.addressof(caller))
        self._decide = library.penstock_limits_decide
        self.note_slots()

    def note_slots(self) -> None:
        """Note where the subjects stand in the table, and what limits they have."""
        for subject, meter in zip(self._subjects, self._meters, strict=True):
            subject.slot = -1 if meter.slot is None else meter.slot
            subject.key[:] = meter.key
            buckets = (meter.requests, meter.input_tokens, meter.output_tokens)
            subject.limits[:] = [0 if bucket is None else bucket.limit for bucket in buckets]
            subject.max_running = -1 if meter.max_running is None else meter.max_running

    def take(self, num_requests: int, demand: Demand, now: float) -> bool:
        """Take tokens, and perhaps a request with its place, from every limit. False if nothing was taken, because a
        limit refuses or only Python can tell."""
        _ASKED.pack_into(
            self._memory, 0, now, num_requests, num_requests, demand.input_tokens, demand.output_tokens, 1
        )
        return bool(self._decide(self._pointer) == _DONE)

    def give_back(self, num_requests: int, input_tokens: int, output_tokens: int, now: float) -> bool:
        """Give back places, and tokens; below 0, more tokens are taken. False if only Python can."""
        _ASKED.pack_into(self._memory, 0, now, -num_requests, 0, -input_tokens, -output_tokens, 0)
        return bool(self._decide(self._pointer) == _DONE)

    def left(self) -> RateLimits:
        """Return what the last decision left."""
        a, b, c, d, e, f, g, h, i = _LEFT.unpack_from(self._memory, _ASKED.size)
        return RateLimits(
            LimitState(int(a), int(b), c) if a else None,
            LimitState(int(d), int(e), f) if d else None,
            LimitState(int(g), int(h), i) if g else None,
        )


@functools.cache
def load_decisions() -> ctypes.PyDLL | None:
    """Return the compiled code; None where it was not built, or from other sources."""
    for path in sorted(Path(__file__).parent.glob("_decisions*.so")):
        try:
            library = ctypes.PyDLL(str(path))  # a decision is too short to let go of the interpreter's lock
        except OSError:
            continue  # built for another kind of machine
        if library.penstock_limits_interface() == INTERFACE:
            library.penstock_limits_decide.argtypes = (c_void_p,)
            return library
        logger.warning("%s was built from other sources than this version of Penstock, and is not used", path)
    return None
