"""Parts of uvicorn that our HTTP protocol subclasses. Where one of these fails, a release of uvicorn has changed an internal:
compare server/http/protocol.py with its httptools_impl.py before the range in pyproject.toml grows."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol

from server.http import protocol
from server.http.protocol import HttpProtocol
from server.http.socket_protocol import SocketProtocol

ROOT = Path(__file__).parents[3]
CALLED_BY_UVICORN = (
    "connection_made", "connection_lost", "data_received", "on_message_begin", "on_url", "on_header", "on_headers_complete",
    "on_body", "on_message_complete", "on_response_complete",
)  # fmt: skip


def test_the_release_is_within_the_range_that_pyproject_allows():
    found = re.search(r'"uvicorn>=0\.(\d+),<1"', (ROOT / "pyproject.toml").read_text())
    assert found, "uvicorn needs a range: its HTTP protocol is subclassed"
    major, minor, *_ = map(int, version("uvicorn").split(".")[:2])
    assert (major, minor) >= (0, int(found[1]))


@pytest.mark.parametrize("name", CALLED_BY_UVICORN)
def test_uvicorn_has_the_method_that_we_override_with_the_same_parameters(name: str):
    assert name in vars(HttpProtocol), f"{name} is no longer overridden"
    theirs, ours = (inspect.signature(getattr(owner, name)) for owner in (HttpToolsProtocol, HttpProtocol))
    assert list(theirs.parameters) == list(ours.parameters)


@pytest.mark.parametrize(
    "name", ["connection_lost", "handle_message", "handle_ping", "shutdown", "pause_writing", "resume_writing"]
)
def test_its_protocol_of_websockets_has_the_method_that_we_override(name: str):
    assert name in vars(SocketProtocol), f"{name} is no longer overridden"
    theirs, ours = (inspect.signature(getattr(owner, name)) for owner in (WSProtocol, SocketProtocol))
    assert list(theirs.parameters) == list(ours.parameters)


def test_its_protocol_of_websockets_makes_the_attributes_that_we_read():
    made = inspect.getsource(WSProtocol)
    for name in ("buffer", "conn", "client", "transport", "writable", "handshake_complete", "close_sent"):
        assert re.search(rf"self\.{name}\b.* = ", made), f"uvicorn's protocol has no attribute {name}"


def test_every_method_that_we_call_of_its_classes_is_there():
    source = inspect.getsource(protocol)
    called = set(re.findall(r"super\(\)\.(\w+)\(", source)) - {"__init__"}
    assert called >= {"on_url", "resume_reading"}
    assert not [name for name in called if not any(hasattr(owner, name) for owner in (HttpToolsProtocol, FlowControl))]


def test_its_protocol_makes_the_attributes_that_we_replace():
    made = inspect.getsource(HttpToolsProtocol) + inspect.getsource(RequestResponseCycle)
    for name in ("cycle", "scope", "headers", "parser", "flow", "transport", "pipeline"):
        assert re.search(rf"self\.{name}\b.* = ", made), f"uvicorn's protocol has no attribute {name}"
