"""JSON schemas as clients send them: bounded, without what asks for nothing, and with a path to each part of one.

What a schema may hold is llguidance's business; here is only what its messages lack.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from octavo.errors import InvalidRequest, NotSupported

MAX_BYTES = 1 << 18
"""of a schema or grammar; the largest in public collections of schemas that people send have about as much"""
Schema = dict[str, Any]
_ONE = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
        "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_NEUTRAL = {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True}
"""keywords that llguidance refuses, with the values at which they ask for nothing"""
_KEYWORDS = {
    *_ONE, *_LISTED, *_NAMED, "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "maxItems", "maxLength",
    "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "required", "type",
}  # fmt: skip
_SIGNS = {
    "Unknown format": "format", "Invalid type": "type", "Pointer '": "$ref", "Resource '": "$ref",
    "circular ref": "$ref", "min/maxProperties": "minProperties", "patternProperty": "patternProperties",
    "regex parse error": "pattern",
}  # fmt: skip
_PLAIN = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")
_LENIENCY = "x-guidance"
"""llguidance's own keyword: with it a schema could turn off that unknown keywords are refused"""


def read_schema(given: str | Schema | bool, name: str) -> Schema:
    """A copy of the schema, which is JSON text or what such text says; `name` is the caller's name for it.

    Raises InvalidRequest.
    """
    try:
        text = given if isinstance(given, str) else msgspec.json.encode(given)
        if len(text) > MAX_BYTES:
            raise InvalidRequest(
                f"{name} has {len(text)} bytes", limit=f"{MAX_BYTES}", fix="send a smaller schema", param=name
            )
        schema = msgspec.json.decode(text)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as err:
        raise InvalidRequest(f"{name} is no JSON: {err}", fix="send a JSON schema", param=name) from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        kind = "false, which nothing fits" if schema is False else f"a {type(schema).__name__}"
        raise InvalidRequest(f"{name} is {kind}", limit="a JSON schema", fix="send an object", param=name)
    for _, part in subschemas(schema):
        if _LENIENCY in part:
            raise unsupported(schema, _LENIENCY, name)
        for keyword, value in _NEUTRAL.items():
            if part.get(keyword) is value:
                del part[keyword]
    return schema


def closed(schema: Schema) -> Schema:
    """The schema, with no further properties in objects whose properties are listed. Changes `schema`."""
    for _, part in subschemas(schema):
        if part.keys() & {"properties", "patternProperties"}:
            part.setdefault("additionalProperties", False)
    return schema


def subschemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, schema) of the schema and all schemas in it, in the order in which they stand."""
    stack: list[tuple[str, Any]] = [("$", schema)]
    while stack:
        path, part = stack.pop()
        if not isinstance(part, dict):
            continue
        yield path, part
        inner: list[tuple[str, Any]] = []
        for keyword, value in part.items():
            here = path + _step(keyword)
            if keyword in _LISTED and isinstance(value, list):
                inner += [(f"{here}[{i}]", one) for i, one in enumerate(value)]
            elif keyword in _NAMED and isinstance(value, dict):
                inner += [(here + _step(key), one) for key, one in value.items()]
            elif keyword in _ONE:
                inner.append((here, value))
        stack += reversed(inner)


def _step(key: str) -> str:
    return f".{key}" if _PLAIN.fullmatch(key) else f"[{msgspec.json.encode(key).decode()}]"


def unsupported(schema: Schema, keyword: str, name: str) -> NotSupported:
    return NotSupported(
        f"unsupported keyword {keyword!r} in {name}{where(schema, keyword)}", fix="write the schema without it",
        param=name,
    )  # fmt: skip


def where(schema: Schema, keyword: str, fault: str = "") -> str:
    """` at PATH` of the first part that holds the keyword, of several the one whose value the fault tells."""
    paths = [(path, part[keyword]) for path, part in subschemas(schema) if keyword in part]
    told = [path for path, value in paths if isinstance(value, (str, int, float)) and _told(value, fault)]
    return f" at {(told or [paths[0][0]])[0]}" if paths else ""


def _told(value: str | float, fault: str) -> bool:
    """Whether the fault quotes the value. References are quoted without what stands before the path."""
    return bool(value) and str(value).removeprefix("#") in fault


def keyword_in(fault: str) -> str | None:
    """The keyword that a message of llguidance is about."""
    return next((keyword for sign, keyword in _SIGNS.items() if sign in fault), None) or next(
        (word for word in re.findall(r"[A-Za-z]+", fault) if word in _KEYWORDS), None
    )
