"""Text encoders run through transformers: choice of the class, its config, loading and checks.

A base model (AutoModel) may have a head that classifies texts or tokens. Masked-LM heads and other training heads are dropped. A
loaded model is compared with transformers' own computation of a text, and served only if they agree."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

import ops
from runtime.config import WeightPolicy
from runtime.models.forward_step import ForwardStep
from runtime.models.read.encoder import POOLS_MEAN, labels, probabilities, with_dimensions
from runtime.models.read.hf_config import HfConfig
from runtime.models.spec.linear import Linear
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.pooler import Dense, PoolerSpec
from runtime.models.through_transformers.agreement import probe_ids
from runtime.models.through_transformers.describe import VERSION, config_of, said
from runtime.models.through_transformers.load import lazily, read_when_needed, state_shapes, with_format
from runtime.models.through_transformers.model import prepare_linears, round_linears
from runtime.models.through_transformers.padded import PaddedModel
from runtime.models.through_transformers.spec import PaddedSpec
from runtime.weights.rules import Checkpoint, Report, WeightsError, refuse_misfit, shape_text

log = logging.getLogger("oneloop.models")

_SEQUENCES = frozenset(modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values())
_TOKENS = frozenset(modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values())
_BARE: Mapping[str, Any] = modeling_auto.MODEL_MAPPING_NAMES
_TRAINED = (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES)
_NO_BASE = frozenset(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.1}  # relative to a token's norm
_SPANS = (12, 11, 5)  # token counts of the texts for the check, two of which are padded to one length


def is_encoder(architecture: str) -> bool:
    """Return whether transformers has a model of this name that encodes texts and does not generate."""
    if architecture in _NO_BASE:
        return False
    bare = {name for each in _BARE.values() for name in ((each,) if isinstance(each, str) else each)}
    return architecture in _SEQUENCES | _TOKENS | bare or any(architecture in each.values() for each in _TRAINED)


def describe(architecture: str, config: Mapping[str, Any]) -> PaddedSpec:
    """Return the spec of an encoder with this config.json. Raises UnsupportedModel."""
    own = config_of(config)
    if own.is_encoder_decoder:
        raise UnsupportedModel("it is an encoder-decoder")
    if architecture in _SEQUENCES | _TOKENS:
        served = architecture
    else:
        name = _BARE.get(own.model_type)
        if not isinstance(name, str):
            raise UnsupportedModel(f"transformers {VERSION} has no one model of model_type {own.model_type!r}")
        served = name
    with torch.device("meta"):
        whole = _built(served, own)
    base = _base_of(whole)
    takes = inspect.signature(base.forward).parameters
    if missing := {"input_ids", "attention_mask"} - takes.keys():
        raise UnsupportedModel(f"it does not take {', '.join(sorted(missing))}, as text models do")
    longest = getattr(own, "max_position_embeddings", None)
    if type(longest) is not int or longest <= 0:
        raise UnsupportedModel("its config names no max_position_embeddings")
    pad = getattr(own, "pad_token_id", None)
    pad = 0 if pad is None else pad
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in whole.modules()):
        longest -= pad + 1  # RoBERTa's positions start after the padding position
    return PaddedSpec(
        architecture=served,
        base=type(base).__name__,
        vocab_size=own.vocab_size,
        max_model_len=longest,
        num_parameters=sum(each.numel() for each in whole.parameters()),
        hidden_size=own.hidden_size,
        num_token_types=getattr(own, "type_vocab_size", 0) if "token_type_ids" in takes else 0,
        pad_token_id=pad,
        pooler=with_dimensions(_pooler(served, HfConfig(config), own), HfConfig(config)),
        config=own,
    )


def _pooler(architecture: str, config: HfConfig, own: Any) -> PoolerSpec:
    if architecture not in _SEQUENCES | _TOKENS:
        return POOLS_MEAN
    names = labels(config)
    head = Dense(Linear("the head of transformers' module", len(names), own.hidden_size, True))
    return PoolerSpec(
        "cls", normalize=False, head=(head,), labels=names, labels_tokens=architecture in _TOKENS,
        activation=probabilities(config, len(names)),
    )  # fmt: skip


def _built(architecture: str, own: Any) -> nn.Module:
    try:
        model: nn.Module = getattr(transformers, architecture)(deepcopy(own), **_without_pooler(architecture)).eval()
    except Exception as error:
        raise UnsupportedModel(f"transformers cannot build a model of its config{said(error)}") from error
    return model


def _without_pooler(architecture: str) -> dict[str, bool]:
    """Return constructor options that omit a base model's pooler, if its class supports that. The pooler is unused, and checkpoints
    may lack it."""
    takes = inspect.signature(getattr(transformers, architecture).__init__).parameters
    return {"add_pooling_layer": False} if "add_pooling_layer" in takes else {}


def _base_of(whole: Any) -> nn.Module:
    base: nn.Module = getattr(whole, whole.base_model_prefix, whole)
    return base


def load(
    spec: PaddedSpec, files: Checkpoint, *, dtype: str, load_format: str, seed: int, progress: Report, device: str = "cpu",
    weights: WeightPolicy | None = None,
) -> PaddedModel:  # fmt: skip
    """Load an encoder. Arguments are those of `models.load.load_model`. Raises WeightsError if config and weights do not match, and
    UnsupportedModel if the outputs differ from transformers' own."""
    if weights is not None and weights.online is not None:
        raise UnsupportedModel(
            f"quantization {weights.online} is not supported for models that run through transformers"
        )
    with torch.device("meta"):
        described = _built(spec.architecture, spec.config)
    with files.open_tensors(load_format, state_shapes(described), seed) as source:
        types = set(source.types.values())
        try:
            with read_when_needed():
                whole, found = getattr(transformers, spec.architecture).from_pretrained(
                    None, config=deepcopy(spec.config), state_dict=lazily(source, list(source.shapes), progress),
                    dtype=getattr(torch, dtype), ignore_mismatched_sizes=True, output_loading_info=True,
                    device_map={"": device}, **_without_pooler(spec.architecture),
                )  # fmt: skip
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, KeyError) as error:
            raise WeightsError(f"transformers cannot make the model of these weights{said(error)}") from error
    misshapen = [
        f"{name} is {shape_text(stored)} instead of {shape_text(wanted)}"
        for name, stored, wanted in sorted(found["mismatched_keys"])
    ]
    # Weights of the training head, which the base model does not have.
    unexpected = sorted(found["unexpected_keys"]) if spec.pooler.labels else []
    refuse_misfit(sorted(found["missing_keys"]), misshapen, unexpected)
    whole.eval()
    stored = with_format(weights or WeightPolicy(dtype), dtype, types, device)
    try:
        with torch.inference_mode():
            round_linears(whole, getattr(torch, stored))
            ids = probe_ids(spec.vocab_size)
            wanted = [_alone(whole, ids[:length], spec.pooler.labels_tokens, device) for length in _SPANS]
            num_bytes = prepare_linears(whole, getattr(torch, stored))
            num_bytes += sum(each.nbytes for each in whole.parameters())
            model = PaddedModel(spec, whole, _base_of(whole), dtype=dtype, device=device, weights_bytes=num_bytes)
            if _error(model, ids, wanted) > _TOLERANCE[dtype]:
                log.info("%s: padding changes results, so only texts of equal length are batched", spec.architecture)
                model.pads = False
            if not (off := _error(model, ids, wanted)) < _TOLERANCE[dtype]:
                raise UnsupportedModel(f"outputs in a batch differ from outputs alone by {off:.1%}")
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, TypeError, ValueError, RuntimeError, KeyError, IndexError) as error:
        raise UnsupportedModel(f"transformers' modules cannot compute texts of several lengths{said(error)}") from error
    return model


