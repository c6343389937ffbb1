"""A server as a process, for tests that start and stop one: `python -m tests.loadtests.toy_server PORT [MOOD …]`.

Moods: `dies` ends before it is healthy; `orphan` leaves a child in a session of its own and prints its pid; `stubborn` ignores
SIGTERM; `broken` answers every completion with 500; `mortal` ends at the first streamed request."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LAG = """# TYPE oneloop:loop_lag_seconds histogram
oneloop:loop_lag_seconds_bucket{le="0.001"} 0
oneloop:loop_lag_seconds_bucket{le="0.005"} %d
oneloop:loop_lag_seconds_bucket{le="+Inf"} %d
"""


class Handler(BaseHTTPRequestHandler):
    moods: tuple[str, ...] = ()
    num_streams = 0

    def do_GET(self) -> None:
        if self.path == "/health":
            self._reply(200, b"{}")
        elif self.path == "/v1/models":
            self._reply(200, json.dumps({"data": [{"id": "toy"}]}).encode())
        elif self.path == "/metrics":
            self._reply(200, (LAG % (Handler.num_streams, Handler.num_streams)).encode())
        else:
            self._reply(404, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "broken" in self.moods:
            self._reply(500, b'{"error": {"message": "toy is broken"}}')
        elif self.path == "/v1/embeddings":
            data = [{"index": index, "embedding": "AAAA"} for index in range(len(body["input"]))]
            self._reply(200, json.dumps({"data": data, "usage": {"prompt_tokens": 3 * len(data)}}).encode())
        elif body.get("stream"):
            if "mortal" in self.moods:
                os._exit(3)
            Handler.num_streams += 1
            self._stream(body["max_tokens"])
        else:
            self._reply(200, b'{"choices": [{"message": {"content": "x"}}]}')

    def _stream(self, num_tokens: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        events: list[dict[str, object]] = [{"choices": [{"delta": {"content": "x"}, "text": "x"}]}] * num_tokens
        events.append({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": num_tokens}})
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main(port: str, *moods: str) -> None:
    if "dies" in moods:
        sys.exit("toy refuses to live")
    if "orphan" in moods:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print(child.pid, flush=True)
    if "stubborn" in moods:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Handler.moods = moods
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
