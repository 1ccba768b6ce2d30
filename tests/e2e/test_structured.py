"""Structured output over HTTP and in Python, with the default model: what comes out fits what was asked for."""

from __future__ import annotations

import json
import random
import re
from enum import Enum

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from octavo import LLM, SamplingParams, StructuredOutputsParams
from tests.matrix import SEED
from tests.schemas import random_regex, random_schema

RNG = random.Random(SEED)
SAY_SEED = f"OCTAVO_SEED={SEED}"
ASK = [{"role": "user", "content": "Describe a person."}]


class Colour(str, Enum):
    RED = "red"
    BLUE = "blue"


class Pet(BaseModel):
    kind: str = Field(max_length=12)
    legs: int = Field(ge=0, le=8)


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)
    favourite: Colour
    pets: list[Pet] = Field(max_length=2)
    nickname: str | None


def answer(client, **fields):
    fields = {"model": "smollm2", "messages": ASK, "max_tokens": 200, "seed": 1, **fields}
    return client.chat.completions.create(**fields).choices


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


@pytest.mark.parametrize("temperature", [0, 1])
def test_parse_of_the_openai_package(client, temperature):
    given = client.chat.completions.parse(
        model="smollm2", messages=ASK, response_format=Person, max_tokens=500, temperature=temperature, seed=SEED
    )
    (choice,) = given.choices
    assert isinstance(choice.message.parsed, Person), (SAY_SEED, choice)
    assert choice.finish_reason == "stop"
    assert given.usage.completion_tokens < 500


@pytest.mark.parametrize("turn", range(2))
def test_random_schemas(client, turn):
    schema = random_schema(RNG)
    for choice in answer(client, response_format=schema_format(schema), n=3, temperature=1):
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), schema)
        else:
            assert choice.finish_reason == "length"


def test_the_other_kinds(client):
    regex = random_regex(RNG)
    for extra, holds in (
        ({"structured_outputs": {"regex": regex}}, lambda text: re.fullmatch(regex, text)),
        ({"guided_regex": "[0-9]{4}-[0-9]{2}"}, lambda text: re.fullmatch("[0-9]{4}-[0-9]{2}", text)),
        ({"structured_outputs": {"choice": ["Paris", "London"]}}, lambda text: text in ("Paris", "London")),
        ({"guided_grammar": 'root ::= "yes" | "no" " " [a-z]{2}'}, lambda t: re.fullmatch("yes|no [a-z]{2}", t)),
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    ):  # fmt: skip
        (choice,) = answer(client, extra_body=extra, temperature=0.8, stop=["\n\n\n"])
        if choice.finish_reason == "stop" and choice.stop_reason is None:
            assert holds(choice.message.content), (SAY_SEED, extra, choice.message.content)
    body = {"structured_outputs": {"json": {"type": "integer", "minimum": 10, "maximum": 99}}}
    completion = client.completions.create(model="smollm2", prompt="A number:", max_tokens=9, extra_body=body)
    assert 10 <= int(completion.choices[0].text) <= 99
    assert completion.choices[0].finish_reason == "stop"


def test_a_stream(client):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    chunks = client.chat.completions.create(
        model="smollm2", messages=ASK, response_format=schema_format({**schema, "additionalProperties": False}),
        stream=True, seed=2, max_tokens=200,
    )  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert json.loads(text)["n"] <= 9


@pytest.mark.parametrize(("fields", "told", "param"), [
    ({"response_format": schema_format({"properties": {"x": {"not": {}}}})},
     "unsupported keyword 'not' in response_format.json_schema.schema at $.properties.x",
     "response_format.json_schema.schema"),
    ({"extra_body": {"guided_json": {"uniqueItems": True}}},
     "unsupported keyword 'uniqueItems' in guided_json at $", "guided_json"),
    ({"extra_body": {"structured_outputs": {"regex": 5}}}, "structured_outputs.regex is 5", "structured_outputs.regex"),
    ({"extra_body": {"guided_regex": "(?=a)"}}, "guided_regex cannot be used: look-around", "guided_regex"),
    ({"extra_body": {"guided_choice": "a"}}, 'guided_choice is "a"', "guided_choice"),
    ({"extra_body": {"structured_outputs": {}}}, "structured_outputs holds nothing", "structured_outputs"),
    ({"response_format": {"type": "json_object"}, "extra_body": {"ignore_eos": True}}, "ignore_eos is true",
     "ignore_eos"),
])  # fmt: skip
def test_refused_by_name(client, fields, told, param):
    with pytest.raises(openai.BadRequestError) as caught:
        answer(client, **fields)
    assert told in caught.value.body["message"]
    assert caught.value.body["param"] == param


def test_in_python(smollm2_path):
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}
    asked = [
        StructuredOutputsParams(json=schema), StructuredOutputsParams(choice=["one", "two"]),
        StructuredOutputsParams(regex="a{3}b{2}"), StructuredOutputsParams(grammar='start: "x" /[0-9]/'), None,
    ]  # fmt: skip
    params = [SamplingParams(temperature=1, seed=3, max_tokens=40, structured_outputs=one) for one in asked]
    with LLM(str(smollm2_path), max_model_len=512, threads=1) as llm:
        together = [output.outputs[0].text for output in llm.generate(["Say:"] * 5, params)]
        plain = llm.generate("Say:", params[-1])[0].outputs[0].text
    jsonschema.validate(json.loads(together[0]), schema)
    assert together[1] in ("one", "two")
    assert together[2] == "aaabb"
    assert re.fullmatch("x[0-9]", together[3])
    assert together[4] == plain
