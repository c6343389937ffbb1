"""Tiny processors, of transformers' own classes, written as the files of models are: every byte is a token."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

END = "<eos>"
# Parts as templates of such models read them, and the same for those that know texts only.
PARTS = (
    "{% for m in messages %}[{{ m.role }}] {% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}{{ TOKENS[part.type] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)
STRINGS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


class Tiny(NamedTuple):
    """`folder`: of the files. `config`: the model's. `processor`: transformers' own."""

    folder: Path
    config: dict[str, Any]
    processor: Any


def tokenizer(special: list[str], **named: str) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: id for id, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in [END, *special]])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=END, extra_special_tokens=named
    )


def _llava() -> tuple[Any, str, Mapping[str, str]]:
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    processor = transformers.LlavaProcessor(
        images,
        tokenizer(["<image>"]),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return processor, "llava", {"image_token_index": "<image>"}


def _without_videos(kind: Any) -> Any:
    """A class for whose instances what needs torchvision may be None."""

    def check(self: Any, name: str, part: Any) -> Any:
        return None if part is None else kind.check_argument_for_proper_class(self, name, part)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})


def _qwen_vl(kind: Any, model_type: str) -> tuple[Any, str, Mapping[str, str]]:
    images = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=1024)
    tokens = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    named = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    return _without_videos(kind)(images, tokenizer(tokens), None), model_type, named


def _llava_next() -> tuple[Any, str, Mapping[str, str]]:
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 16},
        crop_size={"height": 16, "width": 16},
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
    )
    processor = transformers.LlavaNextProcessor(
        images,
        tokenizer(["<image>"]),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return processor, "llava_next", {"image_token_index": "<image>"}


def _internvl() -> tuple[Any, str, Mapping[str, str]]:
    named = {
        "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>",
    }  # fmt: skip
    images = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=4)
    made = _without_videos(transformers.InternVLProcessor)(
        images, tokenizer([*named.values()], **named), None, image_seq_length=4
    )
    return made, "internvl", {"image_token_id": "<IMG_CONTEXT>"}


def _gemma3() -> tuple[Any, str, Mapping[str, str]]:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    processor = transformers.Gemma3Processor(images, tokenizer([*named.values()], **named), image_seq_length=4)
    return processor, "gemma3", {"image_token_index": "<image_soft_token>"}


def _idefics3() -> tuple[Any, str, Mapping[str, str]]:
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokens = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *places]
    images = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor = transformers.Idefics3Processor(images, tokenizer(tokens), image_seq_len=4)
    return processor, "idefics3", {"image_token_id": "<image>"}


def _qwen2_audio() -> tuple[Any, str, Mapping[str, str]]:
    sounds = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    tokens = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
    return (
        transformers.Qwen2AudioProcessor(sounds, tokenizer(tokens)),
        "qwen2_audio",
        {"audio_token_index": "<|AUDIO|>"},
    )


KINDS: Mapping[str, Callable[[], tuple[Any, str, Mapping[str, str]]]] = {
    "llava": _llava, "llava_next": _llava_next, "internvl": _internvl,
    "qwen2_vl": partial(_qwen_vl, transformers.Qwen2VLProcessor, "qwen2_vl"),
    "qwen2_5_vl": partial(_qwen_vl, transformers.Qwen2_5_VLProcessor, "qwen2_5_vl"),
    "qwen3_vl": partial(_qwen_vl, transformers.Qwen3VLProcessor, "qwen3_vl"),
     "gemma3": _gemma3, "idefics3": _idefics3, "qwen2_audio": _qwen2_audio,
}  # fmt: skip


_OWN = {"internvl": {"image_seq_length": 4}}  # what processor_config.json says


def written(kind: str, folder: Path, template: str = PARTS) -> Tiny:
    """The files of such a processor in `folder`, with a chat template."""
    processor, model_type, named = KINDS[kind]()
    tokens = {name: getattr(processor, f"{name}_token", "") for name in ("image", "audio", "video")}
    if "qwen" in kind and "vl" in kind:
        tokens = {name: f"<|vision_start|>{token}<|vision_end|>" for name, token in tokens.items()}
    processor.chat_template = template.replace("TOKENS", json.dumps(tokens))
    if getattr(processor, "video_processor", processor) is None:  # in the older files, of which each part has one
        processor.tokenizer.save_pretrained(folder)
        processor.image_processor.save_pretrained(folder)
        facts = json.loads((folder / "preprocessor_config.json").read_text())
        named_class = {"processor_class": type(processor).__name__}
        (folder / "preprocessor_config.json").write_text(json.dumps(facts | named_class))
        if kind in _OWN:
            (folder / "processor_config.json").write_text(json.dumps(_OWN[kind] | named_class))
    else:
        processor.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(processor.chat_template)
    config = {"model_type": model_type}
    config |= {key: processor.tokenizer.convert_tokens_to_ids(token) for key, token in named.items()}
    (folder / "config.json").write_text(json.dumps(config))
    return Tiny(folder, config, processor)
