"""`oneloop models`: models by name, those that fit, what is on this disk, and the architectures."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from runtime.doctor import models as known
from runtime.doctor.what_fits import what_fits
from runtime.weights.catalogue import BYTES_PER_PARAMETER
from server.cli import models as command


def entry(name: str, task: str = "generate", *, here: bool = False) -> dict:
    return {
        "name": name, "task": task, "license": "MIT", "parameters": 10, "bytes": 98 << 20, "here": here,
        "formats": {"bf16": 98 << 20, "fp8": 49 << 20}, "source": "owner/name",
    }  # fmt: skip


FOUND = {
    "catalogue": [entry("small", here=True), entry("embedder", "embed"), entry("other")],
    "hub_folder": "/cache/hub",
    "kept": [],
    "architectures": {"LlamaForCausalLM": "native", "BertModel": "native", "CwmForCausalLM": "transformers"},
}


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
    fetched(cache, "Qwen/Qwen3-0.6B", {"architectures": ["Qwen3ForCausalLM"]}, {"model.safetensors": 9})
    found = known.models()
    assert found["hub_folder"] == str(cache)
    of_hub = [model for model in found["kept"] if model["path"].startswith(str(cache))]
    assert [(model["name"], model["bytes"], model["architecture"], model["computed_by"]) for model in of_hub] == [
        ("qwen3-0.6b", 9, "Qwen3ForCausalLM", "native"),
        ("owner/ours", 500, "Qwen3ForCausalLM", "native"),
        ("owner/unknown", 7, "StrangeModel", None),
    ]
    assert found["architectures"]["LlamaForCausalLM"] == "native"
    here = {model["name"] for model in found["catalogue"] if model["here"]}
    assert "qwen3-0.6b" in here
    assert "qwen3-1.7b" not in here


def test_a_model_is_described_by_catalogue_and_disk(cache):
    assert known.describe("qwen3-0.6b:fp8") == {
        "name": "qwen3-0.6b:fp8", "task": "generate", "license": "Apache-2.0", "parameters": 596_000_000, "format": "fp8",
        "bytes": 625_800_000, "formats": {"bf16": 1_192_000_000, "fp8": 625_800_000, "q8_0": 633_250_000},
        "source": "Qwen/Qwen3-0.6B-FP8", "here": False,
    }  # fmt: skip
    fetched(cache, "Qwen/Qwen3-0.6B", {"architectures": ["Qwen3ForCausalLM"]}, {"model.safetensors": 9})
    for name in ("qwen3-0.6b", "Qwen/Qwen3-0.6B"):
        described = known.describe(name)
        assert (described["here"], described["bytes"], described["architecture"]) == (True, 9, "Qwen3ForCausalLM")


def test_the_report_lists_names_by_task():
    lines = command.report(FOUND, width=60, is_verbose=False).splitlines()
    assert lines[0] == "Chat:"
    assert lines[1].split() == ["small", "98", "MiB", "MIT", "bf16,", "fp8", "here"]
    assert lines[2].split()[0] == "other"
    assert lines[4:6] == ["Embeddings:", lines[5]]
    assert lines[5].split()[0] == "embedder"
    assert not any("BertModel" in line for line in lines)
    assert "  BertModel LlamaForCausalLM" in command.report(FOUND, width=60, is_verbose=True).splitlines()


def test_what_fits_comes_first_with_its_speed(capsys):
    fits = {
        "memory_bytes": 2**32, "memory_bytes_per_s": 13e9, "fits": [
            {"model": "large", "format": "bf16", "weights_bytes": 2**35, "kv_tokens": 0, "tokens_per_s": 0.4, "fits": False},
            {"model": "small", "format": "fp8", "weights_bytes": 2**30, "kv_tokens": 1000, "tokens_per_s": 12.5, "fits": True},
            {"model": "embedder", "format": "fp32", "weights_bytes": 2**20, "kv_tokens": 0, "tokens_per_s": None, "fits": True},
        ],
    }  # fmt: skip
    assert command.main(["--fit"], lambda: FOUND, lambda: fits) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "13 GB/s" in lines[0]
    assert [line.split()[0] for line in lines[3:]] == ["small", "embedder", "large"]
    assert lines[3].split()[1:] == ["fp8", "1.00", "GiB", "1,000", "12.5"]
    assert lines[5].endswith("does not fit")


def test_a_model_fits_in_its_largest_format_that_leaves_a_cache():
    by_name = {fit.model: fit for fit in what_fits(10 * 2**30, 1e10)}
    assert (by_name["qwen3-4b"].format, by_name["qwen3-4b"].fits) == ("bf16", True)
    assert (by_name["qwen3-8b"].format, by_name["qwen3-8b"].fits) == ("q8_0", True)
    assert (by_name["qwen3-235b-a22b"].fits, by_name["all-minilm-l6-v2"].fits) == (False, True)
    assert by_name["all-minilm-l6-v2"].tokens_per_s is None
    kinds = frozenset(BYTES_PER_PARAMETER) - {"fp8", "q8_0"}
    assert {fit.model: fit for fit in what_fits(10 * 2**30, 1e10, kinds)}["qwen3-8b"].format == "awq"
    one, two = (what_fits(2**34, rate)[0].tokens_per_s for rate in (1e10, 2e10))
    assert two == 2 * one


def test_for_programs_it_is_json_and_what_it_does_not_know_is_refused(capsys):
    assert command.main(["--json"], lambda: FOUND, dict) == 0
    assert json.loads(capsys.readouterr().out) == FOUND
    assert command.main(["--all"], lambda: FOUND, dict) == 2
    assert command.main(["--help"], lambda: FOUND, dict) == 0


def test_a_reader_of_its_beginning_is_no_error_and_a_program_keeps_its_signals(capfd):
    usual = signal.getsignal(signal.SIGPIPE)
    assert command.main([], lambda: FOUND, dict) == 0
    assert signal.getsignal(signal.SIGPIPE) is usual
    program = (
        f"import sys\nfrom server.cli import models\nsys.stdin.read()\nsys.exit(models.main([], lambda: {FOUND}, dict))"
    )
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **piped) as process:
        process.stdout.close()  # before it writes: it waits for the end of its input
        process.stdin.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)
