"""Media encoders of a transformers model, run with its modules and without the decoder.

The model's class is built with a decoder of no layers and a tiny vocabulary. Our readers load the encoder's weights, and the rest
of the decoder is dropped. The class's own `get_image_features` and similar methods compute the outputs."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ops
from runtime.api.media import MediaItem
from runtime.models.model import EncoderPasses
from runtime.models.spec.model import EncoderSpec, UnsupportedModel
from runtime.models.through_transformers import made_up
from runtime.models.through_transformers.describe import VERSION, said, without_code
from runtime.models.through_transformers.grids import Grids
from runtime.models.through_transformers.load import lazily, read_when_needed, state_shapes
from runtime.models.through_transformers.tower_passes import run_by
from runtime.models.through_transformers.vision_blocks import take_over, take_over_layers, towers
from runtime.weights.rules import Checkpoint, Report, WeightsError, refuse_misfit, shape_text

log = logging.getLogger("oneloop.models")

_FEATURES = {"image": "get_image_features", "video": "get_video_features", "audio": "get_audio_features"}
_GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
_LOOKED_AT = ("image_sizes",)  # they stay on the host, where modules read them
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_REFUSALS = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError)
_SAMPLE_SIDES = (8, 16, 37)  # in tokens: images of 224, 448 and 1,036 pixels with 28 pixels per token
_PIXEL_BYTES = 40 << 20  # per pass: four images of 896 x 896, which saturate a GPU
_WITHIN = "thinker."  # prefix in models with speech output, which have another class
# Minimum config of the decoder, which is dropped: only what every class needs.
_ATTENTION = {"": "sdpa", "text_config": "eager"}
_DECODERS = ("language_model", "text_model", "lm_head", "embed_tokens")


class Tower:
    """Implementation of `Encoder` with transformers' modules."""

    def __init__(self, spec: EncoderSpec, model: nn.Module, dtype: torch.dtype, device: str) -> None:
        self.spec = spec
        self.passes: EncoderPasses | None = None
        self._model, self._dtype, self._device = model, dtype, device
        self.num_parameters = sum(each.numel() for each in model.parameters())
        self.weights_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
        self._grids = _own_blocks(model) if spec.is_packed else None
        if not spec.is_packed:
            take_over_layers(model)
            run_by(lambda: self.passes, model)
        base = getattr(model, "model", model)  # without the head, whose own methods may only delegate
        self._features = {each: _features(base, each) for each in spec.modalities}
        self._takes = {each: _parameters(features) for each, features in self._features.items()}

    @torch.inference_mode()
    def encode(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Return the outputs of each item, see `Encoder`. Items are batched if the encoder packs patches, or if images have one
        size. Others are encoded one by one, since classes batch in different ways."""
        if self.spec.is_packed and items[0].modality != "audio":
            return self._encode(items)
        return [outputs for group in self._groups(items) for outputs in self._encode(group)]

    def _groups(self, items: Sequence[MediaItem]) -> Iterator[list[MediaItem]]:
        group: list[MediaItem] = []
        for item in items:
            if group and not self._goes_with(group, item):
                yield group
                group = []
            group.append(item)
        yield group

    def _goes_with(self, group: Sequence[MediaItem], item: MediaItem) -> bool:
        taken = [name for name in item.inputs if name in self._takes[item.modality]]
        first, pixels = group[0].inputs.get("pixel_values"), item.inputs.get("pixel_values")
        if taken != ["pixel_values"] or first is None or pixels is None or first.shape[1:] != pixels.shape[1:]:
            return False
        return pixels.nbytes + sum(each.inputs["pixel_values"].nbytes for each in group) <= _PIXEL_BYTES

    def _encode(self, items: Sequence[MediaItem]) -> list[Tensor]:
        first, sizes = items[0], [len(item.positions) for item in items]
        features = self._outputs(first.modality, [item.inputs for item in items])
        if len(features) != sum(sizes):
            raise ValueError(f"{sum(sizes)} positions for {len(features)} outputs of the {first.modality}")
        return list(features.split_with_sizes(sizes))

    def _outputs(self, modality: str, given: Sequence[made_up.Inputs]) -> Tensor:
        taken = {name: [each[name] for each in given] for name in given[0] if name in self._takes[modality]}
        known = taken.get(_GRIDS.get(modality, ""))
        if known is None or self._grids is None:
            sizes = {name: torch.from_numpy(np.concatenate(taken.pop(name))) for name in _LOOKED_AT if name in taken}
            return self._computed(modality, {name: self._placed(each) for name, each in taken.items()}, sizes)
        grids = torch.from_numpy(np.concatenate(known))
        beside = self._grids.of(grids, self._device)
        if self._grids.on_device:
            return self._computed(modality, {name: self._placed(each) for name, each in taken.items()}, beside)
        del taken[_GRIDS[modality]]
        compute = partial(self._computed, modality, beside={_GRIDS[modality]: grids, **beside})
        placed = {name: self._placed(each) for name, each in taken.items()}
        if self.passes is None:
            return compute(placed)
        shapes = sorted((name, tuple(each.shape)) for name, each in placed.items())
        key = repr((modality, shapes)).encode() + grids.numpy().tobytes()
        return self.passes.run(key, self._grids.num_outputs(grids), placed, compute)

    def _computed(self, modality: str, inputs: Mapping[str, Tensor], beside: Mapping[str, Any] = _NOTHING) -> Tensor:
        found = self._features[modality](**inputs, **beside, return_dict=True)
        features = _flat(found.last_hidden_state if found.pooler_output is None else found.pooler_output)
        if self.spec.num_deepstack and modality == "audio":  # only images and videos have them
            features = nn.functional.pad(features, (0, features.shape[1] * self.spec.num_deepstack))
        elif self.spec.num_deepstack:
            features = torch.cat([features, *map(_flat, found.deepstack_features)], dim=1)
        features = features.to(self._dtype)
        return features if self.spec.multiplier == 1.0 else features * self.spec.multiplier

    @torch.inference_mode()
    def samples(self, max_tokens: int) -> list[list[MediaItem]]:
        """Return groups of artificial items for warm-up, see `Encoder`: small and larger images, a full batch of the largest, a
        video and audio."""
        groups: list[list[MediaItem]] = []
        for modality in sorted(self.spec.modalities, key=("image", "video", "audio").index):
            try:
                groups += self._samples_of(modality, max_tokens)
            except _REFUSALS as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                log.warning("no %s is made up to try %s with at start: %s", modality, self.spec.architecture, error)
        return groups

    def _samples_of(self, modality: str, max_tokens: int) -> list[list[MediaItem]]:
        config: Any = self._model.config
        if modality == "audio":
            return [[self._counted("audio", [made_up.sound(config)])]]
        vision = config.vision_config
        if modality == "image" and "image_pixel_values" in self._takes["image"]:
            return [[self._counted("image", [made_up.crops(vision)])]]
        if not self.spec.is_packed:
            return [[self._counted(modality, made_up.of_one_size(config, modality))]]
        if modality == "video":
            return [[made_up.on_a_grid(vision, "video", 2, _SAMPLE_SIDES[0], 0)]]
        largest = _SAMPLE_SIDES[-1] ** 2
        each = [[made_up.on_a_grid(vision, "image", 1, side, 0)] for side in _SAMPLE_SIDES]
        several = range(1, 1 + max_tokens // largest)
        if len(several) > 1:
            each.append([made_up.on_a_grid(vision, "image", 1, _SAMPLE_SIDES[-1], number) for number in several])
        return each

    def _counted(self, modality: str, possible: Iterable[made_up.Inputs]) -> MediaItem:
        """Return an item with the first of the inputs `possible` that the model accepts, and with its number of outputs. If it
        accepts none, raise the last error."""
        why: Exception = ValueError(f"it takes no {modality}")
        for inputs in possible:
            try:
                num = len(self._outputs(modality, [inputs]))
            except _REFUSALS as error:
                why = error
            else:
                return MediaItem(modality, b"sample " + modality.encode(), np.arange(num, dtype=np.int32), inputs)
        raise why

    def _placed(self, arrays: Sequence[np.ndarray[Any, Any]]) -> Tensor:
        """Concatenate arrays on the encoder's device. On the host this takes twice as long."""
        placed = [torch.from_numpy(each) for each in arrays]
        placed = [each.to(self._device, self._dtype if each.is_floating_point() else None) for each in placed]
        return placed[0] if len(placed) == 1 else torch.cat(placed)


def _own_blocks(model: nn.Module) -> Grids | None:
    """Replace the encoder's blocks by ours, if supported, and return the cache of its grid inputs. Return None if it has no such
    encoder."""
    found = towers(model)
    if len(found) != 1:
        return None
    take_over(found[0])
    return Grids(found[0])


def _features(model: Any, modality: str) -> Any:
    """Return the function that computes the outputs of a modality: a method of the model, or a copy of a part of its forward
    pass."""
    if isinstance(model, transformers.Llama4ForConditionalGeneration):
        return partial(_llama4, model)
    if isinstance(model, transformers.Phi4MultimodalModel):
        if modality == "image":
            return partial(_phi4_pictures, model.embed_tokens_extend)
        return partial(_phi4_sounds, model.embed_tokens_extend)
    if isinstance(model, transformers.Mistral3Model):
        # `get_image_features` squeezes the projector's [N, W], which fails for N = 1.
        model.multi_modal_projector.register_forward_hook(lambda module, given, projected: projected[None])
    own = getattr(model, _FEATURES[modality], None)
    if own is None and isinstance(model, transformers.Qwen2AudioModel):
        return partial(_qwen2_audio, model)
    if own is None:
        raise UnsupportedModel(f"transformers {VERSION} has no {_FEATURES[modality]} of {type(model).__name__}")
    return own


def _qwen2_audio(
    model: Any, input_features: Tensor, feature_attention_mask: Tensor, return_dict: bool = True
) -> BaseModelOutputWithPooling:
    """Return the outputs of all audio items without padding. input_features [n, mels, T], feature_attention_mask [n, T]. This is a
    copy of code inside transformers' `Qwen2AudioModel.forward`."""
    num_frames, num_outputs = model.audio_tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    places = torch.arange((input_features.shape[2] - 2) // 2 + 1, device=input_features.device)
    mask = create_bidirectional_mask(
        config=model.audio_tower.config,
        inputs_embeds=input_features.new_zeros((len(input_features), len(places), 1)),
        attention_mask=(places[None] < num_frames[:, None]).long(),
    )
    hidden = model.audio_tower(input_features, attention_mask=mask).last_hidden_state
    projected = model.multi_modal_projector(hidden)
    is_sound = torch.arange(projected.shape[1], device=projected.device)[None] < num_outputs[:, None]
    return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=projected[is_sound])


def _llama4(model: Any, pixel_values: Tensor, return_dict: bool = True) -> BaseModelOutputWithPooling:
    """Return the projected outputs of pixel_values [tiles, 3, S, S]. transformers' own method omits the projector."""
    seen = model.vision_model(pixel_values).last_hidden_state
    return BaseModelOutputWithPooling(last_hidden_state=seen, pooler_output=model.multi_modal_projector(seen))


def _phi4_pictures(
    embed: Any, image_pixel_values: Tensor, image_sizes: Tensor, image_attention_mask: Tensor, return_dict: bool = True
) -> BaseModelOutputWithPooling:
    """Return the outputs of Phi-4's images.

    image_pixel_values [n, crops, 3, S, S], image_sizes [n, 2], image_attention_mask [n, crops, P, P]: 1 for patches that are not
    padding. transformers writes the outputs at positions of a prompt, so an artificial prompt of image tokens is used. The outputs
    of an image are those of its crops, with one output after each row, a separator, and the outputs of the whole image in the same
    form."""
    part, num = embed.image_embed, 0
    side = math.isqrt(part.num_img_tokens)
    for (height, width), seen in zip((image_sizes // part.crop_size).tolist(), image_attention_mask, strict=True):
        joined = seen[1 : height * width + 1, ::2, ::2].reshape(height, width, side, side).transpose(1, 2)
        joined = joined.reshape(height * side, width * side)
        num += int(joined[:, 0].sum()) * (int(joined[0].sum()) + 1) + 1 + side * (side + 1)
    ids, nothing = _of_outputs(num, embed.image_token_id, part.img_projection_down)
    outputs = part(ids, nothing, image_pixel_values, image_sizes, image_attention_mask)
    return BaseModelOutputWithPooling(pooler_output=outputs)


def _phi4_sounds(
    embed: Any, audio_input_features: Tensor, audio_embed_sizes: Tensor, audio_attention_mask: Tensor | None = None,
    beside_pictures: Tensor | None = None, return_dict: bool = True,
) -> BaseModelOutputWithPooling:  # fmt: skip
    """Return the outputs of audio_input_features [n, T, mels]. audio_embed_sizes [n]: number of outputs of each item.
    `beside_pictures`: not None if the prompt has images, for which the encoder has another projection."""
    part = embed.audio_embed
    ids, nothing = _of_outputs(int(audio_embed_sizes.sum()), embed.audio_token_id, part.down_proj_for_speech)
    mode = "speech" if beside_pictures is None else "vision"
    outputs = part(ids, nothing, audio_input_features, audio_embed_sizes.tolist(), audio_attention_mask, mode)
    return BaseModelOutputWithPooling(pooler_output=outputs)


def _of_outputs(num: int, token: int, last: nn.Linear) -> tuple[Tensor, Tensor]:
    weight = last.weight
    return weight.new_full((1, num), token, dtype=torch.int64), weight.new_zeros((1, num, len(weight)))


def _flat(features: Any) -> Tensor:
    parts = features if isinstance(features, list | tuple) else [features]
    return torch.cat([part.flatten(0, -2) for part in parts])


def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(inspect.unwrap(function)).parameters)


def load(
    spec: EncoderSpec, files: Checkpoint, *, dtype: str, load_format: str, seed: int, progress: Report, device: str
) -> Tower | None:
    """Load an encoder. Arguments are those of `models.load.load_model`. Return None if the checkpoint contains only the text model.
    Raises WeightsError if weights do not match, and UnsupportedModel if transformers has no such model."""
    own = _small_decoder(spec)
    model_class = getattr(transformers, spec.architecture)
    with torch.device("meta"):
        described = _built(model_class, own)
    every = state_shapes(described)
    shapes = {name: shape for name, shape in every.items() if not _is_decoders(name)}
    # transformers would initialise the dropped decoder's weights with the device's generator, changing its state.
    zeros = {name: torch.zeros(shape) for name, shape in every.items() if _is_decoders(name)}
    with files.open_tensors(load_format, shapes, seed) as source:
        names = [name for name in source.shapes if name.startswith(spec.stored_below)]
        if load_format == "dummy":
            names = list(shapes)
        if not names:
            log.warning("%s is served for text alone: its checkpoint has no encoder", spec.architecture)
            return None
        stored = {name.removeprefix(_WITHIN): each for name, each in lazily(source, names, progress).items()}
        try:
            with read_when_needed():
                model, found = model_class.from_pretrained(
                    None, config=own, state_dict=stored | zeros, dtype=getattr(torch, dtype),
                    attn_implementation=_ATTENTION, ignore_mismatched_sizes=True, output_loading_info=True,
                    device_map={"": device},
                )  # fmt: skip
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, KeyError, ImportError) as error:
            raise WeightsError(f"transformers cannot make the encoder of these weights{said(error)}") from error
    misshapen = [
        f"{name} is {shape_text(stored)} instead of {shape_text(wanted)}"
        for name, stored, wanted in sorted(found["mismatched_keys"])
    ]
    missing = sorted(name for name in found["missing_keys"] if not _is_decoders(name))
    refuse_misfit(missing, misshapen, sorted(found["unexpected_keys"]))
    _drop_decoder(model)
    if spec.is_packed:
        _attend_packed(model)
    return Tower(spec, model.eval(), getattr(torch, dtype), device)


def num_parameters(spec: EncoderSpec) -> int:
    """Return the number of parameters of the encoder, without allocating them."""
    with torch.device("meta"):
        model = _built(getattr(transformers, spec.architecture), _small_decoder(spec))
    return sum(each.numel() for name, each in model.named_parameters() if not _is_decoders(name))


def _small_decoder(spec: EncoderSpec) -> Any:
    config: Mapping[str, Any] = spec.config
    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING or not hasattr(transformers, spec.architecture):
        raise UnsupportedModel(f"transformers {VERSION} has no {spec.architecture} of model_type {model_type!r}")
    try:
        own = CONFIG_MAPPING[model_type].from_dict(deepcopy(without_code(_plain(config))))
    except Exception as error:  # each config class has its own checks and errors
        raise UnsupportedModel(f"transformers cannot read the encoder's config{said(error)}") from error
    text = own.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 8, None
    if getattr(text, "layer_types", None):
        text.layer_types = []
    return own


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "quantization_config"}


