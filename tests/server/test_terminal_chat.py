"""`oneloop chat` and `complete`: what is asked on the command line, a conversation at the terminal, and who answers it."""

from __future__ import annotations

import asyncio
import io
import json
import signal
from collections.abc import AsyncGenerator, Iterator

import httpx
import pytest

from server.cli.answerers import AnswerFailed, Endpoint, Piece
from server.cli.arguments import read_arguments, read_value
from server.cli.chat import Chat, Session, is_styled, printable
from server.config.server_options import ConfigError

ASK = {"role": "user", "content": "hi"}


class Scripted:
    """Answers with the pieces given, one list an answer, and writes down what it was asked."""

    name = "scripted"

    def __init__(self, *answers: list[Piece | BaseException]) -> None:
        self.answers = iter(answers)
        self.asked: list[tuple[list[tuple[str, str]], dict[str, object]]] = []

    async def chat(self, messages, fields) -> AsyncGenerator[Piece, None]:
        self.asked.append(([(message["role"], message["content"]) for message in messages], dict(fields)))
        for piece in next(self.answers):
            if isinstance(piece, Piece):
                yield piece
            elif isinstance(piece, KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
                await asyncio.Event().wait()
            else:
                raise piece


def talk(answerer: Scripted, *lines: str, chat: Chat | None = None, styled: bool = False) -> str:
    """What the terminal shows when a person types `lines`, then Ctrl-D."""
    out, typed, seconds = io.StringIO(), iter(lines), iter(range(1000))

    def read(prompt: str) -> str:
        line = next(typed, None)
        if line is None:
            raise EOFError
        return line

    session = Session(answerer, chat or Chat(), out, read, styled=styled, clock=lambda: float(next(seconds)))
    with asyncio.Runner() as runner:
        session.run(runner)
    return out.getvalue()


def test_a_conversation_holds_what_was_said_before():
    answerer = Scripted([Piece("Hel", num_tokens=1), Piece("lo", num_tokens=1)], [Piece("Bye", num_tokens=1)])
    shown = talk(answerer, "hi", "", "and now?")
    assert [asked for asked, _ in answerer.asked] == [
        [("user", "hi")],
        [("user", "hi"), ("assistant", "Hello"), ("user", "and now?")],
    ]
    assert "Hello\n  2 tokens, 1.0 a second, the first after 1000 ms" in shown


def test_lines_between_quotes_or_behind_a_backslash_are_one_question():
    answerer = Scripted([Piece("a")], [Piece("b")])
    talk(answerer, '"""', "one", "", "two", '"""', "three\\", "four")
    assert [asked[-1][1] for asked, _ in answerer.asked] == ["one\n\ntwo", "three\nfour"]


def test_commands_change_what_is_sent():
    answerer = Scripted([Piece("a")], [Piece("b")], [Piece("c")], [Piece("d")])
    shown = talk(
        answerer, "/system Be brief.", "one", "/retry", "/undo", "/undo", "/set temperature 0.5", "/set nonsense 1",
        "/set seed", "two", "/new", "three", "/nothing", "/help", "/exit", "never",
    )  # fmt: skip
    system = ("system", "Be brief.")
    assert answerer.asked == [
        ([system, ("user", "one")], {}),
        ([system, ("user", "one")], {}),
        ([system, ("user", "two")], {"temperature": 0.5, "seed": None}),
        ([system, ("user", "three")], {"temperature": 0.5, "seed": None}),
    ]
    for words in ("taken back", "nothing to take back", "there is no nonsense", "there is no /nothing", "/retry"):
        assert words in shown


def test_a_conversation_is_saved_and_gone_on_with(tmp_path):
    file = tmp_path / "chat.json"
    talk(Scripted([Piece("ü")]), "one", f"/save {file}")
    answerer = Scripted([Piece("b")])
    shown = talk(answerer, f"/load {file}", "two", f"/load {tmp_path}/none", "/load")
    assert answerer.asked[0][0] == [("user", "one"), ("assistant", "ü"), ("user", "two")]
    assert ("2 messages" in shown, "No such file" in shown) == (True, True)
    assert talk(Scripted(), f"/load {__file__}").count("messages") == 0


def test_an_answer_that_fails_is_told_and_its_question_forgotten():
    answerer = Scripted([Piece("half"), AnswerFailed("the engine failed")], [Piece("b")])
    shown = talk(answerer, "one", "two")
    assert "the engine failed" in shown
    assert [asked for asked, _ in answerer.asked][1] == [("user", "two")]


def test_ctrl_c_ends_an_answer_and_keeps_what_came():
    answerer = Scripted([Piece("half"), KeyboardInterrupt()], [Piece("b")])
    shown = talk(answerer, "one", "two")
    assert "(stopped)" in shown
    assert answerer.asked[1][0] == [("user", "one"), ("assistant", "half"), ("user", "two")]


def test_the_tokens_of_a_stopped_answer_are_estimated_where_the_endpoint_has_not_counted_them():
    answerer = Scripted([Piece("one "), Piece("two"), KeyboardInterrupt()])
    assert "about 2 tokens, 1.0 a second, the first after 1000 ms" in talk(answerer, "one")


def test_reasoning_is_dim_where_the_terminal_can_and_not_sent_again():
    answerer = Scripted([Piece(reasoning="hm"), Piece("so")], [Piece("b")])
    assert "\x1b[2mhm\x1b[0m\n\nso" in talk(answerer, "one", "two", styled=True)
    assert answerer.asked[1][0][1] == ("assistant", "so")


def test_a_model_cannot_command_the_terminal():
    assert printable("a\tb\nc") == "a\tb\nc"
    assert printable("\x1b]0;title\x07 \x9b31m \r\x7f é 漢") == "�]0;title� �31m �� é 漢"
    assert "\x1b[31m" not in talk(Scripted([Piece("\x1b[31m")]), "one")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_only_where_they_are_wanted():
    assert is_styled(Terminal(), {"TERM": "xterm"})
    assert not any(is_styled(out, env) for out, env in [
        (Terminal(), {"NO_COLOR": "1"}), (Terminal(), {"TERM": "dumb"}), (io.StringIO(), {}),
    ])  # fmt: skip


# --- the command line ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ["Say", "hi", "--max-num-seqs", "3", "--temperature", "0", "--system", "S", "--model", "m"],
        ["--max-num-seqs", "3", "--temperature", "0", "--system", "S", "--model", "m", "Say", "hi"],
        ["--max-num-seqs", "3", "Say", "--temperature", "0", "--system", "S", "hi", "--model", "m"],
    ],
)
def test_the_prompt_may_stand_before_between_and_after_options(argv):
    asked = read_arguments("chat", argv, {})
    assert (asked.prompt, asked.system, asked.fields) == ("Say hi", "S", {"temperature": 0})
    assert (asked.config.model, asked.config.max_num_seqs, asked.url) == ("m", 3, None)


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_the_prompt_for_an_endpoint_may_follow_its_url(command):
    asked = read_arguments(command, ["--url", "http://x", "Name the capital of France.", "--seed", "3"], {})
    assert (asked.prompt, asked.url, asked.fields) == ("Name the capital of France.", "http://x", {"seed": 3})


