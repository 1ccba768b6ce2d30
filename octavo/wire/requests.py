"""What clients may send: OpenAI's chat completions and completions with vLLM's additions, typed and strict.

Types are checked here (a bool is not a number, NaN is none), ranges by `SamplingParams.verify`. `read` is the only
way in: it turns a body into a request and reports the fields that nobody knows.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from octavo.errors import InvalidRequest
from octavo.wire import fields
from octavo.wire.errors import shown

MAX_PROMPTS = 2048
MAX_UNKNOWN_FIELDS = 256
"""in one request; a client of another API has a few"""
LIMITS = {
    "prompt": "a string, a list of strings, a list of token ids or a list of such lists",
    "stop": "a string or a list of strings",
    "content": "a string or a list of parts of type 'text'",
    "truncation_side": "left or right",
    "logit_bias": "an object of numbers by token id",
}
"""where the words of pydantic would not help"""


def _whole(value: Any) -> Any:
    """Clients whose language has one number type write 16.0 for 16."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, Field(allow_inf_nan=False)]
TokenIds = list[Integer]
_IDS = {"type": "array", "items": {"type": "integer"}}
PROMPT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, _IDS,
                           {"type": "array", "items": _IDS}]}  # fmt: skip


def _one_of_four(value: Any) -> Any:
    """Checked by hand: pydantic would try all four, a millisecond for each thousand tokens."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        kinds = set(map(type, value))
        if kinds <= {str} or kinds == {int} or (kinds == {list} and all(set(map(type, one)) == {int} for one in value)):
            return value
    raise ValueError(LIMITS["prompt"])


class _Strict(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {}


class StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RepetitionDetection(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    max_pattern_size: Integer = 0
    min_pattern_size: Integer = 0
    min_count: Integer = 0


class SamplingFields(_Strict):
    """What both kinds of request share. `None` means: the default of the model's generation config, then vLLM's."""

    model: str | None = None
    n: Integer | None = None
    best_of: Integer | None = None
    use_beam_search: bool | None = None
    length_penalty: Number | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    seed: Integer | None = None
    logit_bias: dict[str, Number] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    thinking_token_budget: Integer | None = None
    repetition_detection: RepetitionDetection | None = None
    prompt_logprobs: Integer | None = None
    logprob_token_ids: TokenIds | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Integer | None = None
    truncation_side: Literal["left", "right"] | None = None
    stream_interval: Integer | None = None
    priority: Integer | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    session_id: str | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_whitespace_pattern: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def reports_logprobs(self) -> bool:
        """The answer shows logprobs of its tokens."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises InvalidRequest for fields that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is set without stream", limit="only with stream=true",
                fix="set stream to true or leave stream_options out", param="stream_options",
            )  # fmt: skip
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                f"prompt_logprobs is {self.prompt_logprobs} in a stream", limit="only without stream",
                fix="set stream to false", param="prompt_logprobs",
            )  # fmt: skip
        if self.stream and self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest(
                f"best_of is {self.best_of} in a stream", limit=f"only without stream, or as n, {self.n or 1}",
                fix="set stream to false, as the best are known only at the end", param="best_of",
            )  # fmt: skip
        if self.stream and self.use_beam_search:
            raise InvalidRequest(
                "use_beam_search is true in a stream", limit="only without stream",
                fix="set stream to false, as the best are known only at the end", param="use_beam_search",
            )  # fmt: skip
        if self.logprob_token_ids is not None and not self.reports_logprobs:
            raise InvalidRequest(
                "logprob_token_ids is set without logprobs", limit="only with logprobs", fix="set logprobs",
                param="logprob_token_ids",
            )  # fmt: skip
        if self.cache_salt == "":
            raise InvalidRequest("cache_salt is empty", fix="give some text or leave it out", param="cache_salt")


SAY_WITHOUT_CONTENT = {"tool_calls", "function_call", "refusal", "reasoning_content", "reasoning"}
"""fields of a message that make sense without content"""


class Message(_Strict):
    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(SamplingFields):
    refused = fields.CHAT
    messages: list[Message]
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def reports_logprobs(self) -> bool:
        return bool(self.logprobs)

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise InvalidRequest("messages is empty", limit="at least 1", fix="give a message", param="messages")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(
                f"top_logprobs is {self.top_logprobs} without logprobs", limit="only with logprobs=true",
                fix="set logprobs to true", param="top_logprobs",
            )  # fmt: skip
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt are both true", limit="one of the two",
                fix="set add_generation_prompt to false", param="continue_final_message",
            )  # fmt: skip

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that says how many tokens may be generated, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """As the client wrote them, for the chat template, which knows what it can show.

    Raises InvalidRequest for a message that says nothing.
    """
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: Message, where: str) -> dict[str, Any]:
    """By hand: pydantic's own way fails for deep values. A null is only kept where templates look for one."""
    extra = {name: value for name, value in (message.model_extra or {}).items() if value is not None}
    if message.content is None and not SAY_WITHOUT_CONTENT & extra.keys():
        raise InvalidRequest(f"{where}.content is missing", fix="give it some text", param="messages")
    content = {"content": message.content} if "content" in message.model_fields_set else {}
    return {"role": message.role, **content, **extra}


