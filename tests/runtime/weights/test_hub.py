"""Downloads from a hub of our own: a small HTTP server that answers as huggingface.co does."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest

from runtime.weights.builtin import FetchCancelled, FetchError
from runtime.weights.hub import download

COMMIT = "a" * 40
FILES = {
    "config.json": b'{"architectures": []}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"w" * 300_000,
    "consolidated.safetensors": b"w" * 300_000,
    "pytorch_model.bin": b"pickle",
    "onnx/config.json": b"{}",
    "README.md": b"# m",
}


class Hub(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path in ("/api/models/owner/name/revision/main", "/api/models/owner/name/revision/v2"):
            self.answer(200, json.dumps({"id": "owner/name", "sha": COMMIT}).encode())
        elif path == f"/api/models/owner/name/tree/{COMMIT}":
            oids = {name: hashlib.sha1(content).hexdigest() for name, content in FILES.items()}
            tree = [{"type": "file", "path": n, "size": len(c), "oid": oids[n]} for n, c in FILES.items()]
            self.answer(200, json.dumps(tree).encode())
        elif "/resolve/" in path:
            content = FILES[path.partition(f"/resolve/{COMMIT}/")[2]]
            self.answer(200, content, X_Repo_Commit=COMMIT, ETag=f'"{hashlib.sha1(content).hexdigest()}"')
        elif path.startswith("/api/models/owner/name/"):
            self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
        elif "gated" in path:
            self.answer(403, b"{}", X_Error_Code="GatedRepo")
        else:
            self.answer(404, b"{}", X_Error_Code="RepoNotFound")

    do_HEAD = do_GET


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))


@pytest.fixture
def hub():
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


def fetch(endpoint, repo="owner/name", revision=None, *, report=lambda progress: None, cancel=None, **options):
    return download(repo, revision, report, cancel or threading.Event(), endpoint=endpoint, **options)


def names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_it_brings_config_tokenizer_and_safetensors_and_nothing_else(hub):
    seen = []
    folder = fetch(hub, report=seen.append)
    assert names(folder) == {"config.json", "chat_template.jinja", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    last = seen[-1]
    assert last.done == last.total == sum(len(FILES[name]) for name in names(folder))
    assert {progress.phase for progress in seen} == {"download"}


def test_without_weights_it_brings_what_describes_the_model(hub):
    assert names(fetch(hub, weights=False)) == {"config.json", "chat_template.jinja"}


def test_no_thread_stays_behind(hub):
    before = set(threading.enumerate())
    fetch(hub)
    left = [t for t in set(threading.enumerate()) - before if "process_request" not in t.name]
    assert left == []


def test_a_later_start_needs_no_network(hub, monkeypatch):
    folder = fetch(hub)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert fetch("http://127.0.0.1:9") == folder


def test_offline_without_a_copy_is_said(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FetchError, match=r"owner/name is not .*in the local cache, and HF_HUB_OFFLINE is set"):
        fetch("http://127.0.0.1:9")


def test_a_hub_that_cannot_be_reached_is_said():
    with pytest.raises(FetchError, match=r"owner/name is not in the local cache, and the hub cannot be reached"):
        fetch("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("repo", "revision", "says"),
    [
        ("owner/gated", None, "owner/gated is gated.*HF_TOKEN"),
        ("owner/none", None, "owner/none is not on the Hugging Face hub"),
        ("owner/name", "v99", "owner/name has no revision 'v99'"),
        ("owner--name/..", None, "could not be downloaded"),
    ],
)
def test_what_the_hub_refuses_is_an_error_in_words(hub, repo, revision, says):
    with pytest.raises(FetchError, match=says):
        fetch(hub, repo, revision)


def test_a_revision_is_asked_for(hub):
    assert names(fetch(hub, revision="v2", weights=False)) == {"config.json", "chat_template.jinja"}


def test_a_download_can_be_cancelled(hub):
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(FetchCancelled):
        fetch(hub, cancel=cancel)


def test_what_sentence_transformers_has_below_the_model_comes_too(hub, monkeypatch):
    modules = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"path": "2_Dense", "type": "sentence_transformers.models.Dense"},
    ]
    more = {
        "modules.json": json.dumps(modules).encode(), "1_Pooling/config.json": b"{}", "2_Dense/config.json": b"{}",
        "2_Dense/model.safetensors": b"w", "2_Dense/pytorch_model.bin": b"pickle",
    }  # fmt: skip
    monkeypatch.setitem(globals(), "FILES", FILES | more)
    described = {"config.json", "chat_template.jinja", "modules.json", "1_Pooling/config.json", "2_Dense/config.json"}
    assert names(fetch(hub, weights=False)) == described
    assert names(fetch(hub)) == described | {"model.safetensors", "2_Dense/model.safetensors"}
