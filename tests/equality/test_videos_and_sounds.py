"""Prompts with videos and with sounds: greedy decoding equal to transformers', in chunks that cut through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from runtime.api import MediaItem, beside_pictures
from runtime.config import EngineConfig
from runtime.models.through_transformers import tower
from tests.equality.greedy import Reference, compare
from tests.equality.media import Medium, Prompt, run, transformers_greedy
from tests.equality.test_media import (
    END,
    FAMILIES,
    IMAGE,
    LLAMA,
    MAX_TOKENS,
    MROPE,
    NEVER,
    PARAMS,
    QWEN2,
    QWEN2_5_VL,
    QWEN3_VL,
    START,
    TEXT,
    drawn,
    floats,
    load,
    on_a_grid,
    with_random_numbers,
)

VIDEO = 101


@dataclass(frozen=True)
class Case:
    """`types`: what transformers calls which tokens are an item's, and what one of a video is there. `token`: stands for a video's
    output."""

    model: Callable[[], transformers.PreTrainedModel]
    medium: Callable[[np.random.Generator, int], Medium]
    types: tuple[str, int] | None = None
    steps: tuple[int, int] = (1, 3)
    token: int = VIDEO


def frames(rng: np.random.Generator, steps: int) -> Medium:
    """Without text between them, and a grid of two by four tokens."""
    inputs = {
        "pixel_values_videos": floats(rng, steps * 4 * 8, 3 * 2 * 4 * 4),
        "video_grid_thw": np.array([[steps, 4, 8]]),
        "second_per_grid_ts": np.array([0.7], np.float32),
    }
    return Medium(inputs, (START, *(VIDEO,) * 8 * steps, END), VIDEO, "video")


def frames_of_qwen2(rng: np.random.Generator, steps: int) -> Medium:
    medium = frames(rng, steps)
    inputs = {name: each for name, each in medium.inputs.items() if name != "second_per_grid_ts"}
    return Medium(inputs, medium.ids, VIDEO, "video")


def frames_with_times(rng: np.random.Generator, steps: int) -> Medium:
    ids: list[int] = []
    for step in range(steps):
        ids += [30 + step, START, *(VIDEO,) * 8, END]
    return Medium(frames_of_qwen2(rng, steps).inputs, tuple(ids), VIDEO, "video")


def frames_like_pictures(rng: np.random.Generator, steps: int) -> Medium:
    medium = frames_with_times(rng, steps)
    return Medium(medium.inputs, tuple(IMAGE if each == VIDEO else each for each in medium.ids), IMAGE, "video")


def pooled_frames(rng: np.random.Generator, steps: int) -> Medium:
    """Four tokens a frame, and one at the end."""
    return Medium(
        {"pixel_values_videos": floats(rng, 1, steps, 3, 32, 32)},
        (START, *(VIDEO,) * (4 * steps + 1), END),
        VIDEO,
        "video",
    )


def sound_with_silence(rng: np.random.Generator, pieces: int) -> Medium:
    """Of forty frames, of which a short sound has twenty: five tokens."""
    frames = 20 * min(pieces, 2)
    mask = (np.arange(40)[None] < frames).astype(np.int64)
    inputs = {"input_features": floats(rng, 1, 8, 40), "feature_attention_mask": mask}
    return Medium(inputs, (START, *(IMAGE,) * (frames // 4), END), IMAGE, "audio")


def sound(rng: np.random.Generator, pieces: int) -> Medium:
    return Medium({"input_features": floats(rng, pieces, 8, 40)}, (IMAGE,) * 10 * pieces, IMAGE, "audio")


def voxtral() -> transformers.PreTrainedModel:
    config = transformers.VoxtralConfig(
        text_config=TEXT | LLAMA,
        audio_config={
            "model_type": "voxtral_encoder", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_mel_bins": 8, "max_source_positions": 20,
        },
        audio_token_id=IMAGE,
    )  # fmt: skip
    return hearing(transformers.VoxtralForConditionalGeneration, config)


def qwen2_audio() -> transformers.PreTrainedModel:
    config = transformers.Qwen2AudioConfig(
        text_config=TEXT | QWEN2,
        audio_config={
            "model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_ffn_dim": 64, "encoder_layers": 2,
            "encoder_attention_heads": 4, "num_mel_bins": 8, "max_source_positions": 20,
        },
        audio_token_id=IMAGE,
    )  # fmt: skip
    return hearing(transformers.Qwen2AudioForConditionalGeneration, config)


def granite_speech() -> transformers.PreTrainedModel:
    config = transformers.GraniteSpeechConfig(
        text_config=TEXT | {
            "model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.8, "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
        encoder_config={
            "input_dim": 8, "num_layers": 2, "hidden_dim": 32, "num_heads": 4, "dim_head": 8, "output_dim": 6,
            "feedforward_mult": 2, "context_size": 10, "max_pos_emb": 12, "conv_kernel_size": 5,
        },
        projector_config={
            "model_type": "blip_2_qformer", "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
            "num_hidden_layers": 1, "encoder_hidden_size": 32, "cross_attention_frequency": 1,
        },
        downsample_rate=3, window_size=6, audio_token_index=IMAGE, has_lora_adapter=False,
    )  # fmt: skip
    return hearing(transformers.GraniteSpeechForConditionalGeneration, config)


def windows_of_sound(rng: np.random.Generator, windows: int) -> Medium:
    """The last of which is not full: two tokens each."""
    return Medium({"input_features": floats(rng, 1, 6 * windows - 2, 8)}, (IMAGE,) * 2 * windows, IMAGE, "audio")


OMNI_AUDIO = {
    "d_model": 32, "encoder_ffn_dim": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "num_mel_bins": 8,
    "max_source_positions": 20, "n_window": 5, "output_dim": 64,
}  # fmt: skip
OMNI = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": 99, "audio_start_token_id": 98, "audio_end_token_id": 97,
    "vision_start_token_id": START, "vision_end_token_id": END, "tie_word_embeddings": False,
}  # fmt: skip


def qwen2_5_omni() -> transformers.PreTrainedModel:
    config = transformers.Qwen2_5OmniThinkerConfig(
        audio_config=OMNI_AUDIO, vision_config=QWEN2_5_VL, text_config=TEXT | {"rope_parameters": MROPE}, **OMNI
    )
    return hearing(transformers.Qwen2_5OmniThinkerForConditionalGeneration, config)


def qwen3_omni() -> transformers.PreTrainedModel:
    config = transformers.Qwen3OmniMoeThinkerConfig(
        audio_config=OMNI_AUDIO | {"downsample_hidden_size": 16, "n_window": 50, "n_window_infer": 200, "conv_chunksize": 2},
        vision_config=QWEN3_VL,
        text_config=TEXT | {
            "rope_parameters": MROPE, "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2,
        },
        **OMNI,
    )  # fmt: skip
    return hearing(transformers.Qwen3OmniMoeThinkerForConditionalGeneration, config)


def omni_sound(rng: np.random.Generator, pieces: int) -> Medium:
    """As long as `pieces` say, and longer than a window of its encoder."""
    frames = 12 * pieces
    mask = (np.arange(36)[None] < frames).astype(np.int64)
    inputs = {"input_features": floats(rng, 1, 8, 36), "feature_attention_mask": mask}
    return Medium(inputs, (98, *(99,) * (((frames - 1) // 2 + 1 - 2) // 2 + 1), 97), 99, "audio")


def omni_3_sound(rng: np.random.Generator, pieces: int) -> Medium:
    """Pieces of a hundred frames make thirteen tokens each, and the thirty behind them four; two pieces are one window."""
    frames = 100 * pieces + 30
    mask = (np.arange(340)[None] < frames).astype(np.int64)
    inputs = {"input_features": floats(rng, 1, 8, 340), "feature_attention_mask": mask}
    return Medium(inputs, (98, *(99,) * (13 * pieces + 4), 97), 99, "audio")


def frames_in_seconds(rng: np.random.Generator, steps: int) -> Medium:
    medium = frames(rng, steps)
    inputs = {name: each for name, each in medium.inputs.items() if name != "second_per_grid_ts"}
    return Medium(inputs | {"video_second_per_grid": np.array([0.7], np.float32)}, medium.ids, VIDEO, "video")


def frames_of_two_a_second(rng: np.random.Generator, steps: int) -> Medium:
    medium = frames_in_seconds(rng, steps)
    return Medium(medium.inputs | {"video_second_per_grid": np.array([1.0], np.float32)}, medium.ids, VIDEO, "video")


def omni_picture(rng: np.random.Generator, larger: int) -> Medium:
    return Medium(on_a_grid(rng, larger > 1), (START, *(IMAGE,) * (6 if larger > 1 else 8), END), IMAGE)


def phi4_multimodal() -> transformers.PreTrainedModel:
    config = transformers.Phi4MultimodalConfig(
        **TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        vision_config={
            "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32,
            "patch_size": 8, "crop_size": 32, "image_token_id": IMAGE,
        },
        audio_config={
            "hidden_size": 32, "intermediate_size": 48, "num_blocks": 3, "num_attention_heads": 4, "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32, "input_size": 8, "nemo_conv_channels": 8, "bias_max_distance": 20,
            "audio_token_id": 99,
        },
    )  # fmt: skip
    return hearing(transformers.Phi4MultimodalForCausalLM, config)


def crops(rng: np.random.Generator, larger: int) -> Medium:
    """All of it and one crop, or two, of the lower of which half is padding; four tokens each, and one behind each row."""
    high = larger > 1
    seen = np.ones((1, 3, 4, 4), np.int64)
    seen[0, 2, 2:] = 0
    inputs = {
        "image_pixel_values": floats(rng, 1, 3, 3, 32, 32),
        "image_sizes": np.array([[64 if high else 32, 32]]),
        "image_attention_mask": seen,
    }
    return Medium(inputs, (IMAGE,) * ((9 if high else 6) + 1 + 6), IMAGE)


def frames_of_sound(rng: np.random.Generator, _: int) -> Medium:
    """Of forty, of which eight are a token."""
    inputs = {"audio_input_features": floats(rng, 1, 40, 8), "audio_embed_sizes": np.array([5])}
    return Medium(inputs, (99,) * 5, 99, "audio")


def hearing(model_class, config) -> transformers.PreTrainedModel:
    torch.manual_seed(5)
    config._attn_implementation = "eager"
    return with_random_numbers(model_class(config).eval())


CASES = {
    "qwen 2 audio": Case(qwen2_audio, sound_with_silence),
    "glm 4.1v": Case(lambda: drawn(FAMILIES["glm 4.1v"]), frames_like_pictures, ("mm_token_type_ids", 2), token=IMAGE),
    "qwen 2 vl": Case(lambda: drawn(FAMILIES["qwen 2 vl"]), frames_of_qwen2, ("mm_token_type_ids", 2)),
    "qwen 2.5 vl": Case(lambda: drawn(FAMILIES["qwen 2.5 vl"]), frames, ("mm_token_type_ids", 2)),
    "qwen 2 vl, a long video": Case(
        lambda: drawn(FAMILIES["qwen 2 vl"]), frames_of_qwen2, ("mm_token_type_ids", 2), (1, 16)
    ),
    "qwen 2.5 vl, a long video": Case(lambda: drawn(FAMILIES["qwen 2.5 vl"]), frames, ("mm_token_type_ids", 2), (1, 8)),
    "qwen 3 vl": Case(lambda: drawn(FAMILIES["qwen 3 vl"]), frames_with_times, ("mm_token_type_ids", 2)),
    "llava-onevision": Case(lambda: drawn(FAMILIES["llava-onevision"]), pooled_frames, steps=(2, 2)),
    "qwen 2.5 omni, sounds": Case(qwen2_5_omni, omni_sound),
    "qwen 2.5 omni, videos": Case(qwen2_5_omni, frames_in_seconds),
    "qwen 2.5 omni, pictures": Case(qwen2_5_omni, omni_picture),
    "qwen 3 omni, pictures": Case(qwen3_omni, omni_picture),
    "qwen 3 omni, videos": Case(qwen3_omni, frames_of_two_a_second),
    "qwen 3 omni, sounds": Case(qwen3_omni, omni_3_sound),
    "voxtral": Case(voxtral, sound),
    "phi 4 multimodal, pictures": Case(phi4_multimodal, crops),
    "phi 4 multimodal, sounds": Case(phi4_multimodal, frames_of_sound),
    "granite speech": Case(granite_speech, windows_of_sound, steps=(4, 4)),
}


def asked(case: Case, folder: Path) -> tuple[list[Prompt], list[Reference]]:
    """Prompts of three different items, and what transformers generates, whose model is saved in `folder`."""
    theirs = case.model()
    if hasattr(theirs.config, "video_token_id"):
        theirs.config.video_token_id = VIDEO
    theirs.save_pretrained(folder)
    rng = np.random.default_rng(3)
    short, long, other = (case.medium(rng, steps) for steps in (*case.steps, case.steps[1]))
    text = [int(each) for each in rng.integers(3, 90, 30)]
    prompts = [Prompt.of(text[:20], long, text[:9]), Prompt.of(short, text[:4], long, text[:6]), Prompt.of(text[:7])]
    prompts.append(Prompt.of(text[:20], other, text[:9]))  # of the same ids as the first
    if short.modality != "video":
        prompts.append(Prompt.of(text[:6], short))
    name, kind = case.types or ("", 0)
    types = {name: lambda ids: (ids == case.token).int() * kind} if name else {"attention_mask": torch.ones_like}
    return prompts, [transformers_greedy(theirs, prompt, MAX_TOKENS, never=NEVER, **types) for prompt in prompts]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_they_are_computed_as_transformers_does(case, tmp_path, monkeypatch):
    prompts, told = asked(case, tmp_path)
    ours = load(tmp_path)
    encoder = ours.encoder
    monkeypatch.setattr(tower, "_SAMPLE_SIDES", (2, 3))
    made_up = encoder.samples(1)
    assert {item.modality for group in made_up for item in group} == encoder.spec.modalities
    for group in made_up:
        assert [len(each) for each in encoder.encode(group)] == [len(item.positions) for item in group]
    options = EngineConfig(num_kv_blocks=64, max_model_len=256, max_num_batched_tokens=13, max_num_seqs=3)
    seen = run(ours, options, prompts, PARAMS, rounds=2)
    assert compare(seen.outcome, told) <= 1
    assert seen.num_encoded == 3
    assert seen.outcome.num_cached_tokens
    again = run(ours, replace(options, max_num_batched_tokens=64), prompts, PARAMS, preempting=True)
    assert compare(again.outcome, told) <= 1
    assert (again.outcome.num_preemptions > 2, again.num_encoded) == (True, 3)


def heard_beside_pictures(folder: Path) -> tuple[list[Prompt], list[Reference]]:
    """Prompts of a picture and a sound, marked as it is beside a picture, of which one is alone; as `asked`."""
    theirs = phi4_multimodal()
    theirs.save_pretrained(folder)
    rng = np.random.default_rng(3)
    picture, heard = crops(rng, 1), frames_of_sound(rng, 1)
    text = [int(each) for each in rng.integers(3, 90, 30)]
    prompts = [
        Prompt.of(text[:20], heard, text[:4], picture, text[:3]),
        Prompt.of(text[:20], heard, text[:4]),
        Prompt.of(picture, heard, text[:5]),
    ]
    told = [
        transformers_greedy(theirs, each, MAX_TOKENS, never=NEVER, attention_mask=torch.ones_like) for each in prompts
    ]
    return [replace(each, media=beside_pictures(each.media)) for each in prompts], told


def test_sounds_beside_pictures_go_through_another_projection(tmp_path):
    prompts, told = heard_beside_pictures(tmp_path)
    options = EngineConfig(num_kv_blocks=64, max_model_len=256, max_num_batched_tokens=13, max_num_seqs=3)
    seen = run(load(tmp_path), options, prompts, PARAMS, together=False, rounds=2)
    assert compare(seen.outcome, told) == 0
    assert seen.num_encoded == 3  # the picture, and the sound twice
    assert told[0].token_ids != told[1].token_ids


def with_sound(
    video: Medium, heard: Medium, before: list[int], behind: list[int], parts: list[tuple[int, int]]
) -> Prompt:
    """A video whose sound stands among its tokens: of each so many, in turns."""
    ids = [*before, START, 98]
    for seen, tokens in parts:
        ids += [VIDEO] * seen + [99] * tokens
    ids += [97, END, *behind]
    media = [
        MediaItem(each.modality, each.digest, np.flatnonzero(np.array(ids) == token).astype(np.int32), each.inputs)
        for each, token in ((video, VIDEO), (heard, 99))
    ]
    return Prompt(ids, tuple(media))


# Which model, how long its sound is, positions a second, and how transformers' processors have tokens of three frames and of the
# sound take turns: at every second, or, Qwen3's, as each is seen and heard.
HEARD = {
    "qwen 2.5 omni": (qwen2_5_omni, frames_in_seconds, omni_sound, 3, 5, [(16, 5), (8, 4)]),
    "qwen 2.5 omni, the sound goes on": (qwen2_5_omni, frames_in_seconds, omni_sound, 2, 2, [(16, 2), (8, 2), (0, 2)]),
    "qwen 2.5 omni, the video goes on": (qwen2_5_omni, frames_in_seconds, omni_sound, 2, 20, [(16, 6), (8, 0)]),
    "qwen 2.5 omni, one behind the other": (qwen2_5_omni, frames_in_seconds, omni_sound, 2, 2, [(24, 6)]),
    "qwen 3 omni": (qwen3_omni, frames_of_two_a_second, omni_3_sound, 2, 5, [(8, 5), (8, 5), (8, 20)]),
}


@pytest.mark.parametrize("name", HEARD)
def test_a_video_is_heard_as_transformers_hears_it(name, tmp_path):
    model, seen, heard, pieces, rate, parts = HEARD[name]
    theirs = model()
    theirs.config.video_token_id = VIDEO
    theirs.config.position_id_per_seconds, theirs.config.seconds_per_chunk = rate, 10 if len(parts) == 1 else 1
    theirs.save_pretrained(tmp_path)
    rng = np.random.default_rng(3)
    video, sound = seen(rng, 3), heard(rng, pieces)
    num_heard = len(sound.ids) - 2
    assert [sum(each) for each in zip(*parts, strict=True)] == [24, num_heard]
    text = [int(each) for each in rng.integers(3, 90, 30)]
    prompts = [
        with_sound(video, sound, text[:5], text[:9], parts),
        with_sound(video, sound, text[:20], text[5:8], parts),
    ]
    never = (*NEVER, 97, 98, 99)
    told = [
        transformers_greedy(
            theirs, each, MAX_TOKENS, never=never, attention_mask=torch.ones_like, use_audio_in_video=lambda _: True
        )
        for each in prompts
    ]
    ours = load(tmp_path)
    params = replace(PARAMS, logit_bias=dict.fromkeys(never, -1e6))
    for budget in (13, 200):
        options = EngineConfig(num_kv_blocks=64, max_model_len=256, max_num_batched_tokens=budget, max_num_seqs=3)
        found = run(ours, options, prompts, params, rounds=2)
        assert compare(found.outcome, told) <= 1
        assert found.num_encoded == 2
        assert found.outcome.num_cached_tokens
