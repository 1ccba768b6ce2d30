"""Values of sampling parameters against their limits. Each raises InvalidRequest naming parameter, value and limit."""

from __future__ import annotations

from collections.abc import Collection

from octavo.errors import InvalidRequest


def within(name: str, value: float, low: float, high: float, unit: str = "") -> None:
    """NaN is within nothing."""
    if not low <= value <= high:
        raise out_of_range(name, value, f"{low} to {high}{' ' + unit if unit else ''}")


def above(name: str, value: float, low: float, high: float) -> None:
    if not low < value <= high:
        raise out_of_range(name, value, f"above {low}, at most {high}")


def out_of_range(name: str, value: object, limit: str) -> InvalidRequest:
    field = name.split(".")[0]
    return InvalidRequest(f"{name} is {value}", limit=limit, fix=f"set {name} within it", param=field)


def at_most(name: str, values: Collection[object], limit: int, unit: str) -> None:
    if len(values) > limit:
        raise InvalidRequest(f"{name} holds {len(values)} {unit}", limit=f"{limit}", fix=f"shorten {name}", param=name)


def holds_within(name: str, values: Collection[object], low: int, high: int, unit: str) -> None:
    count = len(values)
    if not low <= count <= high:
        fix = f"give some, or leave {name} out" if count < low else f"shorten {name}"
        raise InvalidRequest(f"{name} holds {count} {unit}", limit=f"{low} to {high}", fix=fix, param=name)


def known_tokens(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidRequest(
            f"{name} holds token id {wrong}", limit=f"0 to {vocab_size - 1}", fix=f"correct {name}", param=name
        )


def count_of_logprobs(name: str, count: int, vocab_size: int, max_logprobs: int) -> None:
    """-1 stands for the whole vocabulary, in `count` and in `max_logprobs`."""
    most = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
    if count < -1 or count > most or (count == -1 and most < vocab_size):
        whole = f" (-1 is all {vocab_size})" if count == -1 else ""
        raise InvalidRequest(
            f"{name} is {count}{whole}", limit=f"0 to {most}{', or -1' if most == vocab_size else ''}",
            fix=f"set {name} within it, or raise --max-logprobs", param=name,
        )  # fmt: skip
