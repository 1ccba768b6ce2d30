"""What an operation of a template would cost, paid before it runs. Each guard raises LimitExceeded or SecurityError."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError

from octavo.text.meter import CONTAINERS, MAX_INT_BITS, LimitExceeded, Meter

_MAX_DIGITS = 4
"""of a width or precision in a format"""
_MAX_PRECISION = 32
_MAX_NUMBER_LENGTH = 1024


def binary(meter: Meter, operator: str, left: Any, right: Any) -> None:
    if operator == "*":
        _multiply(meter, left, right)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * abs(right) > MAX_INT_BITS:
            raise LimitExceeded(f"integers of {MAX_INT_BITS} bits")
    elif operator == "%" and isinstance(left, str):
        percent(meter, left, right)
    elif operator == "+" and isinstance(left, (str, *CONTAINERS)) and isinstance(right, (str, *CONTAINERS)):
        meter.expect(len(left) + len(right))


def _multiply(meter: Meter, left: Any, right: Any) -> None:
    for many, times in ((left, right), (right, left)):
        if isinstance(many, (str, bytes, list, tuple)) and isinstance(times, int):
            length = len(many) * max(times, 0)
            meter.expect(length)
            if not isinstance(many, str):
                meter.step(length)


def percent(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> None:
    """`'%s' % x`, and the filter `format`."""
    pattern = str(value)
    longest = max((meter.read(arg) for arg in (*args, *kwargs.values())), default=0)
    widths = 0
    for spec in re.findall(r"%(?:\([^)]*\))?([^a-zA-Z%]*)", pattern):
        if "*" in spec:
            raise SecurityError("formats take no * widths")
        widths += _digits(spec)
    meter.expect(len(pattern) + widths + pattern.count("%") * (longest + 32))


def braces(meter: Meter, pattern: str, args: Iterable[Any]) -> None:
    """`'{}'.format(x)`."""
    longest = max((meter.read(arg) for arg in args), default=0)
    total = len(pattern)
    for _, field, spec, _ in string.Formatter().parse(pattern):
        meter.step()
        if field is not None:
            if "{" in (spec or ""):
                raise SecurityError("formats take no nested fields")
            total += _digits(spec or "") + longest + 32
    meter.expect(total)


def _digits(spec: str) -> int:
    """The sum of the numbers in a format's width and precision."""
    numbers = re.findall(r"\d+", spec)
    if any(len(number) > _MAX_DIGITS for number in numbers):
        raise LimitExceeded(f"format widths of {_MAX_DIGITS} digits")
    return sum(map(int, numbers))


def _width(meter: Meter, value: Any, width: Any = 80, *_: Any, **__: Any) -> None:
    meter.expect(meter.read(value) + (width if isinstance(width, int) else 0))


def _indent(meter: Meter, s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> None:
    text = str(s)
    each = width if isinstance(width, int) else len(width)
    meter.expect(len(text) + (text.count("\n") + 2) * max(each, 0))


def _replace(meter: Meter, s: Any, old: Any, new: Any, count: Any = None) -> None:
    meter.read(s)
    text, old = str(s), str(old)
    meter.expect(len(text) + (text.count(old) if old else len(text) + 1) * len(str(new)))


def _batch(meter: Meter, value: Any, linecount: int, fill_with: Any = None) -> None:
    meter.step(max(linecount, 0))


def _round(meter: Meter, value: Any, precision: int = 0, method: str = "common") -> None:
    if abs(precision) > _MAX_PRECISION:
        raise LimitExceeded(f"{_MAX_PRECISION} digits of precision")


def _number(meter: Meter, value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, str) and len(value) > _MAX_NUMBER_LENGTH:
        raise LimitExceeded(f"numbers of {_MAX_NUMBER_LENGTH} characters")


def _sum(meter: Meter, iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, (int, float)):
        raise SecurityError("sum adds numbers only")


def _all(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> None:
    """For what prints, compares or hashes all of its input."""
    for one in (value, *args, *kwargs.values()):
        meter.read(one)


def _items(meter: Meter, value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, (str, *CONTAINERS)):
        meter.step(len(value))


def tojson(
    meter: Meter, value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
    sort_keys: bool = False,
) -> None:  # fmt: skip
    each = len(indent) if isinstance(indent, str) else indent or 0
    extra = sum(len(str(one)) for one in separators or ())
    meter.read(value, indent=each + extra)


def compared(meter: Meter, value: Any = None, *args: Any) -> None:
    """A test with an argument compares."""
    if args:
        _all(meter, value, *args)


def contained(meter: Meter, value: Any = None, seq: Any = ()) -> None:
    meter.read(value)
    if not isinstance(seq, dict):
        meter.read(seq)


FILTERS: Mapping[str, Callable[..., None]] = {
    "batch": _batch, "center": _width, "dictsort": _all, "e": _all, "escape": _all, "float": _number,
    "format": percent, "groupby": _all, "indent": _indent, "int": _number, "list": _items,
    "max": _all, "min": _all, "replace": _replace, "round": _round, "sort": _all, "string": _all, "sum": _sum,
    "title": _all, "trim": _all, "truncate": _width, "unique": _all, "upper": _all, "lower": _all,
    "capitalize": _all, "wordcount": _all, "reverse": _items, "safe": _all,
}  # fmt: skip


def method(meter: Meter, name: str, owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """`owner.name(*args, **kwargs)` of a built-in type."""
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, CONTAINERS):
            meter.read(arg)
    if not isinstance(owner, str):
        if name in ("count", "index"):
            meter.read(owner)
    elif name in ("center", "ljust", "rjust", "zfill"):
        _width(meter, owner, *args)
    elif name == "replace":
        _replace(meter, owner, *args, **kwargs)
    elif name == "join" and args:
        meter.expect(meter.read(args[0]) + len(args[0]) * len(owner))
    elif name in ("split", "rsplit", "splitlines"):
        meter.step(_pieces(owner, args, kwargs))


def _pieces(text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """At most how many pieces a split gives."""
    separator = args[0] if args else kwargs.get("sep")
    if isinstance(separator, str) and separator:
        return text.count(separator) + 1
    return len(text) + 1
