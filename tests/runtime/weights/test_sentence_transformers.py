"""sentence-transformers' files: what they say is taken, what they cannot say here is refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from runtime.config import EngineConfig
from runtime.models.read.sentence_transformers import with_modules
from runtime.models.registry import spec_from_config
from runtime.models.spec.model import UnsupportedModel
from runtime.start import outline_model
from runtime.weights.fetch import resolve
from runtime.weights.rules import WeightsError
from runtime.weights.sentence_transformers import DenseModule, SentenceModules, files_of_modules, read_modules

TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
DENSE = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
NORMALIZE = {"path": "3_Normalize", "type": "sentence_transformers.sentence_transformer.modules.normalize.Normalize"}
LINEAR = {"in_features": 8, "out_features": 4, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
BERT = {
    "architectures": ["BertModel"], "vocab_size": 10, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2,
}  # fmt: skip

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 50, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
}  # fmt: skip


def write(folder, *modules, **configs):
    (folder / "modules.json").write_text(json.dumps(modules))
    for name, config in configs.items():
        (folder / name.lstrip("_")).mkdir(exist_ok=True)
        (folder / name.lstrip("_") / "config.json").write_text(json.dumps(config))


def test_modules_are_read_in_their_order(tmp_path):
    assert read_modules(tmp_path) is None
    write(
        tmp_path, TRANSFORMER, POOLING, DENSE, NORMALIZE, _1_Pooling={"pooling_mode_cls_token": True}, _2_Dense=LINEAR
    )
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 77}')
    dense = DenseModule("2_Dense", 8, 4, True, "torch.nn.modules.activation.Tanh")
    assert read_modules(tmp_path) == SentenceModules("", "cls", (dense,), True, 77)
    assert "2_Dense/*.safetensors" in files_of_modules(tmp_path)


def test_a_linear_layer_without_an_activation_is_followed_by_tanh(tmp_path):
    """That is the default of sentence-transformers' Dense."""
    linear = {key: value for key, value in LINEAR.items() if key != "activation_function"}
    write(tmp_path, TRANSFORMER, POOLING, DENSE, _2_Dense=linear)
    (dense,) = with_modules(spec_from_config(BERT), read_modules(tmp_path)).pooler.dense
    assert dense.activation == "tanh"


JUDGE = {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"}


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({"true_token_id": 9, "false_token_id": 4}, (4, 9)),
        ({"true_token_id": 9, "false_token_id": None}, (9,)),
    ],
)
def test_a_cross_encoder_may_judge_by_the_logits_of_tokens(config, ids, tmp_path):
    write(tmp_path, TRANSFORMER, JUDGE, _1_LogitScore=config)
    modules = read_modules(tmp_path)
    assert (modules.label_token_ids, modules.activation, modules.pooling) == (ids, None, None)
    spec = with_modules(spec_from_config(LLAMA), modules)
    assert spec.generates
    info = spec.pooler_info
    assert (info.label_token_ids, info.activation) == (ids, "sigmoid")
    with pytest.raises(UnsupportedModel, match="a LogitScore needs a model that generates"):
        with_modules(spec_from_config(BERT), modules)


@pytest.mark.parametrize(
    ("written", "activation"),
    [("linear.Identity", "none"), ("activation.Sigmoid", "sigmoid"), ("activation.Softmax", "softmax")],
)
@pytest.mark.parametrize("transformer", ["", "0_Transformer"])
def test_what_a_cross_encoder_makes_of_its_scores_is_read(transformer, written, activation, tmp_path):
    write(tmp_path, TRANSFORMER | {"path": transformer})
    (tmp_path / "config_sentence_transformers.json").write_text(
        json.dumps({"activation_fn": f"torch.nn.modules.{written}"})
    )
    modules = read_modules(tmp_path)
    assert modules.activation == activation
    judges = BERT | {"architectures": ["BertForSequenceClassification"], "num_labels": 1}
    assert with_modules(spec_from_config(judges), modules).pooler.activation == activation


def test_an_activation_that_is_not_known_is_refused(tmp_path):
    write(tmp_path, TRANSFORMER)
    (tmp_path / "config_sentence_transformers.json").write_text('{"activation_fn": "my.Own"}')
    with pytest.raises(WeightsError, match=r"activation_fn 'my\.Own' is not one of"):
        read_modules(tmp_path)


@pytest.mark.parametrize(
    "config", [{}, {"true_token_id": -1}, {"true_token_id": "yes"}, {"true_token_id": 1, "module_input_name": "other"}]
)
def test_a_logit_score_that_says_nothing_is_refused(config, tmp_path):
    write(tmp_path, TRANSFORMER, JUDGE, _1_LogitScore=config)
    with pytest.raises(WeightsError, match="1_LogitScore"):
        read_modules(tmp_path)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
        ({}, "mean"),
    ],
)
def test_pooling_is_read_as_old_and_new_releases_write_it(config, pooling, tmp_path):
    write(tmp_path, TRANSFORMER, POOLING, _1_Pooling=config)
    assert read_modules(tmp_path).pooling == pooling