class CompletionRequest(SamplingFields):
    refused = fields.COMPLETION
    prompt: Annotated[str | list[Any], PlainValidator(_one_of_four), WithJsonSchema(PROMPT_SCHEMA)]
    echo: bool = False
    logprobs: Integer | None = None
    add_special_tokens: bool = True

    @property
    def reports_logprobs(self) -> bool:
        return self.logprobs is not None

    def check(self) -> None:
        super().check()
        if self.logprob_token_ids is not None and self.echo:
            raise InvalidRequest(
                "logprob_token_ids is set with echo", limit="one of the two", fix="set echo to false",
                param="logprob_token_ids",
            )  # fmt: skip

    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt. Raises InvalidRequest for none or too many."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequest("prompt is empty", limit="at least 1 token", fix="give a prompt", param="prompt")
        several: list[Any] = [self.prompt] if isinstance(self.prompt[0], int) else list(self.prompt)
        if len(several) > MAX_PROMPTS:
            raise InvalidRequest(
                f"prompt holds {len(several)} prompts", limit=f"{MAX_PROMPTS}", fix="send several requests",
                param="prompt",
            )  # fmt: skip
        return several


class TokenizeRequest(_Strict):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(_Strict):
    model: str | None = None
    tokens: TokenIds


class LoadAdapterRequest(_Strict):
    refused = fields.LOAD_ADAPTER
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(_Strict):
    refused = fields.UNLOAD_ADAPTER
    lora_name: str


AnyRequest = TypeVar("AnyRequest", bound=_Strict)


def read(kind: type[AnyRequest], body: bytes) -> tuple[AnyRequest, list[str]]:
    """The request in a body, and the unknown fields in it. Raises InvalidRequest naming the field at fault.

    A field that is null counts as one that is not there.
    """
    try:
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as err:
        half = _half_a_pair(body)
        cause = f"a string holds half a surrogate pair ({half})" if half else err
        raise InvalidRequest(f"the body is not valid JSON: {cause}", fix="send a JSON object") from err
    if not isinstance(values, dict):
        raise InvalidRequest(f"the body is a JSON {_kind(values)}", limit="a JSON object", fix="send an object")
    try:
        request = kind.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as err:
        raise _explain(err) from None
    unknown = fields.check(request.model_extra or {}, kind.refused)
    options = getattr(request, "stream_options", None)
    if options is not None:
        unknown += [f"stream_options.{name}" for name in options.model_extra or {}]
    if len(unknown) > MAX_UNKNOWN_FIELDS:
        raise InvalidRequest(
            f"the body has {len(unknown)} unknown fields", limit=f"{MAX_UNKNOWN_FIELDS}", fix="leave them out"
        )
    return request, unknown


ESCAPES = re.compile(
    rb"\\(?:u[dD]([89abAB])[0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}())?|u[dD]([c-fC-F])[0-9a-fA-F]{2}|.)", re.S
)
"""of JSON; the first group is of a high surrogate, the second of the low one after it, the third of a lone low one"""


def _half_a_pair(body: bytes) -> str | None:
    """The first escape of a surrogate that stands alone."""
    alone = (m for m in ESCAPES.finditer(body) if (m[1] and m[2] is None) or m[3])
    return next((m[0].decode("ascii") for m in alone), None)


def _kind(value: object) -> str:
    names = {list: "array", str: "string", int: "number", float: "number", bool: "boolean"}
    return names.get(type(value), "null")


def _explain(err: ValidationError) -> InvalidRequest:
    """The first fault, in one line: field, value, what it may be."""
    fault = err.errors(include_url=False)[0]
    path = [p for p in fault["loc"] if isinstance(p, int) or not _names_a_type(p)]
    name = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
    param = str(path[0]) if path else None
    if fault["type"] == "missing":
        return InvalidRequest(f"{name} is missing", fix=f"give {name}", param=param)
    wanted = next((LIMITS[p] for p in reversed(path) if p in LIMITS), None)
    others = {e["msg"] for e in err.errors(include_url=False) if e["loc"][:1] == fault["loc"][:1]}
    limit = wanted or " or ".join(sorted(_plain_words(m) for m in others))
    return InvalidRequest(f"{name} is {shown(fault['input'])}", limit=limit, fix=f"correct {name}", param=param)


def _names_a_type(part: str) -> bool:
    """pydantic puts the members of a union into the path of a fault."""
    return part in ("str", "int") or part.startswith(("list[", "function-before["))


def _plain_words(message: str) -> str:
    kind = message.removeprefix("Input should be ").removeprefix("a valid ").partition(" or instance of ")[0]
    return {"dictionary": "object", "list": "array"}.get(kind, kind)
