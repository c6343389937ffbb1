"""Reader of sentence-transformers' config files: modules that follow the model, pooling, and maximum length.

modules.json lists the modules in order, each with a folder and a config.json. Only data is read; no class is imported. Unsupported
modules are rejected by name, since ignoring a module would change embeddings silently.

https://sbert.net/docs/sentence_transformer/usage/custom_models.html"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from runtime.weights.names import MODULES
from runtime.weights.rules import WeightsError

_PACKAGE = "config_sentence_transformers.json"
_LENGTHS = "sentence_bert_config.json"
_MODES = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
_ACTIVATIONS: dict[str, Literal["softmax", "sigmoid", "none"]] = {
    "torch.nn.modules.linear.Identity": "none", "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
}  # fmt: skip
_POOLINGS: dict[str, Literal["cls", "mean", "last"]] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}


@dataclass(frozen=True, slots=True)
class DenseModule:
    """Linear layer followed by an activation. `activation`: its class name. `name`: folder of the weights linear.weight and
    linear.bias."""

    name: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """Modules of a sentence-transformers folder.

    `transformer`: subfolder of the model, "" for the folder itself. `pooling`: None if unspecified. `max_seq_length`: maximum
    number of tokens, including special tokens; None for the model's limit. `label_token_ids`: for a cross-encoder that compares
    logits of tokens, their ids, that of "yes" last. `activation`: function applied to a cross-encoder's scores, or None."""

    transformer: str
    pooling: Literal["cls", "mean", "last"] | None
    dense: tuple[DenseModule, ...]
    normalize: bool
    max_seq_length: int | None
    label_token_ids: tuple[int, ...] = ()
    activation: Literal["softmax", "sigmoid", "none"] | None = None


def files_of_modules(folder: Path) -> list[str]:
    """Return glob patterns of the files that modules in subfolders of `folder` may have, relative to it."""
    names = (name for name, _ in _listed(folder) if name)
    return [f"{name}/{pattern}" for name in names for pattern in ("*.json", "*.txt", "*.safetensors")]


def read_modules(folder: Path) -> SentenceModules | None:
    """Return the modules of `folder`; None if it has no modules.json. Raises WeightsError."""
    if not (folder / MODULES).exists():
        return None
    transformer, pooling, dense, normalize = "", None, [], False
    label_token_ids: tuple[int, ...] = ()
    for index, (name, kind) in enumerate(_listed(folder)):
        config = _config(folder / name) if name else {}
        match kind:
            case "Transformer" if index == 0:
                transformer = name
            case "Pooling" if index == 1:
                pooling = _pooling(folder / name, config)
            case "LogitScore" if index == 1:
                label_token_ids = _label_token_ids(folder / name, config)
            case "Dense" if index > 1 and not normalize:
                dense.append(_dense(folder / name, name, config))
            case "Normalize" if index > 1:
                normalize = True
            case "Dropout":
                pass  # used for training only
            case _:
                raise WeightsError(f"{folder / MODULES}: module {index} is a {kind}, which is not supported there")
    return SentenceModules(
        transformer, pooling, tuple(dense), normalize, max_seq_length(folder / transformer), label_token_ids,
        _activation(folder),
    )  # fmt: skip


def max_seq_length(folder: Path) -> int | None:
    """Return the maximum number of tokens of a text, including special tokens, from the files of the transformer in `folder`.

    sentence-transformers 6 stores it in the tokenizer's config. Raises WeightsError."""
    for name, key in ((_LENGTHS, "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        path = folder / name
        length = _read(path).get(key) if path.exists() else None
        if length is not None:
            if type(length) not in (int, float) or not 1 <= length < math.inf:
                raise WeightsError(f"{path}: {key} is {length!r}")
            return int(length)
    return None


def _listed(folder: Path) -> Iterator[tuple[str, str]]:
    path = folder / MODULES
    modules = _json(path)
    if not isinstance(modules, list) or not modules or not all(isinstance(each, Mapping) for each in modules):
        raise WeightsError(f"{path}: not a list of modules")
    for each in modules:
        name, kind = each.get("path", ""), each.get("type")
        if not isinstance(name, str) or not isinstance(kind, str):
            raise WeightsError(f"{path}: a module has no path or type")
        parts = PurePosixPath(name).parts
        if len(parts) > 1 or name.startswith((".", "/")) or "\0" in name or any(mark in name for mark in "*?["):
            raise WeightsError(f"{path}: {name!r} is not a folder beside it")
        if not kind.startswith("sentence_transformers."):
            raise WeightsError(f"{path}: {kind} is code of the model's own, which is never run")
        yield name, kind.rpartition(".")[2]


def _pooling(folder: Path, config: Mapping[str, Any]) -> Literal["cls", "mean", "last"]:
    mode = config.get("pooling_mode")
    modes = mode if isinstance(mode, list) else [mode]
    if mode is None:
        modes = [name for key, name in _MODES.items() if config.get(key)] or ["mean"]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise WeightsError(f"{folder}: pooling by {modes} is not supported; supported: one of {', '.join(_POOLINGS)}")
    if config.get("include_prompt", True) is not True:
        raise WeightsError(f"{folder}: pooling without the prompt (include_prompt) is not supported")
    return _POOLINGS[modes[0]]


def _label_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the id of the token "no", if the config has it, then that of "yes". Raises WeightsError."""
    if config.get("module_input_name", "causal_logits") != "causal_logits":
        raise WeightsError(f"{folder}: module_input_name {config['module_input_name']!r} is not supported")
    ids = tuple(id for id in (config.get("false_token_id"), config.get("true_token_id")) if id is not None)
    if config.get("true_token_id") is None or not all(type(id) is int and 0 <= id < 1 << 31 for id in ids):
        raise WeightsError(f"{folder}: true_token_id and false_token_id are no ids")
    return ids


def _activation(folder: Path) -> Literal["softmax", "sigmoid", "none"] | None:
    """Return the activation of a cross-encoder's scores; None if unspecified. Raises WeightsError if it is unknown."""
    path = folder / _PACKAGE
    written = _read(path).get("activation_fn") if path.exists() else None
    if written is None:
        return None
    if written not in _ACTIVATIONS:
        raise WeightsError(f"{path}: activation_fn {written!r} is not one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[written]


def _dense(folder: Path, name: str, config: Mapping[str, Any]) -> DenseModule:
    sizes = config.get("in_features"), config.get("out_features")
    if not all(type(size) is int and 0 < size < 1 << 31 for size in sizes):
        raise WeightsError(f"{folder}: in_features and out_features are {sizes}")
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise WeightsError(f"{folder}: {key} {config[key]!r} is not supported")
    if config.get("use_residual"):
        raise WeightsError(f"{folder}: use_residual is not supported")
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    return DenseModule(
        name, config["in_features"], config["out_features"], bool(config.get("bias", True)), str(activation)
    )


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    return _read(path) if path.exists() else {}  # a Normalize module has no config, and no folder on the hub


def _read(path: Path) -> Mapping[str, Any]:
    value = _json(path)
    if not isinstance(value, Mapping):
        raise WeightsError(f"{path}: not a JSON object")
    return value


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: not valid JSON: {error}") from error
