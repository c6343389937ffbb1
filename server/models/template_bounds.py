"""Bounds of a chat template, which is a program: the time of its thread that it may take, and how much it may write.

There is no `while` in Jinja, and the sandbox bounds a `range`; but loops within loops, macros that call each other, and powers
have no end that anybody lives to see. So each turn of a loop and each call looks at the clock now and then, and products are
looked at before they are made. Not bounded: a text that a template doubles again and again by concatenation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDER_S = 10.0  # 500,000 messages take half of it
MAX_CHARS = 64 << 20  # four times the largest body
MAX_BITS = 1 << 16  # of a power
_TICKS = 64  # turns and calls between two looks at the clock


class TemplateTooLong(Exception):
    """It does not come to an end, or writes without one."""


class _Effort:
    """What one rendering has taken so far."""

    def __init__(self, clock: Callable[[], float], limit_s: float) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._end_s = clock() + limit_s
        self._ticks = 0

    def tick(self) -> None:
        self._ticks += 1
        if self._ticks % _TICKS == 0 and self._clock() > self._end_s:
            raise TemplateTooLong(f"it takes more than {self._limit_s:g} s")


_EFFORT: ContextVar[_Effort] = ContextVar("effort")


class _Turns:
    """What a loop goes through, counted; as long as that is, if it has a length."""

    def __init__(self, through: Iterable[Any]) -> None:
        self._through = through

    def __iter__(self) -> Iterator[Any]:
        effort = _EFFORT.get()
        for each in self._through:
            effort.tick()
            yield each

    def __len__(self) -> int:
        return len(self._through)  # type: ignore[arg-type]  # where it has none Jinja expects the TypeError


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The immutable sandbox, whose templates come to an end. `clock`: seconds of the thread that asks."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, clock: Callable[[], float] = time.thread_time, **options: Any) -> None:
        super().__init__(**options)
        self._clock = clock
        self.filters["turns"] = _Turns

    def template(self, tree: nodes.Template) -> jinja2.Template:
        """`tree`, compiled; its loops are changed in place."""
        for loop in [*tree.find_all(nodes.For)]:
            loop.iter = nodes.Filter(loop.iter, "turns", [], [], None, None, lineno=loop.lineno)
        return self.from_string(tree)

    def render(self, template: jinja2.Template, variables: dict[str, Any], limit_s: float) -> str:
        """`limit_s`: of the thread's time. Raises TemplateTooLong, and whatever the template does."""
        effort = _Effort(self._clock, limit_s)
        token = _EFFORT.set(effort)
        try:
            pieces, num_chars = [], 0
            for piece in template.generate(variables):
                effort.tick()
                num_chars += len(piece)
                if num_chars > MAX_CHARS:
                    raise TemplateTooLong(f"it writes more than {MAX_CHARS} characters")
                pieces.append(piece)
            return "".join(pieces)
        finally:
            _EFFORT.reset(token)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _EFFORT.get().tick()
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_BITS:
                raise TemplateTooLong(f"it takes a power of more than {MAX_BITS} bits")
        else:
            for text, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(text, str | list | tuple) and len(text) * times > MAX_CHARS:
                    raise TemplateTooLong(f"it repeats a text beyond {MAX_CHARS} characters")
        return super().call_binop(context, operator, left, right)
