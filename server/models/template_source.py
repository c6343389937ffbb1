"""Jinja environment of chat templates, as in transformers, and analysis of the message form that a template reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NoReturn, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

N = TypeVar("N", bound=nodes.Node)


class TemplateRefusal(jinja2.TemplateError):
    """Error that a template raises by calling `raise_exception`."""


def raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON text. Jinja's own filter escapes HTML, unlike the text that models were trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class GenerationTag(Extension):
    """Jinja tag `{% generation %}`, which marks assistant text for training. In a prompt, the tag is only a scope."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@dataclass(frozen=True, slots=True)
class ContentForm:
    """Form of message content that a template reads. `parts`: it iterates over a list of parts. `strings`: it accepts a string
    too."""

    parts: bool
    strings: bool

    @classmethod
    def of(cls, tree: nodes.Template) -> ContentForm:
        """Derive the form from the syntax tree. A loop over a message's content, or access to its first part, means parts. An
        additional test `content is string` means that strings are accepted too."""
        names = _content_names(tree)
        parts = any(_is_content(_looped(loop.iter), names) for loop in nodes_of(tree, nodes.For))
        parts = parts or any(_is_content(node, names) for node in _indexed(tree))
        tests = any(test.name == "string" and _is_content(test.node, names) for test in nodes_of(tree, nodes.Test))
        return cls(parts=parts, strings=tests or not parts)


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return bool(node.attr == "content")
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"


def _content_names(tree: nodes.Template) -> set[str]:
    """Return names of variables that hold a message's content. They have that name or are assigned from it."""
    names = {"content"}
    assigned = [
        (node.target.name, node.node) for node in nodes_of(tree, nodes.Assign) if isinstance(node.target, nodes.Name)
    ]
    while new := {name for name, value in assigned if _is_content(value, names)} - names:
        names |= new
    return names


_LIST_FILTERS: Final = {"list", "reverse", "selectattr", "rejectattr", "select", "reject", "map", "sort"}


def _looped(node: nodes.Node) -> nodes.Node:
    """Return the sequence that the loop `node` iterates over, without slices and without filters that return a list."""
    while True:
        match node:
            case nodes.Filter(node=nodes.Expr() as inner, name=name) if name in _LIST_FILTERS:
                node = inner
            case nodes.Getitem(node=inner, arg=nodes.Slice()):
                node = inner
            case _:
                return node


def _indexed(tree: nodes.Template) -> Iterator[nodes.Node]:
    """Yield the node X of every expression X[0].text and X[0]["type"]."""
    for node in [*nodes_of(tree, nodes.Getattr), *nodes_of(tree, nodes.Getitem)]:
        match node:
            case (
                nodes.Getattr(node=nodes.Getitem(node=whole, arg=nodes.Const(value=int())), attr="text" | "type")
                | nodes.Getitem(
                    node=nodes.Getitem(node=whole, arg=nodes.Const(value=int())), arg=nodes.Const(value="text" | "type")
                )
            ):
                yield whole


def nodes_of(tree: nodes.Template, kind: type[N]) -> list[N]:
    return [node for node in tree.find_all(kind) if isinstance(node, kind)]
