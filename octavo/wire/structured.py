"""How a request says what its answer must be: OpenAI's `response_format`, vLLM's `structured_outputs`, and `guided_*`.

Here their shapes are checked and brought into one; values are checked by `engine.structured`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidRequest, NotSupported
from octavo.wire.errors import shown

if TYPE_CHECKING:
    from octavo.wire.requests import SamplingFields

FORMATS = ("text", "json_object", "json_schema")
FIELDS: dict[str, tuple[type, ...]] = {
    "json": (dict, str, bool), "json_object": (bool,), "regex": (str,), "grammar": (str,), "choice": (list,),
    "disable_any_whitespace": (bool,), "disable_additional_properties": (bool,), "whitespace_pattern": (str,),
}  # fmt: skip
"""of `structured_outputs`"""
_WORDS: dict[type, str] = {dict: "an object", str: "a string", bool: "true or false", list: "a list of strings"}
GUIDED = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
}  # fmt: skip
"""names of older clients"""
SCHEMA = "response_format.json_schema.schema"


def structure_of(asked: SamplingFields) -> dict[str, Any] | None:
    """The fields of `StructuredOutputsParams`; None when nothing is asked for. Raises InvalidRequest."""
    guided = {ours: v for theirs, ours in GUIDED.items() if (v := getattr(asked, theirs)) is not None}
    found = {
        "response_format": _of_format(asked.response_format),
        "structured_outputs": _of_fields(asked.structured_outputs),
        "guided_*": guided or None,
    }  # fmt: skip
    given = {name: fields for name, fields in found.items() if fields is not None}
    if len(given) > 1:
        raise InvalidRequest(
            f"{' and '.join(given)} both say what the answer must be", limit="one of them", fix="leave the other out",
            param=next(iter(given)),
        )  # fmt: skip
    fields = next(iter(given.values()), None)
    for name, value in (fields or {}).items():
        if type(value) not in FIELDS[name] or (name == "choice" and not all(isinstance(one, str) for one in value)):
            ours = f"structured_outputs.{name}"
            theirs = structure_names(asked).get(ours, ours)
            limit = " or ".join(_WORDS[kind] for kind in FIELDS[name])
            raise InvalidRequest(f"{theirs} is {shown(value)}", limit=limit, fix=f"correct {theirs}", param=theirs)
    return fields


def structure_names(asked: SamplingFields) -> dict[str, str]:
    """The client's names for `structured_outputs` and its fields."""
    if asked.response_format is not None:
        return {"structured_outputs": "response_format", "structured_outputs.json": SCHEMA}
    guided = {f"structured_outputs.{v}": k for k, v in GUIDED.items() if getattr(asked, k) is not None}
    whole = next(iter(guided.values())) if len(guided) == 1 else "guided_*"
    return {"structured_outputs": whole, **guided} if guided else {}


def _of_format(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    fields = _object(given, "response_format", ("type", "json_schema"))
    kind, schema = fields.get("type"), fields.get("json_schema")
    if kind == "structural_tag":
        raise NotSupported(
            "response_format.type structural_tag is not supported yet", fix=f"use one of {', '.join(FORMATS)}",
            param="response_format",
        )  # fmt: skip
    if kind not in FORMATS:
        raise InvalidRequest(
            f"response_format.type is {shown(kind)}",
            limit=", ".join(FORMATS),
            fix="correct it",
            param="response_format",
        )
    if kind != "json_schema":
        if schema is not None:
            raise InvalidRequest(
                f"response_format.json_schema is set with type {kind}", limit="only with type json_schema",
                fix="leave it out", param="response_format",
            )  # fmt: skip
        return {"json_object": True} if kind == "json_object" else None
    named = _object(schema, "response_format.json_schema", ("name", "description", "schema", "strict"))
    for name, wanted in (("name", str), ("description", str), ("strict", bool)):
        if not isinstance(named.get(name), (wanted, type(None))):
            raise InvalidRequest(
                f"response_format.json_schema.{name} is {shown(named[name])}", limit=f"a {wanted.__name__}",
                fix="correct it", param="response_format",
            )  # fmt: skip
    if named.get("schema") is None:
        raise InvalidRequest(f"{SCHEMA} is missing", fix="give a JSON schema", param=SCHEMA)
    return {"json": named["schema"]}


def _of_fields(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    if isinstance(given, Mapping) and given.get("structural_tag") is not None:
        raise NotSupported(
            "structured_outputs.structural_tag is not supported yet", fix="use json, regex, grammar or choice",
            param="structured_outputs.structural_tag",
        )  # fmt: skip
    fields = _object(given, "structured_outputs", (*FIELDS, "structural_tag"))
    return {name: value for name, value in fields.items() if value is not None}


def _object(given: Any, name: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise InvalidRequest(f"{name} is {shown(given)}", limit="an object", fix=f"correct {name}", param=name)
    strange = [key for key in given if key not in known]
    if strange:
        raise InvalidRequest(
            f"{name} holds {shown(strange[0])}", limit=", ".join(known), fix="leave it out", param=name
        )
    return given
