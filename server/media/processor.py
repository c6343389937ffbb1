"""Wrapper of a model's transformers processor, which processes one image, audio or video item per call.

Each item is processed alone, so its tensors do not depend on the other items of the prompt or batch. Errors name a missing
processor or package. In this folder, only this file imports transformers, and only for models that need it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from server.media.part import Modality
from server.media.placeholders import Expansion

# What a config calls the token that takes an encoder's outputs.
_OUTPUT_KEYS: Final[Mapping[Modality, tuple[str, ...]]] = MappingProxyType({
    "image": ("image_token_id", "image_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
    "video": ("video_token_id", "video_token_index"),
})  # fmt: skip
_FILES: Final = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_PARTS: Final[Mapping[Modality, tuple[str, ...]]] = MappingProxyType(
    {"image": ("image_processor",), "audio": ("audio_processor", "feature_extractor"), "video": ("video_processor",)}
)
_HEARD: Final = MappingProxyType({"load_audio_from_video": True, "audio_from_video_indices": [0]})
_ARGUMENTS: Final[Mapping[Modality, str]] = MappingProxyType({"image": "images", "audio": "audio", "video": "videos"})
# Of what a processor gives, that is about its text and not about the item.
_OF_TEXT: Final = frozenset(
    {
        "input_ids",
        "labels",
        "attention_mask",
        "token_type_ids",
        "mm_token_type_ids",
        "text_replacement_offsets",
        "video_metadata",
    }
)


class Training(NamedTuple):
    """Details of a model's training that its processor and config do not contain. `images_first`: in a prompt without a
    template, all images precede the text. `tells_apart`: audio is encoded differently if the prompt has images."""

    images_first: bool = False
    tells_apart: bool = False


# By processor class; the only model-specific code of this module.
_TRAINING: Final[Mapping[str, Training]] = MappingProxyType({
    "PaliGemmaProcessor": Training(images_first=True),
    "Phi4MultimodalProcessor": Training(tells_apart=True),
})  # fmt: skip


class ProcessorError(Exception):
    """Error: the processor is not available. The message states a reason that the server's operator can act on."""


class Refused(ValueError):
    """Error: the processor rejects an item. The message is for the client."""


