"""Jinja as chat templates need it, where every operation is allowed by name or refused, and pays (`meter.py`)."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter, sync_do_join
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from octavo.text import guards
from octavo.text.meter import CONTAINERS, METER, metered, settled

_FILTERS = """
    abs attr batch capitalize center count d default dictsort e escape first float format groupby indent int items last
    length list lower map max min reject rejectattr replace reverse round safe select selectattr slice sort string sum
    title trim truncate unique upper wordcount
"""
_STR_METHODS = """
    capitalize casefold center count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower
    isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace
    rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill
"""
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_STR_METHODS.split()),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset(),
    float: frozenset({"is_integer"}),
}
_CONTEXT_ARGUMENTS = ("_loop_vars", "_block_vars")
"""what compiled templates add to every call, for `Context.call` to take away"""
_TYPES = (Cycler, Joiner)


class TemplateRaised(Exception):
    """The template itself refused: `raise_exception(message)`."""


class _Namespace(Namespace):
    """Shows nothing of what it holds, since namespaces can hold one another; keeps no private names."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace keeps no attribute named {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


class _Generation(Extension):
    """`{% generation %}` marks text for training; here it only shows it."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it of the instance)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, cache_size=0, finalize=_printable,
            extensions=[loopcontrols, _Generation],
        )  # fmt: skip
        known = self.filters
        self.filters = {name: _paying(known[name], guards.FILTERS.get(name)) for name in _FILTERS.split()}
        self.filters["join"] = _paying(_join, None)
        self.filters["tojson"] = _paying(_tojson, guards.tojson)
        self.filters.update(_INTERNAL)
        tests = cast("dict[str, Any]", self.tests)
        self.tests = {
            name: _paying(test, guards.contained if name == "in" else guards.compared) for name, test in tests.items()
        }
        self.globals = {
            "range": _range, "dict": _dict, "namespace": _namespace, "cycler": Cycler, "joiner": Joiner,
            "raise_exception": _raise_exception, "strftime_now": _strftime_now,
        }  # fmt: skip

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        _rewrite(source)
        return super()._generate(source, *args, **kwargs)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        meter, collected = METER.get(), []
        for part in parts:
            meter.write(len(part))
            collected.append(part)
        return "".join(collected)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = METER.get()
        guards.binary(meter, operator, left, right)
        return meter.made(self.binop_table[operator](left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = METER.get()
        meter.step()
        if not __self.is_safe_callable(__obj):
            owner = getattr(__obj, "__self__", None)
            what = f"method {__obj.__name__!r} of" if hasattr(__obj, "__name__") and owner is not None else "calling"
            raise SecurityError(f"{what} a {type(__obj if owner is None else owner).__name__} is out of reach")
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, LoopContext):
            args = (metered(args[0]), *args[1:]) if args else args
        elif type(owner) in _METHODS or isinstance(owner, str):
            args = tuple(settled(arg) for arg in args)
            named = {name: value for name, value in kwargs.items() if name not in _CONTEXT_ARGUMENTS}
            guards.method(meter, __obj.__name__, owner, args, named)
        elif isinstance(owner, LoopContext):
            for value in args:
                meter.read(value)
        return meter.made(super().call(__context, __obj, *args, **kwargs))

    def is_safe_callable(self, obj: Any) -> bool:
        if isinstance(obj, Undefined) or (isinstance(obj, type) and obj in _TYPES):
            return True
        owner = getattr(obj, "__self__", None)
        for kind, names in _METHODS.items():
            if isinstance(owner, kind):
                return obj.__name__ in names
        module = getattr(type(obj) if not hasattr(obj, "__name__") else obj, "__module__", "") or ""
        ours = module.startswith(("jinja2.", "octavo.text."))
        return ours and not isinstance(obj, type) and super().is_safe_callable(obj)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"attribute {attribute!r} of a {type(obj).__name__} is out of reach")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def guarded(*args: Any, **kwargs: Any) -> str:
            guards.braces(METER.get(), value.__self__, (*args, *kwargs.values()))
            return formatted(*args, **kwargs)

        return guarded

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, CONTAINERS):
            METER.get().read(argument)  # it may be hashed, or shown in an error
        return super().getitem(obj, argument)


def _paying(function: Callable[..., Any], guard: Callable[..., None] | None) -> Callable[..., Any]:
    """Keeps what Jinja reads off the function: whether it wants the context or the environment first."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def paying(*args: Any, **kwargs: Any) -> Any:
        meter = METER.get()
        args = tuple(settled(arg) for arg in args)
        if guard:
            guard(meter, *args[first:], **kwargs)
        return meter.made(function(*args, **kwargs))

    return paying


