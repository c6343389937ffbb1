"""Description of a model, and of its attention, by transformers' code.

transformers builds the model from its config, and it runs once on the meta device, without memory or weights. Our functions replace
transformers' attention and masks and record every head, window and soft cap. Attention that is not plain causal is rejected before
any weight is read. Only classes of the package are built: code that comes with a model never runs."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from runtime.models.read.encoder import with_dimensions
from runtime.models.read.hf_config import HfConfig
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.pooler import POOLS_LAST
from runtime.models.through_transformers.model import TransformersHead, paged_attention
from runtime.models.through_transformers.spec import AttentionCall, TransformersSpec

_FAR = 1 << 24  # beyond any window

MaskFunction = Callable[..., Any]  # (batch, head, query, key) -> whether it attends


def window_of(sees: MaskFunction) -> int | None:
    """Return the number of last keys that a query attends to, including its own; None if it attends to all. Raises UnsupportedModel
    if the keys are not the last ones, or if their number varies."""

    def seen(query: int, key: int) -> bool:
        return bool(sees(*(torch.tensor(index) for index in (0, 0, query, key))))

    try:
        window = None if seen(_FAR, 0) else _FAR - _first_seen(seen, _FAR) + 1
        width = window or 1
        # Sample positions: the ends of the past, and one key beyond each end.
        for query in (0, 1, 2, 5, width - 1, width, width + 1, _FAR + 1):
            first = 0 if window is None else max(0, query + 1 - width)
            for key in {first - 1, first, (first + query) // 2, query, query + 1, query + width}:
                if key >= 0 and seen(query, key) != (first <= key <= query):
                    raise UnsupportedModel("its attention mask is neither causal nor a sliding window")
    except (RuntimeError, IndexError) as error:  # it reads the tokens themselves
        raise UnsupportedModel("its attention mask depends on more than positions") from error
    return window


def _first_seen(seen: Callable[[int, int], bool], query: int) -> int:
    """Return the first key that `query` attends to, found by bisection. The query must attend to its own key and not to key 0."""
    hidden, shown = 0, query
    while shown - hidden > 1:
        middle = (hidden + shown) // 2
        hidden, shown = (hidden, middle) if seen(query, middle) else (middle, shown)
    return shown


log = logging.getLogger("oneloop.models")

VERSION: str = transformers.__version__

# Names of our attention implementations in transformers.
PAGED = "oneloop"
_TRACED = "oneloop-traced"
_NUM_TRACED = 5  # tokens
# Supported options of attention, besides those that `_traced_attention` reads.
_HARMLESS = {"dropout", "position_ids", "is_causal"}
# Config keys, at any depth, that name code, possibly on the hub.
_CODE = {"auto_map", "attn_implementation", "experts_implementation", "use_kernels", "kernel_config"}
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_VARYING_ROPES = {"dynamic", "longrope"}

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


# --- the class -----------------------------------------------------------------------------------------------------


def names() -> set[str]:
    """Return the names of all causal LMs of transformers, supported or not."""
    return set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def class_refusal(architecture: str) -> str | None:
    """Return the reason why no model of this transformers class can be served; None if it may be served."""
    if architecture not in names():
        return f"transformers {VERSION} has no causal LM of this name"
    model = getattr(transformers, architecture)
    if model._is_stateful:
        return "its tokens are mixed by more than attention"
    if "ALL_ATTENTION_FUNCTIONS" not in vars(sys.modules[model.__module__]):
        return "its attention is code of its own, not behind transformers' attention interface"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "it takes no positions, which tokens of several sequences side by side need"
    return None


def config_refusal(own: Any) -> str | None:
    """Return the reason why a model with this config cannot be served; None if it can. `own`: transformers' config object."""
    if own.is_encoder_decoder:
        return "it is an encoder-decoder"
    text = own.get_text_config()
    if others := set(getattr(text, "layer_types", None) or ()) - _ATTENTION_LAYERS:
        return f"its tokens are mixed by more than attention ({', '.join(sorted(others))})"
    if varying := _rope_types(getattr(text, "rope_parameters", None)) & _VARYING_ROPES:
        return (
            f"its rotary embedding ({', '.join(varying)}) depends on the longest context of a batch, so answers would "
            "depend on other requests"
        )
    return None