class Processor:
    """Wrapper of a transformers processor. `modalities`: the kinds of items that the processor supports. `tokens`: by modality,
    the placeholder that a chat template writes for each item. `output_ids`: by modality, the token id that is replaced by
    encoder outputs. `fingerprint`: digest of the processor's files."""

    def __init__(self, processor: Any, config: Mapping[str, Any], fingerprint: bytes = b"") -> None:
        """Wrap the transformers object `processor` for a model with the config `config`. Raises ProcessorError."""
        self._processor = processor
        self._training = _TRAINING.get(type(processor).__name__, Training())
        self.fingerprint = fingerprint
        self.tokens: dict[Modality, str] = {}
        self.output_ids: dict[Modality, int] = {}
        for modality, keys in _OUTPUT_KEYS.items():
            token = getattr(processor, f"{modality}_token", None)
            if token is None or self._part(modality) is None:
                continue
            ids = (config.get(key) for key in keys)
            found = next((id for id in ids if type(id) is int), getattr(processor, f"{modality}_token_id", None))
            if type(found) is int:
                self.tokens[modality], self.output_ids[modality] = token, found
        if not self.tokens:
            raise ProcessorError(f"{type(processor).__name__} has no placeholder tokens")

    @classmethod
    def load(cls, folder: Path, config: Mapping[str, Any]) -> Processor:
        """Load the processor of the model in `folder`. Raises ProcessorError."""
        try:
            import PIL  # noqa: F401 (transformers would say less of what is missing)
            import transformers.models.auto.processing_auto as found
        except ImportError as error:
            raise ProcessorError(f"{error.name} is not installed: pip install 'oneloop[media]'") from None
        processing_auto: Any = found  # half of it is not typed
        name = _class_name(folder) or processing_auto.PROCESSOR_MAPPING_NAMES.get(config.get("model_type", ""))
        kind = None if name is None else processing_auto.processor_class_from_name(name)
        if kind is None:
            raise ProcessorError(f"transformers has no processor {name}" if name else f"{folder} names no processor")
        try:
            processor = _loaded(kind, folder)
        except ImportError as error:
            raise ProcessorError(f"{name} needs a package that is not installed: {str(error).strip()}") from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ProcessorError(f"{name} cannot be created from {folder}: {error}") from error
        files = [path.read_bytes() for each in _FILES if (path := folder / each).is_file()]
        return cls(processor, config, hashlib.sha256(b"\0".join([str(name).encode(), *files])).digest())

    @property
    def layout(self) -> Callable[[str], str] | None:
        """Function that formats a prompt without a template, or None; see `PromptMedia.layout`."""
        return self._images_first if self._training.images_first else None

    @property
    def tells_apart(self) -> bool:
        """True if audio is encoded differently when the prompt has images; see `PromptMedia.tells_apart`."""
        return self._training.tells_apart

    def _images_first(self, text: str) -> str:
        """Return the prompt `text` in PaliGemma's training format: with BOS after the last image, and a line break at the end."""
        head, token, asked = text.rpartition(self.tokens["image"])
        return f"{head}{token}{self._processor.tokenizer.bos_token}{asked}\n"

    @property
    def hears_videos(self) -> bool:
        """True if the processor accepts a video with its audio. Such a processor requires the frame rate."""
        return hasattr(self._processor, "load_audio_from_video") and {"audio", "video"} <= self.modalities

    @property
    def modalities(self) -> frozenset[Modality]:
        return frozenset(self.tokens)

    @property
    def sampling_rate(self) -> int:
        """Sampling rate of the audio that the processor expects, in Hz."""
        return int(getattr(self._part("audio"), "sampling_rate", 16_000))

    def process(
        self, modality: Modality, value: Any, options: Mapping[str, Any], sound: Any = None
    ) -> tuple[Expansion, dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]]:
        """Process one item. Return the text that replaces its placeholder, and its tensors by name. Raises Refused.

        `options`: mm_processor_kwargs and the options of this item. `sound`: samples [N] of a video's audio track. The names of
        audio tensors then do not contain "video"."""
        token = self.tokens[modality]
        heard = {} if sound is None else {**_HEARD, "audio": [sound], "sampling_rate": self.sampling_rate}
        try:
            made = self._processor(
                text=[token],
                **{_ARGUMENTS[modality]: [value]},
                return_tensors="pt",
                return_text_replacement_offsets=True,
                **options,
                **heard,
            )
        except (ValueError, TypeError, LookupError, AttributeError, ZeroDivisionError, RuntimeError) as error:
            raise Refused(str(error) or type(error).__name__) from error
        if modality == "audio" or sound is not None:
            self._check_heard(made, len(value if sound is None else sound))
        replaced = made["text_replacement_offsets"][0][0]["replacement"]
        tokenizer = self._processor.tokenizer
        output_token = tokenizer.convert_ids_to_tokens(self.output_ids[modality])
        sound_token = None if sound is None else tokenizer.convert_ids_to_tokens(self.output_ids["audio"])
        expansion = Expansion.of(replaced, output_token, sound_token)
        if not expansion.num_outputs:
            raise Refused("it is too small: the processor makes no tokens of it")
        return expansion, {name: _array(tensor) for name, tensor in made.items() if name not in _OF_TEXT}

    def _check_heard(self, made: Mapping[str, Any], num_samples: int) -> None:
        """Raise Refused if the processor has silently shortened the audio. `made`: the processor's output."""
        mask, hop = made.get("feature_attention_mask"), getattr(self._part("audio"), "hop_length", 0)
        if mask is not None and hop and int(mask.sum()) * hop < num_samples - hop:
            seconds = int(mask.sum()) * hop / self.sampling_rate
            raise Refused(
                f"this model accepts audio of at most {seconds:g} s; this one is {num_samples / self.sampling_rate:.1f} s long"
            )

    def _part(self, modality: Modality) -> Any:
        parts = (getattr(self._processor, name, None) for name in _PARTS[modality])
        return next((part for part in parts if part is not None), None)


def _array(tensor: Any) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """Convert a tensor, or a list of tensors (one per image tile), to a numpy array."""
    if isinstance(tensor, Sequence):
        tensor = [_array(each) for each in tensor]
        return np.stack(tensor) if len({each.shape for each in tensor}) == 1 else np.asarray(tensor)
    if str(getattr(tensor, "dtype", "")) == "torch.bfloat16":  # Llama 4; numpy has no bfloat16
        tensor = tensor.float()
    return np.ascontiguousarray(tensor.numpy() if hasattr(tensor, "numpy") else tensor)


def _class_name(folder: Path) -> str | None:
    for name in (*_FILES, "tokenizer_config.json"):
        path = folder / name
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8")).get("processor_class")
            if isinstance(found, str):
                return found
    return None


def _loaded(kind: Any, folder: Path) -> Any:
    """Load a processor of class `kind`. If torchvision is not installed, load it without its video processor."""
    import transformers
    from transformers.utils.import_utils import is_torchvision_available

    if "video_processor" not in kind.get_attributes() or is_torchvision_available():
        return kind.from_pretrained(folder, local_files_only=True)
    makers: dict[str, Any] = {
        "image_processor": transformers.AutoImageProcessor,
        "feature_extractor": transformers.AutoFeatureExtractor,
        "tokenizer": transformers.AutoTokenizer,
    }
    facts, _ = kind.get_processor_dict(folder, local_files_only=True)
    arguments = [
        None if name == "video_processor" else makers[name].from_pretrained(folder, local_files_only=True)
        for name in kind.get_attributes()
    ]
    return _without_videos(kind).from_args_and_dict(arguments, facts)


def _without_videos(kind: Any) -> Any:
    """Return a subclass of the processor class `kind` that allows its components to be None."""

    def check(self: Any, name: str, part: Any) -> Any:
        return None if part is None else kind.check_argument_for_proper_class(self, name, part)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})
