"""ModelInfo: properties of a model that the server uses to check requests and to describe the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from runtime.api.media import EMBEDS, MediaItem, check_media
from runtime.api.requests import PoolingParams, PoolingTask, Request, SequencePooling


@dataclass(frozen=True, slots=True)
class PoolerInfo:
    """Defaults of a model for `PoolingParams`, and the values that requests may choose.

    `embedding_size`: size D of "embed" and "token_embed" vectors. `matryoshka_dimensions`: smaller sizes that the model was
    trained for; () allows any; None: its files name none. `labels`: class names of its classification head, by index; () if it
    has no head. `labels_tokens`: the head classifies each token. `activation`: function applied to the head's output.
    `num_token_types`: number of token type ids; 0 if unsupported. `label_token_ids`: tokens whose logits classify a text; the
    last one means yes."""

    embedding_size: int
    pooling: SequencePooling = "last"
    normalize: bool = True
    matryoshka_dimensions: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()
    labels_tokens: bool = False
    activation: Literal["softmax", "sigmoid", "none"] = "none"
    num_token_types: int = 0
    label_token_ids: tuple[int, ...] = ()

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """Pooling tasks that the model was trained for. Causal models also support "classify" with `label_token_ids`."""
        head: tuple[PoolingTask, ...] = ("token_classify" if self.labels_tokens else "classify",) if self.labels else ()
        return ("embed", "token_embed", *head)


@dataclass(frozen=True, slots=True)
class SpeechInfo:
    """Audio input of a speech model: `num_frames` log-mel frames of `num_mel_bins` bands, from audio at `sample_rate` Hz.

    A frame spans `n_fft` samples and starts `hop_length` samples after the previous one. A request has one audio item: its
    MediaItem has the single position 0 and the input "input_features", float32 [num_mel_bins, num_frames]. The caller pads
    shorter audio and cuts longer audio. The decoder reads the audio through cross-attention, so the prompt contains only text
    and control tokens."""

    num_mel_bins: int
    num_frames: int = 3000
    sample_rate: int = 16_000
    hop_length: int = 160
    n_fft: int = 400

    def silence(self) -> MediaItem:
        """Return an audio item of silence, for probe requests."""
        import numpy as np

        features = np.zeros((self.num_mel_bins, self.num_frames), np.float32)
        return MediaItem("audio", b"silence", np.zeros(1, np.int32), {"input_features": features})

    def check(self, media: Sequence[MediaItem]) -> None:
        """Raise ValueError, with a message for users, unless `media` is one audio item of the model's shape."""
        if len(media) != 1 or media[0].positions.tolist() != [0]:
            raise ValueError(f"a request to a speech model has one window of audio at position 0, not {len(media)}")
        features = media[0].inputs.get("input_features")
        wanted = (self.num_mel_bins, self.num_frames)
        if features is None or features.shape != wanted or features.dtype != "float32":
            given = "none" if features is None else f"{features.dtype} {list(features.shape)}"
            raise ValueError(f"input_features are {given}; this model takes float32 {list(wanted)}")


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """Description of a model from its files, before or after loading. Loading may reduce `max_model_len` if memory is short."""

    architecture: str
    max_model_len: int
    pooler: PoolerInfo
    generates: bool
    modalities: frozenset[str]
    speech: SpeechInfo | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of the loaded model that the server uses to check requests and to describe the model.

    `pooler`: defaults of pooling requests, which any model supports. `generates`: False for encoder models, which have no head
    that samples tokens. Their requests must have PoolingParams. Their `max_model_len` is the longest text that the model's
    files allow, including special tokens."""

    architecture: str
    max_model_len: int  # tokens of prompt and output together
    vocab_size: int
    eos_token_ids: frozenset[int]
    dtype: str
    device: str
    num_parameters: int
    weights_bytes: int
    num_kv_blocks: int
    kv_block_size: int  # tokens
    kv_cache_bytes: int
    max_concurrency: float  # sequences of max_model_len tokens that fit in the KV cache
    prefix_caching: bool
    max_num_seqs: int
    pooler: PoolerInfo
    generates: bool = True
    kv_cache_note: str = ""  # for users: dtype of the KV cache and its gain; empty if it is `dtype`
    speculative: str = ""  # for users: method of speculative decoding; empty if disabled
    reads_predictions: bool = False  # whether draft tokens are also taken from a request's prediction
    modalities: frozenset[str] = frozenset()  # supported media: "image", "audio", "video"
    takes_embeds: bool = False  # prompts may be embeddings
    speech: SpeechInfo | None = None  # for models that transcribe audio, None for others
    topology: str = ""  # for users: connection of its devices; empty if there is nothing to report

    @property
    def probe_media(self) -> tuple[MediaItem, ...]:
        """Media items that a probe request must contain, or () if none are needed."""
        return () if self.speech is None else (self.speech.silence(),)

    def check(self, request: Request) -> None:
        """Raise ValueError, with a message for users, if this model does not support the request's parameters."""
        params = request.params
        if request.media:
            takes = self.modalities | ({EMBEDS} if self.takes_embeds else set())
            check_media(request.media, takes, len(request.prompt_ids), self.architecture)
        if self.speech is not None:
            self.speech.check(request.media)
        if isinstance(params, PoolingParams):
            self.resolve(params, len(request.prompt_ids))
        elif not self.generates:
            raise ValueError(f"{self.architecture} generates no tokens; it can {', '.join(self.pooler.tasks)}")

    def resolve(self, params: PoolingParams, num_tokens: int) -> PoolingParams:
        """Return `params` with its defaults filled in for a prompt of `num_tokens` tokens, or `params` itself if it has none.

        Raises ValueError, with a message for users, if this model does not support `params`."""
        pooler, task, pooling = self.pooler, params.task, params.pooling
        by_tokens = task == "classify" and bool(params.label_token_ids)
        if by_tokens and not self.generates:
            raise ValueError(f"label_token_ids: {self.architecture} generates no tokens")
        if not by_tokens:
            if params.label_token_ids:
                raise ValueError(f"label_token_ids are for the task classify, not {task}")
            if task not in pooler.tasks:
                raise ValueError(f"{self.architecture} cannot {task}; it can {', '.join(pooler.tasks)}")
        elif not 0 <= min(params.label_token_ids) <= max(params.label_token_ids) < self.vocab_size:
            raise ValueError(f"label_token_ids: token ids go from 0 to {self.vocab_size - 1}")
        embeds = task.endswith("embed")
        if pooling is not None and task != "embed":
            raise ValueError(f"pooling applies to the task embed, not {task}")
        if params.dimensions is not None and not (embeds and 0 < params.dimensions <= pooler.embedding_size):
            raise ValueError(f"dimensions: embeddings have from 1 to {pooler.embedding_size}")
        types = params.token_type_ids
        if types is not None:
            if len(types) != num_tokens:
                raise ValueError(f"there are {len(types)} token_type_ids for {num_tokens} tokens")
            if types and not 0 <= min(types) <= max(types) < max(1, pooler.num_token_types):
                raise ValueError(f"token_type_ids go from 0 to {max(1, pooler.num_token_types) - 1}")
        pooling = "last" if by_tokens else pooling or pooler.pooling
        activates = params.use_activation
        if activates is None:
            activates = pooler.normalize if embeds else True
        if pooling == params.pooling and activates is params.use_activation:
            return params
        return replace(params, pooling=pooling, use_activation=activates)
