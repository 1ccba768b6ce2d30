"""Reading request bodies: what is typed, refused, unknown; each fault names its field."""

from __future__ import annotations

import json

import pytest

from octavo.errors import InvalidRequest, NotSupported
from octavo.wire import fields
from octavo.wire.requests import (
    MAX_UNKNOWN_FIELDS,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    plain_messages,
    read,
)

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"prompt": "hello"}
WRONG = [
    ("temperature", "hot"), ("temperature", True), ("n", True), ("n", 1.5), ("n", "2"), ("max_tokens", "16"),
    ("stop", [1]), ("stop", {"a": 1}), ("stop_token_ids", [1.5]), ("stream", 1), ("stream", "yes"), ("seed", "x"),
    ("top_p", [0.5]), ("ignore_eos", "no"), ("model", 3), ("stream_options", {"include_usage": 1}), ("user", 7),
]  # fmt: skip


def body(*parts: dict) -> bytes:
    return json.dumps({key: value for part in parts for key, value in part.items()}).encode()


@pytest.mark.parametrize(("name", "value"), WRONG)
@pytest.mark.parametrize(("kind", "base"), [(ChatRequest, CHAT), (CompletionRequest, COMPLETION)])
def test_wrong_type_names_field_and_value(kind, base, name, value):
    with pytest.raises(InvalidRequest, match=name) as caught:
        read(kind, body(base, {name: value}))
    assert caught.value.param == name
    assert caught.value.limit
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"3", b"null", b'{"prompt": NaN}', b'{"prompt": "\xff"}',
                                 b'{"prompt": "\\ud83d"}', b'{"prompt": 1e999}', b"[" * 100_000])  # fmt: skip
def test_what_is_no_json_object_is_refused(raw):
    with pytest.raises(InvalidRequest, match="JSON"):
        read(CompletionRequest, raw)


@pytest.mark.parametrize(("text", "said"), [
    (r"\ud83d", r"half a surrogate pair (\ud83d)"), (r"a\uDE00b", r"half a surrogate pair (\uDE00)"),
    (r"\ud83d\ud83d\ude00", r"half a surrogate pair (\ud83d)"), (r"\\\ud83d\n", r"half a surrogate pair (\ud83d)"),
    (r"\ud83d\ude00", None), (r"\\ud83d", None),
])  # fmt: skip
def test_half_a_surrogate_pair_is_called_that(text, said):
    raw = b'{"prompt": "' + text.encode() + b'"}'
    if said is None:
        assert read(CompletionRequest, raw)[0].prompts()
        return
    with pytest.raises(InvalidRequest) as caught:
        read(CompletionRequest, raw)
    assert said in str(caught.value)


