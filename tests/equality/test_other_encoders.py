"""Encoders without a description of our own, through transformers' modules: tiny random ones as transformers computes each text
alone, within 1e-5, with heads and without, padded to batches of several lengths."""

from __future__ import annotations

import json
import random

import pytest
import torch
import transformers

from runtime.api import PoolingParams
from runtime.config import EngineConfig
from runtime.models import implementation
from runtime.models.spec.model import UnsupportedModel
from runtime.models.through_transformers.padded import MOST_PADDING, PaddedModel, batches_of
from runtime.weights.fetch import resolve
from runtime.weights.rules import WeightsError
from tests.equality.pooled import pooled
from tests.equality.test_encoders import TOLERANCE, VOCAB, Row, row

LENGTHS = (1, 2, 15, 17, 33, 90, 33)
DEBERTA = {"type_vocab_size": 0, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
XLM = {
    "vocab_size": VOCAB, "emb_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 160, "pad_index": 0,
    "pad_token_id": 0,
}  # fmt: skip
OTHERS = {
    "deberta 3": row("DebertaV2", **DEBERTA, position_buckets=16, norm_rel_ebd="layer_norm", share_att_key=True,
                     position_biased_input=False),
    "deberta": row("Deberta", **DEBERTA),
    "electra": row("Electra", has_kinds=True, embedding_size=32),
    "albert": row("Albert", has_kinds=True, embedding_size=32),
    "xlm": Row(lambda: transformers.XLMConfig(**XLM), "XLM"),
    "convbert": row("ConvBert", has_kinds=True, embedding_size=64),
    "ernie": row("Ernie", has_kinds=True),
}  # fmt: skip


def written(each: Row, head: str, folder, **config):
    own = each.config()
    for key, value in config.items():
        setattr(own, key, value)
    torch.manual_seed(7)
    theirs = getattr(transformers, f"{each.name}{head}")(own).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    theirs.save_pretrained(folder)
    generator = random.Random(3)
    texts = []
    for length in LENGTHS:
        ids = [generator.randrange(3, VOCAB) for _ in range(length)]
        texts.append((ids, [generator.randrange(2) for _ in ids] if each.has_kinds and length % 2 else None))
    return theirs, texts


def ours_of(folder) -> PaddedModel:
    files = resolve(str(folder), None, lambda progress: None)
    spec = implementation.describe(files.config, "auto", files.modules)
    model = implementation.load(
        spec, files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None, device="cpu",
        max_model_len=spec.max_model_len, weights=implementation.WeightPolicy("float32"),
    )  # fmt: skip
    assert isinstance(model, PaddedModel)
    return model


@torch.inference_mode()
def alone(theirs, ids, kinds):
    given = torch.tensor([ids])
    types = {} if kinds is None else {"token_type_ids": torch.tensor([kinds])}
    return theirs(input_ids=given, attention_mask=torch.ones_like(given), **types)


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", OTHERS)
async def test_hidden_states_are_those_of_each_text_alone(name, tmp_path):
    theirs, texts = written(OTHERS[name], "Model", tmp_path)
    asked = [
        PoolingParams("token_embed", None, False), PoolingParams(pooling="mean", use_activation=False),
        PoolingParams(pooling="cls", use_activation=True, dimensions=20),
    ]  # fmt: skip
    for together in (True, False):
        tokens, means, firsts = await pooled(ours_of(tmp_path), texts, asked, together=together)
        for index, text in enumerate(texts):
            states = alone(theirs, *text)[0][0]
            same(tokens[index], states)
            same(means[index], states.mean(dim=0))
            same(firsts[index], torch.nn.functional.normalize(states[0, :20], dim=0))


@pytest.mark.parametrize("name", ["deberta 3", "electra", "albert", "xlm"])
@pytest.mark.parametrize(("head", "task"), [
    ("ForSequenceClassification", "classify"), ("ForTokenClassification", "token_classify"),
])  # fmt: skip
async def test_heads_say_what_they_say_alone(name, head, task, tmp_path):
    theirs, texts = written(OTHERS[name], head, tmp_path, num_labels=3)
    model = ours_of(tmp_path)
    assert model.spec.pooler_info.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    asked = [PoolingParams(task, use_activation=False), PoolingParams(task)]
    raw, activated = await pooled(model, texts, asked, EngineConfig(max_num_batched_tokens=170, max_num_seqs=4))
    for index, text in enumerate(texts):
        wanted = alone(theirs, *text).logits[0]
        same(raw[index], wanted)
        same(activated[index], wanted.softmax(dim=-1))


async def test_an_embedding_may_be_asked_of_a_model_with_a_head(tmp_path):
    theirs, texts = written(OTHERS["electra"], "ForSequenceClassification", tmp_path, num_labels=2)
    (found,) = await pooled(ours_of(tmp_path), texts, [PoolingParams(pooling="mean", use_activation=False)])
    for vector, text in zip(found, texts, strict=True):
        same(vector, alone(theirs.base_model, *text)[0][0].mean(dim=0))


async def test_the_head_by_which_a_model_was_trained_is_left_away(tmp_path):
    theirs, texts = written(OTHERS["electra"], "ForMaskedLM", tmp_path)
    model = ours_of(tmp_path)
    assert model.spec.architecture == "ElectraModel"
    (found,) = await pooled(model, texts, [PoolingParams("token_embed", None, False)])
    for vectors, text in zip(found, texts, strict=True):
        same(vectors, alone(theirs.base_model, *text)[0][0])


async def test_sentence_transformers_pooling_is_taken(tmp_path):
    theirs, texts = written(OTHERS["deberta 3"], "Model", tmp_path)
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    model = ours_of(tmp_path)
    info = model.spec.pooler_info
    assert (info.pooling, info.normalize) == ("cls", True)
    (found,) = await pooled(model, texts, [PoolingParams()])
    for vector, text in zip(found, texts, strict=True):
        same(vector, torch.nn.functional.normalize(alone(theirs, *text)[0][0, 0], dim=0))


def test_weights_that_are_missing_are_named(tmp_path):
    written(OTHERS["electra"], "Model", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(WeightsError, match=r"encoder\.layer\.3\."):
        ours_of(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.T5Config(num_layers=1, d_model=32).to_dict() | {"architectures": ["T5Model"]}, "encoder-decoder"),
        ({"architectures": ["ElectraModel"], "model_type": "no-such"}, "has no model_type"),
        (transformers.ViTConfig().to_dict() | {"architectures": ["ViTModel"]}, "input_ids"),
    ],
)  # fmt: skip
def test_what_reads_no_texts_is_refused(config, words):
    with pytest.raises(UnsupportedModel, match=words):
        implementation.describe(config)


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        ([], []),
        ([0, 4, 0], [[1]]),
        ([5, 100, 6, 98, 5], [[1, 3], [2, 0, 4]]),
        ([8, 8, 8], [[0, 1, 2]]),
        ([100, 50, 25], [[0], [1], [2]]),
    ],
)
def test_rows_of_about_one_length_are_padded_together(lengths, batches):
    assert batches_of(lengths, MOST_PADDING) == batches


def test_where_padding_shows_only_texts_of_one_length_are_together(tmp_path):
    """ConvBERT's convolutions reach into what stands behind a text."""
    written(OTHERS["convbert"], "Model", tmp_path)
    assert not ours_of(tmp_path).pads
    assert batches_of([5, 100, 6, 98, 5], 0.0) == [[1], [3], [2], [0, 4]]
