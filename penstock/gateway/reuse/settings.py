"""How long answers may be kept, and how many bytes. Both tables of the settings file are hot-reloadable."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class ResponseCacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[response_cache]`. Nothing is kept for a caller that did not opt in."""

    enabled: bool = True
    ttl_s: Annotated[float, Meta(gt=0)] = 300.0  # for keys that opted in, where no header says otherwise
    max_ttl_s: Annotated[float, Meta(gt=0)] = 86_400.0  # the longest that a header gets
    max_bytes: Annotated[int, Meta(ge=0)] = 64 << 20
    max_entry_bytes: Annotated[int, Meta(ge=0)] = 1 << 20


class IdempotencySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[idempotency]`."""

    enabled: bool = True
    ttl_s: Annotated[float, Meta(gt=0)] = 86_400.0
    abandoned_after_s: Annotated[float, Meta(ge=0)] = 60.0  # how long an answer runs on without any reader
    max_bytes: Annotated[int, Meta(ge=0)] = 64 << 20
    max_entry_bytes: Annotated[int, Meta(ge=0)] = 4 << 20
