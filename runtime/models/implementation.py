"""Choice of a model's implementation: our own decoder, or transformers' modules with our attention.

torch is imported only when a model is loaded, and transformers only when a model needs it."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from runtime.config import WeightPolicy
from runtime.models.read.sentence_transformers import with_modules
from runtime.models.registry import FAMILIES, architecture_of, is_described, spec_from_config
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.model import ModelSpec, UnsupportedModel
from runtime.models.spec.rope import LongRopeScaling
from runtime.models.through_transformers.tried import ARCHITECTURES, ENCODERS
from runtime.weights.formats import quant_method
from runtime.weights.rules import Checkpoint, Report
from runtime.weights.sentence_transformers import SentenceModules

if TYPE_CHECKING:
    from runtime.models.adapters import AdapterRoom
    from runtime.models.model import Model
    from runtime.models.through_transformers.spec import PaddedSpec, TransformersSpec
    from runtime.parallel.group import Peers
    from runtime.parallel.stages import StageIO

log = logging.getLogger("oneloop.start")


def describe(config: Mapping[str, Any], wanted: str = "auto", modules: SentenceModules | None = None) -> ModelSpec:
    """Return the spec of a Hugging Face config. `wanted`: "native", "transformers", or "auto", which uses native if it is
    supported. `modules`: sentence-transformers modules that follow the model. Raises UnsupportedModel."""
    architecture = architecture_of(config)
    why: str | None = None
    if wanted != "transformers":
        try:
            described = spec_from_config(config)
            return described if modules is None else with_modules(described, modules)
        except UnsupportedModel as error:
            if wanted == "native" or (is_described(architecture) and quant_method(config) is not None):
                raise
            why = str(error) if is_described(architecture) else None
    try:
        spec = _through_transformers(architecture, config)
        if modules is not None:
            from runtime.models.through_transformers.spec import padded_with_modules

            spec = padded_with_modules(spec, modules)
    except UnsupportedModel as error:
        if wanted == "transformers":
            raise UnsupportedModel(f"{architecture} does not run through transformers: {error}") from error
        if why is not None:
            raise UnsupportedModel(f"{why}; nor does it run through transformers: {error}") from error
        raise UnsupportedModel(
            f"architecture {architecture} is not supported: {error}; the nearest that is: {_nearest(architecture)} "
            "(python -m server models lists all)"
        ) from error
    log.info(
        "%s runs through transformers, slower than a native implementation%s",
        architecture,
        "" if why is None else f", which this is not: {why}",
    )
    return replace(spec, native_reason=why)


def load(
    spec: ModelSpec, files: Checkpoint, *, dtype: str, load_format: str, seed: int, progress: Report,
    max_model_len: int, device: str, weights: WeightPolicy, adapters: AdapterRoom | None = None, peers: Peers | None = None,
    stage: StageIO | None = None, counts_experts: bool = False,
) -> Model:  # fmt: skip
    """Load the model of `spec`, a result of `describe`. Arguments are those of `models.load.load_model`. Raises WeightsError if
    config and weights do not match, and UnsupportedModel if they need unsupported features."""
    if isinstance(spec, DecoderSpec):
        if (original := _longrope_switch(spec)) is not None and max_model_len > original:
            log.warning(
                "LongRoPE: the factors for contexts of more than %d tokens are used for all contexts, while transformers uses "
                "other factors for shorter ones; --max-model-len %d gives these theirs, and allows no longer ones",
                original,
                original,
            )
        from runtime.models.load import load_model

        model = load_model(
            files, dtype=dtype, load_format=load_format, seed=seed, progress=progress, max_model_len=max_model_len,
            device=device, weights=weights, spec=spec, adapters=adapters, peers=peers, stage=stage,
            counts_experts=counts_experts,
        )  # fmt: skip
        if spec.encoder is not None and spec.encoder.own is not None:
            from runtime.models import sound_encoder

            model.encoder = sound_encoder.load(
                spec.encoder, files, dtype=dtype, load_format=load_format, seed=seed, progress=progress, device=device,
                weights=weights,
            )  # fmt: skip
        elif spec.encoder is not None:
            from runtime.models.through_transformers import tower

            try:
                model.encoder = tower.load(
                    spec.encoder,
                    files,
                    dtype=dtype,
                    load_format=load_format,
                    seed=seed,
                    progress=progress,
                    device=device,
                )
            except UnsupportedModel as error:
                log.warning("%s is served for text alone: %s", spec.architecture, error)
        return model
    if adapters is not None:
        raise UnsupportedModel(f"{spec.architecture} runs through transformers, which does not support adapters")
    from runtime.models.through_transformers.load import load as load_through_transformers
    from runtime.models.through_transformers.spec import PaddedSpec, TransformersSpec

    if isinstance(spec, PaddedSpec):
        from runtime.models.through_transformers.encoders import load as load_encoder

        return load_encoder(
            spec, files, dtype=dtype, load_format=load_format, seed=seed, progress=progress, device=device, weights=weights
        )  # fmt: skip
    assert isinstance(spec, TransformersSpec)
    try:
        return load_through_transformers(
            spec, files, dtype=dtype, load_format=load_format, seed=seed, progress=progress, device=device, weights=weights
        )  # fmt: skip
    except UnsupportedModel as error:
        if spec.native_reason is None:
            raise UnsupportedModel(f"{spec.architecture} does not run through transformers: {error}") from error
        raise UnsupportedModel(f"{spec.native_reason}; nor does it run through transformers: {error}") from error


def supported() -> Iterator[tuple[str, str]]:
    """Yield (architecture, implementation), where the implementation is "native" or "transformers".

    Architectures through transformers are included if they were tested and the package is installed. A config of a supported
    architecture may still use unsupported options."""
    yield from ((name, "native") for name in FAMILIES)
    yield from ((name, "transformers") for name in _tried())


def _longrope_switch(spec: DecoderSpec) -> int | None:
    """Return the context length in tokens above which transformers uses LongRoPE's long factors; None if the model has one set of
    factors.

    Here one set is used at any length. Otherwise a growing sequence would have to be recomputed from its first token, and cached
    blocks could not be shared."""
    scalings = (attention.rope.scaling for attention in spec.attentions() if attention.rope is not None)
    lengths = (
        each.original_max_positions
        for each in scalings
        if isinstance(each, LongRopeScaling) and each.short != each.long
    )
    return next(lengths, None)


def _through_transformers(architecture: str, config: Mapping[str, Any]) -> TransformersSpec | PaddedSpec:
    if (method := quant_method(config)) is not None:
        raise UnsupportedModel(f"weights quantised with {method!r} cannot be read there")
    try:
        from runtime.models.through_transformers import describe as library
        from runtime.models.through_transformers import encoders
    except ImportError as error:
        raise UnsupportedModel(
            f"it has no native implementation, and the transformers package cannot be imported: "
            f"pip install 'transformers>=5.23,<6' ({error})"
        ) from error
    if encoders.is_encoder(architecture):
        return encoders.describe(architecture, config)
    return library.describe(architecture, config)


# Models published under two names: that of their own code, and that in transformers.
_AS_TRANSFORMERS_HAS_IT = {
    "InternVLChatModel": "InternVLForConditionalGeneration",
    "Phi4MMForCausalLM": "Phi4MultimodalForCausalLM",
    "LlavaLlamaForCausalLM": "LlavaForConditionalGeneration",
    "LlavaQwenForCausalLM": "LlavaOnevisionForConditionalGeneration",
}


def _nearest(architecture: str) -> str:
    if architecture in _AS_TRANSFORMERS_HAS_IT:
        return f"{_AS_TRANSFORMERS_HAS_IT[architecture]}, the same model as transformers has it"
    known = {*FAMILIES, *_tried()} - {architecture}
    return difflib.get_close_matches(architecture, known, n=1, cutoff=0.0)[0]


def _tried() -> tuple[str, ...]:
    return (*ARCHITECTURES, *ENCODERS) if find_spec("transformers") is not None else ()
