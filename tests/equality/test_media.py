"""Every family that sees or hears, as a tiny random model written by transformers' own classes: greedy decoding token for token
equal to transformers, with one picture, several of mixed sizes, at the start, in the middle and at the end, however the engine cuts
the work."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from runtime.api import FinishReason, LoadProgress, MediaItem, Request, SamplingParams
from runtime.config import EngineConfig
from runtime.encode.first_items import encode_first
from runtime.models import implementation
from runtime.models.through_transformers import tower
from runtime.models.through_transformers.vision_blocks import Block
from runtime.runner.warmup import prompts
from runtime.weights.fetch import resolve
from tests.equality.greedy import Reference, compare, engine_parts
from tests.equality.media import Joined, Medium, Prompt, generate, make_engine, run, side_by_side, transformers_greedy

VOCAB, MAX_TOKENS, IMAGE, START, END = 128, 8, 100, 102, 103
NEVER = (IMAGE, 101, START, END)
PARAMS = SamplingParams(MAX_TOKENS, temperature=0.0, logit_bias=dict.fromkeys(NEVER, -1e6))
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CLIP = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads":
    4, "image_size": 32, "patch_size": 8, "vision_use_head": False,
}  # fmt: skip
Inputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """A family. `config`: of the whole model; `draw`: a picture's tensors, the second of another size if it knows several.
    `whole_items`: they are never cut. `types`: what transformers calls which tokens are a picture's, where it wants to be told.
    `whole_prompts`: their tokens see each other all. `has_prefixes`: whether its prompts may be found in the prefix cache.
    `own_blocks`: whether our ops compute those of its tower."""

    config: Callable[[], transformers.PretrainedConfig]
    draw: Callable[[np.random.Generator, bool], Inputs]
    joined: Joined = side_by_side
    whole_items: bool = False
    whole_prompts: bool = False
    types: str = ""
    has_prefixes: bool = True
    own_blocks: bool = True

    def reference(self, theirs: transformers.PreTrainedModel, prompt: Prompt) -> Reference:
        types = {self.types: lambda ids: (ids == IMAGE).int()} if self.types else {}
        if self.whole_prompts:
            types = {"token_type_ids": lambda ids: (torch.arange(ids.shape[1]) >= len(prompt.ids)).int()[None]}
        return transformers_greedy(theirs, prompt, MAX_TOKENS, self.joined, NEVER, **types)


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def square(rng: np.random.Generator, _: bool) -> Inputs:
    return {"pixel_values": floats(rng, 1, 3, 32, 32)}


def tiles(rng: np.random.Generator, larger: bool) -> Inputs:
    return {"pixel_values": floats(rng, 3 if larger else 1, 3, 32, 32)}


def tiles_of_a_batch(rng: np.random.Generator, larger: bool) -> Inputs:
    return {"pixel_values": floats(rng, 1, 3 if larger else 2, 3, 32, 32)}


def with_newlines(rng: np.random.Generator, larger: bool) -> Inputs:
    """Five tiles, of which a small picture has two and the whole."""
    num, size = (5, (60, 50)) if larger else (3, (30, 60))
    return {"pixel_values": floats(rng, 1, num, 3, 32, 32), "image_sizes": np.array([size])}


def of_any_size(rng: np.random.Generator, larger: bool) -> Inputs:
    height, width = (48, 32) if larger else (32, 32)
    return {"pixel_values": floats(rng, 1, 3, height, width), "image_sizes": np.array([[height, width]])}


def padded(media: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    """A batch whose pictures are as large as the largest of them, and tell how much of it is theirs."""
    shapes = [item.inputs["pixel_values"].shape for item in media]
    largest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))[1:]
    pixels = torch.zeros((len(media), *largest))
    for index, item in enumerate(media):
        own = torch.from_numpy(item.inputs["pixel_values"][0])
        pixels[(index, *(slice(size) for size in own.shape))] = own
    return {
        "pixel_values": pixels,
        "image_sizes": torch.from_numpy(np.concatenate([i.inputs["image_sizes"] for i in media])),
    }


def on_a_grid(rng: np.random.Generator, larger: bool) -> Inputs:
    """Patches of 4 x 4, two of them in time, joined two by two."""
    grid = (1, 6, 4) if larger else (1, 4, 8)
    return {"pixel_values": floats(rng, grid[1] * grid[2], 3 * 2 * 4 * 4), "image_grid_thw": np.array([grid])}


def one_batch(media: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.from_numpy(np.concatenate([item.inputs["pixel_values"] for item in media], axis=1))}


def of(config_class: str, text: dict, **rest) -> Callable[[], transformers.PretrainedConfig]:
    """Written when it is needed: a row does not fail with its neighbour."""
    return lambda: getattr(transformers, config_class)(text_config=TEXT | text, **rest)


CLIP_TOWER = {"model_type": "clip_vision_model", "projection_dim": 16} | CLIP
TO_IMAGE = {"image_token_id": IMAGE}
PINPOINTS = [[32, 64], [64, 32], [64, 64]]
LLAMA, MISTRAL, QWEN2 = ({"model_type": name} for name in ("llama", "mistral", "qwen2"))
PIXTRAL = {"model_type": "pixtral", "image_size": 64, "head_dim": 8} | {
    k: v for k, v in CLIP.items() if k != "image_size"
}
INTERNVL = {"model_type": "internvl_vision", "image_size": [32, 32], "patch_size": [8, 8]} | {
    k: v for k, v in CLIP.items() if k not in ("image_size", "patch_size")
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN_TOWER = {
    "depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_act": "silu",
}  # fmt: skip
ON_A_GRID = {"image_token_id": IMAGE, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
QWEN2_VL = QWEN_TOWER | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
QWEN2_5_VL = QWEN_TOWER | {
    "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 42, "window_size": 16, "fullatt_block_indexes": [1],
}  # fmt: skip
QWEN3_VL = QWEN_TOWER | {
    "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 40, "num_position_embeddings": 36, "depth": 3,
    "deepstack_visual_indexes": [0, 2],
}  # fmt: skip
GLM4V = QWEN_TOWER | {
    "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 40, "image_size": 24, "attention_bias": False,
}  # fmt: skip
PALIGEMMA = {
    "vision_config": SIGLIP, "projection_dim": 64, "hidden_size": 64, "image_token_index": IMAGE, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA4 = {
    "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size":
    8, "vision_output_dim": 24, "projector_input_dim": 24, "projector_output_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
IDEFICS = {k: v for k, v in SIGLIP.items() if k not in ("model_type", "vision_use_head")}
FAMILIES = {
    "llava 1.5": Row(of("LlavaConfig", LLAMA, vision_config=CLIP_TOWER, **TO_IMAGE), square),
    "llava, mistral, all patches": Row(
        of(
            "LlavaConfig", MISTRAL, vision_config=CLIP_TOWER, **TO_IMAGE, vision_feature_select_strategy="full",
            vision_feature_layer=-1,
        ),
        square,
    ),
    "pixtral": Row(
        of(
            "LlavaConfig", MISTRAL, vision_config=PIXTRAL, **TO_IMAGE, vision_feature_select_strategy="full",
            vision_feature_layer=-1,
        ),
        of_any_size,
        padded,
    ),
    "vip-llava": Row(
        of("VipLlavaConfig", LLAMA, vision_config=CLIP_TOWER, vision_feature_layers=[-1, -2], **TO_IMAGE), square
    ),
    "mistral 3": Row(of("Mistral3Config", MISTRAL, vision_config=PIXTRAL, **TO_IMAGE), of_any_size, padded),
    "llava-next": Row(
        of("LlavaNextConfig", MISTRAL, vision_config=CLIP_TOWER, image_grid_pinpoints=PINPOINTS, **TO_IMAGE), with_newlines, padded
    ),
    "llava-onevision": Row(
        of("LlavaOnevisionConfig", QWEN2, vision_config=SIGLIP, image_grid_pinpoints=PINPOINTS, **TO_IMAGE), with_newlines, padded
    ),
    "internvl": Row(of("InternVLConfig", QWEN2, vision_config=INTERNVL, **TO_IMAGE), tiles),
    "idefics 3": Row(of("Idefics3Config", LLAMA, vision_config=IDEFICS, **TO_IMAGE), tiles_of_a_batch, one_batch),
    "gemma 3": Row(
        of(
            "Gemma3Config",
            {
                "head_dim": 24, "tie_word_embeddings": False, "sliding_window": 10,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            vision_config=SIGLIP, mm_tokens_per_image=16, image_token_index=IMAGE,
            tie_word_embeddings=False,
        ),
        square, whole_items=True, types="token_type_ids",
    ),
    "qwen 2 vl": Row(
        of("Qwen2VLConfig", {"rope_parameters": MROPE}, vision_config=QWEN2_VL, **ON_A_GRID), on_a_grid, types="mm_token_type_ids"
    ),
    "qwen 2.5 vl": Row(
        of("Qwen2_5_VLConfig", {"rope_parameters": MROPE}, vision_config=QWEN2_5_VL, **ON_A_GRID), on_a_grid,
        types="mm_token_type_ids",
    ),
    "qwen 3 vl": Row(
        of("Qwen3VLConfig", {"rope_parameters": MROPE, "head_dim": 16}, vision_config=QWEN3_VL, **ON_A_GRID), on_a_grid,
        types="mm_token_type_ids",
    ),
    "qwen 3.5": Row(
        of(
            "Qwen3_5Config",
            {
                "rope_parameters": MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}, "head_dim": 32,
                "linear_key_head_dim": 32, "linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                "layer_types": ["linear_attention", "full_attention"],
            },
            vision_config={k: v for k, v in QWEN3_VL.items() if k != "deepstack_visual_indexes"}, **ON_A_GRID,
        ),
        on_a_grid, types="mm_token_type_ids", has_prefixes=False,
    ),
    "qwen 3 vl moe": Row(
        of(
            "Qwen3VLMoeConfig",
            {
                "rope_parameters": MROPE, "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 6,
                "num_experts_per_tok": 2,
            },
            vision_config=QWEN3_VL, **ON_A_GRID,
        ),
        on_a_grid, types="mm_token_type_ids",
    ),
    "glm 4.1v": Row(
        of(
            "Glm4vConfig",
            {"rope_parameters": MROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}, "tie_word_embeddings": False},
            vision_config=GLM4V, image_start_token_id=START, image_end_token_id=END, video_start_token_id=START,
            video_end_token_id=END, image_token_id=IMAGE, video_token_id=101,
        ),
        on_a_grid, types="mm_token_type_ids",
    ),
    "llama 4": Row(
        of(
            "Llama4Config",
            {
                "head_dim": 16, "intermediate_size_mlp": 40, "num_local_experts": 4, "no_rope_layers": [1, 0], "moe_layers": [0],
                "attention_chunk_size": 32,
            },
            vision_config=LLAMA4, image_token_index=IMAGE,
        ),
        tiles, own_blocks=False,
    ),
    "paligemma": Row(
        of(
            "PaliGemmaConfig", {"model_type": "gemma", "head_dim": 24, "tie_word_embeddings": False}, **PALIGEMMA
        ),
        square, whole_items=True, whole_prompts=True, has_prefixes=False,
    ),
    "paligemma 2": Row(
        of(
            "PaliGemmaConfig",
            {
                "model_type": "gemma2", "head_dim": 24, "sliding_window": 10, "query_pre_attn_scalar": 40,
                "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0, "tie_word_embeddings": False,
            },
            **PALIGEMMA,
        ),
        square, whole_items=True, whole_prompts=True, has_prefixes=False,
    ),
    "smolvlm": Row(of("SmolVLMConfig", LLAMA, vision_config=IDEFICS, **TO_IMAGE), tiles_of_a_batch, one_batch),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    folder: Path
    theirs: transformers.PreTrainedModel
    ours: object
    family: Row
    pictures: list[Medium]
    drew: bool

    def text(self, length: int, seed: int = 0) -> list[int]:
        rng = random.Random(f"{length} {seed}")
        return [rng.randrange(3, IMAGE) for _ in range(length)]

    def reference(self, prompt: Prompt) -> Reference:
        return self.family.reference(self.theirs, prompt)


def drawn(family: Row) -> transformers.PreTrainedModel:
    """A model of the family, always the same: numbers are random, but not by chance."""
    torch.manual_seed(5)
    model = transformers.AutoModelForImageTextToText.from_config(
        family.config(), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return with_random_numbers(model)


def with_random_numbers(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases and norms begin as zeros and ones, which hides mistakes
            torch.nn.init.normal_(parameter, float(parameter.data[0]), 0.3)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.25)
    return model


@torch.inference_mode()
def medium(theirs, inputs: Inputs) -> Medium:
    """With as many ids as transformers makes outputs of it."""
    found = theirs.get_image_features(
        **{name: torch.from_numpy(each) for name, each in inputs.items()}, return_dict=True
    )
    features = found.last_hidden_state if found.pooler_output is None else found.pooler_output
    parts = features if isinstance(features, list | tuple) else [features]
    return Medium(inputs, (START, *(IMAGE,) * sum(part.shape[:-1].numel() for part in parts), END), IMAGE)


def load(folder: Path, device: str = "cpu"):
    files = resolve(str(folder), None, lambda progress: None)
    return implementation.load(
        implementation.describe(files.config, "native"), files, dtype="float32", load_format="auto", seed=0,
        progress=lambda progress: None, max_model_len=256, device=device, weights=None,
    )  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp("model")
    theirs = drawn(family)
    theirs.save_pretrained(folder)
    rng = np.random.default_rng(2)
    pictures = [medium(theirs, family.draw(rng, index == 1)) for index in range(3)]
    before = torch.get_rng_state()
    ours = load(folder)
    return Case(folder, theirs, ours, family, pictures, not torch.equal(before, torch.get_rng_state()))


@pytest.fixture(scope="module")
def told(case) -> list[tuple[Prompt, Reference]]:
    a, b, c = case.pictures
    prompts = [
        Prompt.of(case.text(9)),
        Prompt.of(a, case.text(5)),
        Prompt.of(case.text(7), a, case.text(6), b),
        Prompt.of(case.text(3), b, a, case.text(20), c, case.text(2)),
        Prompt.of(case.text(7), b, case.text(6), a),  # the same text, and other pictures
    ]
    return [(prompt, case.reference(prompt)) for prompt in prompts]


def config(**options) -> EngineConfig:
    return EngineConfig(num_kv_blocks=64, max_model_len=256, **options)


def same(case: Case, told: list[tuple[Prompt, Reference]], options: EngineConfig, **how):
    seen = run(case.ours, options, [prompt for prompt, _ in told], PARAMS, **how)
    assert compare(seen.outcome, [reference for _, reference in told]) <= 1
    return seen


def test_pictures_matter(case, told):
    """Else the others would show nothing."""
    (_, _), (_, _), (_, one), _, (_, other) = told
    assert one.token_ids != other.token_ids


def test_blocks_are_computed_by_ops(case):
    names = [type(each).__name__ for each in case.ours.encoder._model.modules()]
    blocks = sum(isinstance(each, Block) for each in case.ours.encoder._model.modules())
    if case.family.own_blocks:
        assert blocks > 1
        assert not [name for name in names if name.endswith(("Attention", "VisionMLP"))]
    else:
        assert not blocks


def test_loading_draws_no_numbers(case):
    """On a device a capture that was refused leaves torch's generator so that it draws none any more."""
    assert not case.drew


