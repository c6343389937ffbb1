"""Draft heads, MTP layers and EAGLE's: what they guess is what a plain reference of them guesses, step by step, and no guess ever
changes an answer. On a CPU and, marked gpu, on CUDA."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import transformers

from runtime.api import Request, SamplingParams
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.kv.kinds import State
from runtime.models.load import load_draft_head, load_model
from runtime.models.pair import ModelPair
from runtime.models.read.eagle import head_from_config
from runtime.models.registry import mtp_from_config, spec_from_config
from runtime.models.spec.draft_head import PairSpec
from runtime.speculate.config import SpeculativeConfig
from runtime.speculate.resting import Resting
from runtime.speculate.speculation import DeviceSpeculation
from runtime.weights.fetch import resolve
from tests.equality.draft_heads import (
    MtpLayout,
    Reference,
    eagle3_checkpoint,
    eagle_checkpoint,
    echo,
    mtp_checkpoint,
    spread,
)
from tests.equality.greedy import TIE, engine_parts, run
from tests.equality.test_drafts import DEVICES, NUM_TOKENS, PROMPTS, VOCAB, assert_alike, generate
from tests.runtime.guesses import noting_guesses
from tests.tiers import on_push

SMALL = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = SMALL | {"moe_intermediate_size": 24, "num_experts_per_tok": 3, "n_routed_experts": 8}
LATENT = EXPERTS | {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
}  # fmt: skip
BEYOND_THE_LAST = MtpLayout(
    "model.layers.2.", "model.layers.2.enorm.weight", "model.layers.2.hnorm.weight", "model.layers.2.eh_proj.weight",
    "model.layers.2.shared_head.norm.weight", False,
    copies=("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"),
)  # fmt: skip
HYBRID = SMALL | {
    "head_dim": 24, "moe_intermediate_size": 24, "num_experts_per_tok": 3, "num_experts": 9, "shared_expert_intermediate_size": 36,
    "linear_key_head_dim": 32, "linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
ATTENDING = {"layer_types": ["full_attention"]}
MTP_DOT = MtpLayout(
    "mtp.layers.0.", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight", "mtp.norm.weight", True
)  # fmt: skip
MIMO = MtpLayout(
    "model.mtp_layers.0.", "model.mtp_layers.0.token_layernorm.weight", "model.mtp_layers.0.hidden_layernorm.weight",
    "model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.final_layernorm.weight", True, hidden_first=True,
)  # fmt: skip
ERNIE = MtpLayout(
    "model.mtp_block.0.", "model.mtp_emb_norm.0.weight", "model.mtp_hidden_norm.0.weight", "model.mtp_linear_proj.0.weight",
    None, False,
)  # fmt: skip
NEMOTRON = SMALL | {
    "head_dim": 24, "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24, "chunk_size": 16,
    "time_step_min": 1e-30, "n_routed_experts": 8, "moe_intermediate_size": 28, "moe_shared_expert_intermediate_size": 36,
    "num_experts_per_tok": 3,
}  # fmt: skip
NEMOTRON_MTP = MtpLayout(
    "mtp.layers.{}.", "mtp.layers.0.enorm.weight", "mtp.layers.0.hnorm.weight", "mtp.layers.0.eh_proj.weight",
    "mtp.layers.1.final_layernorm.weight", True,
)  # fmt: skip


@dataclass(frozen=True)
class Mtp:
    """`layer`: what the config of the layer alone says otherwise. `told`: what config.json says of it."""

    config_class: str
    values: dict
    layer: dict
    layout: MtpLayout
    told: dict
    loudness: float | None = None
    method = "mtp"

    def made(self, folder: Path) -> Reference:
        of = getattr(transformers, self.config_class)
        alone = of(**self.values | {"num_hidden_layers": 1} | self.layer)
        return mtp_checkpoint(folder, of(**self.values), alone, self.layout, self.told, self.loudness)


@dataclass(frozen=True)
class Eagle:
    """`head`: what its config says otherwise than the model's. `more`: of how its checkpoint is made."""

    method: str
    head: dict
    more: dict

    def made(self, folder: Path) -> Reference:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | {"num_hidden_layers": 6}))
        loudness = self.more.get("loudness")
        spread(model) if loudness is None else echo(model, loudness)
        model.save_pretrained(folder)
        config = transformers.LlamaConfig(**SMALL | {"num_hidden_layers": 1, "num_key_value_heads": 4} | self.head)
        make = eagle_checkpoint if self.method == "eagle" else eagle3_checkpoint
        return make(folder / "head", model, config, **self.more)


