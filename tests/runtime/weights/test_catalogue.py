"""The catalogue of short names: the form of its entries, and what a name means."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from runtime.weights import catalogue, names
from runtime.weights.builtin import FetchError
from runtime.weights.catalogue import BYTES_PER_PARAMETER, TASKS, CatalogueModel, find, hub_id

MODELS = catalogue.catalogue()
FIELDS = {
    "hub", "wheel", "license", "parameters", "active_parameters", "kv", "task", "format", "bytes", "quantizations",
}  # fmt: skip
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:\w+)?")


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_an_entry_has_what_a_choice_needs(model: CatalogueModel):
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", model.name)
    assert (model.hub is None) != (model.wheel is None), "one place has the files in the model's own format"
    assert model.task in TASKS
    assert model.license
    assert model.parameters > 1e6
    assert {model.format, *model.quantizations} <= set(BYTES_PER_PARAMETER)
    assert model.format not in model.quantizations
    assert len(model.kv) == 3 if model.task == "generate" else len(model.kv) in (0, 3)
    assert all(HUB_ID.fullmatch(each) for each in (*filter(None, [model.hub]), *model.quantizations.values()))
    assert ":" not in (model.hub or "")
    assert (model.active_parameters or 1) < model.parameters
    if model.wheel is not None:
        assert "==" in model.wheel.requirement
        assert len(model.wheel.wheel_sha256) == len(model.wheel.file_sha256) == 64
        assert model.wheel.file_name.endswith(".gguf") or "config.json" in model.wheel.beside


def test_the_file_has_no_other_fields_and_no_two_names_for_the_same_files():
    entries = tomllib.loads(Path(catalogue.__file__).with_suffix(".toml").read_text())
    assert {key for entry in entries.values() for key in entry} == FIELDS
    ids = [each for model in MODELS.values() for each in (model.hub, *model.quantizations.values()) if each]
    assert len(ids) == len(set(ids))
    assert len(entries) >= 40


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3-0.6b", "Qwen/Qwen3-0.6B"),
        ("Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("qwen3-0.6b:latest", "Qwen/Qwen3-0.6B"),
        ("qwen3-0.6b:bf16", "Qwen/Qwen3-0.6B"),
        ("qwen3-0.6b:fp8", "Qwen/Qwen3-0.6B-FP8"),
        ("qwen3-4b:q4_k_m", "Qwen/Qwen3-4B-GGUF:Q4_K_M"),
        ("owner/name", "owner/name"),
    ],
)
def test_a_name_and_its_tag_mean_an_id_of_the_hub(name, expected):
    assert hub_id(name) == expected


def test_a_tag_that_a_model_does_not_have_is_no_name():
    assert find("qwen3-0.6b:q2") is None
    assert find("nothing-like-it") is None


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("qwen3-0.6", "did you mean qwen3-0.6b or"),
        ("lama-3.1-8b", "did you mean llama-3.1-8b"),
        ("smollm2-135m", "did you mean smollm2-135m-instruct or"),
        ("qwen3-0.6b:q2", "qwen3-0.6b comes as bf16, fp8, q8_0"),
    ],
)
def test_a_typing_error_names_the_nearest_names(word, said):
    with pytest.raises(FetchError, match=re.escape(said)):
        names.check_name(word)


def test_a_word_that_is_like_no_name_gets_no_hint():
    with pytest.raises(FetchError) as refused:
        names.check_name("zzzzzz")
    assert "did you mean" not in str(refused.value)


def test_a_folder_goes_before_a_name_of_the_catalogue(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert names.is_on_hub("qwen3-0.6b")
    (tmp_path / "qwen3-0.6b").mkdir()
    assert not names.is_on_hub("qwen3-0.6b")
    with pytest.raises(FetchError, match=r"qwen3-0.6b: no config.json in this folder"):
        names.check_name("qwen3-0.6b")


def test_sizes_follow_from_parameters_unless_they_are_known():
    small, oss = MODELS["smollm2-135m-instruct"], MODELS["gpt-oss-20b"]
    assert small.weights_bytes("q4_1") == small.wheel.file_bytes
    assert oss.weights_bytes("mxfp4") == oss.bytes
    assert oss.token_bytes("mxfp4") == oss.bytes * oss.active_parameters // oss.parameters
    qwen = MODELS["qwen3-0.6b"]
    assert qwen.weights_bytes("bf16") == 2 * qwen.parameters
    assert qwen.kv_token_bytes == 2 * 28 * 8 * 128 * 2
