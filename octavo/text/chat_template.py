"""A conversation to the text that the model reads, by the model's own Jinja template, sandboxed and bounded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jinja2.exceptions import SecurityError

from octavo.errors import InvalidRequest, NotSupported, TemplateError
from octavo.text.content_format import content_format
from octavo.text.meter import MAX_DEPTH, METER, LimitExceeded, Meter
from octavo.text.sandbox import TemplateEnvironment, TemplateRaised

MAX_SOURCE_CHARACTERS = 1 << 17
_STEPS, _STEPS_A_VALUE = 200_000, 64
_CHARACTERS, _CHARACTERS_A_CHARACTER = 8 << 20, 64
_CPU_SECONDS, _CPU_SECONDS_A_CHARACTER = 0.5, 1e-7
"""a rendering may take so much, and more for larger conversations"""
_CONTINUE = "\u2063to be continued\u2063 "
"""stands for a moment where the last message is cut; ends in a space to see whether the template trims"""

_MAX_MESSAGE = 500
T = TypeVar("T")


class ChatTemplate:
    """`special_tokens` are `Tokenizer.special_tokens`. `tool_source` is used instead for requests with tools.

    Raises TemplateError, with the line, if a template does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        self._special_tokens = dict(special_tokens)
        self._plain = _Compiled(source)
        self._with_tools = _Compiled(tool_source) if tool_source else self._plain

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """`messages` are OpenAI's, as plain values; a tool call's `arguments` in JSON are parsed for the template.

        `kwargs` are further variables of the template. Raises TemplateError if the template fails, refuses or goes
        beyond its limits, NotSupported for a content part that is not text, InvalidRequest for the rest.
        """
        if continue_final_message and (add_generation_prompt or not messages):
            raise InvalidRequest(
                "continue_final_message needs a last message and excludes add_generation_prompt",
                fix="set add_generation_prompt to false", param="continue_final_message",
            )  # fmt: skip
        compiled = self._with_tools if tools else self._plain
        prepared = [compiled.prepare(message, index) for index, message in enumerate(messages)]
        if continue_final_message:
            _mark(prepared[-1])
        variables = {**self._special_tokens, "tools": tools, "documents": documents, **kwargs}
        text = compiled.render({**variables, "messages": prepared, "add_generation_prompt": add_generation_prompt})
        return _cut(text) if continue_final_message else text


class _Compiled:
    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise TemplateError(
                f"the chat template has {len(source)} characters", limit=f"{MAX_SOURCE_CHARACTERS} characters"
            )
        environment = TemplateEnvironment()
        self._template = _bounded(_meter(len(source), 0), lambda: environment.from_string(source), "chat_template")
        self._format = content_format(environment.parse(source))

    def prepare(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"messages[{index}] is {_kind(message)}", limit="an object", param="messages")
        prepared = dict(message)
        content = prepared.get("content")
        for name, value, kinds in (
            ("role", prepared.get("role"), str),
            ("content", content, str | list | tuple | None),
        ):
            if not isinstance(value, kinds):
                limit = "text" if name == "role" else "text or a list of parts"
                raise InvalidRequest(f"messages[{index}].{name} is {_kind(value)}", limit=limit, param="messages")
        if isinstance(content, (list, tuple)):
            parts = [_text_part(part, index) for part in content]
            prepared["content"] = parts if self._format.parts else "\n".join(part["text"] for part in parts)
        elif isinstance(content, str) and self._format.parts and not self._format.text:
            prepared["content"] = [{"type": "text", "text": content}]
        if prepared.get("tool_calls") is not None:
            prepared["tool_calls"] = _parsed_calls(prepared["tool_calls"], f"messages[{index}].tool_calls")
        return prepared

    def render(self, variables: dict[str, Any]) -> str:
        plain, values, characters = _plain(variables)
        return _bounded(_meter(characters, values), lambda: self._template.render(plain), "messages")


def _meter(characters: int, values: int) -> Meter:
    return Meter(
        steps=_STEPS + _STEPS_A_VALUE * values, characters=_CHARACTERS + _CHARACTERS_A_CHARACTER * characters,
        cpu_seconds=_CPU_SECONDS + _CPU_SECONDS_A_CHARACTER * characters,
    )  # fmt: skip


