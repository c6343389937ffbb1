"""Whisper: greedy decoding equal to transformers', of several sounds at a time, in chunks, preempted, and with prefixes from the
cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from runtime.api import MediaItem, SamplingParams
from runtime.config import EngineConfig, PlanError, WeightPolicy
from runtime.encode.first_items import encode_first
from runtime.models import implementation
from runtime.models.spec.model import UnsupportedModel
from runtime.runner.warmup import prompts
from runtime.start import start_engine
from runtime.weights.fetch import resolve
from tests.equality.greedy import THREADS, Reference, compare, engine_parts
from tests.equality.media import Prompt, run
from tests.equality.test_media import floats, with_random_numbers
from tests.tiers import on_push

NUM_OUTPUTS, MAX_TOKENS = 20, 12  # the former no whole number of blocks
SMALL = {
    "vocab_size": 120, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 64, "num_mel_bins": 8,
    "max_source_positions": NUM_OUTPUTS, "max_target_positions": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
    "decoder_start_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "as tiny": SMALL,
    "as turbo": SMALL | {"encoder_layers": 3, "decoder_layers": 1, "num_mel_bins": 16, "decoder_attention_heads": 2},
    "as distil": SMALL | {"decoder_layers": 2, "scale_embedding": True, "decoder_ffn_dim": 96},
    "with an untied head": SMALL | {"tie_word_embeddings": False},
}
CONFIG = EngineConfig(device="cpu", num_kv_blocks=96, max_model_len=64, max_num_seqs=8)
PARAMS = SamplingParams(MAX_TOKENS, temperature=0.0, ignore_eos=True)


def heard(number: int, num_mel_bins: int) -> MediaItem:
    features = floats(np.random.default_rng(number), num_mel_bins, 2 * NUM_OUTPUTS)
    return MediaItem("audio", b"sound %d" % number, np.zeros(1, np.int32), {"input_features": features})


@torch.inference_mode()
def transformers_greedy(model, prompt: Prompt) -> Reference:
    """A pass over all of it for each token: no cache of theirs is believed."""
    torch.set_num_threads(THREADS)
    ids, margins = list(prompt.ids), []
    outputs = model.model.encoder(torch.from_numpy(prompt.media[0].inputs["input_features"])[None])
    for _ in range(MAX_TOKENS):
        logits = model(encoder_outputs=outputs, decoder_input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        best = logits.topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return Reference(prompt.ids, ids[len(prompt.ids) :], margins)


def load(folder: Path, weights: WeightPolicy | None = None):
    files = resolve(str(folder), None, lambda progress: None)
    return implementation.load(
        implementation.describe(files.config, "native"), files, dtype="float32", load_format="auto", seed=0,
        progress=lambda progress: None, max_model_len=64, device="cpu", weights=weights,
    )  # fmt: skip


def saved(folder: Path, config: dict[str, object]):
    torch.manual_seed(5)
    theirs = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**config)).eval()
    with_random_numbers(theirs)
    with torch.no_grad():  # a head that is the embedding would repeat each token, whatever is heard
        theirs.model.decoder.embed_tokens.weight *= 0.1
    theirs.save_pretrained(folder)
    return theirs


@pytest.fixture(scope="module", params=on_push(CONFIGS, "as tiny", "as turbo"))
def case(request, tmp_path_factory):
    """Prompts of several lengths, two of them of several blocks that begin alike with the same sound and with another."""
    folder, config = tmp_path_factory.mktemp("whisper"), CONFIGS[request.param]
    theirs = saved(folder, config)
    sounds = [heard(number, config["num_mel_bins"]) for number in range(4)]
    ids = [int(each) for each in np.random.default_rng(1).integers(1, 120, 40)]
    prompts = [
        Prompt(ids[:3], (sounds[0],)),
        Prompt(ids[:4], (sounds[1],)),
        Prompt(ids[:1], (sounds[2],)),
        Prompt(ids[:38], (sounds[3],)),
        Prompt(ids[:38], (sounds[0],)),
        Prompt(ids[:36], (sounds[3],)),
    ]
    return load(folder), prompts, [transformers_greedy(theirs, prompt) for prompt in prompts]


def test_answers_depend_on_the_sound(case):
    _, _, expected = case
    assert expected[3].token_ids != expected[4].token_ids


def test_different_sounds_in_one_step_equal_transformers(case):
    model, prompts, expected = case
    compare(run(model, CONFIG, prompts, PARAMS).outcome, expected)


def test_prompts_in_chunks_equal_transformers(case):
    model, prompts, expected = case
    compare(run(model, replace(CONFIG, max_num_batched_tokens=16), prompts, PARAMS).outcome, expected)


def test_preempted_sequences_hear_their_sound_again(case):
    model, prompts, expected = case
    seen = run(model, CONFIG, prompts, PARAMS, preempting=True)
    assert seen.outcome.num_preemptions > 0
    compare(seen.outcome, expected)


def test_a_prefix_is_a_hit_with_the_same_sound_only(case):
    model, prompts, expected = case
    alone = run(model, CONFIG, prompts[3:], PARAMS, together=False)
    assert alone.outcome.num_cached_tokens == 32  # of the last prompt, which shares its sound with the first
    compare(alone.outcome, expected[3:])
    again = run(model, CONFIG, prompts[3:], PARAMS, rounds=2)
    assert again.outcome.num_cached_tokens == 32 * 3
    compare(again.outcome, expected[3:])


def test_a_sound_is_encoded_once_for_all_who_hear_it(case):
    model, prompts, _ = case
    assert run(model, CONFIG, [prompts[0]] * 5, PARAMS).num_encoded == 1


def test_sequences_wait_for_blocks_of_their_sounds(case):
    model, prompts, expected = case
    few = replace(CONFIG, num_kv_blocks=12)
    compare(run(model, few, prompts, PARAMS).outcome, expected)


def test_guesses_from_the_prompt_change_nothing(case):
    model, prompts, expected = case
    compare(run(model, replace(CONFIG, speculative_method="ngram"), prompts, PARAMS).outcome, expected)


@pytest.mark.parametrize("kernels", ["int8", "int16"])
def test_rounded_weights_of_both_halves_change_little(kernels, tmp_path):
    theirs = saved(tmp_path, SMALL | {"d_model": 64, "num_mel_bins": 16})
    exact, rounded = (load(tmp_path, WeightPolicy("float32", online=each)) for each in (None, kernels))
    assert rounded.encoder.weights_bytes < exact.encoder.weights_bytes
    sound = heard(1, 16)
    (ours,) = rounded.encoder.encode([sound])
    with torch.inference_mode():
        wanted = theirs.model.encoder(torch.from_numpy(sound.inputs["input_features"])[None]).last_hidden_state[0]
    error = float((ours - wanted).norm() / wanted.norm())
    assert 0 < error < {"int8": 0.05, "int16": 1e-3}[kernels]


def test_a_request_has_one_window_of_sound(tmp_path):
    saved(tmp_path, SMALL)
    speech = implementation.describe(resolve(str(tmp_path), None, lambda progress: None).config).encoder.speech
    speech.check([heard(1, 8)])
    with pytest.raises(ValueError, match="one window of audio"):
        speech.check([])
    with pytest.raises(ValueError, match="one window of audio"):
        speech.check([heard(1, 8), heard(2, 8)])
    with pytest.raises(ValueError, match=r"input_features are float32 \[16, 40\]; this model takes float32 \[8, 40\]"):
        speech.check([heard(1, 16)])


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"enable_lora": True}, PlanError, "--enable-lora is not supported for speech models"),
        ({"pipeline_parallel_size": 2}, UnsupportedModel, "does not support pipeline stages"),
        ({"tensor_parallel_size": 2}, UnsupportedModel, "layers that read an encoder"),
    ],
)
async def test_what_does_not_go_with_it_is_refused(options, error, says, tmp_path):
    saved(tmp_path, SMALL)
    files = resolve(str(tmp_path), None, lambda progress: None)
    with pytest.raises(error, match=says):
        await start_engine(replace(CONFIG, **options), files, lambda progress: None)


async def test_a_probe_hears_silence(tmp_path):
    saved(tmp_path, SMALL)
    engine = await start_engine(CONFIG, resolve(str(tmp_path), None, lambda progress: None), lambda progress: None)
    try:
        await engine.probe()
    finally:
        await engine.close()


async def test_the_encoder_is_tried_with_a_step_that_reads_it(case):
    model, _, _ = case
    parts = await engine_parts(model, CONFIG)
    (alone, several) = model.encoder.samples(3 * NUM_OUTPUTS)
    assert (len(alone), len(several)) == (1, 3)
    step = prompts([1], parts.plan.layout, parts.plan.num_kv_blocks)
    reported = []
    await encode_first(parts.runner, [alone, several], step, reported.append, crosses=True)
    assert reported[-1].done == 2
    await parts.runner.close()
