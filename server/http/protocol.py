"""HttpProtocol: uvicorn's HTTP/1.1 protocol with limits on the size and duration of a client's input.

The parser gets one message at a time, cut at the end of a head or body. This has four effects. The size of a head is counted even
if it arrives in many packets. Pipelined requests wait as plain bytes until the response is sent. Responses keep their order. An
error follows the responses to earlier requests. Trailers count like heads and are dropped.

A body that cannot continue (too slow, too many bytes in all connections, invalid HTTP) ends with an ApiError in the application.
The response then has the API's error format, a log line and a count. Before the application starts, this class responds.

A connection is in one `ConnectionPhase`, each with a time limit. `clients` holds the limits and the state shared by connections.
The application receives a normal ASGI scope, extended by `scope["call"]`. A client that closes its sending half counts as
disconnected, since a closed connection looks the same."""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.http.call import Call, IncomingBody
from server.http.clients import Clients, Timed
from server.http.errors import ApiError, HeadTooLarge, MalformedHttp, RequestTimeout
from server.http.outlet import BodyWriter, Outlet
from server.http.websocket import Sockets

if TYPE_CHECKING:
    from server.http.socket_protocol import SocketProtocol

MAX_HEAD_BYTES = 64 * 1024  # request line and fields; trailers and sizes of chunks between two pieces of a body
MAX_FIELDS = 256  # of one message, trailers included
MIN_BODY_BYTES = 16 * 1024  # of an unfinished body in each --timeout-body
CHUNKED_PIECE_BYTES = 4096  # parsed at once of a chunked body, in which every byte may be a chunk
CALLBACKS_A_TURN = 1000  # of the parser, about half a millisecond; then others have their turn of the loop
LINGER_S = 2.0  # for a client to read why it is refused, while what it still sends is thrown away
_BLANK_LINE = b"\r\n\r\n"


class ConnectionPhase(Enum):
    """Phase of a connection, named after the event for which it waits."""

    IDLE = auto()  # for the next request
    HEAD = auto()  # for the end of a head; of the first one, from the beginning
    BODY = auto()  # for the end of a body
    ANSWER = auto()  # for us
    READER = auto()  # for the client to read what it was sent
    CLOSING = auto()  # for the client to read the last of it


