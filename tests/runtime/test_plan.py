"""EnginePlan: what options come to, and which are refused by name."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import ops
from ops import attention
from runtime.api import PoolerInfo
from runtime.config import GIB, EngineConfig, EnginePlan, PlanError, WeightPolicy
from runtime.kv.kinds import Nothing
from runtime.models.registry import spec_from_config
from runtime.models.spec.model import EncoderSpec, ModelSpec
from runtime.platform import cpu, cuda
from runtime.platform.cpu import CpuPlatform
from runtime.platform.cuda import CudaPlatform
from runtime.platform.platform import DeviceMemory
from tests.kinds import BFLOAT16, full, state, window

LAYERS = (full(3, 64, None),) * 30


def resolve(free_bytes=16 * GIB, model_len=8192, dtype="float32", layers=LAYERS, **options) -> EnginePlan:
    return EnginePlan.resolve(
        EngineConfig(**options),
        dtype=dtype,
        layers=layers,
        model_len=model_len,
        defaults=cpu.DEFAULTS,
        free_bytes=free_bytes,
    )


def test_a_token_of_smollm2_costs_46080_bytes_in_float32_and_half_in_bfloat16():
    assert resolve().layout.block_bytes == 16 * 30 * 2 * 3 * 64 * 4
    assert resolve(kv_cache_dtype="bfloat16").layout.block_bytes == 16 * 30 * 2 * 3 * 64 * 2
    assert resolve(dtype="bfloat16").kv_cache_dtype == "bfloat16"


def test_in_int8_it_costs_a_byte_a_number_and_four_a_head_so_that_more_fit():
    plan = resolve(kv_cache_dtype="int8_per_token_head", kv_cache_bytes=GIB)
    assert plan.layout.block_bytes == 16 * 30 * 2 * 3 * (64 + 4)
    assert plan.num_kv_blocks == GIB // plan.layout.block_bytes > 3.7 * resolve(kv_cache_bytes=GIB).num_kv_blocks


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_in_fp8_it_costs_a_byte_a_number_so_that_twice_as_many_fit_as_in_bfloat16(name):
    plan = resolve(dtype="bfloat16", kv_cache_dtype=name, kv_cache_bytes=GIB)
    assert plan.layout.block_bytes == 16 * 30 * 2 * 3 * 64
    assert plan.kv_cache_note == f"{name}, 2.00 times the tokens of bfloat16"
    assert resolve(dtype="bfloat16").kv_cache_note == ""
    assert resolve(kv_cache_dtype=name, layers=(full(1, 576, None, latent=True),)).layout.block_bytes == 16 * 576


@pytest.mark.parametrize(
    ("layer", "named"), [(full(1, 576, None, latent=True), "latent"), (full(3, 128, None), "same head size")]
)
def test_int8_is_refused_where_no_kernel_or_block_suits_it(layer, named):
    with pytest.raises(PlanError, match=f"kv-cache-dtype int8_per_token_head.*{named}"):
        resolve(kv_cache_dtype="int8_per_token_head", layers=(*LAYERS, layer))


def test_the_cache_takes_what_was_asked_in_bytes_or_blocks():
    assert resolve(kv_cache_bytes=GIB).num_kv_blocks == GIB // (16 * 46080)
    assert resolve(num_kv_blocks=600).num_kv_blocks == 600


def test_a_cache_smaller_than_the_models_context_shortens_it_and_says_so():
    plan = resolve(free_bytes=GIB)
    assert plan.max_model_len == plan.num_kv_blocks * 16 < 8192
    assert "max-model-len" in plan.notes[0]


def test_layers_without_reusable_memory_turn_prefix_caching_off_and_that_is_said():
    layers = (*LAYERS, Nothing())
    plan = resolve(layers=layers)
    assert not plan.enable_prefix_caching
    assert any("prefix caching is off" in note for note in plan.notes)
    assert not any("prefix caching" in note for note in resolve(layers=layers, enable_prefix_caching=False).notes)
    assert resolve().enable_prefix_caching
    assert resolve(layers=(*LAYERS, state((64, 64)))).enable_prefix_caching


def test_a_model_without_memory_takes_no_blocks_and_its_whole_context():
    plan = resolve(layers=(Nothing(),) * 12, model_len=512)
    assert (plan.num_kv_blocks, plan.max_model_len, plan.enable_prefix_caching) == (0, 512, False)
    assert plan.max_concurrency == plan.max_num_seqs


def test_a_step_holds_the_longest_text_of_a_model_that_computes_it_whole():
    layers = (Nothing(),) * 12
    assert resolve(layers=layers, model_len=8192).max_num_batched_tokens >= 8192
    assert resolve(layers=layers, model_len=8192, max_model_len=600).max_num_batched_tokens < 8192
    with pytest.raises(
        PlanError, match=r"--max-num-batched-tokens \(1024\) is less than the model's longest text \(8192\)"
    ):
        resolve(layers=layers, model_len=8192, max_num_batched_tokens=1024)


def test_layers_with_a_dtype_of_their_own_keep_it():
    plan = resolve(layers=(*LAYERS, full(3, 64, BFLOAT16)), kv_cache_dtype="float32")
    assert [kind.kv.known_dtype.name for kind in plan.layout.kinds] == ["float32"] * 30 + ["bfloat16"]


def test_groups_of_layers_are_described_where_there_are_several():
    (note,) = resolve(layers=(*LAYERS, window(3, 64, 512, None))).notes
    assert "30 layers see all tokens" in note
    assert "1 layers see 512 tokens" in note
    assert resolve().notes == ()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_model_len": 9000}, "max-model-len"),
        ({"max_model_len": 8192, "num_kv_blocks": 100}, "kv-cache-memory"),
        ({"num_kv_blocks": 0}, "kv-cache-memory"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 64}, "max-num-batched-tokens"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(options, named):
    with pytest.raises(PlanError, match=named):
        resolve(**options)


def test_a_small_budget_alone_lowers_the_number_of_rows():
    assert resolve(max_num_batched_tokens=16).max_num_seqs == 15


def test_many_rows_alone_raise_the_budget():
    assert resolve(max_num_seqs=1000).max_num_batched_tokens == 1001


SPEC = spec_from_config(
    {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
    }
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"quantization": "int8"}, "quantization int8"),
        ({"quantization": "int16"}, "quantization int16"),
        ({"kernels": "native"}, "kernels native"),
    ],
)
def test_what_is_for_the_cpu_is_refused_on_a_gpu_by_name(options, named):
    with pytest.raises(PlanError, match=f"{named} (is|are) for the CPU"):
        CudaPlatform().refuse(EngineConfig(**options))


def test_fp8_caches_are_refused_on_a_cpu_by_name_but_for_references():
    with pytest.raises(PlanError, match="kv-cache-dtype fp8 is for GPUs; on a CPU int8_per_token_head"):
        CpuPlatform().refuse(EngineConfig(kv_cache_dtype="fp8"))
    CpuPlatform().refuse(EngineConfig(kv_cache_dtype="fp8", kernels="reference"))


@pytest.mark.parametrize(
    ("dtype", "head_size", "capability", "named"),
    [(torch.float8_e4m3fn, 64, (8, 0), "8.9"), (torch.int8, 6, (9, 0), "multiples of 4")],
)
def test_caches_that_no_kernel_of_a_gpu_reads_are_refused(monkeypatch, dtype, head_size, capability, named):
    cuda = torch.device("cuda")
    monkeypatch.setattr(attention, "capability", lambda device: capability)
    assert named in str(ops.cache_refusal(cuda, dtype, head_size))
    assert ops.cache_refusal(torch.device("cpu"), dtype, head_size) is None
    assert ops.cache_refusal(cuda, torch.bfloat16, head_size) is None


@pytest.fixture
def native(monkeypatch):
    monkeypatch.setattr(ops, "linear_refusal", lambda *case: None)


@pytest.mark.parametrize(
    ("options", "weights", "kv"),
    [
        ({}, WeightPolicy("stored", keep_quantized=True), "float32"),
        ({"quantization": "none"}, WeightPolicy("stored"), "float32"),
        ({"dtype": "bfloat16"}, WeightPolicy("bfloat16", keep_quantized=True), "bfloat16"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "float32"}, WeightPolicy("bfloat16", keep_quantized=True), "float32"),
        ({"dtype": "float16", "quantization": "none"}, WeightPolicy("float16"), "float32"),
        ({"quantization": "int8"}, WeightPolicy("stored", keep_quantized=True, online="int8"), "float32"),
        ({"quantization": "int16"}, WeightPolicy("stored", keep_quantized=True, online="int16"), "float32"),
    ],
)
def test_on_a_cpu_weights_stay_as_they_are_stored_and_activations_are_float32(native, options, weights, kv):
    plan = CpuPlatform().plan(EngineConfig(**options), SPEC)
    assert (plan.dtype, plan.weights, plan.kv_cache_dtype) == ("float32", weights, kv)


def test_references_compute_in_the_type_of_the_weights(monkeypatch):
    monkeypatch.setattr(ops, "linear_refusal", lambda *case: "there are references only")
    assert CpuPlatform().plan(EngineConfig(), SPEC).weights == WeightPolicy("float32")
    plan = CpuPlatform().plan(EngineConfig(dtype="bfloat16"), SPEC)
    assert (plan.dtype, plan.weights) == ("bfloat16", WeightPolicy("bfloat16"))
    for quantization in ("int8", "int16"):
        with pytest.raises(PlanError, match=f"quantization {quantization} needs the native kernels"):
            CpuPlatform().refuse(EngineConfig(quantization=quantization))


@pytest.mark.parametrize(("quantization", "online", "parts"), [("fp8", "fp8", 2), ("int4", "w4", 4)])
def test_fp8_and_int4_are_for_gpus(quantization, online, parts):
    with pytest.raises(PlanError, match=f"quantization {quantization} is for GPUs"):
        CpuPlatform().refuse(EngineConfig(quantization=quantization))
    with pytest.raises(PlanError, match=rf"quantization {quantization} is not for this device: .* bfloat16 or float16"):
        CudaPlatform().refuse(EngineConfig(quantization=quantization, dtype="float32"))
    CudaPlatform().refuse(EngineConfig(quantization=quantization))
    plan = resolve(dtype="bfloat16", quantization=quantization)
    assert plan.weights == WeightPolicy("bfloat16", keep_quantized=True, online=online)
    at_least = CudaPlatform().weights_bytes(EngineConfig(quantization=quantization), spec_of_gib(10), None)
    assert at_least == 10 * GIB // parts


def test_weights_leave_memory_to_the_cache_as_they_are_kept(native, monkeypatch):
    monkeypatch.setattr(cpu, "free_host_bytes", lambda: 4 << 20)
    in_float32 = CpuPlatform().plan(EngineConfig(quantization="none"), SPEC, stored_bytes=100_000).kv_cache_bytes
    assert CpuPlatform().plan(EngineConfig(), SPEC, stored_bytes=100_000).kv_cache_bytes > in_float32


class SharedGpu(CudaPlatform):
    """Of 100 GiB so many are free: at first, and at each further look."""

    def __init__(self, *free_gib: float) -> None:
        super().__init__()
        self._free = [*free_gib]

    def memory(self) -> DeviceMemory:
        free = self._free.pop(0) if len(self._free) > 1 else self._free[0]
        return DeviceMemory(int(free * GIB), 100 * GIB)


def spec_of_gib(weights: float, encoder: EncoderSpec | None = None) -> ModelSpec:
    return cast(
        "ModelSpec",
        SimpleNamespace(
            weights_bytes=lambda dtype: int(weights * GIB),
            memory_kinds=lambda: LAYERS,
            max_model_len=8192,
            encoder=encoder,
            pooler_info=PoolerInfo(4096),
        ),
    )


@pytest.mark.parametrize("held_by_others", [0, 45, 59])
def test_a_share_of_a_gpu_is_this_servers_whatever_others_hold(held_by_others):
    plan = SharedGpu(100 - held_by_others).plan(EngineConfig(gpu_memory_utilization=0.4), spec_of_gib(10))
    assert plan.kv_cache_bytes == pytest.approx(30 * GIB, rel=1e-3)


def test_what_an_encoder_keeps_and_computes_in_is_not_the_caches():
    seeing = EncoderSpec("Sees", frozenset({"image"}), (), {}, num_deepstack=3)
    config = EngineConfig(
        gpu_memory_utilization=0.4, encoder_cache_size=32768
    )  # vectors of 4 x 4096 numbers of two bytes: 1 GiB
    plan = SharedGpu(100).plan(config, spec_of_gib(10, seeing))
    assert plan.kv_cache_bytes == pytest.approx(28 * GIB, rel=1e-3)


def test_what_the_server_has_taken_since_it_looked_first_counts():
    gpu, config = SharedGpu(60, 48), EngineConfig(gpu_memory_utilization=0.4)
    gpu.plan(config, spec_of_gib(10))
    assert gpu.plan(config, spec_of_gib(3)).kv_cache_bytes == pytest.approx((40 - 12 - 3) * GIB, rel=1e-3)


def test_a_share_that_others_hold_is_refused_with_what_would_fit():
    with pytest.raises(
        PlanError, match=r"0.9 is 90.0 of .* only 55.5 are free; other processes .* Lower it to 0.55 at most"
    ):
        SharedGpu(55.5).plan(EngineConfig(), spec_of_gib(10))
    assert SharedGpu(55.5).plan(EngineConfig(kv_cache_bytes=GIB), spec_of_gib(10)).num_kv_blocks > 0


def test_a_share_that_the_model_fills_is_refused_in_numbers_that_are_never_negative():
    with pytest.raises(PlanError, match=r"model and steps take 50.0 GiB of the 40.0 that .* 0.4 grants"):
        SharedGpu(45).plan(EngineConfig(gpu_memory_utilization=0.4), spec_of_gib(50))


@pytest.mark.parametrize(("quantization", "in_files", "expected"), [("auto", 2, 2), ("auto", 30, 10), ("none", 2, 10)])
def test_what_weights_take_on_a_device_follows_from_what_becomes_of_those_that_are_stored_quantised(
    quantization, in_files, expected
):
    config, spec, stored_bytes = EngineConfig(quantization=quantization), spec_of_gib(10), in_files * GIB
    assert CudaPlatform().weights_bytes(config, spec, stored_bytes) == expected * GIB
    keeps = ops.linear_refusal([ops.WeightFormat("int8")], torch.float32, torch.device("cpu")) is None
    assert CpuPlatform().weights_bytes(config, spec, stored_bytes) == (expected if keeps else 10) * GIB
    assert CpuPlatform().weights_bytes(config, spec, None) == 10 * GIB


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int16", 16)])
def test_weights_rounded_on_a_cpu_take_their_new_bits_whatever_the_file_takes(quantization, bits):
    config = EngineConfig(quantization=quantization)
    for stored_bytes in (None, 1000, 100 * GIB):
        at_least = CpuPlatform().weights_bytes(config, SPEC, stored_bytes)
        assert at_least == SPEC.weights_bytes("float32") * bits // 32


@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
def test_a_start_tries_few_and_many_requests_of_few_and_many_tokens(max_num_seqs):
    """Kernels have other tiles for many tokens, and for many requests, and are compiled when they are first wanted."""
    model = SimpleNamespace(spec=SimpleNamespace(generates=True, hands_on=False), adapters=None)
    plan = resolve(max_num_seqs=max_num_seqs, max_num_batched_tokens=256, max_model_len=128)
    lengths = []
    runner = SimpleNamespace(run=lambda batch: lengths.append([row.num_tokens for row in batch.rows]))
    cuda._run_each_kind(runner, plan, 4, cast("Any", model), pools=False)
    assert [1] in lengths
    assert [1] * max_num_seqs in lengths
    assert [17] in lengths
    assert [17] * max_num_seqs in lengths
    assert max_num_seqs == 1 or [2, *[1] * (max_num_seqs - 1)] in lengths
