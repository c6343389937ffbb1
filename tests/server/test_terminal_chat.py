"""`oneloop chat` and `complete`: what is asked on the command line, a conversation at the terminal, and who answers it."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import signal
from collections.abc import AsyncGenerator, Iterator

import httpx
import pytest

from server.cli.answerers import AnswerFailed, AnswerPiece, Endpoint
from server.cli.arguments import read_arguments, read_value
from server.cli.attachments import part_of
from server.cli.chat import Session
from server.cli.conversation import ChatSession
from server.cli.markdown import BOLD, CYAN, DIM, ITALIC, RESET, UNDERLINED, Markdown
from server.cli.shown import is_styled, printable
from server.config.server_options import ConfigError

ASK = {"role": "user", "content": "hi"}


class Scripted:
    """Answers with the pieces given, one list an answer, and writes down what it was asked."""

    name = "scripted"

    def __init__(self, *answers: list[AnswerPiece | BaseException]) -> None:
        self.answers = iter(answers)
        self.asked: list[tuple[list[tuple[str, str]], dict[str, object]]] = []

    async def chat(self, messages, fields) -> AsyncGenerator[AnswerPiece, None]:
        self.asked.append(([(message["role"], message["content"]) for message in messages], dict(fields)))
        for piece in next(self.answers):
            if isinstance(piece, AnswerPiece):
                yield piece
            elif isinstance(piece, KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
                await asyncio.Event().wait()
            else:
                raise piece


def talk(answerer: Scripted, *lines: str, chat: ChatSession | None = None, styled: bool = False) -> str:
    """What the terminal shows when a person types `lines`, then Ctrl-D."""
    out, typed, seconds = io.StringIO(), iter(lines), iter(range(1000))

    def read(prompt: str) -> str:
        line = next(typed, None)
        if line is None:
            raise EOFError
        return line

    session = Session(answerer, chat or ChatSession(), out, read, styled=styled, clock=lambda: float(next(seconds)))
    with asyncio.Runner() as runner:
        session.run(runner)
    return out.getvalue()


def test_a_conversation_holds_what_was_said_before():
    answerer = Scripted(
        [AnswerPiece("Hel", num_tokens=1), AnswerPiece("lo", num_tokens=1)], [AnswerPiece("Bye", num_tokens=1)]
    )
    shown = talk(answerer, "hi", "", "and now?")
    assert [asked for asked, _ in answerer.asked] == [
        [("user", "hi")],
        [("user", "hi"), ("assistant", "Hello"), ("user", "and now?")],
    ]
    assert "Hello\n  2 tokens, 1.0 a second, the first after 1000 ms" in shown


def test_lines_between_quotes_or_behind_a_backslash_are_one_question():
    answerer = Scripted(*([AnswerPiece("a")] for _ in range(4)))
    talk(answerer, '"""', "one", "", "two", '"""', "three\\", "four", '"""five', 'six"""', '"""seven"""')
    assert [asked[-1][1] for asked, _ in answerer.asked] == ["one\n\ntwo", "three\nfour", "five\nsix", "seven"]


def test_commands_change_what_is_sent():
    answerer = Scripted([AnswerPiece("a")], [AnswerPiece("b")], [AnswerPiece("c")], [AnswerPiece("d")])
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
    for words in ("taken back", "nothing to take back", "unknown setting nonsense", "there is no /nothing", "/retry"):
        assert words in shown


def test_a_conversation_is_saved_and_gone_on_with(tmp_path):
    file = tmp_path / "chat.json"
    talk(Scripted([AnswerPiece("ü")]), "one", f"/save {file}")
    answerer = Scripted([AnswerPiece("b")])
    shown = talk(answerer, f"/load {file}", "two", f"/load {tmp_path}/none", "/load")
    assert answerer.asked[0][0] == [("user", "one"), ("assistant", "ü"), ("user", "two")]
    assert ("2 messages" in shown, "No such file" in shown) == (True, True)
    assert talk(Scripted(), f"/load {__file__}").count("messages") == 0


def test_an_answer_that_fails_is_told_and_its_question_forgotten():
    answerer = Scripted([AnswerPiece("half"), AnswerFailed("the engine failed")], [AnswerPiece("b")])
    shown = talk(answerer, "one", "two")
    assert "the engine failed" in shown
    assert [asked for asked, _ in answerer.asked][1] == [("user", "two")]


def test_ctrl_c_ends_an_answer_and_keeps_what_came():
    answerer = Scripted([AnswerPiece("half"), KeyboardInterrupt()], [AnswerPiece("b")])
    shown = talk(answerer, "one", "two")
    assert "(stopped)" in shown
    assert answerer.asked[1][0] == [("user", "one"), ("assistant", "half"), ("user", "two")]


def test_the_tokens_of_a_stopped_answer_are_estimated_where_the_endpoint_has_not_counted_them():
    answerer = Scripted([AnswerPiece("one "), AnswerPiece("two"), KeyboardInterrupt()])
    assert "about 2 tokens, 1.0 a second, the first after 1000 ms" in talk(answerer, "one")


def test_reasoning_is_folded_into_a_line_and_not_sent_again():
    answerer = Scripted(
        [AnswerPiece(reasoning="hm "), AnswerPiece(reasoning="hm"), AnswerPiece("so")], [AnswerPiece("b")]
    )
    shown = talk(answerer, "one", "two", styled=True)
    assert "\r\x1b[K\x1b[2mthinking … 2 words\x1b[0m\r\x1b[K\x1b[2mthought in 2 words" in shown
    assert "hm" not in shown
    assert answerer.asked[1][0][1] == ("assistant", "so")


def test_reasoning_is_shown_to_whoever_asks_for_it():
    answerer = Scripted(*([AnswerPiece(reasoning="hm"), AnswerPiece("so")] for _ in range(3)))
    shown = talk(
        answerer, "/reasoning", "one", "/reasoning", "/reasoning on", "two", "/reasoning off", "three", "/reasoning x"
    )
    assert "the last answer has no reasoning" in shown
    assert shown.count("hm") == 2
    assert "hm\n\nso" in shown
    assert "/reasoning, /reasoning on or /reasoning off" in shown


def test_a_file_goes_with_the_next_question_and_with_its_repetition(tmp_path):
    note = tmp_path / "note.txt"
    note.write_text("remember")
    answerer = Scripted([AnswerPiece("a")], [AnswerPiece("b")], [AnswerPiece("c")])
    shown = talk(
        answerer, f"/file {note}", "one", "/retry", "two", f"/file {tmp_path}/none", "/file", f"/file {__file__}c"
    )
    parts = [{"type": "text", "text": "note.txt:\n```\nremember\n```"}, {"type": "text", "text": "one"}]
    assert [asked[-1][1] for asked, _ in answerer.asked] == [parts, parts, "two"]
    assert "note.txt is sent with the next question" in shown
    assert "none: No such file or directory" in shown


def test_a_file_of_a_question_that_failed_goes_with_the_next(tmp_path):
    (tmp_path / "note.txt").write_text("remember")
    answerer = Scripted([AnswerFailed("too long")], [AnswerPiece("b")])
    talk(answerer, f"/file {tmp_path}/note.txt", "one", "two")
    failed, next_one = (asked[-1][1] for asked, _ in answerer.asked)
    assert (failed[0], failed[1]["text"]) == (next_one[0], "one")
    assert next_one[1]["text"] == "two"


def test_a_conversation_with_files_is_saved_and_loaded(tmp_path):
    (tmp_path / "a.png").write_bytes(b"png")
    chat, saved = ChatSession(), tmp_path / "chat.json"
    talk(Scripted([AnswerPiece("a")]), f"/file {tmp_path}/a.png", "one", f"/save {saved}", chat=chat)
    again = ChatSession()
    again.load(saved.read_text())
    assert again.messages == chat.messages
    url = {"url": f"data:image/png;base64,{base64.b64encode(b'png').decode()}"}
    assert again.messages[0]["content"][0] == {"type": "image_url", "image_url": url}


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.wav", b"RIFF", "audio_url"),
        ("a.mp4", b"x", "video_url"),
        ("a.jpg", b"x", "image_url"),
        ("a.py", b"x = 1", "text"),
    ],
)
def test_a_file_is_sent_by_its_kind(tmp_path, name, content, kind):
    (tmp_path / name).write_bytes(content)
    assert part_of(str(tmp_path / name))["type"] == kind


def test_a_text_with_fences_of_its_own_is_fenced_by_longer_ones(tmp_path):
    (tmp_path / "a.md").write_text("```\nx\n```")
    assert part_of(str(tmp_path / "a.md"))["text"] == "a.md:\n````\n```\nx\n```\n````"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.pdf", b"%PDF", "PDF is not supported"),
        ("a.bin", b"\xff\xfe\x00", "neither text in UTF-8 nor"),
        ("a.txt", b"x" * ((1 << 20) + 1), "1,048,577 bytes of text exceed"),
    ],
)
def test_a_file_that_cannot_be_sent_is_refused_by_what_it_is(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=says):
        part_of(str(tmp_path / name))


MARKDOWN = [
    ("plain 2 * 3 * 4 and a_b_c", "plain 2 * 3 * 4 and a_b_c"),
    ("a **b** c", f"a {BOLD}b{RESET} c"),
    ("an *i* and **b *bi***", f"an {ITALIC}i{RESET} and {BOLD}b {ITALIC}bi{RESET}{BOLD}{RESET}"),
    ("`**x**` y", f"{CYAN}**x**{RESET} y"),
    ("# Title\ntext", f"{BOLD}{UNDERLINED}Title{RESET}\ntext"),
    ("## Two **b**\n", f"{BOLD}Two {BOLD}b{RESET}{BOLD}{RESET}\n"),
    ("- one\n  * two\n", "• one\n  • two\n"),
    ("> said\n", f"{DIM}│ said{RESET}\n"),
    ("```py\n# a *b*\n- c\n```\nd", f"{CYAN}# a *b*\n- c\n{RESET}d"),
    ("1. one\n#tag\n-5 degrees\n", "1. one\n#tag\n-5 degrees\n"),
    ("**bold is left open\nnext", f"{BOLD}bold is left open{RESET}\nnext"),
    ("ends in a fence\n```", "ends in a fence\n"),
    ("*", "*"),
]


@pytest.mark.parametrize(("text", "styled"), MARKDOWN, ids=[text for text, _ in MARKDOWN])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_markdown_is_styled_however_it_is_cut(text, styled, size):
    codec = Markdown()
    pieces = [codec.feed(text[start : start + size]) for start in range(0, len(text), size)]
    assert "".join(pieces) + codec.flush() == styled


def test_markdown_is_written_as_soon_as_it_is_known():
    codec = Markdown()
    assert codec.feed("Hello, wor") == "Hello, wor"
    assert (codec.feed("ld *"), codec.feed(" x")) == ("ld ", "* x")


def test_a_model_cannot_command_the_terminal():
    assert printable("a\tb\nc") == "a\tb\nc"
    assert printable("\x1b]0;title\x07 \x9b31m \r\x7f é 漢") == "�]0;title� �31m �� é 漢"
    assert "\x1b[31m" not in talk(Scripted([AnswerPiece("\x1b[31m")]), "one")


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


def test_run_takes_the_model_first_and_the_rest_as_the_question():
    environment = {"ONELOOP_PORT": "1"}  # where no server is
    asked = read_arguments("run", ["owner/name", "Say", "--temperature", "0", "hi"], environment)
    assert (asked.prompt, asked.config.model, asked.fields) == ("Say hi", "owner/name", {"temperature": 0})
    assert read_arguments("run", ["owner/name"], environment).prompt == ""
    asked = read_arguments("run", ["name", "--url", "http://x", "hi"], {})
    assert (asked.prompt, asked.model, asked.url, asked.config) == ("hi", "name", "http://x", None)
    for argv in ([], ["--model", "owner/name"]):
        with pytest.raises(ConfigError, match="run: the model comes first"):
            read_arguments("run", argv, environment)


async def test_run_uses_the_server_that_has_the_model(serve):
    server = await serve(served_model_name=("tiny",), api_key=("secret",))
    environment = {"ONELOOP_PORT": str(server.port), "ONELOOP_API_KEY": "secret"}

    async def run(*argv: str):
        return await asyncio.to_thread(read_arguments, "run", argv, environment)

    asked = await run("tiny", "hi")
    assert (asked.url, asked.model, asked.api_key) == (f"http://127.0.0.1:{server.port}", "tiny", "secret")
    assert (await run("other", "hi")).url is None
    assert (await run("tiny", "--max-num-seqs", "3", "hi")).url is None
    environment["ONELOOP_API_KEY"] = "wrong"
    assert (await run("tiny", "hi")).url is None


def test_files_of_the_command_line_go_with_the_first_question(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    asked = read_arguments("chat", ["hi", "--url", "http://x", "--file", str(tmp_path / "a.txt")], {})
    assert [part["type"] for part in asked.attached] == ["text"]
    with pytest.raises(ConfigError, match=r"--file .*none: No such file"):
        read_arguments("chat", ["--file", str(tmp_path / "none")], {})


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
        (["--temperature", "warm"], "temperature must be a number, not warm"),
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


async def pieces(answer) -> list[AnswerPiece]:
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


async def test_a_stopped_answer_of_our_own_server_has_its_exact_number_of_tokens(serve, tokenizer):
    server = await serve(says="Hello there")
    endpoint = Endpoint(f"http://127.0.0.1:{server.port}", "tiny", None)
    counted = [piece.num_tokens for piece in await pieces(endpoint.chat([ASK], {})) if piece.num_tokens]
    assert sum(counted) == len(tokenizer.encode("Hello there")) + 1
    assert len(counted) > 1, "they are counted as they come, not at the end"
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

    for model, words in [
        ("fails", "boom"),
        ("no json", "not an OpenAI-compatible"),
        ("a list", "not an OpenAI-compatible"),
    ]:
        endpoint = Endpoint("http://x", model, None, httpx.MockTransport(respond))
        with pytest.raises(AnswerFailed, match=words):
            await pieces(endpoint.chat([ASK], {}))
        await endpoint.close()