CASES = {
    "deepseek v3": Mtp(
        "DeepseekV3Config", LATENT | {"first_k_dense_replace": 1}, {"first_k_dense_replace": 0}, BEYOND_THE_LAST,
        {"num_nextn_predict_layers": 1},
    ),
    "glm-4.5": Mtp(
        "Glm4MoeConfig", EXPERTS | {"head_dim": 24, "use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 1},
        {"first_k_dense_replace": 0}, BEYOND_THE_LAST, {"num_nextn_predict_layers": 1},
    ),
    "qwen 3 next": Mtp(
        "Qwen3NextConfig", HYBRID | {"layer_types": ["linear_attention", "full_attention"]}, ATTENDING, MTP_DOT, {}
    ),
    "qwen 3.5": Mtp(
        "Qwen3_5TextConfig", HYBRID | {"layer_types": ["full_attention", "linear_attention"]}, ATTENDING, MTP_DOT,
        {"mtp_num_hidden_layers": 1},
    ),
    "mimo": Mtp("Qwen2Config", SMALL, {}, MIMO, {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}),
    "ernie 4.5 moe": Mtp(
        "Ernie4_5_MoeConfig", SMALL | {"moe_intermediate_size": 24, "moe_num_experts": 8, "moe_k": 3}, {}, ERNIE,
        {"num_nextn_predict_layers": 1},
    ),
    "nemotron-h": Mtp(
        "NemotronHConfig", NEMOTRON | {"layers_block_type": ["mamba", "attention", "mlp"]},
        {"layers_block_type": ["attention", "moe"], "num_hidden_layers": 2}, NEMOTRON_MTP,
        {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
    ),
    "eagle": Eagle("eagle", {}, {"bias": True}),
    "eagle, two layers": Eagle("eagle", {"num_hidden_layers": 2}, {"bias": False}),
    "eagle 3": Eagle("eagle3", {}, {"layers": (2, 3, 5), "num_ids": 100}),
    "eagle 3, narrower, all tokens": Eagle("eagle3", {"hidden_size": 48}, {"layers": (0, 6), "num_ids": None}),
    "eagle 3, as speculators write it": Eagle("eagle3", {}, {"layers": (2, 3, 3 + 1), "num_ids": 150, "speculators": True}),
}  # fmt: skip


def alike(loudness: float) -> dict[str, Mtp | Eagle]:
    """Heads that say what their models do, which hangs on the last token alone, but for what layers add."""
    told = f"louder by {loudness}"
    return {
        f"glm-4.5, {told}": replace(CASES["glm-4.5"], loudness=loudness),
        f"qwen 3 next, {told}": replace(CASES["qwen 3 next"], loudness=loudness),
        f"eagle, {told}": Eagle("eagle", {}, {"bias": False, "loudness": loudness}),
        f"eagle 3, {told}": Eagle(
            "eagle3", {}, {"layers": (2, 3, 5), "num_ids": 210, "speculators": True, "loudness": loudness}
        ),
    }


SAME = alike(0.0)
CASES |= alike(0.05)  # of whose guesses some are right
# MTP over latent attention and experts, over recurrent layers; EAGLE 3.
ON_PUSH = ("deepseek v3", "qwen 3 next, louder by 0.05", "eagle 3")

IN_PIECES = {"max_num_batched_tokens": 24}  # prompts, over several steps


@dataclass(frozen=True)
class Loaded:
    pair: ModelPair
    reference: Reference

    @property
    def model(self):
        return self.pair.model


@pytest.fixture(scope="module", params=DEVICES)
def loaded(request, tmp_path_factory):
    """Makes, once, the model and the head of a case, and their reference."""
    made: dict[str, Loaded] = {}

    def load(name: str) -> Loaded:
        if name not in made:
            made[name] = _load((CASES | SAME)[name], tmp_path_factory.mktemp("mtp"), request.param)
        return made[name]

    return load


def _load(case: Mtp | Eagle, folder, device: str) -> Loaded:
    torch.manual_seed(5)
    reference = case.made(folder)
    files = resolve(str(folder), None, lambda progress: None)
    spec = spec_from_config(files.config)
    if case.method == "mtp":
        draft, head = files, mtp_from_config(files.config, spec)
    else:
        draft = resolve(str(folder / "head"), None, lambda progress: None)
        head = head_from_config(case.method, draft.config, spec)
    spec = PairSpec.with_head(spec, head)
    given = {"load_format": "auto", "seed": 0, "progress": lambda progress: None}
    model = load_model(files, dtype="float32", device=device, spec=spec.model, **given)
    return Loaded(ModelPair(model, load_draft_head(spec.draft, draft, model, max_model_len=256, **given)), reference)


def config_of(num: int = 3, **options) -> SpeculativeConfig:
    return SpeculativeConfig.of({"method": "mtp", "num_speculative_tokens": num, "adaptive": False} | options)


def engine_config(device: str, **options) -> EngineConfig:
    return EngineConfig(
        device=device, dtype="float32", **{"num_kv_blocks": 400, "max_num_seqs": 8, "max_model_len": 200} | options
    )


@pytest.mark.parametrize("name", on_push(CASES, *ON_PUSH))
@pytest.mark.parametrize("options", on_push([{}, IN_PIECES], IN_PIECES), ids=str)
def test_guesses_are_those_of_the_published_layers(loaded, name, options, monkeypatch):
    """Over prompts in one piece and in several, behind guesses that were wrong, and where prefixes are found again."""
    both = loaded(name)
    guesses = noting_guesses(monkeypatch)
    config = engine_config(both.model.device, speculative_config=config_of(), **options)
    prompt = PROMPTS[1]
    outcome = run(both.pair, config, [prompt], NUM_TOKENS, together=True, rounds=2, planned=True)
    text = [*prompt, *outcome.token_ids[0]]
    compared = 0
    for length, found in guesses.by_length(len(text)):
        expected, margins = both.reference.guesses(text[:length], len(found))
        for own, other, margin in zip(found, expected, margins, strict=True):
            if own != other:
                assert margin < TIE
                break
            compared += 1
    assert compared > 30
    assert outcome.num_cached_tokens > 0 or recurrent(both)


@pytest.mark.parametrize("name", on_push(["eagle 3", "mimo", "glm-4.5, louder by 0.05"], "eagle 3"))
@pytest.mark.parametrize("worth", [0.0, 1.0])
def test_a_head_that_rests_now_and_then_guesses_of_whole_texts_alone(loaded, name, worth, monkeypatch):
    """It has none of the tokens of steps in which it rested; whoever has such a token has no guesses until it is computed anew,
    which is worth while or not."""
    both = loaded(name)
    rng, guesses = random.Random(4), noting_guesses(monkeypatch)
    monkeypatch.setattr(Resting, "follows_size", lambda self, num_rows: rng.random() < 0.9)
    monkeypatch.setattr(DeviceSpeculation, "gain", lambda self, num_rows: worth)
    config = engine_config(both.model.device, speculative_config=config_of())
    plain = run(both.model, replace(config, speculative_config=None), PROMPTS[1:2], NUM_TOKENS, together=True)
    outcome = run(both.pair, config, PROMPTS[1:2], NUM_TOKENS, together=True, rounds=2, planned=True)
    assert outcome.token_ids == plain.token_ids
    text = [*PROMPTS[1], *outcome.token_ids[0]]
    made = list(guesses.by_length(len(text)))
    for length, found in made:
        expected, margins = both.reference.guesses(text[:length], len(found))
        for own, other, margin in zip(found, expected, margins, strict=True):
            if own != other:
                assert margin < TIE
                break
    assert len(made) > (10 if worth else 1)


def recurrent(both: Loaded) -> bool:
    """Whether its model has layers behind whose states no prefix is found again."""
    return any(isinstance(kind, State) for kind in both.model.spec.memory_kinds())


@pytest.mark.parametrize("name", on_push(SAME, *[name for name in SAME if "eagle 3" in name]))
def test_guesses_of_a_head_that_says_what_its_model_does_are_right(loaded, name):
    both = loaded(name)
    config = engine_config(both.model.device, speculative_config=config_of())
    plain = run(both.model, replace(config, speculative_config=None), PROMPTS, NUM_TOKENS, together=True)
    guessed = run(both.pair, config, PROMPTS, NUM_TOKENS, together=True, planned=True)
    assert guessed.token_ids == plain.token_ids
    assert guessed.num_accepted_tokens / guessed.num_draft_tokens > 0.95


OPTIONS = [{}, {"steps_in_flight": 1}, IN_PIECES]
BLOCKS = {"num_kv_blocks": 400}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, OPTIONS[way], marks=() if name in ON_PUSH else pytest.mark.nightly)
        for turn, name in enumerate(CASES)
        for way in (0, 1 + turn % 2)
    ],
    ids=str,
)
def test_guesses_change_no_token(loaded, name, options):
    both = loaded(name)
    plain, _ = asyncio.run(generate(both.model, None, **BLOCKS, **options))
    guessed, num_drafted = asyncio.run(
        generate(both.pair, "planned", speculative_config=config_of(), **BLOCKS, **options)
    )
    assert_alike(guessed, plain)
    assert num_drafted > 40