@pytest.mark.parametrize(
    ("modules", "configs", "message"),
    [
        (
            [TRANSFORMER, POOLING],
            {"_1_Pooling": {"pooling_mode_max_tokens": True}},
            "pooling by .'max'. is not supported",
        ),
        ([TRANSFORMER, POOLING], {"_1_Pooling": {"pooling_mode": ["cls", "mean"]}}, "pooling by .'cls', 'mean'."),
        ([TRANSFORMER, POOLING], {"_1_Pooling": {"include_prompt": False}}, "include_prompt"),
        ([TRANSFORMER, POOLING | {"type": "custom.Pooling"}], {}, "code of the model's own, which is never run"),
        ([TRANSFORMER, POOLING | {"path": "../etc"}], {}, "is not a folder beside it"),
        ([TRANSFORMER, POOLING | {"path": "/etc"}], {}, "is not a folder beside it"),
        ([TRANSFORMER, POOLING | {"path": "*"}], {}, "is not a folder beside it"),
        ([TRANSFORMER, POOLING | {"type": "sentence_transformers.models.LSTM"}], {}, "module 1 is a LSTM"),
        ([TRANSFORMER, POOLING, NORMALIZE, DENSE], {"_2_Dense": LINEAR}, "module 3 is a Dense"),
        ([TRANSFORMER, POOLING, DENSE], {"_2_Dense": LINEAR | {"in_features": "8"}}, "in_features"),
        ([TRANSFORMER, POOLING, DENSE], {"_2_Dense": LINEAR | {"use_residual": True}}, "use_residual"),
        ([], {}, "not a list of modules"),
        ([3], {}, "not a list of modules"),
        ([{}], {}, "no path or type"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(modules, configs, message, tmp_path):
    write(tmp_path, *modules, **configs)
    with pytest.raises(WeightsError, match=message):
        read_modules(tmp_path)


@pytest.mark.parametrize(
    ("name", "key", "length"),
    [
        ("sentence_bert_config", "max_seq_length", -1),
        ("tokenizer_config", "model_max_length", 0),
        ("tokenizer_config", "model_max_length", "512"),
        ("tokenizer_config", "model_max_length", float("inf")),
    ],
)
def test_a_length_that_is_none_is_refused(name, key, length, tmp_path):
    write(tmp_path, TRANSFORMER)
    (tmp_path / f"{name}.json").write_text(json.dumps({key: length}))
    with pytest.raises(WeightsError, match=f"{key} is {length!r}"):
        read_modules(tmp_path)


@pytest.mark.parametrize(
    ("own", "tokenizer", "length"),
    [
        ({"max_seq_length": 77}, {"model_max_length": 40}, 77),
        ({"max_seq_length": None}, {"model_max_length": 40}, 40),
        ({"transformer_task": "feature-extraction"}, {"model_max_length": 40}, 40),
        (None, {"model_max_length": 1e30}, 512),
        (None, {}, 512),
    ],
)
@pytest.mark.parametrize("kind", ["sentence-transformers", "plain", "reranker"])
def test_texts_are_as_long_as_the_tokenizers_config_says_where_nothing_else_does(
    kind, own, tokenizer, length, tmp_path
):
    """Releases of sentence-transformers from 6 on write the length there, as do plain encoders."""
    config = BERT | (
        {"architectures": ["BertForSequenceClassification"], "num_labels": 1} if kind == "reranker" else {}
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    if own is not None:
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps(own))
    if kind == "sentence-transformers":
        write(tmp_path, TRANSFORMER, POOLING)
    files = resolve(str(tmp_path), None, lambda progress: None)
    assert outline_model(EngineConfig(), files).max_model_len == length
    assert outline_model(EngineConfig(max_model_len=200), files).max_model_len == 200


def test_the_context_of_a_model_that_generates_is_not_what_its_tokenizers_config_says(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 40}')
    files = resolve(str(tmp_path), None, lambda progress: None)
    assert outline_model(EngineConfig(), files).max_model_len == 2048


def test_the_model_may_be_in_a_folder_of_its_own_and_a_linear_layer_in_another(tmp_path):
    write(
        tmp_path, TRANSFORMER | {"path": "0_Transformer"}, POOLING, DENSE,
        _0_Transformer=BERT, _1_Pooling={"pooling_mode": "mean"}, _2_Dense=LINEAR,
    )  # fmt: skip
    save_file({"pooler.dense.weight": torch.ones(2, 2)}, tmp_path / "0_Transformer" / "model.safetensors")
    save_file(
        {"linear.weight": torch.ones(4, 8), "linear.bias": torch.ones(4)}, tmp_path / "2_Dense" / "model.safetensors"
    )
    files = resolve(str(tmp_path), None, lambda progress: None)
    assert files.config["architectures"] == ["BertModel"]
    assert (files.path, files.modules_path) == (tmp_path / "0_Transformer", tmp_path)
    with files.open_tensors("auto", {}, 0) as source:
        assert source.shapes["2_Dense.linear.weight"] == (4, 8)
    spec = with_modules(spec_from_config(files.config), files.modules)
    assert spec.pooler_info.embedding_size == 4
    assert {p.name for p in spec.parameters()} >= {"2_Dense.linear.weight", "2_Dense.linear.bias"}


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        (DenseModule("2_Dense", 9, 4, True, "torch.nn.modules.linear.Identity"), "takes 9 numbers, and is given 8"),
        (DenseModule("2_Dense", 8, 4, True, "os.system"), "activation os.system is not supported"),
    ],
)
def test_a_linear_layer_that_does_not_fit_is_refused(dense, message):
    with pytest.raises(UnsupportedModel, match=message):
        with_modules(spec_from_config(BERT), SentenceModules("", "mean", (dense,), False, None))
