"""Causal models that are pooled: bare ones, heads for classes and rewards, and those that answer yes or no, as transformers has
them: whole, in pieces and out of the prefix cache."""

from __future__ import annotations

import json
import random

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

from runtime.api import PoolingParams
from runtime.config import EngineConfig
from runtime.models import implementation
from runtime.models.spec.model import UnsupportedModel
from runtime.weights.fetch import resolve
from tests.equality.pooled import pooled
from tests.equality.test_encoders import ours_of, same

VOCAB = 128
CONFIG = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
CHUNKS = EngineConfig(max_num_batched_tokens=40, max_num_seqs=8)


def written(name: str, folder, kind=transformers.Qwen3Config, **config):
    torch.manual_seed(5)
    theirs = getattr(transformers, name)(kind(**CONFIG | config)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    theirs.save_pretrained(folder)
    return theirs


def texts():
    generator = random.Random(8)
    prefix = [generator.randrange(3, VOCAB) for _ in range(50)]
    return [([*prefix[: 50 * (length > 20)], *(generator.randrange(3, VOCAB) for _ in range(length))], None)
            for length in (1, 3, 17, 33, 70)]  # fmt: skip


@torch.inference_mode()
def states_of(base, ids) -> torch.Tensor:
    return base(input_ids=torch.tensor([ids])).last_hidden_state[0]


@torch.inference_mode()
def states_both_ways(base, ids) -> torch.Tensor:
    seen = torch.zeros(1, 1, len(ids), len(ids))  # added to all scores
    return base(input_ids=torch.tensor([ids]), attention_mask=seen).last_hidden_state[0]


def with_modules(folder, pooling: str):
    """The model in `folder`, whose texts sentence-transformers would pool so, and normalise."""
    modules = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    files = resolve(str(folder), None, lambda progress: None)
    spec = implementation.describe(files.config, "native", files.modules)
    return implementation.load(
        spec, files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None, device="cpu",
        max_model_len=256, weights=implementation.WeightPolicy("float32"),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["Qwen3Model", "Qwen3ForCausalLM"])
async def test_the_last_token_of_a_text_is_its_embedding(name, tmp_path):
    theirs = written(name, tmp_path)
    last, mean = await pooled(
        ours_of(tmp_path), texts() * 2, [PoolingParams(), PoolingParams(pooling="mean", use_activation=False)], CHUNKS
    )
    for index, (ids, _) in enumerate(texts() * 2):
        states = states_of(theirs.base_model, ids)
        same(last[index], normalize(states[-1], dim=0))
        same(mean[index], states.mean(dim=0))


async def test_a_model_without_its_head_is_read_under_either_name(tmp_path):
    """As Qwen3-Embedding is stored: a causal model's config, and sentence-transformers' modules, beside a bare model's names."""
    theirs = written("Qwen3ForCausalLM", tmp_path, tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}, path)
    (found,) = await pooled(with_modules(tmp_path, "lasttoken"), texts(), [PoolingParams()])
    for vector, (ids, _) in zip(found, texts(), strict=True):
        same(vector, normalize(states_of(theirs.base_model, ids)[-1], dim=0))


async def test_e5_mistral_is_the_last_token_seen_through_windows(tmp_path):
    """A bare Mistral whose windows are shorter than its texts, whole, in pieces and behind a prefix that is there."""
    theirs = written("MistralModel", tmp_path, transformers.MistralConfig, sliding_window=48)
    model = with_modules(tmp_path, "lasttoken")
    for config in (None, CHUNKS):
        (found,) = await pooled(model, texts() * 2, [PoolingParams()], config)
        for vector, (ids, _) in zip(found, texts() * 2, strict=True):
            same(vector, normalize(states_of(theirs, ids)[-1], dim=0))


@pytest.mark.parametrize(("pooling", "is_causal"), [("lasttoken", True), ("mean_tokens", False)])
async def test_gritlm_embeds_with_a_causal_models_weights(pooling, is_causal, tmp_path):
    """By the last token of what a causal model sees, and as GritLM itself: by the mean of what sees both ways."""
    theirs = written("MistralForCausalLM", tmp_path, transformers.MistralConfig, sliding_window=None)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_causal": is_causal}))
    (found,) = await pooled(with_modules(tmp_path, pooling), texts() * 2, [PoolingParams()])
    for vector, (ids, _) in zip(found, texts() * 2, strict=True):
        states = states_of(theirs.base_model, ids) if is_causal else states_both_ways(theirs.base_model, ids)
        same(vector, normalize(states[-1] if is_causal else states.mean(dim=0), dim=0))


@pytest.mark.parametrize("num_labels", [1, 3])
async def test_heads_for_classes_read_the_last_token(num_labels, tmp_path):
    theirs = written("Qwen3ForSequenceClassification", tmp_path, num_labels=num_labels)
    (scores,) = await pooled(ours_of(tmp_path), texts(), [PoolingParams("classify", use_activation=False)], CHUNKS)
    for vector, (ids, _) in zip(scores, texts(), strict=True):
        with torch.inference_mode():
            same(vector, theirs(input_ids=torch.tensor([ids])).logits[0])


async def test_heads_for_tokens_read_each(tmp_path):
    theirs = written("Qwen3ForTokenClassification", tmp_path, num_labels=3)
    (scores,) = await pooled(
        ours_of(tmp_path), texts(), [PoolingParams("token_classify", use_activation=False)], CHUNKS
    )
    for vectors, (ids, _) in zip(scores, texts(), strict=True):
        with torch.inference_mode():
            same(vectors, theirs(input_ids=torch.tensor([ids])).logits[0])


async def test_a_reward_is_one_number_as_it_comes(tmp_path):
    theirs = written("Qwen3Model", tmp_path, architectures=["Qwen3ForRewardModel"])
    tensors = load_file(tmp_path / "model.safetensors")
    head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    tensors = {f"model.{name}": each for name, each in tensors.items()}
    tensors |= {f"score.{name}": each.detach() for name, each in head.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForRewardModel"]}))
    (found,) = await pooled(ours_of(tmp_path), texts(), [PoolingParams("classify")])
    for vector, (ids, _) in zip(found, texts(), strict=True):
        with torch.inference_mode():
            same(vector, head(states_of(theirs, ids)[-1]))


async def test_a_reranker_may_answer_yes_or_no(tmp_path):
    theirs = written("Qwen3ForCausalLM", tmp_path)
    no, yes = 17, 99
    (found,) = await pooled(ours_of(tmp_path), texts(), [PoolingParams("classify", label_token_ids=(no, yes))], CHUNKS)
    for vector, (ids, _) in zip(found, texts(), strict=True):
        with torch.inference_mode():
            same(vector, theirs(input_ids=torch.tensor([ids])).logits[0, -1, [no, yes]].softmax(dim=0))


def test_a_config_that_sees_both_ways_through_windows_is_refused():
    config = transformers.Qwen3Config(
        **CONFIG, use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention"] * 2
    )
    values = config.to_dict() | {"architectures": ["Qwen3Model"], "is_causal": False}
    with pytest.raises(UnsupportedModel, match="bidirectional attention with sliding windows"):
        implementation.describe(values, "native")


async def test_a_causal_model_may_be_trained_to_see_both_ways(tmp_path):
    theirs = written("Qwen3Model", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    (found,) = await pooled(ours_of(tmp_path), texts(), [PoolingParams("token_embed", None, False)])
    for vectors, (ids, _) in zip(found, texts(), strict=True):
        same(vectors, states_both_ways(theirs, ids))
