"""The body of an error, as OpenAI's clients read it."""

from __future__ import annotations

import msgspec

from octavo.errors import OctavoError


def error_body(message: str, kind: str, code: int, param: str | None = None) -> bytes:
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def body_of(error: OctavoError) -> bytes:
    return error_body(str(error), error.kind, error.status, error.param)


INTERNAL = error_body("internal error; fix: see the server's log", "InternalServerError", 500)
"""for our own bugs, whose details are nobody else's business"""