class _Flow(FlowControl):
    """Flow control of a connection. `held`: True while reading is paused because too many bytes wait to be parsed."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class HttpProtocol(HttpToolsProtocol):
    def __init__(self, clients: Clients, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clients = clients
        self.deadline_queue: dict[Timed, float] | None = None
        self.is_admitted = False
        self.held_bytes = 0
        self._phase = ConnectionPhase.IDLE
        self._unparsed = b""
        self._is_deaf = False  # what still comes is thrown away
        self._is_scheduled = False  # the rest is parsed in the loop's next turn
        self._callbacks = 0
        # The message that is being parsed
        self._in_body = False
        self._head_bytes = 0
        self._num_fields = 0
        self._last_bytes = b""  # of what was parsed, for a blank line that comes in two pieces
        self._remaining: int | None = 0  # bytes of the body that are announced; None of a chunked one
        self._unframed_bytes = 0  # of a chunked body since the last byte of content
        self._body: IncomingBody | None = None
        self._progress_bytes = 0  # of the body, or unsent ones, when the deadline was set
        self._discarded_bytes = 0
        self._is_reparsing = False

    # --- the connection -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._flow = _Flow(transport)
        self._outlet = Outlet(self)
        refusal = self.clients.admit(self)
        if refusal is None:
            self._enter(ConnectionPhase.HEAD)
        elif self.clients.may_be_told:
            self.refuse(refusal)
        else:
            self._is_deaf = True
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._is_deaf, self._unparsed, self._body = True, b"", None
        self.clients.leave(self)
        if self.cycle is None or self.cycle.response_complete:
            self._forget()
            del self._outlet  # which has this object: they would keep each other

    @property
    def address(self) -> str | None:
        return self.client[0] if self.client else None

    @property
    def unfinished_bytes(self) -> int:
        if self._is_deaf:
            return 0
        body = self._body.num_bytes if self._body is not None and self._in_body else 0
        return len(self._unparsed) + self._head_bytes + body

    def account(self) -> None:
        """Report the number of buffered bytes to `clients`."""
        held = len(self._unparsed) + self._head_bytes + (self._body.num_bytes if self._body is not None else 0)
        self.clients.hold(self, held)

    # --- what comes in --------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._unparsed = self._unparsed + data if self._unparsed else data
        self._parse()

    def _parse(self) -> None:
        """Parse received data up to the end of an unanswered message, at most for one iteration of the loop."""
        turn_ends = self._callbacks + CALLBACKS_A_TURN
        while self._unparsed and (self._in_body or self.cycle is None):
            if self._callbacks > turn_ends:
                self._parse_later()
                break
            self._parse_piece(self._next_piece())
        if self._is_deaf:
            return
        self._hold_reading(self._is_scheduled or len(self._unparsed) > HIGH_WATER_LIMIT)
        self.account()
        if not self._is_deaf:
            self._enter_by_state()

    def _parse_later(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon(self._parse_on)

    def _parse_on(self) -> None:
        self._is_scheduled = False
        if not self._is_deaf:
            self._parse()

    def _hold_reading(self, held: bool) -> None:
        if held:
            self.flow.pause_reading()
            self._flow.held = True
        elif self._flow.held:
            self._flow.held = False
            if not self._in_body or len(self.cycle.body) <= HIGH_WATER_LIMIT:
                self.flow.resume_reading()

    def _next_piece(self) -> bytes:
        """Remove and return the data that may be parsed now: at most the rest of one head or of one body."""
        data = self._unparsed
        if self._in_body and self._remaining is not None:
            end = self._remaining
        else:
            if not self._in_body and not self._head_bytes:
                data = data.lstrip(b"\r\n")  # robust servers skip empty lines before a request
            last = self._last_bytes
            found = (last + data).find(_BLANK_LINE) if last else data.find(_BLANK_LINE)
            end = len(data) if found < 0 else found + len(_BLANK_LINE) - len(last)
            if self._in_body:
                end = min(end, CHUNKED_PIECE_BYTES)
            self._last_bytes = (last + data[:end])[-3:]
        piece, self._unparsed = data[:end], data[end:]
        return piece

    def _parse_piece(self, piece: bytes) -> None:
        self._callbacks += 1
        if not self._in_body:
            self._head_bytes += len(piece)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.refuse(HeadTooLarge(f"it has more than {MAX_HEAD_BYTES} bytes"))
                return
        elif self._remaining is None:
            self._unframed_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            if self._opens_socket:
                self._open_socket(piece[upgrade.args[0] :] + self._unparsed)
                return
            # Another protocol is offered, not demanded: the request is answered in this one.
            self._unparsed = piece[upgrade.args[0] :] + self._unparsed
            if self._in_body:
                self._parse_body_anyway()
        except httptools.HttpParserError:
            too_many = self._num_fields > MAX_FIELDS
            self.refuse(HeadTooLarge(f"it has more than {MAX_FIELDS} fields") if too_many else MalformedHttp())
            return
        if self._in_body and self._unframed_bytes > MAX_HEAD_BYTES:
            self.refuse(HeadTooLarge(f"more than {MAX_HEAD_BYTES} bytes of trailers or chunk extensions"))
        elif self._discarded_bytes > self.clients.max_held_bytes:
            self.finish()

    def _parse_body_anyway(self) -> None:
        """Parse a body after an `Upgrade` header with a second parser. Java's HTTP client sends both. The first parser would
        treat the body as data of the protocol in the header."""
        framing = b"transfer-encoding: chunked" if self._remaining is None else b"content-length: %d" % self._remaining
        self.parser = httptools.HttpRequestParser(self)
        self._is_reparsing = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + _BLANK_LINE)
        self._is_reparsing = False

    # --- WebSockets -----------------------------------------------------------------------------------------------

    @property
    def _opens_socket(self) -> bool:
        return bool(self.parser.should_upgrade() and self._should_upgrade())

    def _should_upgrade(self) -> bool:
        sockets = self.ws_protocol_class
        is_get = self.parser.get_method() == b"GET" and self._remaining == 0
        return (
            isinstance(sockets, Sockets)
            and is_get
            and self.url.partition(b"?")[0] in sockets.paths
            and super()._should_upgrade()
        )

    def _open_socket(self, rest: bytes) -> None:
        """Hand the connection over to the WebSocket protocol. `rest`: bytes received after the handshake."""
        self._is_deaf, self._unparsed = True, b""
        self.handle_websocket_upgrade()
        successor = cast("SocketProtocol", self.transport.get_protocol())
        self.clients.replace(self, successor)
        if rest:
            successor.data_received(rest)
        self._forget()
        del self._outlet

    # --- what the parser finds ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if not self._is_reparsing:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_reparsing:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_reparsing:
            return
        self._callbacks += 1
        self._num_fields += 1
        if self._num_fields > MAX_FIELDS:
            raise ValueError("too many fields")  # ends the parsing
        if self._in_body:
            return  # a trailer
        name = name.lower()
        if name == b"content-length":
            self._remaining = int(value)
        elif name == b"transfer-encoding":
            self._remaining = None
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._is_reparsing:
            return
        self._prefer_host_of_target()
        self._body = IncomingBody(self.account)
        self.scope["call"] = Call(body=self._body, writer=self.body_writer)  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        if self._opens_socket:
            return
        self._outlet.begin()
        self.cycle.transport = self._outlet  # type: ignore[assignment]
        self._in_body = True
        self._head_bytes = self._unframed_bytes = self._discarded_bytes = self._progress_bytes = 0

    def _prefer_host_of_target(self) -> None:
        """Use the host of an absolute request target instead of the Host header (RFC 9112, 3.2.2)."""
        if not self.url.startswith((b"/", b"*")):
            url = httptools.parse_url(self.url)
            host = b"[%b]" % url.host if b":" in url.host else url.host
            authority = host + (b":%d" % url.port if url.port else b"")
            self.headers[:] = [(name, authority if name == b"host" else value) for name, value in self.headers]

    def on_body(self, body: bytes) -> None:
        self._callbacks += 1
        self._unframed_bytes = 0
        self._progress_bytes += len(body)
        if self._remaining is not None:
            self._remaining -= len(body)
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            return
        if self._body is not None:
            self._body.num_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._opens_socket:
            return
        if self.parser.should_upgrade() and self._remaining != 0:
            return  # its body comes yet: `_parse_body_anyway`
        super().on_message_complete()
        self._in_body = False
        self._head_bytes = self._num_fields = 0
        self._last_bytes, self._remaining = b"", 0
        if self.cycle.response_complete:
            self._forget()

    def _forget(self) -> None:
        """Drop references to a finished request, so that an idle connection holds no memory."""
        self.cycle = self.scope = self.headers = self._body = None  # type: ignore[assignment]

    # --- answers --------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        self._outlet.flush()  # one without a body
        self.server_state.total_requests += 1
        if self._body is not None:
            self._body.release()
        if self._is_deaf or self.transport.is_closing():
            return
        if not self._in_body:
            self._forget()
        self.flow.resume_reading()
        self._parse()

    def body_writer(self) -> BodyWriter:
        return BodyWriter(self.cycle, self.flow, self._outlet)

    def refuse(self, error: ApiError) -> None:
        """Answer the message being received with `error`, then close the connection."""
        self.clients.refused[error.code or error.type] += 1
        self._is_deaf, self._unparsed, self._head_bytes = True, b"", 0
        cycle = self.cycle
        if cycle is None:
            self._write(error)
            self._linger()
        elif cycle.response_complete:
            self.finish()
        else:
            cycle.keep_alive = False
            if self._in_body and self._body is not None:
                self._body.fail(error)
                cycle.more_body = False
                cycle.message_event.set()
            if self._phase is not ConnectionPhase.READER:
                self._enter(ConnectionPhase.ANSWER)
            self._hold_reading(False)
        self.account()

    def _write(self, error: ApiError) -> None:
        body = error.body()
        fields = "".join(f"{name}: {value}\r\n" for name, value in error.headers().items())
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{fields}connection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)

    def finish(self) -> None:
        """Close the connection after the last response. The sending half is closed first, because the client may still send
        data."""
        self._outlet.flush()
        if self._in_body or self._unparsed or self.flow.read_paused or self.transport.can_write_eof():
            self._linger()
            return
        self._is_deaf = True
        self.transport.close()
        self._enter(ConnectionPhase.CLOSING)

    def _linger(self) -> None:
        """Keep the connection half open for a while. A closed socket resets on further bytes, which can lose the response."""
        self._is_deaf, self._unparsed = True, b""
        if not self.transport.is_closing():
            if self.transport.can_write_eof():  # TLS cannot
                self.transport.write_eof()
            self._hold_reading(False)
            self.flow.resume_reading()
        self._enter(ConnectionPhase.CLOSING)

    # --- time -----------------------------------------------------------------------------------------------------

    def _enter_by_state(self) -> None:
        if self._phase is ConnectionPhase.READER:
            return
        if self._in_body:
            self._enter(ConnectionPhase.BODY)
        elif self.cycle is not None:
            self._enter(ConnectionPhase.ANSWER)
        elif self._head_bytes:
            self._enter(ConnectionPhase.HEAD)
        elif self._phase is not ConnectionPhase.HEAD:
            self._enter(ConnectionPhase.IDLE)

    def _enter(self, phase: ConnectionPhase) -> None:
        """Enter `phase` and start its time limit. Does nothing if the connection is already in `phase`."""
        if phase is self._phase and self.deadline_queue is not None:
            return
        self._phase = phase
        config = self.clients.config
        match phase:
            case ConnectionPhase.IDLE:
                span_s = config.timeout_keep_alive
            case ConnectionPhase.HEAD:
                span_s = config.timeout_head
            case ConnectionPhase.BODY:
                span_s = config.timeout_body
            case ConnectionPhase.ANSWER:
                span_s = 0.0
            case ConnectionPhase.READER:
                span_s, self._progress_bytes = config.timeout_write, self.transport.get_write_buffer_size()
            case ConnectionPhase.CLOSING:
                unsent = self._progress_bytes = self.transport.get_write_buffer_size()
                span_s = config.timeout_write if unsent else LINGER_S
        self.clients.deadlines.set(self, span_s)

    def overdue(self) -> None:
        match self._phase:
            case ConnectionPhase.HEAD if self._head_bytes:
                self.refuse(RequestTimeout("the request's head", self.clients.config.timeout_head))
            case ConnectionPhase.IDLE | ConnectionPhase.HEAD:
                self.finish()
            case ConnectionPhase.BODY:
                if self._progress_bytes >= MIN_BODY_BYTES or self.flow.read_paused:
                    self._progress_bytes = 0
                    self._enter(ConnectionPhase.BODY)
                else:
                    self.refuse(RequestTimeout("more of the request's body", self.clients.config.timeout_body))
            case ConnectionPhase.READER | ConnectionPhase.CLOSING:
                if 0 < self.transport.get_write_buffer_size() < self._progress_bytes:
                    self._enter(self._phase)
                else:
                    self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._phase is not ConnectionPhase.CLOSING:
            self._enter(ConnectionPhase.READER)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._phase is ConnectionPhase.READER:
            self._phase = ConnectionPhase.ANSWER
            self.clients.deadlines.clear(self)
            self._enter_by_state()