def _alone(whole: Any, ids: list[int], by_token: bool, device: str) -> Tensor:
    """Return the outputs of one text, computed by transformers' own modules: hidden states [T, H], or [T, H + C] with a head's
    output."""
    seen: list[Any] = []
    base = _base_of(whole)
    hook = base.register_forward_hook(lambda module, given, output: seen.append(output))
    try:
        given = torch.tensor([ids], device=device)
        output = whole(input_ids=given, attention_mask=torch.ones_like(given))
    finally:
        hook.remove()
    hidden: Tensor = seen[0][0][0]
    if base is whole:
        return hidden
    logits = output.logits[0] if by_token else output.logits.expand(len(ids), -1)
    return torch.cat([hidden, logits], dim=1)


def _error(model: PaddedModel, ids: list[int], wanted: list[Tensor]) -> float:
    """Return the largest relative error of a token in a batch of texts. `wanted`: outputs of each text computed separately."""
    device = torch.device(model.device)
    starts = torch.tensor([0, *torch.tensor(_SPANS).cumsum(0).tolist()], dtype=torch.int32, device=device)
    lengths = torch.tensor(_SPANS, dtype=torch.int32, device=device)
    meta = ops.AttentionMeta(starts, lengths, lengths.new_empty(len(_SPANS), 0), max(_SPANS), max(_SPANS))
    tokens = torch.tensor([id for length in _SPANS for id in ids[:length]], device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in _SPANS])
    got = model.forward(ForwardStep(tokens, positions, (torch.full_like(tokens, -1),), (meta,), ()))
    expected = torch.cat(wanted).float()
    return float(((got.float() - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-6)).max())