@pytest.mark.parametrize("name", on_push(CASES, *ON_PUSH))
def test_neither_preemption_nor_a_prefix_found_again_changes_one(loaded, name):
    both, adaptive = loaded(name), [*CASES].index(name) % 2 == 0
    config = engine_config(
        both.model.device, num_kv_blocks=400, max_num_seqs=4, speculative_config=config_of(adaptive=adaptive)
    )
    plain = run(both.model, replace(config, speculative_config=None), PROMPTS, NUM_TOKENS, together=True)
    cut = run(both.pair, config, PROMPTS, NUM_TOKENS, together=True, preempting=True, planned=True)
    again = run(both.pair, config, PROMPTS, NUM_TOKENS, together=True, rounds=2, planned=True)
    assert cut.token_ids == again.token_ids == plain.token_ids
    assert cut.num_preemptions > 3
    assert again.num_cached_tokens > 0 or recurrent(both)


@pytest.mark.parametrize("options", on_push(OPTIONS, IN_PIECES), ids=str)
def test_a_recurrent_model_takes_what_is_looked_up_on_the_device(loaded, options):
    model = loaded("qwen 3 next, louder by 0.05").model
    plain, _ = asyncio.run(generate(model, None, **BLOCKS, **options))
    config = SpeculativeConfig.of({"method": "ngram_gpu", "prompt_lookup_min": 1, "adaptive": False})
    guessed, num_drafted = asyncio.run(generate(model, "planned", speculative_config=config, **BLOCKS, **options))
    assert_alike(guessed, plain)
    assert num_drafted > 40