def _rope_types(parameters: Any) -> set[str]:
    if not isinstance(parameters, Mapping):
        return set()
    if isinstance(kind := parameters.get("rope_type"), str):
        return {kind}
    return {kind for each in parameters.values() for kind in _rope_types(each)}


# --- the model -----------------------------------------------------------------------------------------------------


def describe(architecture: str, config: Mapping[str, Any]) -> TransformersSpec:
    """Return the spec of a decoder with this config.json. Raises UnsupportedModel with the reason."""
    own = _own_config(architecture, config)
    text = own.get_text_config()
    model = on_meta(architecture, own)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    calls = _trace(model, own)
    longest = getattr(text, "max_position_embeddings", None)
    if type(longest) is not int or longest <= 0:
        raise UnsupportedModel("its config names no max_position_embeddings")
    pooler = with_dimensions(POOLS_LAST, HfConfig(config))
    return TransformersSpec(
        architecture, text.vocab_size, longest, num_parameters, text.hidden_size, calls, own, pooler
    )


def _own_config(architecture: str, config: Mapping[str, Any]) -> Any:
    if config.get("is_encoder_decoder") is True:
        raise UnsupportedModel("it is an encoder-decoder")
    if why := class_refusal(architecture):
        remote = " and the code that its repository brings (auto_map) is never run" if "auto_map" in config else ""
        raise UnsupportedModel(why + ("," if remote else "") + remote)
    own = config_of(config)
    if why := config_refusal(own):
        raise UnsupportedModel(why)
    return own


def config_of(config: Mapping[str, Any]) -> Any:
    """Return transformers' config object, without keys that name code. Raises UnsupportedModel if transformers has no such model
    type."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UnsupportedModel(f"transformers {VERSION} has no model_type {model_type!r}")
    try:
        return CONFIG_MAPPING[model_type].from_dict(without_code(dict(config)))
    except Exception as error:  # each config class has its own checks and errors
        raise UnsupportedModel(f"transformers cannot read its config{said(error, _OF_CONFIG)}") from error


def without_code(value: Any) -> Any:
    """Return the config without keys that name code to run, at any depth."""
    if isinstance(value, Mapping):
        return {
            key: without_code(each)
            for key, each in value.items()
            if str(key).strip("_").removesuffix("_internal") not in _CODE
        }
    return [without_code(each) for each in value] if isinstance(value, list) else value


def on_meta(architecture: str, own: Any) -> nn.Module:
    """Build transformers' model on the meta device, without memory. Raises UnsupportedModel."""
    config = deepcopy(own)
    config._attn_implementation = _TRACED
    config._experts_implementation = "batched_mm"  # the implementation that never reads the router's choices
    try:
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, architecture)(config).eval()
    except Exception as error:
        raise UnsupportedModel(f"transformers cannot build a model of its config{said(error, _OF_CONFIG)}") from error
    return model


@dataclass(slots=True)
class _Trace:
    """Record of the attention calls of a forward pass. `windows`: by a mask's id, its window or the error, and the mask. The mask
    is kept so that ids stay unique."""

    calls: list[AttentionCall] = field(default_factory=list)
    windows: dict[int, tuple[int | UnsupportedModel | None, Tensor]] = field(default_factory=dict)


_trace_under_way: ContextVar[_Trace] = ContextVar("trace")


