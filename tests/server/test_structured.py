"""What a request may ask of its answer's form: read from the body, checked, and refused by name where it cannot be."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.engine.structured import MAX_CHOICES, Grammars
from octavo.engine.types import SamplingParams, StructuredOutputsParams
from octavo.errors import InvalidRequest, NotSupported
from octavo.text.json_schema import MAX_BYTES
from octavo.wire.requests import ChatRequest, CompletionRequest, read
from octavo.wire.structured import SCHEMA, structure_names, structure_of

MESSAGES = [{"role": "user", "content": "Hi"}]


def asked(**fields) -> ChatRequest:
    return read(ChatRequest, json.dumps({"messages": MESSAGES, **fields}).encode())[0]


def schema_format(schema: Any = None, **more) -> dict[str, Any]:
    named = {"name": "it", "schema": {"type": "object"} if schema is None else schema, **more}
    return {"type": "json_schema", "json_schema": named}


@pytest.mark.parametrize(("fields", "found"), [
    ({}, None), ({"response_format": None}, None), ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": schema_format(strict=True, description="x")}, {"json": {"type": "object"}}),
    ({"structured_outputs": {"regex": "a+", "json": None}}, {"regex": "a+"}),
    ({"structured_outputs": {"json": "{}", "whitespace_pattern": " ?"}}, {"json": "{}", "whitespace_pattern": " ?"}),
    ({"guided_json": {"type": "null"}, "guided_decoding_backend": "auto"}, {"json": {"type": "null"}}),
    ({"guided_regex": "a"}, {"regex": "a"}), ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"response_format": {"type": "text"}, "guided_regex": "a"}, {"regex": "a"}),
])  # fmt: skip
def test_one_shape_of_all(fields, found):
    assert structure_of(asked(**fields)) == found
    body = json.dumps({"prompt": "Hi", **fields}).encode()
    assert structure_of(read(CompletionRequest, body)[0]) == found


@pytest.mark.parametrize(("fields", "told"), [
    ({"response_format": "json"}, 'response_format is "json"'),
    ({"response_format": {}}, "response_format.type is null"),
    ({"response_format": {"type": "xml"}}, 'response_format.type is "xml"'),
    ({"response_format": {"type": "structural_tag"}}, "structural_tag is not supported yet"),
    ({"response_format": {"type": "json_object", "schema": {}}}, 'response_format holds "schema"'),
    ({"response_format": {"type": "text", "json_schema": {}}}, "json_schema is set with type text"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is null"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, f"{SCHEMA} is missing"),
    ({"response_format": schema_format(name=5)}, "response_format.json_schema.name is 5"),
    ({"response_format": schema_format(strict="yes")}, 'response_format.json_schema.strict is "yes"'),
    ({"response_format": schema_format(scheme={})}, 'response_format.json_schema holds "scheme"'),
    ({"structured_outputs": []}, "structured_outputs is []"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag is not supported yet"),
    ({"structured_outputs": {"regexp": "a"}}, 'structured_outputs holds "regexp"'),
    ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "structured_outputs and guided_* both say"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "both say"),
    ({"guided_choice": "a"}, 'guided_choice is "a"; limit: a list of strings'),
    ({"guided_regex": 5}, "guided_regex is 5; limit: a string"),
    ({"structured_outputs": {"json_object": "yes"}}, 'structured_outputs.json_object is "yes"; limit: true or false'),
    ({"response_format": schema_format(schema=5)}, f"{SCHEMA} is 5"), ({"guided_choice": [1]}, "guided_choice is [1]"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend is not supported yet"),
])  # fmt: skip
def test_shapes_that_are_none(fields, told):
    with pytest.raises(InvalidRequest) as caught:
        structure_of(asked(**fields))
    assert told in str(caught.value)


def test_names_are_the_callers():
    whole = "structured_outputs"
    named = structure_names(asked(response_format=schema_format()))
    assert named == {whole: "response_format", f"{whole}.json": SCHEMA}
    named = structure_names(asked(guided_choice=["a"]))
    assert named == {whole: "guided_choice", f"{whole}.choice": "guided_choice"}
    assert structure_names(asked(guided_choice=["a"], guided_regex="a"))[whole] == "guided_*"
    assert structure_names(asked()) == {}


@pytest.fixture(scope="module")
def tokenizer():
    return SimpleNamespace(special_ids=frozenset({0, 1}), token_text=lambda id: ["<eos>", "<think>"][id])


@pytest.fixture
def grammars(tokenizer):
    made = Grammars(tokenizer, 1000, (0,))
    yield made
    made.close()


async def admit(grammars, ignore_eos=False, **fields) -> StructuredOutputsParams:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields), ignore_eos=ignore_eos)
    found = (await grammars.admit(params)).structured_outputs
    assert found is not None
    return found


TRUE = {"type": "string"}
SUPPORTED = [
    TRUE, True, {}, {"type": "array", "items": TRUE, "minItems": 1, "maxItems": 3, "uniqueItems": False},
    {"prefixItems": [TRUE], "items": False}, {"type": ["string", "null"]}, {"enum": [1, "a", None]},
    {"const": {"a": 1}},
    {"type": "integer", "minimum": 1, "exclusiveMaximum": 9, "multipleOf": 2}, {"anyOf": [TRUE, {"type": "null"}]},
    {"allOf": [{"type": "object"}, {"properties": {"a": TRUE}}]}, {"oneOf": [TRUE, {"type": "integer"}]},
    {"$defs": {"a": TRUE}, "$ref": "#/$defs/a"}, {"type": "object", "properties": {"me": {"$ref": "#"}}},
    {"patternProperties": {"^a": TRUE}, "additionalProperties": False}, {"type": "object", "minProperties": 1},
    {"type": "string", "format": "date-time"}, {"type": "string", "pattern": "^a+$", "maxLength": 5},
    {"title": "t", "description": "d", "default": 1, "examples": [1], "nullable": True, "x-mine": 5},
    {"properties": {"not": TRUE, "if": {"const": "uniqueItems"}}}, {"type": "object", "unevaluatedProperties": True},
]  # fmt: skip


@pytest.mark.parametrize("schema", SUPPORTED, ids=str)
async def test_schemas_that_are_followed(grammars, schema):
    assert json.loads((await admit(grammars, json=schema)).json) is not None
    assert (await admit(grammars, json=json.dumps(schema))).json


UNSUPPORTED = {
    "not": {}, "if": {}, "then": {}, "else": {}, "contains": {}, "minContains": 1, "maxContains": 1,
    "uniqueItems": True, "propertyNames": {}, "dependentRequired": {}, "dependentSchemas": {}, "dependencies": {},
    "unevaluatedItems": False, "unevaluatedProperties": False, "$dynamicRef": "#a", "x-guidance": {"lenient": True},
}  # fmt: skip


@pytest.mark.parametrize("keyword", UNSUPPORTED)
async def test_keywords_that_are_not_supported_are_named_with_their_place(grammars, keyword):
    inner = {"anyOf": [TRUE, {keyword: UNSUPPORTED[keyword]}]}
    schema = {"properties": {"a b": {"type": "array", "items": inner}, keyword: TRUE}}
    with pytest.raises(NotSupported) as caught:
        await admit(grammars, json=schema)
    place = '$.properties["a b"].items.anyOf[1]'
    assert f"unsupported keyword {keyword!r} in structured_outputs.json at {place};" in str(caught.value)
    assert caught.value.param == "structured_outputs.json"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"type": "objekt"}, "at $: Invalid type: objekt"), ({"items": {"type": 5}}, "type must be a string"),
    ({"properties": {"a": {"format": "uri-template", "type": "string"}}}, "at $.properties.a: Unknown format"),
    ({"items": {"pattern": "(?=a)b", "type": "string"}}, "at $.items: look-around"),
    ({"items": {"pattern": "(a", "type": "string"}}, "at $.items: unclosed group"),
    ({"items": [TRUE, {"$ref": "#/nowhere"}]}, "at $.items[1]: Pointer '/nowhere' does not exist"),
    ({"$ref": "https://example.com/schema"}, "at $: Resource 'https://example.com/schema'"),
    ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength (5) is greater than maxLength (3)"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "unsupported use of keyword 'oneOf'"),
    ({"properties": {"a": {}, "b": {}}, "minProperties": 2}, "min/maxProperties only supported"),
    ({"$ref": "#"}, "no text of the json can be found"), ({"enum": []}, "anyOf is empty"),
    ({"type": "object", "properties": {f"p{i}": TRUE for i in range(600)}}, "Current row has"),
    ({"patternProperties": {"a": {}, "b": {}}}, "are not disjoint"), ({"properties": {"a": 5}}, "must be an object"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "told"), WRONG, ids=lambda value: str(value)[:40])
async def test_schemas_that_cannot_be_followed(grammars, schema, told):
    with pytest.raises(InvalidRequest) as caught:
        await admit(grammars, json=schema)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "non-verbose" not in str(caught.value)


deep: dict[str, Any] = {}
for _ in range(300):
    deep = {"items": deep}


@pytest.mark.parametrize(("fields", "told"), [
    ({}, "holds nothing that says what is wanted"), ({"json": {}, "regex": "a"}, "holds json and regex"),
    ({"json": False}, "is false, which nothing fits"), ({"json": "{"}, "structured_outputs.json is no JSON"),
    ({"json": "[]"}, "structured_outputs.json is a list"), ({"json": deep}, "recursion limit"),
    ({"json": {"a": {"const": "x" * MAX_BYTES}}}, f"limit: {MAX_BYTES}"), ({"regex": "a" * (MAX_BYTES + 1)}, "bytes"),
    ({"json": {"const": "\ud800"}}, "is no JSON"),
    ({"regex": "(a"}, "structured_outputs.regex cannot be used: unclosed"),
    ({"grammar": "start: " + "x" * 5000}, "xxx; fix"),
    ({"regex": r"a\b"}, "lookarounds not supported"), ({"choice": ()}, "holds 0 texts"),
    ({"choice": tuple(map(str, range(MAX_CHOICES + 1)))}, f"limit: 1 to {MAX_CHOICES}"),
    ({"grammar": "start: b"}, "unknown name"), ({"grammar": ""}, "Empty grammar"),
    ({"grammar": "root ::= b"}, "not found"),
    ({"grammar": 'start: %json {"not": {}}'}, 'Unimplemented keys: ["not"]'),
    ({"grammar": "start: <tool>"}, "special token"),
    ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern is set with regex"),
    ({"json_object": True, "disable_additional_properties": True}, "disable_additional_properties is set with"),
    ({"json_object": True, "whitespace_pattern": "("}, "unclosed group"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos is true with structured output"),
], ids=lambda value: str(value)[:40])  # fmt: skip
async def test_what_is_refused(grammars, fields, told):
    with pytest.raises(InvalidRequest) as caught:
        await admit(grammars, **fields)
    assert told in str(caught.value)
    assert len(str(caught.value)) < 1000


async def test_what_the_engine_gets(grammars):
    assert (await admit(grammars, json={"type": "object"})).json == '{"type":"object"}'
    schema = {"properties": {"a": {"patternProperties": {"^b": TRUE}}, "c": {"additionalProperties": TRUE}}}
    closed = json.loads((await admit(grammars, json=schema, disable_additional_properties=True)).json)
    assert closed["additionalProperties"] is closed["properties"]["a"]["additionalProperties"] is False
    assert closed["properties"]["c"]["additionalProperties"] == TRUE
    assert (await admit(grammars, grammar='root ::= "a"')).grammar.startswith("%llguidance")
    assert (await admit(grammars, grammar="start: <think> /a+/")).grammar == "start: <think> /a+/"


async def test_a_model_without_an_end_has_no_structured_output(tokenizer):
    grammars = Grammars(tokenizer, 1000, ())
    with pytest.raises(InvalidRequest, match="would never end"):
        await admit(grammars, regex="a")
    grammars.close()