def test_an_endpoint_has_a_key_from_the_environment_unless_one_is_given():
    environment = {"OPENAI_API_KEY": "other", "ONELOOP_API_KEY": "ours"}
    assert read_arguments("chat", ["--url", "http://x"], environment).api_key == "ours"
    assert read_arguments("chat", ["--url", "http://x", "--api-key", "k"], environment).api_key == "k"
    assert read_arguments("complete", ["--url", "http://x"], {}).api_key is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["hi", "--bogus", "1"], "--bogus"),
        (["hi", "--temprature", "1"], r"unknown option --temprature \(did you mean --temperature\?\)"),
        (
            ["--url", "http://x", "--max-num-seqs", "3"],
            "--max-num-seqs configures a model in this process; leave it out",
        ),
        (["--temperature", "warm"], "temperature is a number, not warm"),
        (["--temperature"], "expected one argument"),
    ],
)
def test_what_cannot_be_honoured_is_refused(argv, words):
    with pytest.raises(ConfigError, match=words):
        read_arguments("chat", argv, {})


def test_help_says_what_there_is(capsys):
    with pytest.raises(SystemExit) as ended:
        read_arguments("complete", ["--help"], {})
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert "--url" in shown
    assert "--max-num-seqs" not in shown


@pytest.mark.parametrize("text", ["true", "[1]", '"x"', "x"])
def test_a_field_is_a_number(text):
    with pytest.raises(ConfigError):
        read_value("seed", text)


