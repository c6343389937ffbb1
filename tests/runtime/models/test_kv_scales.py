"""Scales of an fp8 KV cache come from the checkpoint, by whichever name a tool has written them under."""

from __future__ import annotations

import pytest
import torch
import transformers

import ops
from runtime.kv.kv_cache import LayerKV
from runtime.models.load import load_model, opened
from runtime.models.registry import spec_from_config
from runtime.weights.fetch import resolve
from tests.runtime.models.checkpoints import checkpoint
from tests.runtime.models.paged import Paged
from tests.runtime.models.test_load import CONFIG, IDS, change, set_config

NAMES = [
    ("k_scale", "v_scale"), ("attn.k_scale", "attn.v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("kv_scale", "kv_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
]  # fmt: skip
FIRST = "model.layers.0.self_attn."
OPTIONS = {"dtype": "float32", "load_format": "auto", "seed": 0}


@pytest.fixture
def folder(tmp_path):
    checkpoint(tmp_path, transformers.LlamaConfig(**CONFIG), seed=3)
    set_config(tmp_path, quantization_config={"quant_method": "compressed-tensors", "config_groups": {}})
    return tmp_path


def files_of(folder):
    return resolve(str(folder), None, lambda progress: None)


def scales_in(folder) -> dict[str, tuple[float, float]]:
    files = files_of(folder)
    with opened(spec_from_config(files.config), files, **OPTIONS, device="cpu", policy=None) as reader:
        return reader.kv_scales()


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
def test_scales_are_found_by_every_name(folder, names):
    assert scales_in(folder) == {}
    keys, values = torch.tensor(0.5), torch.tensor([0.25])  # a scalar, and one in a row
    change(folder, **{FIRST + names[0]: keys, FIRST + names[1]: values})
    expected = (0.25, 0.25) if names[0] == names[1] else (0.5, 0.25)
    assert scales_in(folder) == {"model.layers.0": expected}


def test_of_a_scale_for_each_head_the_largest_suits_all(folder):
    change(folder, **{f"{FIRST}k_scale": torch.tensor([0.1, 0.3]), f"{FIRST}v_scale": torch.tensor([0.5, 0.25])})
    assert scales_in(folder) == {"model.layers.0": (pytest.approx(0.3), 0.5)}


@pytest.mark.parametrize("unset", [0.0, -1.0])
def test_what_was_never_measured_is_no_scale(folder, unset):
    change(folder, **{f"{FIRST}k_scale": torch.tensor(unset), f"{FIRST}v_scale": torch.tensor(0.5)})
    assert scales_in(folder) == {}


def test_keys_and_values_are_stored_divided_by_them(folder):
    ops.force("reference")
    try:
        plain, keys = cached(folder)
        change(folder, **{f"{FIRST}k_scale": torch.tensor(0.25), f"{FIRST}v_scale": torch.tensor(0.125)})
        scaled, by_scale = cached(folder)
    finally:
        ops.force(None)
    for before, after, factor in zip(keys, by_scale, (4, 8), strict=True):
        assert before.isfinite().all()
        torch.testing.assert_close(after, before * factor, rtol=0.15, atol=0.1)  # steps are finer the larger a number
    torch.testing.assert_close(scaled, plain, rtol=0.1, atol=0.5)


def cached(folder) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of some tokens, and what an fp8 cache holds of them in the first layer."""
    decoder = load_model(files_of(folder), **OPTIONS, progress=lambda progress: None)
    rows = Paged(decoder, 1, 16)
    rows.kv_caches = [
        LayerKV(tuple(torch.zeros_like(each).to(torch.float8_e4m3fn) for each in layer.tensors))
        for layer in rows.kv_caches
    ]
    logits = rows.step({0: IDS})[0]
    (block,) = rows.tables[0]
    return logits, [each[block, :, : len(IDS)].float() for each in rows.kv_caches[0].tensors]
