"""The tree of errors. Everything a user, a file or the environment can cause is one of these.

    OctavoError                 500, exit 1   something of ours broke
    ├── UsageError              400, exit 2   a flag, setting or name that cannot work
    │   ├── ModelNotFound       404, exit 2   no model of that name
    │   ├── BadModelFile        400, exit 2   weights, config or tokenizer that cannot be used
    │   ├── DeviceUnavailable   400, exit 2   the device asked for is not on this machine
    │   └── NotEnoughMemory     400, exit 2   weights or one KV block do not fit
    ├── InvalidRequest          400, exit 2   a request that cannot be served as it stands
    │   ├── NotSupported        400, exit 2   a known field that Octavo does not have yet
    │   └── TemplateError       400, exit 2   a chat template that fails, loops or reaches too far
    ├── Overloaded              503           queues are full; `retry_after_s` says when to come back
    └── EngineDead              503, exit 1   the engine process ended
        └── EngineHangs         503, exit 1   it is there, but does not step

A message is one line: the cause with the value, then the limit, then the fix. `assert` is for our own bugs.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all typed errors.

    `status` is the HTTP status, `kind` the `type` in an OpenAI error body, `exit_code` what a command ends with.
    `param` names the request field or flag at fault.
    """

    status = 500
    kind = "InternalServerError"
    exit_code = 1

    def __init__(
        self, cause: str, *, limit: str | None = None, fix: str | None = None, param: str | None = None
    ) -> None:
        self.cause, self.limit, self.fix, self.param = cause, limit, fix, param
        parts = [cause] + ([f"limit: {limit}"] if limit else []) + ([f"fix: {fix}"] if fix else [])
        super().__init__(" ".join("; ".join(parts).split()))


class UsageError(OctavoError):
    status, kind, exit_code = 400, "BadRequestError", 2


class ModelNotFound(UsageError):
    status, kind = 404, "NotFoundError"


class BadModelFile(UsageError):
    pass


class DeviceUnavailable(UsageError):
    pass


class NotEnoughMemory(UsageError):
    pass


class InvalidRequest(OctavoError):
    status, kind, exit_code = 400, "BadRequestError", 2


class NotSupported(InvalidRequest):
    pass


class TemplateError(InvalidRequest):
    pass


class Overloaded(OctavoError):
    status, kind = 503, "ServiceUnavailableError"

    def __init__(self, cause: str, *, retry_after_s: int = 1, limit: str | None = None, fix: str | None = None) -> None:
        super().__init__(cause, limit=limit, fix=fix)
        self.retry_after_s = retry_after_s


class EngineDead(OctavoError):
    status, kind = 503, "ServiceUnavailableError"


class EngineHangs(EngineDead):
    pass


def to_wire(error: OctavoError) -> dict[str, object]:
    """The error as plain values, for the engine to send to an API process; `from_wire` is its inverse."""
    fields = {"class": type(error).__name__, "cause": error.cause, "limit": error.limit, "fix": error.fix}
    retry = {"retry_after_s": error.retry_after_s} if isinstance(error, Overloaded) else {}
    return {**fields, "param": error.param, **retry}


def from_wire(fields: dict[str, object]) -> OctavoError:
    cls = globals().get(str(fields.get("class")))
    if not (isinstance(cls, type) and issubclass(cls, OctavoError)):
        cls = OctavoError
    error = cls(str(fields.get("cause")), limit=_text(fields.get("limit")), fix=_text(fields.get("fix")))
    error.param = _text(fields.get("param"))
    if isinstance(error, Overloaded) and isinstance(wait := fields.get("retry_after_s"), int):
        error.retry_after_s = wait
    return error


def _text(value: object) -> str | None:
    return None if value is None else str(value)
