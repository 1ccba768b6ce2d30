"""Structured output at admission: from what a request asks for to a grammar that the engine can follow. No torch."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import msgspec

from octavo.engine.types import SamplingParams, StructuredOutputsParams
from octavo.errors import InvalidRequest, NotSupported, Overloaded
from octavo.text import grammar
from octavo.text.grammar_check import MAX_MEMORY_BYTES, TIMEOUT_S, GrammarCheck, TooMuch
from octavo.text.json_schema import MAX_BYTES, Schema, closed, keyword_in, read_schema, unsupported, where
from octavo.text.tokenizer import Tokenizer

KINDS = ("json", "json_object", "regex", "grammar", "choice")
MAX_CHOICES = 4096
MAX_KNOWN = 128
"""grammars found to be good that are not checked again"""
MAX_WAITING = 64
LONGEST_CAUSE = 300
"""characters of llguidance's words in an error; they may quote a whole regex"""
_KEYS = re.compile(r'^Unimplemented keys: \["([^"]+)"')


def grammar_of(asked: StructuredOutputsParams) -> str:
    """In llguidance's form, of what `Grammars.admit` returned."""
    if asked.regex is not None:
        return grammar.from_regex(asked.regex)
    if asked.choice is not None:
        return grammar.from_choices(asked.choice)
    if asked.grammar is not None:
        return asked.grammar
    schema = {"type": "object"} if asked.json is None else asked.json
    if isinstance(schema, str):
        schema = msgspec.json.decode(schema)
    return grammar.from_schema(schema, not asked.disable_any_whitespace, asked.whitespace_pattern)


class Grammars:
    """Checks grammars beside the event loop, one after the other. Belongs to one API process."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        special = {id: tokenizer.token_text(id) for id in sorted(tokenizer.special_ids)}
        self._check = GrammarCheck(special, vocab_size)
        self._can_end = bool(eos_token_ids)
        self._pool = ThreadPoolExecutor(1, "octavo-grammar")
        self._waiting = 0
        self._known: OrderedDict[bytes, StructuredOutputsParams] = OrderedDict()

    async def admit(self, params: SamplingParams) -> SamplingParams:
        """The parameters, with a grammar that the engine can follow.

        Raises InvalidRequest, which names the keyword that a schema must do without, or Overloaded.
        """
        asked = params.structured_outputs
        if asked is None:
            return params
        try:
            known = msgspec.json.encode(asked)
        except (TypeError, ValueError, RecursionError) as err:
            name = "structured_outputs.json"
            raise InvalidRequest(f"{name} is no JSON: {err}", fix="send a JSON schema", param=name) from None
        if known not in self._known:
            if self._waiting >= MAX_WAITING:
                raise Overloaded(
                    f"{self._waiting} grammars wait to be compiled", limit=f"{MAX_WAITING}", fix="ask again later"
                )
            self._waiting += 1
            try:
                self._known[known] = await asyncio.get_running_loop().run_in_executor(self._pool, self._checked, asked)
            finally:
                self._waiting -= 1
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(known)
        self._check_company(params)
        return msgspec.structs.replace(params, structured_outputs=self._known[known])

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._check.close()

    def _check_company(self, params: SamplingParams) -> None:
        if params.ignore_eos:
            raise InvalidRequest(
                "ignore_eos is true with structured output, whose end is the end-of-sequence token",
                fix="set ignore_eos to false", param="ignore_eos",
            )  # fmt: skip
        if not self._can_end:
            raise InvalidRequest(
                "structured output of this model would never end", limit="it names no end-of-sequence token",
                fix="use another model, or no structured output", param="structured_outputs",
            )  # fmt: skip

    def _checked(self, asked: StructuredOutputsParams) -> StructuredOutputsParams:
        kind, name = _kind(asked)
        schema: Schema | None = None
        if asked.json is not None:
            schema = read_schema(asked.json, name)
            if asked.disable_additional_properties:
                schema = closed(schema)
            asked = msgspec.structs.replace(asked, json=msgspec.json.encode(schema).decode())
        gbnf = asked.grammar is not None and not grammar.is_lark(asked.grammar)
        try:
            text = _bounded(asked.grammar if gbnf and asked.grammar else grammar_of(asked), name)
            answer = self._check.ask(text, gbnf)
        except TooMuch as err:
            raise InvalidRequest(
                f"{name} takes too much to compile", limit=f"{TIMEOUT_S:g} s and {MAX_MEMORY_BYTES >> 20} MiB",
                fix="make it smaller", param=name,
            ) from err  # fmt: skip
        except ValueError as err:  # of the library, for a schema that is too deep
            answer = {"error": str(err)}
        if "error" in answer:
            raise explained(answer["error"], kind, name, schema)
        return msgspec.structs.replace(asked, grammar=answer["grammar"]) if gbnf else asked


def _kind(asked: StructuredOutputsParams) -> tuple[str, str]:
    """The one kind that is asked for, and its name. Raises InvalidRequest for none, or several."""
    kinds = [
        kind for kind in KINDS if getattr(asked, kind) not in (None, False) or (kind == "json" and asked.json is False)
    ]
    if len(kinds) != 1:
        raise InvalidRequest(
            f"structured_outputs holds {' and '.join(kinds) or 'nothing that says what is wanted'}",
            limit=f"exactly one of {', '.join(KINDS)}", fix="give one", param="structured_outputs",
        )  # fmt: skip
    kind, name = kinds[0], f"structured_outputs.{kinds[0]}"
    if kind == "choice" and asked.choice is not None and not 1 <= len(asked.choice) <= MAX_CHOICES:
        raise InvalidRequest(
            f"{name} holds {len(asked.choice)} texts", limit=f"1 to {MAX_CHOICES}", fix="give some", param=name
        )
    for option, only in (
        ("disable_any_whitespace", ("json", "json_object")), ("whitespace_pattern", ("json", "json_object")),
        ("disable_additional_properties", ("json",)),
    ):  # fmt: skip
        if getattr(asked, option) not in (None, False) and kind not in only:
            raise InvalidRequest(
                f"structured_outputs.{option} is set with {kind}", limit=f"only with {' or '.join(only)}",
                fix="leave it out", param=f"structured_outputs.{option}",
            )  # fmt: skip
    return kind, name


def _bounded(text: str, name: str) -> str:
    size = len(text.encode("utf-8", "replace"))
    if size > MAX_BYTES:
        raise InvalidRequest(f"{name} has {size} bytes", limit=f"{MAX_BYTES}", fix="make it smaller", param=name)
    return text


def explained(fault: str, kind: str, name: str, schema: Schema | None) -> InvalidRequest:
    """llguidance's words, with the part of the schema that they are about."""
    if schema is not None and (found := _KEYS.match(fault)):
        return unsupported(schema, found[1], name)
    lines = [line.strip() for line in fault.replace("<non-verbose/>", "").splitlines()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    cause = (errors[0] if errors else lines[0])[:LONGEST_CAUSE]
    keyword = None if schema is None else keyword_in(fault)
    place = "" if schema is None or keyword is None else where(schema, keyword, fault)
    if cause.startswith("oneOf "):
        return NotSupported(
            f"unsupported use of keyword 'oneOf' in {name}{place}",
            limit="members that exclude each other by type or by a constant text", fix="write anyOf", param=name,
        )  # fmt: skip
    cause = f"no text of the {kind} can be found" if cause == "NoExtensionBias" else cause
    return InvalidRequest(f"{name} cannot be used{place}: {cause}", fix=f"correct {kind}", param=name)
