"""Whether a chat template reads a message's content as text or as a list of parts, found in its syntax tree."""

from __future__ import annotations

from dataclasses import dataclass

from jinja2 import nodes


@dataclass(frozen=True)
class ContentFormat:
    """`parts`: the template loops over the content. `text`: it also asks whether the content is a string."""

    parts: bool
    text: bool


def content_format(template: nodes.Template) -> ContentFormat:
    """Follows `messages` and `message.content` through assignments, loops, filters and macro arguments."""
    names = _Names(template)
    parts = any(names.is_content(loop.iter) for loop in template.find_all(nodes.For))
    text = any(test.name == "string" for test in template.find_all(nodes.Test))
    return ContentFormat(parts, text)


class _Names:
    """The template's names that stand for the list of messages, for a message, or for its content."""

    def __init__(self, template: nodes.Template) -> None:
        self._lists, self._messages, self._contents = {"messages"}, set[str](), set[str]()
        while self._grow(template):
            pass

    def _grow(self, template: nodes.Template) -> bool:
        before = self._size()
        for loop in template.find_all(nodes.For):
            if self._is_list(loop.iter) and isinstance(loop.target, nodes.Name):
                self._messages.add(loop.target.name)
        for assignment in template.find_all(nodes.Assign):
            if isinstance(assignment.target, nodes.Name):
                self._bind(assignment.target.name, assignment.node)
        macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
        for call in template.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            for parameter, argument in zip(macro.args if macro else [], call.args, strict=False):
                self._bind(parameter.name, argument)
        return self._size() > before

    def _size(self) -> int:
        return len(self._lists) + len(self._messages) + len(self._contents)

    def _bind(self, name: str, value: nodes.Node) -> None:
        for kind, names in (
            (self._is_list, self._lists), (self._is_message, self._messages), (self.is_content, self._contents)
        ):  # fmt: skip
            if kind(value):
                names.add(name)

    def _is_list(self, node: nodes.Node) -> bool:
        node = _source(node)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return self._is_list(node.node)
        return isinstance(node, nodes.Name) and node.name in self._lists

    def _is_message(self, node: nodes.Node) -> bool:
        node = _source(node)
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
            return self._is_list(node.node)
        return isinstance(node, nodes.Name) and node.name in self._messages

    def is_content(self, node: nodes.Node) -> bool:
        node = _source(node)
        if isinstance(node, nodes.Getattr):
            return node.attr == "content" and self._is_message(node.node)
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content" and self._is_message(node.node)
        return isinstance(node, nodes.Name) and node.name in self._contents


def _source(node: nodes.Node) -> nodes.Node:
    """What an expression's filters and tests are applied to."""
    while isinstance(node, (nodes.Filter, nodes.Test)) and node.node is not None:
        node = node.node
    return node