def test_alone(case, told):
    seen = same(case, told, config(enable_prefix_caching=False), together=False)
    assert (seen.num_encoded, seen.num_kept) == (3, 5)  # of eight pictures three are different


def test_together(case, told):
    assert same(case, told, config()).num_encoded == 3


def test_a_picture_of_one_token_beside_a_larger_one(case):
    """Alone, transformers' Mistral 3 fails for it."""
    rng = np.random.default_rng(4)
    if case.family.draw is of_any_size:
        side = 8 * getattr(case.theirs.config, "spatial_merge_size", 1)
        inputs = {"pixel_values": floats(rng, 1, 3, side, side), "image_sizes": np.array([[side, side]])}
    elif case.family.draw is on_a_grid:
        inputs = {"pixel_values": floats(rng, 4, 3 * 2 * 4 * 4), "image_grid_thw": np.array([[1, 2, 2]])}
    else:
        pytest.skip("its pictures are of one size")
    icon = Medium(inputs, (START, IMAGE, END), IMAGE)
    prompt = Prompt.of(case.text(5), icon, case.text(3), case.pictures[1], case.text(2))
    same(case, [(prompt, case.reference(prompt))], config())


def test_a_prefix_with_the_same_pictures_is_found_and_no_other(case, told):
    if not case.family.has_prefixes:
        pytest.skip("it has recurrent layers, or sees whole prompts")
    seen = same(case, told, config(), together=False, rounds=2)
    most = sum((len(prompt.ids) - 1) // 16 * 16 for prompt, _ in told)
    assert seen.outcome.num_cached_tokens == most
    first = same(case, told, config(), together=False)
    assert first.outcome.num_cached_tokens == 0  # the fifth begins with the ids of the third


@pytest.mark.parametrize("budget", [7, 13])
def test_chunks_cut_through_pictures(case, told, budget):
    if case.family.whole_items:
        pytest.skip("its pictures are never cut")
    seen = same(case, told, config(max_num_batched_tokens=budget, max_num_seqs=3, enable_prefix_caching=False))
    assert seen.num_encoded == 3


def test_preemption_encodes_nothing_again(case, told):
    budget = 256 + 3 if case.family.whole_prompts else 64
    seen = same(case, told, config(max_num_batched_tokens=budget, max_num_seqs=3), preempting=True)
    assert seen.outcome.num_preemptions > 3
    assert seen.num_encoded == 3


def test_a_small_cache_encodes_again_and_changes_nothing(case, told):
    if case.family.whole_prompts:
        pytest.skip("a prompt wants all of its pictures at a time")
    longest = max(len(picture.ids) for picture in case.pictures)
    options = config(encoder_cache_size=longest, max_num_encoder_tokens=1, enable_prefix_caching=False, max_num_seqs=3)
    assert same(case, told, options).num_encoded > 3


async def test_what_an_encoder_is_tried_with_at_start_is_encoded_and_leaves_nothing(case, told, monkeypatch):
    monkeypatch.setattr(tower, "_SAMPLE_SIDES", (2, 3))
    groups = case.ours.encoder.samples(18)
    spec = case.ours.encoder.spec
    videos = [1] * ("video" in spec.modalities)
    assert [len(each) for each in groups] == ([1, 1, 2] if spec.is_packed else [1]) + videos
    parts = await engine_parts(case.ours, config())
    reported: list[LoadProgress] = []
    first = None if case.family.whole_prompts else prompts([len(groups[0][0].positions)], parts.plan.layout, 64)
    await encode_first(parts.runner, groups, first, reported.append)
    assert [each.done for each in reported] == [*range(len(groups) + 1)]
    assert not parts.runner._encoding._items
    engine = make_engine(parts, config())
    try:
        found, _ = await generate(engine, [prompt for prompt, _ in told], PARAMS)
    finally:
        await engine.close()
    assert found == [reference.token_ids for _, reference in told]


async def test_an_item_that_cannot_be_encoded_ends_its_request_alone(case, told):
    ((good, reference),) = told[2:3]
    cut = {name: each[..., :1] if each.dtype == np.float32 else each for name, each in case.pictures[0].inputs.items()}
    broken = Prompt.of(case.text(4), replace(case.pictures[0], inputs=cut))
    parts = await engine_parts(case.ours, config())
    engine = make_engine(parts, config())
    ids: list[int] = []
    errors = []
    try:
        requests = [Request(str(i), each.ids, PARAMS, media=each.media) for i, each in enumerate((broken, good))]
        async with engine.submit(requests) as stream:
            async for outputs in stream:
                for output in outputs:
                    ids += output.token_ids if output.index else []
                    errors += [(output.index, output.finish)] if output.error else []
    finally:
        await engine.close()
    assert errors == [(0, FinishReason.ERROR)]
    assert ids == reference.token_ids
