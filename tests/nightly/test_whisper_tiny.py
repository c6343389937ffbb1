"""The built-in whisper-tiny.en: what it writes down equals transformers', token for token, with the same weights."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from runtime.api import MediaItem, SamplingParams
from runtime.config import EngineConfig, WeightPolicy
from runtime.models import implementation
from runtime.weights.ctranslate2 import MODEL_BIN, CTranslate2Checkpoint
from runtime.weights.fetch import resolve
from tests.equality.greedy import Reference, compare
from tests.equality.media import Prompt, run

START, NO_TIMESTAMPS, MAX_TOKENS = 50257, 50362, 24
CONFIG = EngineConfig(device="cpu", num_kv_blocks=400, max_model_len=448, max_num_seqs=4)


def heard(number: int) -> MediaItem:
    """A tone that rises and falls, as often as `number` says, in noise."""
    rng, seconds = np.random.default_rng(number), np.arange(480_000) / 16_000
    samples = 0.3 * np.sin(2 * np.pi * 300 * seconds + 40 * np.sin(number * seconds)) + rng.normal(0, 0.02, 480_000)
    extract = transformers.WhisperFeatureExtractor()
    features = extract(samples.astype(np.float32), sampling_rate=16_000, return_tensors="np")["input_features"][0]
    return MediaItem("audio", b"%d" % number, np.zeros(1, np.int32), {"input_features": features.astype(np.float32)})


def transformers_of(files):
    """The model of transformers, with the numbers that our reader gives."""
    checkpoint = CTranslate2Checkpoint(files.path / MODEL_BIN)
    state = {}
    for name, shape in checkpoint.shapes.items():
        values = np.empty(shape, np.float32)
        checkpoint.read_rows(name, 0, values)
        state[name] = torch.from_numpy(values)
    checkpoint.close()
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**files.config)).eval()
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


@torch.inference_mode()
def greedy(model, prompt: Prompt) -> Reference:
    ids, margins = list(prompt.ids), []
    outputs = model.model.encoder(torch.from_numpy(prompt.media[0].inputs["input_features"])[None])
    for _ in range(MAX_TOKENS):
        logits = model(encoder_outputs=outputs, decoder_input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        best = logits.topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return Reference(prompt.ids, ids[len(prompt.ids) :], margins)


def test_the_built_in_whisper_writes_what_transformers_does():
    files = resolve("whisper-tiny.en", None, lambda progress: None)
    assert (files.kind, files.eos_token_ids) == ("ctranslate2", {50256})
    spec = implementation.describe(files.config, "native")
    model = implementation.load(
        spec, files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None, max_model_len=448,
        device="cpu", weights=WeightPolicy("stored", keep_quantized=True),
    )  # fmt: skip
    prompts = [Prompt([START, NO_TIMESTAMPS], (heard(number),)) for number in (1, 2, 3)]
    theirs = transformers_of(files)
    params = SamplingParams(MAX_TOKENS, temperature=0.0, ignore_eos=True)
    compare(run(model, CONFIG, prompts, params).outcome, [greedy(theirs, prompt) for prompt in prompts])
