"""The way of a chat through the server: a file that is done with its body is not entered again before the engine has it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import FrameType

import pytest

from server.api.openai.request_types import ChatRequest
from server.generate.encode import EncodedPrompts
from server.generate.request import GenerateRequest

SERVER = Path(__file__).parents[2] / "server"
# Means and no places: what takes work to where it may last, a body's decoding and a conversation's rendering; and what is known of
# the request from its head.
MEANS = ("http/offload.py", "http/call.py")
# The forms in which a conversation exists until it is ids, in order, each with the function that returns it.
FORMS = {
    bytes: "joined",
    ChatRequest: "Wire.decode",
    GenerateRequest: "of_chat",
    list: "messages_json",
    tuple: "ChatTemplate.render_shielded",  # text, and the same with aliases for control tokens
    EncodedPrompts: "_encode_chat",
}


class Way:
    """The files of server/ that a request enters: called from outside of them. Reading a property and making an object is not
    entering: it goes on where it was. Nor is what uvicorn asks of its connection, whose class is ours: to read on."""

    def __init__(self, first: str, last: str) -> None:
        """From a call into `first` to one of the function `last`, in whichever file."""
        self.entered: list[tuple[str, str]] = []
        self.returned: dict[str, type] = {}  # by those functions of FORMS that were called, in order
        self._first, self._last = first, last
        self._state = "before"

    def trace(self, frame: FrameType, event: str, arg: object) -> Callable[[FrameType, str, object], None] | None:
        code = frame.f_code
        if code.co_name == self._last:
            self._state = "behind"
        file = Path(code.co_filename)
        if self._state == "behind" or SERVER not in file.parents:
            return None
        name = file.relative_to(SERVER).as_posix()
        if name == self._first:
            self._state = "on it"
        goes_on = code.co_name in ("__init__", "__post_init__") or _is_property(frame) or _is_of_uvicorn(frame.f_back)
        if self._state == "on it" and name not in MEANS and not goes_on and not _is_inside(frame):
            self.entered.append((name, code.co_qualname))
        return self._note_return if self._state == "on it" and code.co_qualname in FORMS.values() else None

    def _note_return(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "return":
            name = frame.f_code.co_qualname
            self.returned.pop(name, None)  # a coroutine also returns where it waits
            self.returned[name] = type(arg)

    def again(self) -> dict[str, list[str]]:
        """The files that were entered more than once, and by which functions."""
        times = Counter(file for file, _ in self.entered)
        return {file: [at for each, at in self.entered if each == file] for file in times if times[file] > 1}


def _is_property(frame: FrameType) -> bool:
    found = getattr(type(frame.f_locals.get("self")), frame.f_code.co_name, None)
    return isinstance(found, (property, cached_property))


def _is_of_uvicorn(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_globals.get("__name__", "").startswith("uvicorn.")


def _is_inside(frame: FrameType) -> bool:
    """Whether its file is entered already, and waits for what was called from there."""
    above = frame.f_back
    while above is not None:
        if above.f_code.co_filename == frame.f_code.co_filename:
            return True
        above = above.f_back
    return False


@pytest.fixture
async def way(serve):
    server = await serve(says="Hello there", access_log=False)
    assert (await server.chat(stream=True)).status_code == 200  # what is made once has been made
    way = Way("api/openai/chat.py", "submit")
    usual = sys.gettrace()
    sys.settrace(way.trace)
    try:
        answer = await server.chat(stream=True)
    finally:
        sys.settrace(usual)
    assert answer.status_code == 200
    return way


async def test_a_chat_goes_straight_to_the_engine(way):
    files = {file for file, _ in way.entered}
    assert files >= {"http/body.py", "generate/start.py", "models/prompt.py"}, "the way is not where the test looks"
    assert not way.again()


async def test_a_chat_is_ids_after_18_files_at_most(way):
    files = [file for file, _ in way.entered]
    until_ids = files[: files.index("models/tokenizer.py") + 1]
    assert len(until_ids) <= 18, until_ids


async def test_a_chat_has_six_forms_until_it_is_ids(way):
    """Whatever else the functions on the way return is no form of the conversation but a part of one."""
    assert list(way.returned) == list(FORMS.values())
    assert all(issubclass(way.returned[name], form) for form, name in FORMS.items())
    assert len(FORMS) == 6
