"""Common parts of encoder families: BERT's layers, classification heads, and checkpoint names with a prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol

from runtime.models.read.hf_config import HfConfig, activation, context_length, heads, num_layers
from runtime.models.spec.attention import Attention, Mask, RelativeBias
from runtime.models.spec.decoder import DecoderSpec, LearnedPositions
from runtime.models.spec.layer import AnyLayer, PostNormLayer
from runtime.models.spec.linear import Linear
from runtime.models.spec.mlp import PlainMLP
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import LayerNorm, NoNorm, Norm
from runtime.models.spec.pooler import Dense, PoolerActivation, PoolerSpec
from runtime.weights.rules import NameMapping, Rule, rename

# Default embedding of sentence-transformers for a model without module files.
POOLS_MEAN = PoolerSpec("mean", normalize=False)
NORMS = ("attention_norm", "output_norm")
Kind = Literal["model", "sequence", "token"]


class EncoderFamily(Protocol):
    def __call__(self, config: HfConfig, architecture: str, kind: Kind) -> DecoderSpec: ...


_OLD_NORMS = (rename("LayerNorm.gamma", into="LayerNorm.weight"), rename("LayerNorm.beta", into="LayerNorm.bias"))


def encoder(
    config: HfConfig, architecture: str, layers: Iterable[AnyLayer], prefix: str, rules: tuple[Rule, ...], *,
    embedding_norm: Norm, positions: LearnedPositions | None = None, num_token_types: int = 0, norm: Norm | None = None,
    more_rules: tuple[tuple[Rule, ...], ...] = (),
) -> DecoderSpec:  # fmt: skip
    """Return the spec of an encoder without a head. `rules`: names of the base model's tensors in the checkpoint.

    Other classes of the model have these names below `prefix`. `more_rules`: alternative name mappings. `norm`: norm of the last
    layer's output, if any."""
    ways = [way for bare in (rules, *more_rules) for way in (bare, tuple(_below(prefix, rule) for rule in bare))]
    return DecoderSpec(
        architecture=architecture,
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        layers=tuple(layers),
        norm=norm or NoNorm(),
        tied_embedding=False,
        max_model_len=context_length(config, 512) if positions is None else positions.rows - positions.offset,
        positions=positions,
        embedding_norm=embedding_norm,
        rules=ways[0],
        other_rules=(*ways[1:], *(way + _OLD_NORMS for way in ways)),
        ignored=(".position_ids", ".token_type_ids"),
        ignored_below=("pooler.", f"{prefix}.pooler.", "cls.", "lm_head.", "vocab_", "head.", "decoder."),
        pooler=POOLS_MEAN,
        num_token_types=num_token_types,
        generates=False,
    )


def architectures(name: str, family: EncoderFamily) -> dict[str, Callable[[HfConfig], DecoderSpec]]:
    """Return `family` for each architecture name: transformers' class of the base model, and its classes with a head."""
    kinds: dict[str, Kind] = {
        "Model": "model", "ForMaskedLM": "model", "ForSequenceClassification": "sequence", "ForTokenClassification": "token",
    }  # fmt: skip
    return {
        f"{name}{ending}": partial(family, architecture=f"{name}{ending}", kind=kind) for ending, kind in kinds.items()
    }


def _below(prefix: str, rule: Rule) -> Rule:
    if isinstance(rule, NameMapping) and rule.ours[0] == "model":
        return replace(rule, theirs=tuple((prefix, *name) for name in rule.theirs))
    return rule


def post_norm_layers(
    config: HfConfig, norm: LayerNorm, relative_bias: RelativeBias | None = None
) -> list[PostNormLayer]:
    """Return BERT's layers: all linear layers have biases, and each block is followed by a norm."""
    num_heads, num_kv_heads, head_size = heads(config)
    attention = Attention(
        num_heads, num_kv_heads, head_size, None, qkv_bias=True, output_bias=True, mask=Mask.FULL,
        relative_bias=relative_bias,
    )  # fmt: skip
    mlp = PlainMLP(config.count("intermediate_size"), True, activation(config, default="gelu"))
    return [PostNormLayer(attention, mlp, norm, NORMS)] * num_layers(config)