# --- endpoints ----------------------------------------------------------------------------------------------------


async def pieces(answer) -> list[Piece]:
    return [piece async for piece in answer]


async def test_an_endpoint_answers_chats_and_goes_on_with_texts(serve, tokenizer):
    server = await serve(says="Hello", api_key=("secret",))
    endpoint = Endpoint(f"http://127.0.0.1:{server.port}/v1/", None, "secret")
    for answer in (endpoint.chat([ASK], {"temperature": 0}), endpoint.complete("hi", {"max_tokens": 9})):
        found = await pieces(answer)
        assert "".join(piece.text for piece in found) == "Hello"
        assert sum(piece.num_tokens for piece in found) == len(tokenizer.encode("Hello")) + 1
    assert endpoint.name == "tiny"
    await endpoint.close()


@pytest.mark.parametrize("form", ["unix:{}", "unix://{}"])
async def test_an_endpoint_may_be_a_unix_socket(tmp_path, form):
    path = tmp_path / "s"

    async def answer(reader, writer):
        request = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert request.startswith("GET /v1/models HTTP/1.1\r\nHost: localhost\r\n")
        body = b'{"data": [{"id": "behind-a-socket"}]}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    async with await asyncio.start_unix_server(answer, path):
        endpoint = Endpoint(form.format(path), None, None)
        await endpoint.find_model()
        await endpoint.close()
    assert endpoint.name == "behind-a-socket"


@pytest.mark.parametrize(
    ("key", "model", "fields", "words"),
    [
        (None, None, {}, "HTTP 401"),
        ("secret", "other", {}, "HTTP 404"),
        ("secret", None, {"temperature": 9}, "temperature"),
    ],
)
async def test_what_an_endpoint_refuses_is_told_in_its_words(serve, key, model, fields, words):
    server = await serve(api_key=("secret",))
    endpoint = Endpoint(f"http://127.0.0.1:{server.port}", model, key)
    with pytest.raises(AnswerFailed, match=words):
        await pieces(endpoint.chat([ASK], fields))
    await endpoint.close()


async def test_usage_in_every_event_counts_tokens_once():
    event = '{"choices": [{"delta": {"content": "x"}}], "usage": {"completion_tokens": %d}}'
    stream = "".join(f"data: {event % number}\n\n" for number in (1, 2, 3))
    endpoint = Endpoint("http://x", "m", None, httpx.MockTransport(lambda _: httpx.Response(200, text=stream)))
    assert sum(piece.num_tokens for piece in await pieces(endpoint.chat([ASK], {}))) == 3
    await endpoint.close()


async def test_an_endpoint_that_fails_in_the_middle_or_speaks_otherwise_is_told():
    def lines(*data: str) -> Iterator[bytes]:
        for line in data:
            yield f"data: {line}\n\n".encode()

    answers = {
        "fails": b"".join(lines('{"choices": [{"delta": {"content": "x"}}]}', '{"error": {"message": "boom"}}')),
        "no json": b"data: {\n\n",
        "a list": b'data: {"choices": [3]}\n\n',
    }

    def respond(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=answers[json.loads(request.content)["model"]])

    for model, words in [("fails", "boom"), ("no json", "does not speak"), ("a list", "does not speak")]:
        endpoint = Endpoint("http://x", model, None, httpx.MockTransport(respond))
        with pytest.raises(AnswerFailed, match=words):
            await pieces(endpoint.chat([ASK], {}))
        await endpoint.close()
