"""`oneloop models`: what can be served by name, what the hub's cache has, and the architectures."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from runtime.doctor import models as known
from server.cli import models as command

FOUND = {
    "built_in": [{"name": "small", "bytes": 98 << 20, "here": True}, {"name": "other", "bytes": 1 << 30, "here": False}],
    "hub_folder": "/cache/hub",
    "hub": [],
    "architectures": {"LlamaForCausalLM": "native", "BertModel": "native", "CwmForCausalLM": "transformers"},
}  # fmt: skip


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def fetched(cache, name: str, config: dict, weights: dict[str, int], revision: str = "main") -> None:
    """A repository as huggingface_hub leaves it."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / revision).write_text("0123abcd")
    (snapshot / "config.json").write_text(json.dumps(config))
    for file, size in weights.items():
        (snapshot / file).write_bytes(bytes(size))


def test_what_the_hubs_cache_has_whole_is_listed_with_what_computes_it(cache):
    fetched(cache, "owner/ours", {"architectures": ["Qwen3ForCausalLM"]}, {"a.safetensors": 300, "b.safetensors": 200})
    fetched(cache, "owner/unknown", {"architectures": ["StrangeModel"]}, {"model.safetensors": 7})
    fetched(cache, "owner/described-only", {"architectures": ["Qwen3ForCausalLM"]}, {})
    fetched(cache, "owner/other-revision", {"architectures": ["Qwen3ForCausalLM"]}, {"model.safetensors": 7}, "v1")
    fetched(cache, "owner/no-model", {"what": "else"}, {"model.safetensors": 7})
    found = known.models()
    assert found["hub_folder"] == str(cache)
    assert found["hub"] == [
        {"name": "owner/ours", "bytes": 500, "architecture": "Qwen3ForCausalLM", "computed_by": "native"},
        {"name": "owner/unknown", "bytes": 7, "architecture": "StrangeModel", "computed_by": None},
    ]
    assert found["architectures"]["LlamaForCausalLM"] == "native"
    assert "smollm2-135m-instruct" in [model["name"] for model in found["built_in"]]


def test_a_built_in_one_says_whether_it_has_to_be_fetched(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not any(model["here"] for model in known.models()["built_in"])
    file = tmp_path / "oneloop" / "models" / "smollm2-135m-instruct" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.parent.mkdir(parents=True)
    file.touch()
    here = {model["name"]: model["here"] for model in known.models()["built_in"]}
    assert here == {"smollm2-135m-instruct": True, "all-minilm-l6-v2": False}


def test_the_report_begins_with_names_and_fits_the_terminal():
    lines = command.report(FOUND, 60).splitlines()
    assert lines[2].split() == ["small", "98", "MiB", "is", "here"]
    assert lines[3].endswith("fetched from PyPI when it is first served")
    assert "  none yet: oneloop serve OWNER/NAME fetches one" in lines
    assert "  BertModel LlamaForCausalLM" in lines
    hub = [{"name": "owner/ours", "bytes": 1 << 30, "architecture": "Qwen3ForCausalLM", "computed_by": "native"}]
    assert "oneloop's own kernels" in command.report({**FOUND, "hub": hub}, 60).splitlines()[7]


def test_for_programs_it_is_json_and_what_it_does_not_know_is_refused(capsys):
    assert command.main(["--json"], lambda: FOUND) == 0
    assert json.loads(capsys.readouterr().out) == FOUND
    assert command.main(["--all"], lambda: FOUND) == 2
    assert command.main(["--help"], lambda: FOUND) == 0


def test_a_reader_of_its_beginning_is_no_error_and_a_program_keeps_its_signals(capfd):
    usual = signal.getsignal(signal.SIGPIPE)
    assert command.main([], lambda: FOUND) == 0
    assert signal.getsignal(signal.SIGPIPE) is usual
    program = f"import sys\nfrom server.cli import models\nsys.stdin.read()\nsys.exit(models.main([], lambda: {FOUND}))"
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **piped) as process:
        process.stdout.close()  # before it writes: it waits for the end of its input
        process.stdin.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)
