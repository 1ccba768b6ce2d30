"""The body of an error, as OpenAI's clients read it."""

from __future__ import annotations

import msgspec

from octavo.errors import EngineDead, EngineHangs, OctavoError


def error_body(message: str, kind: str, code: int, param: str | None = None) -> bytes:
    message = message.encode("utf-8", "replace").decode()  # half a surrogate pair may be quoted in it
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def shown(value: object, longest: int = 60) -> str:
    """A client's value in an error, spelled as the client did: true and null, not True and None."""
    try:
        text = msgspec.json.encode(value).decode()
    except (RecursionError, TypeError, ValueError):
        text = "something that is too deep or no JSON"
    return text if len(text) <= longest else text[: longest - 3] + "..."


INTERNAL = error_body("internal error; fix: see the server's log", "InternalServerError", 500)
"""for our own bugs, whose details are nobody else's business"""


def body_of(error: OctavoError) -> bytes:
    """What a client may read of it: not the engine's last words, nor what broke inside."""
    if error.status == 500:
        return INTERNAL
    dead = isinstance(error, EngineDead) and not isinstance(error, EngineHangs)
    message = "the engine is not running; fix: try again later" if dead else str(error)
    return error_body(message, error.kind, error.status, error.param)
