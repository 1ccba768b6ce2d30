"""JSON answers, whole ones and errors."""

from __future__ import annotations

from starlette.responses import Response

from octavo.errors import OctavoError, Overloaded
from octavo.wire.errors import body_of
from octavo.wire.responses import encode


def json_response(value: object, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


def error_response(error: OctavoError) -> Response:
    headers = {"retry-after": str(error.retry_after_s)} if isinstance(error, Overloaded) else {}
    return Response(body_of(error), error.status, headers=headers, media_type="application/json")
