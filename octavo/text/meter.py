"""What one rendering of a chat template may spend, so that no template can hang the server or fill its memory.

Every operation of a template pays here before or after it runs (`sandbox.py`): steps for loop turns, calls and list
items, characters for text. Lists share their items, so a few nested lists can stand for exponentially much text; `read`
therefore counts a value as text would, shared parts every time, before anything prints, compares or sorts it.
"""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from contextvars import ContextVar
from typing import Any

from jinja2.runtime import Undefined

MAX_DEPTH = 200
MAX_INT_BITS = 4096
CONTAINERS = (list, tuple, dict, KeysView, ValuesView, ItemsView)
"""what `read` looks into"""


class LimitExceeded(Exception):
    """Carries what ran out, for `TemplateError.limit`."""


class Meter:
    """`steps` and `characters` are what is left. The clock is the thread's CPU time: a busy machine fails nobody.

    Every method raises LimitExceeded.
    """

    def __init__(self, *, steps: int, characters: int, cpu_seconds: float) -> None:
        self.steps, self.characters = steps, characters
        self._limits = {"steps": steps, "characters": characters, "seconds of CPU time": cpu_seconds}
        self._deadline = time.thread_time() + cpu_seconds

    def step(self, count: int = 1) -> None:
        self.steps -= count
        if self.steps < 0:
            raise self._exceeded("steps")
        if time.thread_time() > self._deadline:
            raise self._exceeded("seconds of CPU time")

    def _exceeded(self, what: str) -> LimitExceeded:
        return LimitExceeded(f"{round(self._limits[what], 1)} {what}")

    def expect(self, characters: int) -> None:
        """Before an operation that would make so much text."""
        if characters > self.characters:
            raise self._exceeded("characters")

    def write(self, characters: int) -> None:
        self.expect(characters)
        self.characters -= characters

    def made(self, value: Any) -> Any:
        """Pays for what an operation has made, without what it holds. Generators run here, paying for each item."""
        self.step()
        if isinstance(value, (str, bytes)):
            self.write(len(value))
        elif isinstance(value, CONTAINERS):
            self.step(len(value))
        elif isinstance(value, int):
            if value.bit_length() > MAX_INT_BITS:
                raise LimitExceeded(f"integers of {MAX_INT_BITS} bits")
        elif isinstance(value, Iterator):
            return iter(list(Metered(value)))
        return value

    def read(self, value: Any, indent: int = 0) -> int:
        """Pays for a value as text, before it is printed, compared or sorted; returns about how long that is."""
        if isinstance(value, str):
            return len(value)
        total, todo = 0, [(value, 1)]
        while todo:
            item, depth = todo.pop()
            if depth > MAX_DEPTH:
                raise LimitExceeded(f"values nested {MAX_DEPTH} deep")
            if isinstance(item, (str, bytes)):
                total += len(item)
            elif isinstance(item, CONTAINERS):
                self.step(len(item) + 1)
                inner = [part for pair in item.items() for part in pair] if isinstance(item, dict) else item
                total += len(item) * (2 + indent * depth)
                todo.extend((part, depth + 1) for part in inner)
            self.expect(total)
        self.write(total if isinstance(value, CONTAINERS) else 0)
        return total


METER: ContextVar[Meter] = ContextVar("template_meter")


def settled(value: Any) -> Any:
    """An iterator as a list, so that it can be read before it is used."""
    return list(value) if isinstance(value, Iterator) else value


class Metered:
    """An iterable that pays a step an item; as long as what it wraps, where that has a length."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        meter = METER.get()
        for item in self._items:
            meter.step()
            yield item

    def __len__(self) -> int:
        return len(self._items)


def metered(items: Any) -> Any:
    """For loops: leaves what is no iterable to fail as it would."""
    return Metered(items) if isinstance(items, Iterable) and not isinstance(items, Undefined) else items
