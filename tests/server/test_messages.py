"""Conversations of every shape: a text comes out, or an error that names the field; never anything else."""

from __future__ import annotations

import functools
import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from octavo.errors import InvalidRequest
from octavo.text.chat_template import ChatTemplate
from octavo.wire.errors import body_of
from octavo.wire.requests import ChatRequest, plain_messages, read
from tests.unit.chat_templates import FAMILIES, PARTS

DEEP = 100_000
SOURCES = {name: source for name, (source, *_) in FAMILIES.items()} | {"parts": PARTS}
ODD = st.sampled_from(["", "{", "[" * 300, "[" * DEEP, '{"a": "\\ud800"}', "9" * 5000, "NaN", "{}", 2**70, 1e300, -0.0])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text() | ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NEST = st.integers(0, 400).map(lambda depth: functools.reduce(lambda inner, _: [inner], range(depth), 1))
ANY = VALUES | NEST


def loosely(fields: dict[str, st.SearchStrategy]) -> st.SearchStrategy:
    """Objects with these fields, some of them missing and some of any type."""
    return st.fixed_dictionaries({}, optional={name: right | ANY for name, right in fields.items()}) | ANY


FUNCTION = loosely({"name": st.text(), "arguments": VALUES.map(json.dumps) | ODD, "description": st.text()})
CALL = loosely({"id": st.text(), "type": st.just("function"), "function": FUNCTION})
PART = loosely({"type": st.sampled_from(["text", "refusal", "image_url"]), "text": st.text(), "refusal": st.text()})
MESSAGE = loosely({
    "role": st.sampled_from(["system", "user", "assistant", "tool", "zork"]), "name": st.text(),
    "content": st.text() | st.lists(PART, max_size=3), "tool_calls": st.lists(CALL, max_size=2),
    "tool_call_id": st.text(), "function_call": FUNCTION, "reasoning_content": st.text(), "__class__": ANY,
})  # fmt: skip
KWARGS = st.dictionaries(st.sampled_from(["self", "tools", "documents", "enable_thinking", "loop", "range"]), ANY)


@functools.cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(SOURCES[name], {"bos_token": "<s>", "eos_token": "</s>"})


def answer(name: str, body: dict) -> str | InvalidRequest:
    try:
        asked, _ = read(ChatRequest, json.dumps(body).encode())
        asked.check()
        return template(name).render(
            plain_messages(asked.messages), add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message, **(asked.chat_template_kwargs or {}),
        )  # fmt: skip
    except InvalidRequest as error:
        return error


USER = {"role": "user", "content": "Hi"}


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(SOURCES)), st.lists(MESSAGE, max_size=3), KWARGS, st.booleans())
@example("qwen2.5", [USER, {"role": "assistant", "tool_calls": 5}], {}, False)
@example("qwen2.5", [USER, {"role": "assistant", "tool_calls": [5]}], {}, False)
@example("qwen2.5", [USER], {"self": 1}, False)
def test_any_messages_make_a_text_or_a_typed_error(name, messages, kwargs, go_on):
    body = {"messages": messages, "chat_template_kwargs": kwargs}
    got = answer(name, body | ({"continue_final_message": True, "add_generation_prompt": False} if go_on else {}))
    if isinstance(got, InvalidRequest):
        assert json.loads(body_of(got))["error"]["code"] == 400
        assert len(str(got)) < 2000


def call(**function: object) -> dict:
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(("wrong", "named"), [
    ({"role": "assistant", "tool_calls": 5}, "messages[1].tool_calls is a number"),
    ({"role": "assistant", "tool_calls": [True]}, "messages[1].tool_calls[0] is true"),
    (call(name="f", arguments="[" * DEEP), "messages[1].tool_calls[0].function.arguments is nested too deeply"),
    (call(name="f", arguments="{"), "messages[1].tool_calls[0].function.arguments is no JSON"),
    ({"role": "user"}, "messages[1].content is missing"),
    ({"role": "assistant", "content": None}, "messages[1].content is missing"),
    ({"role": "user", "content": 5}, "messages[1].content is 5"),
    ({"content": "x"}, "messages[1].role is missing"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content holds a text part without"),
    ({"role": "user", "content": "x", "extra": functools.reduce(lambda i, _: [i], range(300), 1)}, "nested too deeply"),
])  # fmt: skip
def test_the_fault_is_named(wrong, named):
    error = answer("qwen2.5", {"messages": [USER, wrong]})
    assert isinstance(error, InvalidRequest)
    assert named in str(error)
    assert error.param == "messages"


def test_what_a_client_library_echoes_is_as_good_as_the_bare_message():
    bare = {"role": "assistant", "content": "yes"}
    echoed = bare | {"tool_calls": None, "function_call": None, "refusal": None, "audio": None}
    texts = [answer("qwen2.5", {"messages": [USER, message, USER]}) for message in (bare, echoed)]
    assert texts[0] == texts[1]
    assert isinstance(texts[0], str)
