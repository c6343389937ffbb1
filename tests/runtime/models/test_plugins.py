"""Families that the registry finds by itself, and those that other packages bring once they are named."""

from __future__ import annotations

import pytest

from runtime.config import PlanError
from runtime.models import registry
from runtime.models.families.llama import llama
from runtime.models.registry import FAMILIES, add_plugins, register, spec_from_config
from runtime.models.spec.model import UnsupportedModel

CONFIG = {
    "architectures": ["MyForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
MODULE = """
from dataclasses import replace
from runtime.models.families.llama import llama

ARCHITECTURES = {"MyForCausalLM": lambda config: replace(llama(config, "MyForCausalLM"), logit_scale=0.5)}
TAKEN = {"OtherForCausalLM": llama, "Qwen2ForCausalLM": llama}
"""
ENTRY_POINTS = "[oneloop.models]\nmine = {module}\ntaken = {module}:TAKEN\nempty = {module}:replace\n"


@pytest.fixture(autouse=True)
def as_it_was():
    before = dict(FAMILIES)
    yield
    registry._families.clear()
    registry._families.update(before)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package whose entry points bring families."""
    (tmp_path / "brought_families.py").write_text(MODULE)
    facts = tmp_path / "brought_families-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: brought-families\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(ENTRY_POINTS.format(module="brought_families"))
    monkeypatch.syspath_prepend(tmp_path)


def test_what_a_package_brings_is_off_until_it_is_named(installed):
    with pytest.raises(UnsupportedModel, match="MyForCausalLM is not supported natively"):
        spec_from_config(CONFIG)
    for _ in range(2):  # a second engine of the process asks for the same
        add_plugins(["mine"])
    assert spec_from_config(CONFIG).logit_scale == 0.5
    assert "MyForCausalLM" in FAMILIES


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("yours", "'yours' is not an installed package; installed: .*mine"),
        ("empty", "'empty' has no ARCHITECTURES"),
        ("taken", "'taken' serves Qwen2ForCausalLM, which runtime.models.families.qwen already does"),
    ],
)
def test_what_cannot_be_added_is_said_and_changes_nothing(installed, name, says):
    before = dict(FAMILIES)
    with pytest.raises(PlanError, match=says):
        add_plugins([name])
    assert before == FAMILIES


def test_an_architecture_has_one_family():
    with pytest.raises(ValueError, match="here serves MistralForCausalLM, which"):
        register({"MistralForCausalLM": llama}, "here")
    register({"LlamaForCausalLM": llama}, "here")