def _bounded(meter: Meter, run: Callable[[], T], param: str) -> T:
    """Runs what a template does; whatever happens in there is a TemplateError about `param`."""
    token = METER.set(meter)
    try:
        return run()
    except LimitExceeded as error:
        raise TemplateError(f"the chat template does too much{_line(error)}", limit=str(error), param=param) from error
    except TemplateRaised as error:
        raise TemplateError(f"the chat template refuses the conversation: {_short(error)}", param=param) from error
    except SecurityError as error:
        raise TemplateError(f"the chat template reaches too far{_line(error)}: {_short(error)}", param=param) from error
    except RecursionError as error:
        raise TemplateError(f"the chat template nests too deeply{_line(error)}", param=param) from error
    except Exception as error:
        raise TemplateError(f"the chat template fails{_line(error)}: {_short(error)}", param=param) from error
    finally:
        METER.reset(token)


def _line(error: BaseException) -> str:
    """Where in the template: from a syntax error itself, else from the frames that Jinja rewrote to the template's."""
    line = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace:
        if "__jinja_exception__" in trace.tb_frame.f_globals:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" at line {line}" if line else ""


def _short(cause: object) -> str:
    text = str(cause)
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "…"


def _plain(variables: Mapping[str, Any]) -> tuple[dict[str, Any], int, int]:
    """A deep copy with nothing in it but JSON's types, its number of values, and of characters."""
    values = characters = 0

    def copy(value: Any, depth: int) -> Any:
        nonlocal values, characters
        values += 1
        if depth > MAX_DEPTH:
            raise InvalidRequest(
                "messages, tools or chat_template_kwargs are nested too deeply", limit=f"{MAX_DEPTH} levels",
                param="messages",
            )  # fmt: skip
        if isinstance(value, str):
            characters += len(value)
            return value
        if isinstance(value, Mapping):
            return {str(key): copy(one, depth + 1) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [copy(one, depth + 1) for one in value]
        if value is None or isinstance(value, (bool, int, float)):
            return value
        raise InvalidRequest(f"a chat template takes no {type(value).__name__}", limit="values as JSON has them")

    return copy(variables, 0), values, characters


def _text_part(part: Any, index: int) -> dict[str, Any]:
    """A content part as `{"type": "text", "text": …}`."""
    where = f"messages[{index}].content"
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"{where} holds {_kind(part)}", limit="text parts", param="messages")
    kind = part.get("type", "text")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in ("text", "refusal"):
        raise NotSupported(
            f"{where} holds a part of type {_short(kind)!r}", limit="this model takes text",
            fix="send parts of type text only", param="messages",
        )  # fmt: skip
    if not isinstance(text, str):
        raise InvalidRequest(f"{where} holds a {kind} part without its {kind}", param="messages")
    return {**part, "type": "text", "text": text}


def _parsed_calls(calls: Any, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(calls, (list, tuple)):
        raise InvalidRequest(f"{where} is {_kind(calls)}", limit="a list of tool calls", param="messages")
    return [_parsed_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _parsed_call(call: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(call, Mapping):
        raise InvalidRequest(f"{where} is {_kind(call)}", limit="an object", param="messages")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        cause = "nested too deeply" if isinstance(error, RecursionError) else f"no JSON: {_short(error)}"
        raise InvalidRequest(f"{where}.function.arguments is {cause}", fix="correct it", param="messages") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _kind(value: Any) -> str:
    """In JSON's words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    kinds = {
        str: "a string",
        int: "a number",
        float: "a number",
        list: "an array",
        tuple: "an array",
        dict: "an object",
    }
    return kinds.get(type(value), f"a {type(value).__name__}")


def _mark(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUE
    elif isinstance(content, list) and content:
        message["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUE}]
    else:
        raise InvalidRequest(
            "continue_final_message is set, but the last message has no text", param="continue_final_message"
        )


def _cut(text: str) -> str:
    at = text.rfind(_CONTINUE.strip())
    if at < 0:
        raise TemplateError(
            "the chat template does not show the last message, so it cannot be continued",
            param="continue_final_message",
        )
    trimmed = not text.startswith(_CONTINUE, at)
    return text[:at].rstrip() if trimmed else text[:at]
