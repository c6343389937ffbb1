"""Refused bodies are freed at once: no reference cycle keeps them until a collection, which a server makes rarely."""

from __future__ import annotations

import ast
import asyncio
import gc
import json
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

import server
from server.api.route import FORM, JSON
from server.api.routes import ROUTES
from server.generate.structured.grammar import GrammarError
from server.http.errors import ApiError
from tests.server.conftest import RawClient, Running
from tests.server.http.test_connections import ConnectionPhase, chunk, connections, uncollected, until
from tests.server.pooling.embedders import CLASSIFIER, EMBEDDER
from tests.server.test_costly_bodies import POOLED
from tests.server.test_fuzzed_bodies import ALL_BODIES

SIZE = 100_000  # of each body
PIECE_SIZE = 4096  # what is smaller is no part of a body, but perhaps of an earlier test's server
TEXT = "x " * (SIZE // 2)
REFUSALS = (ApiError, GrammarError, BaseExceptionGroup)
NOTHING = (False, {})
MULTIPART = f"{FORM}; boundary=b"
TAKE_BODIES = [route for route in ROUTES if route.request is not None]
MODELS = pytest.mark.parametrize("pooler", [None, EMBEDDER, CLASSIFIER], ids=["generates", "embeds", "classifies"])


def head(path: str, kind: str, num_bytes: int | None = None) -> bytes:
    """`num_bytes`: the announced length; None for a chunked body."""
    framing = "Transfer-Encoding: chunked" if num_bytes is None else f"Content-Length: {num_bytes}"
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{framing}\r\n\r\n".encode()


def form(content: bytes, end: bytes = b"\r\n--b--\r\n", file: str = "file", **fields: str) -> bytes:
    parts = [f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n' for name, text in fields.items()]
    parts.append(f'--b\r\nContent-Disposition: form-data; name="{file}"; filename="x"\r\n\r\n')
    return "".join(parts).encode() + content + end


async def until_over(server: Running) -> None:
    await until(lambda: not server.clients.num_connected and not server.service.http_stats.in_flight)


def kept_by_cycles() -> tuple[bool, dict[str, int]]:
    """Return whether half a body or more is only freed by a collection, and the refusals that only a collection frees."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        found = [*gc.garbage]
        texts = {id(each): len(each) for each in gc.get_referents(*found) if isinstance(each, bytes | bytearray | str)}
        texts.pop(id(TEXT), None)  # a parameter of another test
        errors = Counter(repr(each)[:80] for each in found if isinstance(each, REFUSALS))
        return sum(size for size in texts.values() if size >= PIECE_SIZE) >= SIZE / 2, dict(errors)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


# --- bodies without their end ---------------------------------------------------------------------------------------


async def broken(server: Running, client: RawClient, path: str, kind: str, body: bytes) -> int:
    client.send(head(path, kind) + chunk(body) + b"no size\r\n")
    return (await client.answer())[0]


async def slow(server: Running, client: RawClient, path: str, kind: str, body: bytes) -> int:
    client.send(head(path, kind, 2 * SIZE) + body)
    await until(lambda: sum(each._progress_bytes for each in connections(server)) >= len(body))
    while any(
        each._phase is ConnectionPhase.BODY for each in connections(server)
    ):  # unless it was refused before its end
        server.clients.deadlines.expire(math.inf)
        await asyncio.sleep(0)
    return (await client.answer())[0]


async def too_large(server: Running, client: RawClient, path: str, kind: str, body: bytes) -> int:
    client.send(head(path, kind) + 4 * chunk(body))
    return (await client.answer())[0]


async def crowded(server: Running, client: RawClient, path: str, kind: str, body: bytes) -> int:
    if kind != JSON:
        return 503  # a form goes to a file as it comes
    other = await server.raw()
    other.send(head("/v1/completions", JSON, SIZE) + b" " * (SIZE // 2))
    await until(lambda: server.clients.held_bytes >= SIZE // 2)
    client.send(head(path, kind, 2 * SIZE) + body + body[:-1])
    status = (await client.answer())[0]
    other.leave()
    return status


async def abandoned(server: Running, client: RawClient, path: str, kind: str, body: bytes) -> int:
    client.send(head(path, kind, 2 * SIZE) + body)
    await until(lambda: sum(each._progress_bytes for each in connections(server)) >= len(body))
    return 499


Send = Callable[[Running, RawClient, str, str, bytes], Awaitable[int]]
BOUNDS = {"max_body_size": 2 * SIZE, "max_batch_file_size": 2 * SIZE}


@pytest.mark.parametrize(
    ("send", "expected"), [(broken, 400), (slow, 408), (too_large, 413), (crowded, 503), (abandoned, 499)]
)
@MODELS
async def test_nothing_is_left_of_a_body_without_an_end(serve, tmp_path, send: Send, expected, pooler):
    server = await serve(batch_dir=str(tmp_path), pooler=pooler, **BOUNDS)
    server.clients.max_held_bytes = 2 * SIZE
    statuses = Counter[int]()
    with uncollected():
        for route in TAKE_BODIES:
            path = re.sub(r"\{.*?\}", "none", route.path)
            is_form = route.request_media == FORM
            body, kind = (form(b" " * SIZE, b""), MULTIPART) if is_form else (b" " * SIZE, JSON)
            client = await server.raw()
            statuses[await send(server, client, path, kind, body)] += 1
            client.leave()
            await until_over(server)
        assert kept_by_cycles() == NOTHING
    assert statuses[expected] > 10


# --- whole bodies ---------------------------------------------------------------------------------------------------


async def refused(
    server: Running, *bodies: tuple[str, bytes | dict], kind: str = JSON, may_be_taken: bool = False
) -> None:
    """Every one of `bodies` is a 4xx at its path, and nothing is left of any."""
    with uncollected():
        for path, given in bodies:
            body = given if isinstance(given, bytes) else json.dumps(given).encode()
            client = await server.raw()
            client.send(head(path, kind, len(body)) + body)
            status, _, answer = await client.answer()
            assert 400 <= status < 500 or (may_be_taken and status == 200), (path, answer)
            client.leave()
            await until_over(server)
        assert kept_by_cycles() == NOTHING


FAULTS: dict[str, Callable[[dict], bytes | dict]] = {
    "cut off": lambda body: json.dumps({**body, "user": TEXT}).encode()[:-1],
    "of a wrong type": lambda body: {**body, "model": [TEXT]},
    "with an unknown field": lambda body: {**body, "nonsense": TEXT},
    "for an unknown model": lambda body: {**body, "model": "other" + TEXT},
    "too long": lambda body: re.sub('"H[io]"', json.dumps(TEXT), json.dumps(body)).encode(),
}


@pytest.mark.parametrize("fault", FAULTS)
@MODELS
async def test_nothing_is_left_of_a_body_that_is_refused(serve, fault, pooler):
    bodies = [(path, FAULTS[fault](body)) for path, body in ALL_BODIES.items() if POOLED.get(path) is pooler]
    await refused(await serve(pooler=pooler), *bodies, may_be_taken=fault == "too long")


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": "(" + TEXT[:10_000]}},
        {"structured_outputs": {"regex": TEXT}},
        {"structured_outputs": {"grammar": "root ::= " + TEXT[:10_000]}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": TEXT}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/" + TEXT}}}},
    ],
)
async def test_nothing_is_left_of_a_constraint_that_cannot_be_compiled(serve, fields):
    await refused(await serve(), ("/v1/completions", {"prompt": "Hi", "user": TEXT, **fields}))


@pytest.mark.parametrize("inputs", [["Hi"] * 2000 + [TEXT], [TEXT] + ["Hi"] * 2000, [[1]] * 2000 + [[1] * 5000]])
async def test_nothing_is_left_of_many_inputs_one_of_which_is_too_long(serve, inputs):
    await refused(await serve(pooler=EMBEDDER), ("/v1/embeddings", {"input": inputs, "user": TEXT}))


async def test_nothing_is_left_of_items_that_cannot_be_read(serve):
    item = {"role": "user", "content": [{"type": "input_text", "text": TEXT, "nonsense": 1}]}
    await refused(await serve(strict_fields=True), ("/v1/responses", {"input": [item]}))
    await refused(await serve(), ("/v1/responses", {"input": [{"role": TEXT, "content": TEXT}]}))


async def test_nothing_is_left_of_forms_and_batches_that_are_refused(serve, tmp_path):
    server = await serve(batch_dir=str(tmp_path), max_batch_bytes=2 * SIZE)
    content = TEXT.encode()
    forms = (
        form(content), form(content, purpose="vision"), form(content, purpose=TEXT), form(content, b"", purpose="batch"),
        form(content, purpose="batch", file="other"), form(2 * content, purpose="batch"),
        form(content, purpose="batch", x="y" * 5000), form(content, **{f"x{number}": "" for number in range(20)}), content,
    )  # fmt: skip
    await refused(server, *(("/v1/files", each) for each in forms), kind=MULTIPART)
    await refused(
        server,
        ("/v1/batches", {"input_file_id": TEXT}),
        ("/v1/batches", {"input_file_id": "none", "endpoint": "/v1/completions", "completion_window": TEXT}),
    )


# --- the source -----------------------------------------------------------------------------------------------------


def raises_of_kept_errors(node: ast.AST, freed: frozenset[str] = frozenset()) -> Iterator[ast.Raise]:
    """Raises of an error that something still refers to afterwards, as its traceback does to that: not of a class or a new error,
    nor of a name that its block deletes."""
    if isinstance(node, ast.ExceptHandler) and node.name:
        freed |= {node.name}
    if isinstance(node, ast.Try):
        deleted = [each.targets for each in node.finalbody if isinstance(each, ast.Delete)]
        freed |= {target.id for targets in deleted for target in targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.Raise) and node.exc is not None:
        values = [node.exc.body, node.exc.orelse] if isinstance(node.exc, ast.IfExp) else [node.exc]
        names = [ast.unparse(value) for value in values if not isinstance(value, ast.Call)]
        if any(name not in freed and not name.split(".")[-1][0].isupper() for name in names):
            yield node
    for child in ast.iter_child_nodes(node):
        yield from raises_of_kept_errors(child, freed)


@pytest.mark.parametrize(
    ("statement", "is_kept"),
    [
        ("raise self.error", True), ("raise errors.exceptions[0] from None", True), ("raise error", True),
        ("raise KeyError", False), ("raise asyncio.CancelledError", False), ("raise", False), ("raise made()", False),
        ("try: raise error\nfinally: del error", False), ("try: go()\nexcept OSError as error: raise error", False),
    ],
)  # fmt: skip
def test_a_raise_of_an_error_that_is_kept_is_told_from_others(statement, is_kept):
    assert bool([*raises_of_kept_errors(ast.parse(statement))]) == is_kept


def test_no_error_is_raised_that_is_kept():
    for path in sorted(Path(server.__file__).parent.rglob("*.py")):
        for found in raises_of_kept_errors(ast.parse(path.read_text())):
            raise AssertionError(f"{path}:{found.lineno}: {ast.unparse(found)}")