def _printable(value: Any) -> Any:
    if not isinstance(value, str):
        METER.get().read(value)
    return value


def _concatenated(values: list[Any]) -> str:
    meter = METER.get()
    meter.expect(sum(meter.read(value) for value in values))
    return str(meter.made("".join(map(str, values))))


def _operand(value: Any, operator: str) -> Any:
    meter, value = METER.get(), settled(value)
    meter.step()
    if isinstance(value, CONTAINERS) and not (isinstance(value, dict) and operator in ("in", "notin")):
        meter.read(value)
    return value


def _made(value: Any) -> Any:
    return METER.get().made(value)


def _read(value: Any) -> Any:
    METER.get().read(value)
    return value


_INTERNAL: dict[str, Callable[..., Any]] = {
    "(loop)": metered, "(made)": _made, "(read)": _read, "(concatenated)": _concatenated, "(operand)": _operand,
}  # fmt: skip
"""filters that no template can name; `_rewrite` puts them in"""


def _rewrite(template: nodes.Template) -> None:
    """Makes loops, comparisons, literals, slices and `~` pay: the operations that Jinja compiles to plain Python."""
    if next(template.find_all(nodes.ScopedEvalContextModifier), None):
        raise SecurityError("autoescape blocks are not part of chat templates")
    for loop in list(template.find_all(nodes.For)):
        loop.iter = _through("(loop)", loop.iter)
    for comparison in list(template.find_all(nodes.Compare)):
        comparison.expr = _through("(operand)", comparison.expr, nodes.Const(""))
        for operand in comparison.ops:
            operand.expr = _through("(operand)", operand.expr, nodes.Const(operand.op))
    for pair in list(template.find_all(nodes.Pair)):
        if not isinstance(pair.key, nodes.Const):
            pair.key = _through("(read)", pair.key)
    _Rewriter().visit(template)


def _through(name: str, value: nodes.Node, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, value), name, list(args), [], None, None, lineno=value.lineno)


class _Rewriter(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through("(concatenated)", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through("(made)", node) if isinstance(node.arg, nodes.Slice) else node

    def _literal(self, node: nodes.Literal) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _through("(made)", node)

    visit_List = visit_Dict = visit_Tuple = _literal


@jinja2.pass_eval_context
def _join(context: nodes.EvalContext, value: Any, d: Any = "", attribute: Any = None) -> str:
    items = list(metered(value))
    if attribute is not None:
        items = list(map(make_attrgetter(context.environment, attribute), items))
    meter = METER.get()
    meter.expect(meter.read(items) + len(items) * meter.read(str(d)))
    return sync_do_join(context, items, d)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own: no HTML escapes, text as it is."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _range(*args: int) -> range:
    numbers = range(*args)
    METER.get().step(len(numbers))
    return numbers


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    for value in args:
        METER.get().read(value)
    return dict(*args, **kwargs)


def _namespace(*args: Any, **kwargs: Any) -> Namespace:
    space = _Namespace()
    for name, value in _dict(*args, **kwargs).items():
        space[name] = value
    return space


def _raise_exception(message: Any) -> None:
    METER.get().read(message)
    raise TemplateRaised(str(message))


def _strftime_now(pattern: str) -> str:
    if re.search(r"%[^a-zA-Z%]*\d", pattern):
        raise SecurityError("strftime_now takes no widths")
    METER.get().expect(32 * len(pattern))
    return datetime.now().strftime(pattern)
