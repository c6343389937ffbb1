"""Models with sentence-transformers modules. Their embeddings equal those of that package."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.read.causal_heads import with_bare_names
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.linear import Linear
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.pooler import Dense, PoolerActivation
from runtime.weights.sentence_transformers import DenseModule, SentenceModules

_ACTIVATIONS: dict[str, PoolerActivation] = {
    "Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "Sigmoid": "sigmoid",
}  # fmt: skip


def with_modules(spec: DecoderSpec, modules: SentenceModules) -> DecoderSpec:
    """Return `spec` with the pooling and layers of `modules`. If the model generates, its checkpoint may lack the head and the
    name prefix. Raises UnsupportedModel for modules that the model cannot have."""
    if spec.generates:
        spec = with_bare_names(spec)
    if modules.label_token_ids:
        if not spec.generates:
            raise UnsupportedModel(f"a LogitScore needs a model that generates; {spec.architecture} does not")
        judged = replace(
            spec.pooler, label_token_ids=modules.label_token_ids, activation=modules.activation or "sigmoid"
        )
        return replace(spec, pooler=judged)
    if spec.pooler.labels and modules.activation is not None:
        spec = replace(spec, pooler=replace(spec.pooler, activation=modules.activation))
    if modules.pooling is None:
        return spec
    dense = tuple(_dense(each) for each in modules.dense)
    sizes = [spec.hidden_size, *(each.linear.out_features for each in dense)]
    for each, size in zip(dense, sizes, strict=False):
        if each.linear.in_features != size:
            raise UnsupportedModel(f"{each.linear.name} takes {each.linear.in_features} numbers, and is given {size}")
    pooler = replace(spec.pooler, pooling=modules.pooling, normalize=modules.normalize, dense=dense)
    return replace(spec, pooler=pooler)


def _dense(module: DenseModule) -> Dense:
    name = module.activation.rpartition(".")[2]
    if not module.activation.startswith("torch.nn.") or name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedModel(f"{module.name}: activation {module.activation} is not supported; supported: {known}")
    linear = Linear(f"{module.name}.linear", module.out_features, module.in_features, module.bias)
    return Dense(linear, _ACTIVATIONS[name])
