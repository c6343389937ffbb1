"""Every family of encoders, as a tiny random model written by transformers' own config class: hidden states and what heads make of
them equal transformers' within 1e-5, texts longer than every window, alone and packed into steps together."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from runtime.api import PoolingParams
from runtime.config import EngineConfig
from runtime.models import implementation
from runtime.models.blocks.rope import inverse_frequencies
from runtime.weights.fetch import resolve
from tests.equality.pooled import pooled

VOCAB = 128
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 160, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LENGTHS = (1, 2, 15, 17, 33, 90, 150)
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Row:
    config: Callable[[], transformers.PretrainedConfig]
    name: str  # of its classes, without what they are for
    has_kinds: bool = False


def row(name: str, *, has_kinds: bool = False, **rest) -> Row:
    return Row(lambda: getattr(transformers, f"{name}Config")(**SMALL | rest), name, has_kinds)


DISTILBERT = {
    "vocab_size": VOCAB, "dim": 64, "hidden_dim": 48, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 160,
}  # fmt: skip
ENCODERS = {
    "bert": row("Bert", has_kinds=True),
    "roberta": row("Roberta", has_kinds=True, pad_token_id=1),
    "xlm-roberta": row("XLMRoberta", pad_token_id=1, type_vocab_size=1),
    "camembert": row("Camembert", pad_token_id=1, type_vocab_size=1),
    "distilbert": Row(lambda: transformers.DistilBertConfig(**DISTILBERT), "DistilBert"),
    "mpnet": row("MPNet", pad_token_id=1),
    "modernbert": row("ModernBert", local_attention=20, num_hidden_layers=5),
    "modernbert, biases, mean": row(
        "ModernBert", local_attention=16, norm_bias=True, attention_bias=True, mlp_bias=True, classifier_bias=True,
        classifier_pooling="mean", num_hidden_layers=4,
    ),
    "nomic bert": row("NomicBert", has_kinds=True),
    "gte": row("Gte", has_kinds=True, type_vocab_size=2),
    "gte, without kinds of tokens": row("Gte", type_vocab_size=0),
}  # fmt: skip
HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")


def written(each: Row, head: str, folder, **config):
    """A random model in `folder`, whose matrices are wide enough to tell blocks apart; and texts for it."""
    own = each.config()
    for key, value in config.items():
        setattr(own, key, value)
    torch.manual_seed(7)
    theirs = getattr(transformers, f"{each.name}{head}")(own).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            scale = 0.15 if parameter.dim() > 1 else 0.1
            is_norm = name.endswith(("norm.weight", "Norm.weight")) or ".norm" in name.removesuffix(".bias")
            parameter.copy_(torch.randn_like(parameter) * scale + (is_norm and parameter.dim() == 1))
    theirs.save_pretrained(folder)
    generator = random.Random(3)
    texts = []
    for length in LENGTHS:
        ids = [generator.randrange(3, VOCAB) for _ in range(length)]  # without the id of padding, which has no place
        texts.append((ids, [generator.randrange(2) for _ in ids] if each.has_kinds and length % 2 else None))
    return theirs, texts


def ours_of(folder, *, device="cpu", dtype="float32"):
    files = resolve(str(folder), None, lambda progress: None)
    spec = implementation.describe(files.config, "native")
    return implementation.load(
        spec, files, dtype=dtype, load_format="auto", seed=0, progress=lambda progress: None, device=device,
        max_model_len=spec.max_model_len, weights=implementation.WeightPolicy(dtype),
    )  # fmt: skip


@torch.inference_mode()
def transformers_output(theirs, ids, kinds):
    more = {} if kinds is None else {"token_type_ids": torch.tensor([kinds])}
    return theirs(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64), **more)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("together", [True, False])
async def test_hidden_states_equal_transformers(name, together, tmp_path):
    theirs, texts = written(ENCODERS[name], "Model", tmp_path)
    asked = [
        PoolingParams("token_embed", None, False), PoolingParams(pooling="mean", use_activation=False),
        PoolingParams(pooling="cls", use_activation=True, dimensions=20), PoolingParams(pooling="last", use_activation=False),
    ]  # fmt: skip
    config = EngineConfig(max_num_batched_tokens=200) if together else None
    found = await pooled(ours_of(tmp_path), texts, asked, config, together=together)
    for index, text in enumerate(texts):
        states = transformers_output(theirs, *text).last_hidden_state[0]
        unit = torch.nn.functional.normalize
        expected = (states, states.mean(dim=0), unit(states[0, :20], dim=0), states[-1])
        for each, wanted in zip(found, expected, strict=True):
            same(each[index], wanted)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("num_labels", [1, 3])
async def test_heads_for_whole_texts_equal_transformers(name, num_labels, tmp_path):
    theirs, texts = written(ENCODERS[name], "ForSequenceClassification", tmp_path, num_labels=num_labels)
    model = ours_of(tmp_path)
    assert len(model.spec.pooler_info.labels) == num_labels
    scores, probabilities = await pooled(
        model, texts, [PoolingParams("classify", use_activation=False), PoolingParams("classify")]
    )
    for index, text in enumerate(texts):
        wanted = transformers_output(theirs, *text).logits[0]
        same(scores[index], wanted)
        same(probabilities[index], wanted.sigmoid() if num_labels == 1 else wanted.softmax(dim=0))


@pytest.mark.parametrize("name", ENCODERS)
async def test_heads_for_tokens_equal_transformers(name, tmp_path):
    if ENCODERS[name].name == "NomicBert" and not hasattr(transformers, "NomicBertForTokenClassification"):
        pytest.skip("transformers has none")
    theirs, texts = written(ENCODERS[name], "ForTokenClassification", tmp_path, num_labels=5)
    (scores,) = await pooled(ours_of(tmp_path), texts, [PoolingParams("token_classify", use_activation=False)])
    for index, text in enumerate(texts):
        same(scores[index], transformers_output(theirs, *text).logits[0])


@pytest.mark.parametrize("name", ENCODERS)
async def test_of_a_model_for_masked_tokens_the_encoder_is_read(name, tmp_path):
    theirs, texts = written(ENCODERS[name], "ForMaskedLM", tmp_path)
    (states,) = await pooled(ours_of(tmp_path), texts[:3], [PoolingParams("token_embed", None, False)])
    for index, text in enumerate(texts[:3]):
        with torch.inference_mode():
            more = {} if text[1] is None else {"token_type_ids": torch.tensor([text[1]])}
            wanted = theirs.base_model(input_ids=torch.tensor([text[0]]), **more).last_hidden_state[0]
        same(states[index], wanted)


@pytest.mark.parametrize(("name", "older"), [("gte", "NewModel"), ("nomic bert", "NomicBertModel")])
async def test_checkpoints_may_have_either_names(name, older, tmp_path):
    """Those of their authors' code, which transformers writes, and those of its own modules."""
    theirs, texts = written(ENCODERS[name], "Model", tmp_path)
    newer = tmp_path / "newer"
    newer.mkdir()
    save_file(theirs.state_dict(), newer / "model.safetensors")
    config = tmp_path / "config.json"
    (newer / "config.json").write_bytes(config.read_bytes())
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [older]}))
    assert not load_file(newer / "model.safetensors").keys() >= load_file(tmp_path / "model.safetensors").keys()
    asked = [PoolingParams(use_activation=False)]
    (found,), (again,) = [await pooled(ours_of(folder), texts, asked) for folder in (tmp_path, newer)]
    for one, other in zip(found, again, strict=True):
        assert torch.equal(one, other)


def test_a_rotary_embedding_that_was_stretched_once_and_for_all():
    """The authors' own: a base of 8 times the theta, and every frequency lower by 8 to the power of two over the dims."""
    config = ENCODERS["gte"].config().to_dict() | {"architectures": ["NewModel"], "rope_theta": 20000}
    del config["rope_parameters"]
    spec = implementation.describe(config | {"rope_scaling": {"type": "ntk", "factor": 8.0}}, "native")
    (rope,) = {attention.rope for attention in spec.attentions()}
    wanted = 160000.0 ** (-torch.arange(0, 16, 2) / 16) / 8 ** (2 / 16)
    torch.testing.assert_close(inverse_frequencies(rope, 100), wanted)