@torch.inference_mode()
def _trace(model: Any, own: Any) -> tuple[AttentionCall, ...]:
    base = getattr(model, model.base_model_prefix, None)
    if base is None or "position_ids" not in inspect.signature(base.forward).parameters:
        raise UnsupportedModel("it takes no positions, which tokens of several sequences side by side need")
    found = _Trace()
    token = _trace_under_way.set(found)
    try:
        hidden = base(
            input_ids=torch.zeros((1, _NUM_TRACED), dtype=torch.int64, device="meta"),
            position_ids=torch.arange(_NUM_TRACED, device="meta")[None],
            # Otherwise transformers reads the positions to detect packed sequences.
            attention_mask=torch.ones((1, _NUM_TRACED), dtype=torch.bool, device="meta"),
            use_cache=False,
        )
    except UnsupportedModel:
        raise
    except Exception as error:
        why = _BY_VALUES if "meta" in str(error) else _OF_CONFIG
        raise UnsupportedModel(f"transformers' modules cannot be traced{said(error, why)}") from error
    finally:
        _trace_under_way.reset(token)
    try:
        TransformersHead(model, model.base_model_prefix).logits(hidden)
    except Exception as error:
        log.debug("its head on its own", exc_info=error)
        raise UnsupportedModel("its logits cannot be computed apart from its layers") from error
    num_layers = getattr(own.get_text_config(), "num_hidden_layers", 0)
    if len(found.calls) < num_layers:
        raise UnsupportedModel(
            f"{num_layers - len(found.calls)} of its {num_layers} layers do not use transformers' attention interface"
        )
    return tuple(found.calls)


def _traced_mask(*, q_length: int, kv_length: int, mask_function: MaskFunction, **_: Any) -> Tensor:
    """Return a placeholder for a mask and record its window. transformers calls this function for masks while a model is traced."""
    mask = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
    window: int | UnsupportedModel | None
    try:
        window = window_of(mask_function)
    except UnsupportedModel as why:  # possibly no layer uses it
        window = why
    _trace_under_way.get().windows[id(mask)] = window, mask
    return mask


def _traced_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, softcap: float | None = None, sliding_window: int | None = None,
    s_aux: Tensor | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Record an attention call. transformers calls this function for attention while a model is traced."""
    trace = _trace_under_way.get()
    known = trace.windows.get(id(attention_mask))
    if known is None:
        raise UnsupportedModel("it uses an attention mask of its own")
    window, _ = known
    if isinstance(window, UnsupportedModel):
        raise window
    if strange := sorted(name for name, value in options.items() if name not in _HARMLESS and _says_something(value)):
        raise UnsupportedModel(f"its attention needs {', '.join(strange)}")
    (_, num_heads, num_queries, key_size), (_, num_kv_heads, num_keys, value_size) = query.shape, value.shape
    if num_keys != num_queries or num_heads % num_kv_heads or key.shape != (1, num_kv_heads, num_keys, key_size):
        raise UnsupportedModel("its attention reads keys of other tokens than the sequence's own")
    scale = key_size**-0.5 if scaling is None else float(scaling)
    trace.calls.append(AttentionCall(num_heads, num_kv_heads, key_size, value_size, scale, window, softcap))
    return value.new_empty((1, num_queries, num_heads, value_size)), None


def _says_something(option: Any) -> bool:
    return isinstance(option, Tensor) or bool(option)


_INTERNAL = (AttributeError, TypeError, RuntimeError, LookupError, AssertionError)
_OF_CONFIG = "something in its config is missing, or does not fit the rest"
_BY_VALUES = "what they do depends on the values they compute"


def said(error: Exception, otherwise: str = "") -> str:
    """Return the end of a message: a colon and one line of a library's error. For internal errors the line is `otherwise`. Log the
    error."""
    log.debug("transformers", exc_info=error)
    words = otherwise if isinstance(error, _INTERNAL) else " ".join(str(error).split())[:300]
    return f": {words}" if words else ""


AttentionInterface.register(PAGED, paged_attention)
AttentionInterface.register(_TRACED, _traced_attention)
AttentionMaskInterface.register(_TRACED, _traced_mask)  # no masks for PAGED: transformers then creates none
