"""Every error that a user can meet.

    PenstockError                     500  internal_error
    ├── InvalidRequest                400  invalid_request_error
    │   ├── ContextLengthExceeded     400  context_length_exceeded
    │   ├── ContentRefused            400  content_policy_violation  (a safety policy said no)
    │   └── ThreadsUnsupported        400  thread_unsupported_request  (send the whole conversation instead)
    ├── AuthenticationFailed          401  invalid_api_key
    ├── PermissionDenied              403  permission_denied     (the key is known, but may not do this)
    ├── ModelNotFound                 404  model_not_found
    ├── NotFound                      404  not_found
    ├── RequestTimeout                408  request_timeout       (it did not arrive in time)
    ├── Conflict                      409  conflict              (it exists already, or is in another state)
    │   └── Superseded                409  superseded            (another control process has taken over)
    ├── PreconditionFailed            412  precondition_failed   (it was changed meanwhile)
    ├── PreconditionRequired          428  precondition_required (the request must name what it changes)
    ├── RequestTooLarge               413  request_too_large
    ├── UnsupportedMediaType          415  unsupported_media_type
    ├── HeadTooLarge                  431  request_header_fields_too_large
    ├── RateLimited                   429  rate_limit_exceeded
    │   ├── RequestExceedsLimit       429  request_exceeds_limit (alone it is more than a limit ever allows)
    │   └── QuotaExceeded             429  insufficient_quota    (a spend budget is used up; waiting won't help)
    ├── Overloaded                    503  overloaded            (queues are full)
    │   └── ShuttingDown              503  shutting_down         (draining)
    ├── EngineUnavailable             503  engine_unavailable    (starting, restarting, gone)
    ├── StoreUnavailable              503  store_unavailable     (the database does not answer)
    ├── LimitsUnavailable             503  limits_unavailable    (shared limits cannot be read, and must be)
    ├── SafetyCheckFailed             503  safety_check_failed   (a guard broke, and its policy lets nothing pass)
    ├── DeadlineExceeded              504  deadline_exceeded
    └── UsageError                    500  usage_error           (the operator's: flags, files, models on disk)
        ├── ConfigError                    config_error
        └── ModelLoadError                 model_load_error

Each knows its HTTP status, a code for programs and the sentence a person reads. `hint` says what to do next.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar, Self

from penstock.core.identity import RateLimits

MAX_MESSAGE_CHARACTERS = 4000  # messages quote what clients and other servers send
MAX_QUOTED_CHARACTERS = 200


def quoted(text: object) -> str:
    """Return a text of a client in quotes, for a message. To escape all of a text of megabytes would keep other
    requests waiting."""
    if isinstance(text, str) and len(text) > MAX_QUOTED_CHARACTERS:
        return f"{text[:MAX_QUOTED_CHARACTERS]!r}..."
    return repr(text)


class PenstockError(Exception):
    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "api_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        hint: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE_CHARACTERS:
            message = f"{message[:MAX_MESSAGE_CHARACTERS]} [...]"
        super().__init__(message)
        self.message = message
        self.param = param
        self.hint = hint
        self.retry_after_s = retry_after_s
        self.rate_limits: RateLimits | None = None  # the caller's limits, if known

    def with_rate_limits(self, rate_limits: RateLimits) -> Self:
        """Return a copy for one caller: a single error, such as the loss of an engine, may end many requests."""
        error = copy.copy(self)
        error.rate_limits = rate_limits
        return error

    def with_param(self, param: str) -> Self:
        """Return a copy for an API that has another name for the parameter."""
        error = copy.copy(self)
        error.param = param
        return error


class InvalidRequest(PenstockError):
    status = 400
    code = "invalid_request_error"
    type = "invalid_request_error"


@dataclass(frozen=True, slots=True)
class Overflow:
    """The token counts of a request that does not fit a model's context."""

    context: int
    prompt: int
    answer: int | None = None  # None where the prompt alone is too long


class ContextLengthExceeded(InvalidRequest):
    """`overflow` is None if only another server or process knows the counts."""

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        hint: str | None = None,
        overflow: Overflow | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, param=param, hint=hint, retry_after_s=retry_after_s)
        self.overflow = overflow


class ContentRefused(InvalidRequest):
    code = "content_policy_violation"


class ThreadsUnsupported(InvalidRequest):
    code = "thread_unsupported_request"


class AuthenticationFailed(PenstockError):
    status = 401
    code = "invalid_api_key"
    type = "invalid_request_error"


class PermissionDenied(PenstockError):
    status = 403
    code = "permission_denied"
    type = "permission_error"


class ModelNotFound(PenstockError):
    status = 404
    code = "model_not_found"
    type = "invalid_request_error"


class NotFound(PenstockError):
    status = 404
    code = "not_found"
    type = "invalid_request_error"


class RequestTimeout(PenstockError):
    status = 408
    code = "request_timeout"
    type = "invalid_request_error"


class Conflict(PenstockError):
    status = 409
    code = "conflict"
    type = "invalid_request_error"


class Superseded(Conflict):
    """A control process tried to act after another had taken over."""

    code = "superseded"


class PreconditionFailed(PenstockError):
    status = 412
    code = "precondition_failed"
    type = "invalid_request_error"


class PreconditionRequired(PenstockError):
    status = 428
    code = "precondition_required"
    type = "invalid_request_error"


class RequestTooLarge(PenstockError):
    status = 413
    code = "request_too_large"
    type = "invalid_request_error"


class UnsupportedMediaType(PenstockError):
    status = 415
    code = "unsupported_media_type"
    type = "invalid_request_error"


class HeadTooLarge(PenstockError):
    status = 431
    code = "request_header_fields_too_large"
    type = "invalid_request_error"


class RateLimited(PenstockError):
    status = 429
    code = "rate_limit_exceeded"
    type = "rate_limit_error"
    waiting_helps: ClassVar[bool] = True


class RequestExceedsLimit(RateLimited):
    code = "request_exceeds_limit"
    waiting_helps = False


class QuotaExceeded(RateLimited):
    code = "insufficient_quota"
    type = "insufficient_quota"
    waiting_helps = False


class Overloaded(PenstockError):
    status = 503
    code = "overloaded"
    type = "overloaded_error"


class ShuttingDown(Overloaded):
    code = "shutting_down"


class EngineUnavailable(PenstockError):
    status = 503
    code = "engine_unavailable"
    type = "api_error"


class StoreUnavailable(PenstockError):
    status = 503
    code = "store_unavailable"
    type = "api_error"


class LimitsUnavailable(PenstockError):
    status = 503
    code = "limits_unavailable"
    type = "api_error"


class SafetyCheckFailed(PenstockError):
    status = 503
    code = "safety_check_failed"
    type = "api_error"


class DeadlineExceeded(PenstockError):
    status = 504
    code = "deadline_exceeded"
    type = "api_error"


class UsageError(PenstockError):
    code = "usage_error"


class ConfigError(UsageError):
    code = "config_error"


class ModelLoadError(UsageError):
    code = "model_load_error"


def _by_code(root: type[PenstockError]) -> dict[str, type[PenstockError]]:
    """Return the classes of errors that have a code of their own. Others stand for the class above them."""
    found = {root.code: root} if "code" in vars(root) else {}
    for child in root.__subclasses__():
        found = _by_code(child) | found
    return found


def error_from_code(code: str, message: str, *, retry_after_s: float | None = None) -> PenstockError:
    """Rebuild an error that crossed a process boundary as (code, message)."""
    return _by_code(PenstockError).get(code, PenstockError)(message, retry_after_s=retry_after_s)