async def left(pair: ModelPair, config: EngineConfig) -> list[list[int]]:
    """What prompts are answered beside others that are left in the middle."""
    parts = await engine_parts(pair, config)
    engine = Engine(parts.scheduler, parts.runner, parts.model, steps_in_flight=config.steps_in_flight)
    params = SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True)

    async def answer(ids: Sequence[int], most: int) -> list[int]:
        found: list[int] = []
        async with engine.submit([Request("r", list(ids), params)]) as stream:
            async for outputs in stream:
                found += [token for output in outputs for token in output.token_ids]
                if len(found) >= most:
                    break
        return found

    try:
        return await asyncio.gather(*(answer(ids, 5 if nth % 2 else NUM_TOKENS) for nth, ids in enumerate(PROMPTS)))
    finally:
        await engine.close()
        assert parts.scheduler.blocks.pool.num_free == parts.scheduler.blocks.pool.num_blocks


@pytest.mark.parametrize("name", ["glm-4.5, louder by 0.05", "qwen 3 next, louder by 0.05"])
def test_those_who_leave_change_nobodys_answer(loaded, name):
    both = loaded(name)
    config = engine_config(both.model.device, speculative_config=config_of())
    plain = run(both.model, replace(config, speculative_config=None), PROMPTS, NUM_TOKENS, together=True)
    for ids, expected in zip(asyncio.run(left(both.pair, config)), plain.token_ids, strict=True):
        assert len(ids) >= 5
        assert ids == expected[: len(ids)]