def _built(model_class: Any, own: Any) -> nn.Module:
    try:
        model: nn.Module = model_class(deepcopy(own))
    except Exception as error:
        raise UnsupportedModel(f"transformers cannot build the encoder of its config{said(error)}") from error
    return model


def _is_decoders(name: str) -> bool:
    return name == "model.norm.weight" or not set(name.split(".")).isdisjoint(_DECODERS)


def _drop_decoder(model: nn.Module) -> None:
    for parent in [*model.modules()]:
        for name in _DECODERS:
            if name in dict(parent.named_children()):
                setattr(parent, name, None)


def _attend_packed(model: nn.Module) -> None:
    """Configure the encoder so that the patches of all items are computed in one attention call."""
    for name, module in model.named_modules():
        if "audio_tower" not in name and isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            config._attn_implementation = _PACKED


def _packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, cu_seq_lens_q: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return attention [1, T, Hq, D] of query, key and value [1, Hq, T, D]. transformers calls this function. `cu_seq_lens_q` [R +
    1]: starts of the groups of patches that attend to each other."""
    assert attention_mask is None
    assert cu_seq_lens_q is not None
    num_heads, num_tokens, size = query.shape[1:]
    qkv = torch.cat([each[0].transpose(0, 1) for each in (query, key, value)], dim=1).flatten(1)
    starts = cu_seq_lens_q.to(qkv.device, torch.int32)
    heads = ops.AttentionHeads(
        num_heads, num_heads, size, size**-0.5 if scaling is None else scaling, qkv.new_empty((0, 0), dtype=torch.float32),
        mask="full",
    )  # fmt: skip
    meta = ops.AttentionMeta(starts, starts[1:] - starts[:-1], starts[:0, None], num_tokens, num_tokens)
    mixed = ops.attend_packed(qkv, heads, starts, meta)
    return mixed.view(1, num_tokens, num_heads, size), None


# What transformers treats as flash attention gets all patches of a step, and the start of each item.
_PACKED = "oneloop_flash_packed"
AttentionInterface.register(_PACKED, _packed_attention)
