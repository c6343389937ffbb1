"""Models in fewer bits: what is written is what was meant, loads back, and is read alike by the package whose format it is."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from runtime.config import WeightPolicy
from runtime.models.load import load_model
from runtime.quantize.gptq import gptq
from runtime.quantize.inputs import read_text
from runtime.quantize.model import quantize
from runtime.quantize.schemes import SCHEMES, spread
from runtime.weights.fetch import resolve
from runtime.weights.rules import WeightsError
from tests.runtime.models.checkpoints import checkpoint

CONFIG = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "dtype": "float32",
}  # fmt: skip
WORST = {"w4a16": 0.15, "fp8": 0.04, "w8a8": 0.012}  # of a matrix's length


def silent(progress) -> None:
    pass


def quantised(tmp_path, scheme: str, config=None, texts=(), **options):
    """The files before and behind, and what is said of them."""
    tmp_path.mkdir(exist_ok=True)
    files = checkpoint(tmp_path / "model", config or transformers.LlamaConfig(**CONFIG), seed=3)
    found = quantize(files, tmp_path / "out", scheme, texts, silent, **options)
    return files, resolve(str(tmp_path / "out"), None, silent), found


def load(files, policy=None):
    return load_model(files, dtype="float32", load_format="auto", seed=0, progress=silent, weights=policy)


def worth(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A matrix by the words of its format, number by number."""
    scales = tensors[f"{name}.weight_scale"].double()
    if f"{name}.weight_packed" not in tensors:
        return tensors[f"{name}.weight"].double() * scales
    rows, columns = tensors[f"{name}.weight_shape"].tolist()
    words = tensors[f"{name}.weight_packed"].tolist()
    numbers = [[(row[column // 8] >> 4 * (column % 8) & 15) - 8.0 for column in range(columns)] for row in words]
    assert len(numbers) == rows
    return torch.tensor(numbers, dtype=torch.float64) * scales.repeat_interleave(columns // scales.shape[1], dim=1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_matrix_is_near_what_it_was_and_the_rest_is_as_it_was(scheme, tmp_path):
    files, out, found = quantised(tmp_path, scheme)
    before, after = (load_file(each.path / "model.safetensors") for each in (files, out))
    assert found.num_quantised == 14
    matrices = [name.removesuffix(".weight") for name in before if "_proj" in name]
    for name in matrices:
        was = before[f"{name}.weight"].double()
        lost = (worth(after, name) - was).norm() / was.norm()
        assert 0 < lost < WORST[scheme]
        assert lost == pytest.approx(found.lost[f"{name}.weight"], rel=1e-3)
    others = {name for name in before if name.removesuffix(".weight") not in matrices}
    assert all(torch.equal(before[name], after[name]) for name in others)
    assert {name for name in after if not name.startswith(tuple(matrices))} == others


@pytest.mark.parametrize("scheme", SCHEMES)
@torch.inference_mode()
def test_what_is_written_loads_and_computes_with_those_numbers(scheme, tmp_path):
    files, out, _ = quantised(tmp_path, scheme)
    after = load_file(out.path / "model.safetensors")
    expected = load(files)
    theirs = transformers.LlamaForCausalLM.from_pretrained(files.path, dtype=torch.float32).eval()
    for name, module in theirs.named_modules():
        if "_proj" in name:
            module.weight.data = worth(after, name).float()
    ids = list(range(20))
    wanted = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(read_text(load(out), ids), wanted, rtol=1e-3, atol=1e-3)
    kept = read_text(load(out, WeightPolicy("stored", keep_quantized=True)), ids)  # activations are rounded, too
    assert (kept - wanted).norm() < 0.06 * wanted.norm()
    assert not torch.allclose(read_text(expected, ids), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compressed_tensors_reads_the_same(scheme, tmp_path):
    pytest.importorskip("compressed_tensors")
    _, out, _ = quantised(tmp_path, scheme)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        out.path, dtype=torch.float32, quantization_config=transformers.CompressedTensorsConfig(run_compressed=False)
    )
    after, state = load_file(out.path / "model.safetensors"), theirs.state_dict()
    for name in (name.removesuffix(".weight_scale") for name in after if name.endswith("_scale")):
        torch.testing.assert_close(state[f"{name}.weight"].double(), worth(after, name), rtol=1e-5, atol=1e-7)


def test_routers_and_heads_stay_and_experts_go(tmp_path):
    config = transformers.MixtralConfig(**CONFIG, num_local_experts=3, num_experts_per_tok=2)
    files, out, found = quantised(tmp_path, "w4a16", config)
    assert found.num_quantised == 2 * (4 + 3 * 3)
    ignored = out.config["quantization_config"]["ignore"]
    assert "lm_head" in ignored
    assert sum(name.endswith("gate") for name in ignored) == 2
    ids = list(range(16))
    was, now = read_text(load(files), ids), read_text(load(out), ids)
    assert 0 < (was - now).norm() / was.norm() < 1


def test_matrices_of_several_groups_are_told_apart_by_name(tmp_path):
    """128 columns make groups of 128, 192 of 64; those of 80 fit none."""
    _, out, _ = quantised(tmp_path, "w4a16")
    section = out.config["quantization_config"]
    groups = {group["weights"]["group_size"]: group["targets"] for group in section["config_groups"].values()}
    assert groups[64] == [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]
    assert len(groups[128]) == 12
    odd = transformers.LlamaConfig(**CONFIG | {"intermediate_size": 80})
    _, out, found = quantised(tmp_path / "odd", "w4a16", odd)
    assert [name for name in found.left if name != "lm_head"] == [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]
    assert set(out.config["quantization_config"]["ignore"]) == set(found.left)
    assert [group["targets"] for group in out.config["quantization_config"]["config_groups"].values()] == [["Linear"]]
    load(out)


def test_shards_have_an_index_and_hold_the_same(tmp_path):
    _, whole, _ = quantised(tmp_path, "fp8")
    _, parts, _ = quantised(tmp_path / "parts", "fp8", shard_bytes=60_000)
    index = json.loads((parts.path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    expected = load_file(whole.path / "model.safetensors")
    for name, file in index["weight_map"].items():
        with safe_open(parts.path / file, "pt") as shard:
            assert torch.equal(shard.get_tensor(name).view(torch.uint8), expected.pop(name).view(torch.uint8))
    assert not expected
    load(parts)


def test_a_folder_that_is_there_stays_as_it_is_and_failures_leave_nothing(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("1")
    with pytest.raises(WeightsError, match="already exists"):
        quantised(tmp_path, "fp8")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]
    (tmp_path / "out" / "mine").unlink()
    monkeypatch.setattr(SCHEMES["fp8"].__class__, "tensors", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quantised(tmp_path, "fp8")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model", "out"]
    assert not list((tmp_path / "out").iterdir())


def inputs(count: int, size: int) -> torch.Tensor:
    """Of few directions, as a layer's are."""
    random = torch.Generator().manual_seed(1)
    few = torch.randn(count, size // 8, generator=random) @ torch.randn(size // 8, size, generator=random)
    return few + 0.1 * torch.randn(count, size, generator=random)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_errors_go_where_inputs_do_not_see_them(scheme):
    x, weight = inputs(600, 256), torch.randn(40, 256, generator=torch.Generator().manual_seed(2))
    how = SCHEMES[scheme]
    codes, scales = gptq(how, weight, x.T @ x, torch.float32)
    alone = how.scales(weight, None, torch.float32)
    assert torch.equal(how.codes(codes), codes)

    def error(codes, scales):
        return ((codes * spread(scales, 256) - weight) @ x.T).norm()

    assert error(codes, scales) < 0.6 * error(how.rounded(weight, alone), alone)


def test_inputs_that_were_never_seen_round_as_if_alone():
    weight, how = torch.randn(20, 128), SCHEMES["w8a8"]
    codes, scales = gptq(how, weight, torch.zeros(128, 128), torch.float32)
    assert torch.equal(codes, how.rounded(weight, scales))


@torch.inference_mode()
def test_a_calibrated_model_is_nearer_to_what_it_was(tmp_path):
    random = torch.Generator().manual_seed(5)
    texts = [torch.randint(96, (60,), generator=random).tolist() for _ in range(12)]
    files, plain, _ = quantised(tmp_path, "w4a16")
    _, calibrated, found = quantised(tmp_path / "by text", "w4a16", texts=texts, gram_bytes=1)  # a layer at a time
    assert found.facts["num_calibrated"] == 14
    exact, *others = (load(each) for each in (files, plain, calibrated))

    def distance(decoder):
        return sum(float((read_text(decoder, text) - read_text(exact, text)).norm()) for text in texts)

    without, with_texts = map(distance, others)
    assert with_texts < 0.9 * without


def test_rows_of_zeros_stay_zeros(tmp_path):
    for how in SCHEMES.values():
        weight = torch.randn(4, 128)
        weight[1] = 0
        scales = how.scales(weight, None, torch.bfloat16)
        assert (how.rounded(weight, scales)[1] == 0).all()
        assert scales.isfinite().all()
