from __future__ import annotations

import json
import subprocess
import sys

import pytest

from runtime.weights import fetch
from runtime.weights.builtin import FetchError
from runtime.weights.catalogue import wheel_of
from runtime.weights.fetch import DEFAULT_MODEL, resolve
from runtime.weights.rules import WeightsError
from tests.runtime.weights.gguf_bytes import example


def files_of(model, **options):
    return resolve(str(model), None, lambda progress: None, **options)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "my-model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["X"], "eos_token_id": 5}))
    return path


def test_a_folder_is_taken_as_it_is(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5], "temperature": 0.6}))
    files = files_of(folder)
    assert (files.name, files.kind, files.path, files.tokenizer_path) == ("my-model", "hf", folder, folder)
    assert files.config["architectures"] == ["X"]
    assert files.generation_config["temperature"] == 0.6
    assert files.eos_token_ids == {5, 7}
    assert files.gguf is None


def test_a_folder_needs_no_generation_config(folder):
    files = files_of(folder)
    assert files.generation_config == {}
    assert files.eos_token_ids == {5}


def test_a_gguf_file_is_described_by_its_metadata():
    files = files_of(DEFAULT_MODEL)
    assert (files.name, files.kind) == (DEFAULT_MODEL, "gguf")
    assert files.generation_config == {
        **wheel_of(DEFAULT_MODEL).generation_config,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert files.tokenizer_path == files.path
    assert files.config["architectures"] == ["LlamaForCausalLM"]
    assert files.eos_token_ids == {2}
    assert len(files.gguf.metadata["tokenizer.ggml.tokens"]) == 49152
    by_path = files_of(files.path)
    assert by_path.name == "SmolLM2-135M-Instruct.Q4_1"
    assert by_path.config == files.config


@pytest.mark.parametrize(
    ("content", "says"),
    [("{", "not valid JSON"), ("[1]", "not a JSON object"), ("\udcff", "not valid JSON"), ("[" * 99999, "not valid")],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_broken_config_is_named(folder, name, content, says):
    (folder / name).write_text(content, errors="surrogateescape")
    with pytest.raises(FetchError, match=f"{name}: {says}"):
        files_of(folder)


def test_a_folder_without_config_says_what_it_has(tmp_path):
    with pytest.raises(FetchError, match=r"no config\.json"):
        files_of(tmp_path)
    (tmp_path / "a.Q4_K_M.gguf").write_bytes(example()[0])
    with pytest.raises(FetchError, match=r"holds a\.Q4_K_M\.gguf: give that file"):
        files_of(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickles_are_refused_unopened(tmp_path, name):
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(FetchError, match="never loaded"):
        files_of(tmp_path / name)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(FetchError, match="give the folder"):
        files_of(tmp_path / "model.safetensors")
    (tmp_path / "README.md").write_text("A model, as text, of more than twenty-four bytes.")
    with pytest.raises(WeightsError, match="not a GGUF file"):
        files_of(tmp_path / "README.md")


@pytest.mark.parametrize("model", ["./gone", "/gone/model", "~/gone", "gone.gguf", "a/b/c", "models/gone/"])
def test_a_path_that_is_not_there_is_no_hub_id(model):
    with pytest.raises(FetchError, match="no such file or folder"):
        files_of(model)


def test_a_misspelt_alias_is_refused_with_the_nearest():
    with pytest.raises(FetchError, match=f"did you mean {DEFAULT_MODEL}"):
        files_of("smollm2-135m")
    with pytest.raises(FetchError, match="neither a name that"):
        files_of("owner/na me")


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_hub_id_is_downloaded_with_weights_only_if_they_are_wanted(monkeypatch, folder, load_format):
    downloads = []
    monkeypatch.setattr(fetch.hub, "download", lambda *args, **options: downloads.append((args[:2], options)) or folder)
    files = resolve("owner/name", "v2", lambda progress: None, load_format=load_format)
    assert (files.name, files.path) == ("owner/name", folder)
    assert downloads == [(("owner/name", "v2"), {"weights": load_format == "auto"})]


def test_formats_that_contradict_the_files_are_refused(folder):
    with pytest.raises(WeightsError, match=r"needs a \.gguf file"):
        files_of(folder).open_tensors("gguf", {}, 0)
    with pytest.raises(WeightsError, match="needs a folder"):
        files_of(DEFAULT_MODEL).open_tensors("safetensors", {}, 0)
    with pytest.raises(WeightsError, match="'pickle' is not one of auto, safetensors, gguf, dummy"):
        files_of(folder).open_tensors("pickle", {}, 0)


def test_finding_a_model_imports_nothing_heavy():
    code = "import sys, runtime.weights.fetch, runtime.models.registry; print([m for m in sys.modules if m in HEAVY])"
    heavy = "HEAVY = ('torch', 'huggingface_hub', 'transformers', 'gguf', 'safetensors', 'tqdm', 'ops')\n"
    printed = subprocess.run([sys.executable, "-c", heavy + code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
    assert wheel_of(DEFAULT_MODEL) is not None