# --- heads ---------------------------------------------------------------------------------------------------------


def labels(config: HfConfig) -> tuple[str, ...]:
    """Return the names of the classes. Without names in the config they are LABEL_0, LABEL_1 and so on, as in transformers."""
    named = config.get("id2label")
    if named is None:
        count = config.count("num_labels", 2, max_value=1 << 20)
        return tuple(f"LABEL_{index}" for index in range(count))
    if not isinstance(named, Mapping) or {str(key) for key in named} != {str(index) for index in range(len(named))}:
        raise UnsupportedModel("config: id2label must name classes 0, 1, 2, … without a gap")
    by_index = {str(key): str(value) for key, value in named.items()}
    return tuple(by_index[str(index)] for index in range(len(named))) or labels(HfConfig({}))


def probabilities(config: HfConfig, num_labels: int) -> Literal["softmax", "sigmoid", "none"]:
    """Return the function that converts class scores to probabilities. It is the one that sentence-transformers stored for a
    cross-encoder. Otherwise it depends on the problem type: by default sigmoid for one class, softmax for several."""
    written = config.section("sentence_transformers").get("activation_fn") or config.get(
        "sbert_ce_default_activation_function"
    )
    if written is not None:
        name = str(written).rpartition(".")[2].lower()
        if name not in ("identity", "sigmoid", "softmax"):
            raise UnsupportedModel(f"config: activation_fn {written!r} is not Identity, Sigmoid or Softmax")
        return "none" if name == "identity" else "sigmoid" if name == "sigmoid" else "softmax"
    match config.get("problem_type"):
        case "regression":
            return "none"
        case "multi_label_classification":
            return "sigmoid"
        case "single_label_classification":
            return "softmax"
        case None:
            return "sigmoid" if num_labels == 1 else "softmax"
    raise UnsupportedModel(f"config: problem_type {config.get('problem_type')!r} is not known")


def dense(
    config: HfConfig, name: str, activation: PoolerActivation = "identity", *, out: int | None = None, bias: bool = True
) -> Dense:
    """Return a linear layer from the hidden size to `out`, by default the hidden size."""
    size = config.count("hidden_size")
    return Dense(Linear(name, out or size, size, bias), activation)


def with_classes(
    spec: DecoderSpec, config: HfConfig, before: tuple[Dense, ...], name: str = "classifier", *, by_token: bool = False,
    pooling: Literal["cls", "mean", "last"] = "cls", bias: bool = True,
) -> DecoderSpec:  # fmt: skip
    """Return `spec` with a classification head: the layers `before`, then a linear layer `name` with one output per class."""
    names = labels(config)
    last = dense(config, name, out=len(names), bias=bias)
    return replace(
        spec,
        pooler=replace(
            spec.pooler, pooling=pooling, head=(*before, last), labels=names, labels_tokens=by_token,
            activation=probabilities(config, len(names)),
        ),
    )  # fmt: skip


def with_head(spec: DecoderSpec, config: HfConfig, kind: Kind, before: Dense, name: str = "classifier") -> DecoderSpec:
    """Return `spec` with the head that `kind` requires. Text classification has the layers `before` and `name`, token
    classification a single layer "classifier", and a base model none."""
    match kind:
        case "sequence":
            return with_classes(spec, config, (before,), name)
        case "token":
            return with_classes(spec, config, (), by_token=True)
        case "model":
            return spec


def with_dimensions(pooler: PoolerSpec, config: HfConfig) -> PoolerSpec:
    """Return `pooler` with the sizes of Matryoshka embeddings in the config, under vLLM's config keys."""
    sizes = config.get("matryoshka_dimensions")
    if sizes is None and not config.flag("is_matryoshka", False):
        return pooler
    if sizes is not None and not (isinstance(sizes, list) and all(type(each) is int and each > 0 for each in sizes)):
        raise UnsupportedModel(f"config: matryoshka_dimensions is {sizes!r}, not a list of positive integers")
    return replace(pooler, matryoshka_dimensions=tuple(sizes or ()))