@pytest.mark.parametrize("prompt", ["text", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_the_four_kinds_of_prompt(prompt):
    request, unknown = read(CompletionRequest, body({"prompt": prompt}))
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert request.prompts() == (prompt if several else [prompt])
    assert unknown == []


@pytest.mark.parametrize("prompt", [[1, "a"], [True], [[1], "a"], 3, None, [[1.5]]])
def test_a_mixed_prompt_is_refused(prompt):
    with pytest.raises(InvalidRequest, match="prompt") as caught:
        read(CompletionRequest, body({"prompt": prompt}))
    assert caught.value.param == "prompt"


def test_an_empty_list_of_prompts_is_refused():
    request, _ = read(CompletionRequest, body({"prompt": []}))
    with pytest.raises(InvalidRequest, match="prompt"):
        request.prompts()


def test_whole_floats_count_as_integers():
    request, _ = read(CompletionRequest, body(COMPLETION, {"max_tokens": 16.0, "seed": -3.0}))
    assert (request.max_tokens, request.seed) == (16, -3)


@pytest.mark.parametrize("name", sorted(fields.CHAT))
def test_refused_fields_are_named_unless_neutral(name):
    neutral = [None, *fields.CHAT[name]]
    for value in neutral:
        _, unknown = read(ChatRequest, body(CHAT, {name: value}))
        assert unknown == []
    if name == "parallel_tool_calls":
        return  # both its values are neutral without tools
    with pytest.raises(NotSupported, match=name) as caught:
        read(ChatRequest, body(CHAT, {name: {"some": "thing"}}))
    assert caught.value.param == name


def test_a_bool_is_no_neutral_number():
    with pytest.raises(NotSupported):
        read(CompletionRequest, body(COMPLETION, {"routed_experts_prompt_start": False}))


NULLABLE = [
    *((ChatRequest, CHAT, name) for name in ChatRequest.model_fields if name not in CHAT),
    *((CompletionRequest, COMPLETION, name) for name in CompletionRequest.model_fields if name not in COMPLETION),
    *((TokenizeRequest, COMPLETION, name) for name in TokenizeRequest.model_fields if name not in COMPLETION),
    *((ChatRequest, CHAT, name) for name in ("zork", *fields.CHAT)),
]


@pytest.mark.parametrize(("kind", "base", "name"), NULLABLE)
def test_null_is_as_if_not_there(kind, base, name):
    assert read(kind, body(base, {name: None})) == read(kind, body(base))


@pytest.mark.parametrize(("kind", "name"), [(ChatRequest, "messages"), (CompletionRequest, "prompt")])
def test_a_field_that_must_be_there_may_not_be_null(kind, name):
    with pytest.raises(InvalidRequest, match=f"{name} is missing"):
        read(kind, body({name: None}))


@pytest.mark.parametrize(("name", "value", "said"), [
    ("n", True, "n is true; limit: integer"), ("stream", [None, False, "x"], 'stream is [null,false,"x"]'),
    ("stop", [None], "stop is [null]"), ("messages", {"a": None}, 'messages is {"a":null}; limit: array'),
    ("stream_options", False, "stream_options is false; limit: object"),
    ("echo", True, "set it to false or leave it out"), ("modalities", ["a"], 'set it to ["text"] or'),
])  # fmt: skip
def test_errors_speak_json(name, value, said):
    with pytest.raises(InvalidRequest) as caught:
        read(ChatRequest, body(CHAT, {name: value}))
    assert said in str(caught.value)


def test_unknown_fields_are_reported_not_refused():
    request, unknown = read(ChatRequest, body(CHAT, {"zork": 1, "model": "m", "stream_options": {"obscure": True}}))
    assert unknown == ["zork", "stream_options.obscure"]
    assert request.model == "m"


def test_a_flood_of_unknown_fields_is_refused():
    few, many = ({f"f{i}": 1 for i in range(count)} for count in (MAX_UNKNOWN_FIELDS, MAX_UNKNOWN_FIELDS + 1))
    assert len(read(ChatRequest, body(CHAT, few))[1]) == MAX_UNKNOWN_FIELDS
    for wrong in (many, few | {"stream": True, "stream_options": {"z": 1}}):
        with pytest.raises(InvalidRequest, match=f"limit: {MAX_UNKNOWN_FIELDS}"):
            read(ChatRequest, body(CHAT, wrong))


@pytest.mark.parametrize(("kind", "more", "param"), [
    (ChatRequest, CHAT | {"messages": []}, "messages"),
    (ChatRequest, CHAT | {"top_logprobs": 2}, "top_logprobs"),
    (ChatRequest, CHAT | {"continue_final_message": True}, "continue_final_message"),
    (ChatRequest, CHAT | {"stream_options": {"include_usage": True}}, "stream_options"),
    (CompletionRequest, COMPLETION | {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    (CompletionRequest, COMPLETION | {"cache_salt": ""}, "cache_salt"),
])  # fmt: skip
def test_contradictions_are_refused(kind, more, param):
    request, _ = read(kind, body(more))
    with pytest.raises(InvalidRequest) as caught:
        request.check()
    assert caught.value.param == param


def test_messages_reach_the_template_as_they_were_written():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "b", "tool_call_id": "1"},
    ]
    request, _ = read(ChatRequest, body({"messages": messages}))
    assert plain_messages(request.messages) == messages
