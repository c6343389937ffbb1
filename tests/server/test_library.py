"""`oneloop pull`, `list`, `show` and `rm`: what they print, ask and return, over a library of the test and over a real disk."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from runtime.api import LoadProgress
from runtime.weights import library as disk
from runtime.weights.builtin import FetchError
from server.cli import library as commands
from server.config.server_options import ConfigError


class Shelf:
    """A library of one model, which may be here."""

    def __init__(self, *, here: bool = True, error: BaseException | None = None) -> None:
        self.here, self.error = here, error
        self.cancelled = None

    def pull(self, name, revision, report, cancel) -> Path:
        report(LoadProgress("download", 5, 10, "B"))
        self.cancelled = cancel
        if self.error is not None:
            raise self.error
        return Path(f"/cache/{name}@{revision}")

    def kept(self):
        return (
            [{"name": "small", "bytes": 98 << 20, "path": "/cache/small", "modified": 0.0, "whole": True}]
            if self.here
            else []
        )

    def describe(self, name):
        if name != "small":
            raise ValueError(f"{name} is no model")
        known = {"name": name, "license": "MIT", "bytes": 98 << 20, "here": self.here, "formats": {"bf16": 98 << 20}}
        return known | ({"path": "/cache/small"} if self.here else {})

    def remove(self, name):
        if not self.here:
            raise ValueError(f"{name} is not on this disk")
        self.here = False
        return {"name": name, "bytes": 98 << 20}


@pytest.fixture
def terminal(monkeypatch):
    stdin = io.StringIO()
    stdin.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", stdin)


def test_a_pull_says_where_the_model_is(capsys):
    assert commands.pull(["a", "--revision", "v2", "b"], Shelf()) == 0
    assert capsys.readouterr().out == "a is in /cache/a@v2\nb is in /cache/b@v2\n"


def test_a_pull_that_fails_is_one_line_and_an_exit_code(capsys):
    assert commands.pull(["a"], Shelf(error=ValueError("the hub cannot be reached"))) == 1
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1]) == ("", "oneloop: the hub cannot be reached")


def test_ctrl_c_cancels_a_pull_and_says_how_to_go_on(capsys):
    shelf = Shelf(error=KeyboardInterrupt())
    assert commands.pull(["a"], shelf) == commands.INTERRUPTED
    assert shelf.cancelled.is_set()
    assert "stopped; oneloop pull a continues" in capsys.readouterr().err


def test_a_list_has_a_line_a_model_and_json_for_programs(capsys):
    assert commands.list_kept([], Shelf()) == 0
    assert capsys.readouterr().out.split()[:3] == ["small", "98", "MiB"]
    assert commands.list_kept(["--json"], Shelf()) == 0
    assert json.loads(capsys.readouterr().out) == Shelf().kept()
    shelf = Shelf()
    shelf.kept = lambda: [{**Shelf().kept()[0], "whole": False}]
    assert commands.list_kept([], shelf) == 0
    assert "incomplete: oneloop pull small continues" in capsys.readouterr().out
    assert commands.list_kept([], Shelf(here=False)) == 0
    assert "no models yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "just now"), (59, "just now"), (60, "1 minute ago"), (7200, "2 hours ago"), (90_000, "1 day ago")],
)
def test_ages_are_in_their_largest_unit(seconds, words):
    assert commands.ago(seconds) == words


def test_a_model_is_shown_by_title(capsys):
    assert commands.show(["small"], Shelf()) == 0
    out = capsys.readouterr().out
    assert "license       MIT" in out
    assert "here          /cache/small" in out
    assert commands.show(["small"], Shelf(here=False)) == 0
    assert "no: oneloop pull small" in capsys.readouterr().out
    assert commands.show(["huge"], Shelf()) == 1
    assert capsys.readouterr().err == "oneloop: huge is no model\n"


@pytest.mark.parametrize(("answer", "code", "stays"), [("y", 0, False), ("", 1, True), ("no", 1, True)])
def test_rm_asks_first(terminal, answer, code, stays, capsys):
    shelf, asked = Shelf(), []
    assert commands.remove(["small"], shelf, lambda question: asked.append(question) or answer) == code
    assert shelf.here == stays
    assert asked == ["delete small (98 MiB, /cache/small)? [y/N] "]


def test_rm_with_yes_asks_nobody_and_without_a_terminal_it_is_required(capsys, monkeypatch):
    shelf = Shelf()
    assert commands.remove(["--yes", "small"], shelf, pytest.fail) == 0
    assert capsys.readouterr().out == "deleted small, 98 MiB\n"
    assert commands.remove(["--yes", "small"], shelf) == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(ConfigError, match="add --yes"):
        commands.remove(["small"], shelf)


@pytest.mark.parametrize("command", [commands.pull, commands.show, commands.remove, commands.list_kept])
def test_options_that_there_are_not_are_refused(command):
    with pytest.raises(ConfigError, match="unknown option --loud"):
        command(["small", "--loud"] if command is not commands.list_kept else ["--loud"], Shelf())


# --- a real disk --------------------------------------------------------------------------------------------------


@pytest.fixture
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return tmp_path


def of_hub(caches: Path, repo_id: str, *names: str) -> Path:
    """A repository as huggingface_hub keeps it, with links from a snapshot to files by hash."""
    repository = caches / "huggingface" / "hub" / f"models--{repo_id.replace('/', '--')}"
    for folder in ("snapshots/0123abcd", "refs", "blobs"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abcd")
    for number, name in enumerate(names):
        blob = repository / "blobs" / f"{number:040x}"
        blob.write_text("{}")
        os.symlink(blob, repository / "snapshots" / "0123abcd" / name)
    return repository


def test_models_of_the_hub_have_their_short_names_and_are_removed_whole(caches):
    repository = of_hub(caches, "Qwen/Qwen3-0.6B", "config.json", "model.safetensors")
    assert [model.name for model in disk.kept()] == ["qwen3-0.6b"]
    for name in ("qwen3-0.6b", "Qwen/Qwen3-0.6B", "qwen3-0.6b:latest"):
        assert disk.find_kept(name).num_bytes == 2
    assert disk.find_kept("qwen3-0.6b:fp8") is None
    assert disk.remove("qwen3-0.6b").name == "qwen3-0.6b"
    assert not repository.exists()
    with pytest.raises(FetchError, match=r"qwen3-0\.6b is not on this disk"):
        disk.remove("qwen3-0.6b")


def test_a_model_without_all_its_files_is_incomplete_and_can_be_removed(caches, capsys):
    repository = of_hub(caches, "Qwen/Qwen3-8B", "config.json", "model-1.safetensors", "model.safetensors.index.json")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (repository / "snapshots" / "0123abcd" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [(model.name, model.is_whole) for model in disk.kept()] == [("qwen3-8b", False)]
    (repository / "snapshots" / "0123abcd" / "model-2.safetensors").write_text("{}")
    assert disk.find_kept("qwen3-8b").is_whole
    disk.remove("qwen3-8b")
    assert not repository.exists()


def test_a_gguf_file_that_the_catalogue_does_not_have_is_named_by_its_type(caches):
    of_hub(caches, "owner/name-GGUF", "name-Q5_K_M.gguf", "other.Q8_0.gguf")
    assert [model.name for model in disk.kept()] == ["owner/name-GGUF:Q5_K_M", "owner/name-GGUF:Q8_0"]
    assert disk.find_kept("owner/name-GGUF:Q5_K_M").path.name == "name-Q5_K_M.gguf"


def test_of_several_gguf_files_one_is_removed(caches):
    repository = of_hub(caches, "Qwen/Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf", "Qwen3-4B-Q8_0.gguf")
    assert {model.name for model in disk.kept()} == {"qwen3-4b:q4_k_m", "qwen3-4b:q8_0"}
    disk.remove("qwen3-4b:q8_0")
    assert [model.name for model in disk.kept()] == ["qwen3-4b:q4_k_m"]
    assert [path.name for path in (repository / "blobs").iterdir()] == [f"{0:040x}"]


def test_a_model_of_a_wheel_is_removed_with_its_mark(caches):
    folder = caches / "oneloop" / "models" / "smollm2-135m-instruct"
    folder.mkdir(parents=True)
    for name in ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf.verified"):
        (folder / name).write_text("{}")
    assert [model.name for model in disk.kept()] == ["smollm2-135m-instruct"]
    disk.remove("smollm2-135m-instruct")
    assert not folder.exists()


def test_a_folder_of_the_users_own_is_never_removed(caches, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text("{}")
    with pytest.raises(FetchError, match="delete it yourself"):
        disk.remove(str(own))
    assert own.exists()
