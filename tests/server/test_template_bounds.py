"""A chat template without end: it is bounded in time and in what it writes, and holds neither the loop nor a thread."""

from __future__ import annotations

import itertools
import threading

import pytest

from server.models import prompt
from server.models.prompt import MAX_CHARS, MAX_RENDER_S, ChatTemplate, EndlessTemplate

MESSAGES = [{"role": "user", "content": "Hi"}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
CALLS = "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(50) }}"
TREE = "{% for a in [[1]] recursive %}{% if loop.depth < 50 %}{{ loop([[1]]) }}{{ loop([[1]]) }}{% endif %}{% endfor %}"
ENDLESS = {"loops": LOOPS, "calls": CALLS, "a loop that calls itself": TREE}


def ticking(step_s=0.1):
    """A clock on which each look takes a while."""
    return itertools.count(0.0, step_s).__next__


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_what_turns_or_calls_without_end_has_so_much_time_and_no_more(source):
    looks = []
    clock = ticking()
    template = ChatTemplate(source, clock=lambda: looks.append(1) or clock())
    looks.clear()
    with pytest.raises(EndlessTemplate, match="exceeds its limits on these messages: it takes more than 10 s"):
        template.render(MESSAGES)
    assert len(looks) == pytest.approx(10 * MAX_RENDER_S, abs=3)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ 9 ** (9 ** 9) }}", "a power of more than"),
        ("{{ 'a' * 10 ** 12 }}", "repeats a text beyond"),
        ("{{ 10 ** 12 * 'a' }}", "repeats a text beyond"),
        ("{{ ([1] * 10 ** 12) | length }}", "repeats a text beyond"),
        ("{% for n in range(200) %}{{ 'a' * 1000000 }}{% endfor %}", f"writes more than {MAX_CHARS} characters"),
    ],
)
def test_what_would_be_too_large_is_never_made(source, why):
    with pytest.raises(EndlessTemplate, match=why):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for n in [1, 2] %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}", "1/2False 2/2True "),
        ("{% for n in [1, 2, 3] if n != 2 %}{{ n }}{{ loop.revindex }}{% endfor %}", "1231"),
        ("{% for n in none_such %}{{ n }}{% else %}none{% endfor %}", "none"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{% for n in [1, 2] | map('string') %}{{ n }}{{ loop.length }}{% endfor %}", "1222"),
        ("{% for n in [1, 2, 3] %}{% if loop.previtem %}{{ loop.previtem }}{% endif %}{% break %}{% endfor %}", ""),
        ("{% for n in [[1], [2]] recursive %}{{ n if n is number else loop(n) }}{% endfor %}", "12"),
        ("{{ 'ab' * 2 }}{{ 2 ** 10 }}{{ 1.5 * 2 }}{{ 2 ** -1 }}", "abab10243.00.5"),
    ],
)
def test_loops_and_products_mean_what_they_meant(source, text):
    assert ChatTemplate(source).render(MESSAGES) == text


def test_a_template_without_end_holds_no_start_up():
    looks = []
    clock = ticking()
    ChatTemplate("{{ tool_calls }}" + LOOPS, clock=lambda: looks.append(1) or clock())
    assert len(looks) <= 2 * (10 * prompt._PROBE_S + 5)


async def test_it_leaves_the_event_loop_and_the_next_chat_never_gets_there(serve, monkeypatch):
    threads: list[str] = []
    original = prompt._Effort.__init__

    def noted(self, clock, limit_s):
        threads.append(threading.current_thread().name)
        original(self, clock, limit_s)

    server = await serve(template=ChatTemplate(LOOPS, clock=ticking()))
    monkeypatch.setattr(prompt._Effort, "__init__", noted)
    for _ in range(2):
        refused = await server.chat(messages=MESSAGES)
        assert refused.status_code == 400
        assert "exceeds its limits" in refused.json()["error"]["message"]
    on_loop = [name == threading.current_thread().name for name in threads]
    assert on_loop == [True, False, False]
