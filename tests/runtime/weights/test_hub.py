"""Downloads from a hub of our own: a small HTTP server that answers as huggingface.co does."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import huggingface_hub.constants
import pytest

from runtime.weights.builtin import FetchCancelled, FetchError
from runtime.weights.hub import download, download_gguf, verify

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


def oid_of(name, content):
    if name.endswith((".safetensors", ".gguf")):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


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

    cut_off: ClassVar[dict[str, int]] = {}  # bytes after which the connection breaks, once, by name
    asked: ClassVar[list[str]] = []  # ranges

    def send_file(self, name):
        """A file, or the rest of it; weights as the hub keeps large files, by SHA-256, others by git's SHA-1."""
        content = FILES[name]
        oid = oid_of(name, content)
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if "Range" in self.headers:
            self.asked.append(self.headers["Range"])
        self.send_response(206 if start else 200)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{oid}"', "Content-Length": str(len(content) - start)}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        for header, value in headers.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command != "HEAD":
            end = self.cut_off.pop(name, len(content))
            self.wfile.write(content[start:end])
            if end < len(content):
                self.close_connection = True

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path in ("/api/models/owner/name/revision/main", "/api/models/owner/name/revision/v2"):
            self.answer(200, json.dumps({"id": "owner/name", "sha": COMMIT}).encode())
        elif path == f"/api/models/owner/name/tree/{COMMIT}":
            tree = [{"type": "file", "path": n, "size": len(c), "oid": oid_of(n, c)} for n, c in FILES.items()]
            self.answer(200, json.dumps(tree).encode())
        elif "/resolve/" in path:
            self.send_file(path.partition(f"/resolve/{COMMIT}/")[2])
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
    Hub.cut_off.clear()
    Hub.asked.clear()
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


def check(folder, *, report=lambda progress: None, cancel=None):
    verify(folder, report, cancel or threading.Event())


def test_a_download_that_broke_off_goes_on_where_it_was(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 50_000)
    half = len(FILES["model.safetensors"]) // 2
    Hub.cut_off["model.safetensors"] = half
    folder = None
    while folder is None:  # whether the hub's client tries again by itself, or its caller does
        try:
            folder = fetch(hub)
        except FetchError:
            assert not Hub.cut_off
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert Hub.asked == [f"bytes={half}-"]
    check(folder)


def test_hashes_of_all_files_are_checked_and_reported(hub):
    folder, seen = fetch(hub), []
    check(folder, report=seen.append)
    total = sum(len(FILES[name]) for name in names(folder))
    assert (seen[-1].phase, seen[-1].done, seen[-1].total) == ("verify", total, total)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_with_another_hash_is_deleted_and_fetched_again(hub, name):
    folder = fetch(hub)
    blob = (folder / name).resolve()
    blob.write_bytes(b"x" * len(FILES[name]))
    with pytest.raises(FetchError, match=rf"{name} is not the file that the hub lists .*pull again"):
        check(folder)
    assert not blob.exists()
    assert (fetch(hub) / name).read_bytes() == FILES[name]
    check(folder)


def test_a_check_can_be_cancelled(hub):
    folder, cancel = fetch(hub), threading.Event()
    cancel.set()
    with pytest.raises(FetchCancelled):
        check(folder, cancel=cancel)


def test_a_gguf_file_is_chosen_by_its_type_in_either_case(hub, monkeypatch):
    files = {f"name-{kind}.gguf": kind.encode() for kind in ("Q4_K_M", "q8_0")} | {"mmproj-Q8_0.gguf": b"eyes"}
    monkeypatch.setitem(globals(), "FILES", files)
    for kind, name in (("q4_k_m", "name-Q4_K_M.gguf"), ("Q8_0", "name-q8_0.gguf")):
        file = download_gguf("owner/name", kind, None, lambda progress: None, threading.Event(), endpoint=hub)
        assert (file.name, file.read_bytes()) == (name, FILES[name])
        check(file)
    with pytest.raises(FetchError, match="owner/name has no file of the type Q5_0"):
        download_gguf("owner/name", "Q5_0", None, lambda progress: None, threading.Event(), endpoint=hub)


def test_a_gguf_file_in_several_parts_is_refused(hub, monkeypatch):
    files = {f"name-Q8_0-0000{part}-of-00002.gguf": b"x" * part for part in (1, 2)}
    monkeypatch.setitem(globals(), "FILES", files)
    with pytest.raises(FetchError, match="2 files, and one is served"):
        download_gguf("owner/name", "Q8_0", None, lambda progress: None, threading.Event(), endpoint=hub)
