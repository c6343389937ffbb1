"""Pooling models: decides whether a model pools or generates, and which pooling task it performs.

The options `--runner`, `--convert` and `--pooler-config` decide this, as in vLLM; without them, the model's files do. This
module computes nothing. A request becomes PoolingParams, which the engine resolves for its model (`ModelInfo.pooler`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta, Struct

from runtime.api import ModelInfo, ModelOutline, PoolerInfo, PoolingParams, PoolingTask, SequencePooling
from server.http.errors import Field, InvalidRequest, TaskNotSupported, clip
from server.models.score_template import ScoreTemplate
from server.models.tokenizer import Tokenizer, read_json

Runner = Literal["auto", "generate", "pooling"]
Convert = Literal["auto", "none", "embed", "classify"]
Scoring = Literal["bi-encoder", "late-interaction", "cross-encoder"]
DIMENSIONS = Field("dimensions")
# Among what sentence-transformers gives a chat template: arguments of the call, and a switch of its own.
_NO_VARIABLES = frozenset(
    {"restore_suffix", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length"}
)


class PoolerConfig(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Value of `--pooler-config`, as in vLLM. `pooling_type`: alternative name of `seq_pooling_type` and of `tok_pooling_type`.
    `classifier_from_token`: words with which a generating model answers. The last word means yes; its probability is the score."""

    task: PoolingTask | None = None
    pooling_type: Literal["CLS", "LAST", "MEAN", "ALL"] | None = None
    seq_pooling_type: Literal["CLS", "LAST", "MEAN"] | None = None
    tok_pooling_type: Literal["ALL"] | None = None
    use_activation: bool | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    classifier_from_token: Annotated[list[str], Meta(min_length=1, max_length=128)] | None = None

    @classmethod
    def read(cls, text: str | None) -> PoolerConfig:
        """Parse --pooler-config. Raises ValueError if the text is invalid or contains a contradiction."""
        if text is None:
            return cls()
        try:
            found = msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"--pooler-config: {error}") from None
        if found.pooling_type is not None and (found.seq_pooling_type or found.tok_pooling_type):
            raise ValueError(
                "--pooler-config: pooling_type has the meaning of seq_pooling_type or tok_pooling_type; set one"
            )
        return found

    @property
    def pooling(self) -> SequencePooling | None:
        named = self.seq_pooling_type or self.pooling_type
        return None if named in (None, "ALL") else cast("SequencePooling", named.lower())

    @property
    def wanted_task(self) -> PoolingTask | None:
        all_tokens = "ALL" in (self.pooling_type, self.tok_pooling_type)
        return self.task or ("token_embed" if all_tokens else None)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts that sentence-transformers places before a text, by name (`config_sentence_transformers.json`). `default`: name of
    the prompt for requests that name none. `template_kwargs`: variables of a chat template (`sentence_bert_config.json`)."""

    by_name: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    default: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def read(cls, folder: Path, transformer: Path) -> Prompts:
        """Read the prompts of the model in `folder`. `transformer`: folder of its first module. The result is empty if no file
        contains prompts. Raises ValueError for an invalid file."""
        found = read_json(folder / "config_sentence_transformers.json")
        by_name = {name: text for name, text in (found.get("prompts") or {}).items() if isinstance(text, str)}
        default = found.get("default_prompt_name")
        processing = read_json(transformer / "sentence_bert_config.json").get("processing_kwargs")
        given = processing.get("chat_template") if isinstance(processing, dict) else None
        kwargs = {name: value for name, value in (given or {}).items() if name not in _NO_VARIABLES}
        return cls(MappingProxyType(by_name), default if default in by_name else None, MappingProxyType(kwargs))

    def text(self, name: str | None, param: str) -> str:
        """Return the prompt called `name`, or the default prompt if `name` is None. Raises InvalidRequest for an unknown name."""
        if name is None:
            return "" if self.default is None else self.by_name[self.default]
        if name not in self.by_name:
            known = f"it has {', '.join(map(repr, self.by_name))}" if self.by_name else "it has no prompts"
            raise InvalidRequest(f"{param} {clip(name)!r}: this model has no prompt of that name; {known}", param=param)
        return self.by_name[name]


@dataclass(frozen=True, slots=True)
class ServedPooling:
    """Pooling settings of a served model. `tasks`: supported tasks, the default first. `pooling`, `use_activation`,
    `dimensions`: values of the server's options; None uses the model's. `labels`: names of the classes. `label_token_ids`: token
    ids of the classes, if the classes are tokens. `score_template`: prompt format for scoring two texts; if None, the tokenizer
    joins the texts."""

    architecture: str
    info: PoolerInfo
    tasks: tuple[PoolingTask, ...]
    pooling: SequencePooling | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    label_token_ids: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    prompts: Prompts = field(default_factory=Prompts)
    score_template: ScoreTemplate | None = None

    @classmethod
    def of(
        cls, model: ModelInfo, tokenizer: Tokenizer, config: PoolerConfig, convert: Convert, prompts: Prompts,
        score_template: ScoreTemplate | None = None,
    ) -> ServedPooling:  # fmt: skip
        """Create the pooling settings of a model. Raises ValueError if the model does not support the options."""
        words = tuple(config.classifier_from_token or ())
        ids = [tokenizer.id_of(word) for word in words]
        if None in ids:
            raise ValueError(f"--pooler-config: {words[ids.index(None)]!r} is not a token of this model")
        if words and not model.generates:
            raise ValueError(
                f"--pooler-config: classifier_from_token needs a model that generates; {model.architecture} does not"
            )
        label_ids, use_activation = tuple(id for id in ids if id is not None), config.use_activation
        if not words:
            label_ids = model.pooler.label_token_ids
            if label_ids and use_activation is None:
                use_activation = model.pooler.activation != "none"
        served = cls(
            architecture=model.architecture,
            info=model.pooler,
            tasks=pooled_tasks(model, config, convert),
            pooling=config.pooling,
            use_activation=use_activation,
            dimensions=config.dimensions,
            label_token_ids=label_ids,
            labels=tuple(tokenizer.token_strings(label_ids)) or model.pooler.labels,
            prompts=prompts,
            score_template=score_template,
        )
        try:
            served.check_dimensions(config.dimensions)
        except InvalidRequest as error:
            raise ValueError(f"--pooler-config: {error.message}") from None
        return served

    @property
    def task(self) -> PoolingTask:
        return self.tasks[0]

    @property
    def scoring(self) -> Scoring:
        """Method of scoring two texts. Raises TaskNotSupported if the model has none."""
        if self.task == "embed":
            return "bi-encoder"
        if self.task == "token_embed":
            return "late-interaction"
        if self.task == "classify" and (self.label_token_ids or len(self.labels) == 1):
            return "cross-encoder"
        raise TaskNotSupported(self.architecture, "score", self.tasks)

    def params(
        self, task: PoolingTask, *, dimensions: int | None = None, use_activation: bool | None = None
    ) -> PoolingParams:
        """Return the engine's parameters for a prompt of one text. Raises InvalidRequest for unsupported values."""
        if task not in self.tasks:
            raise TaskNotSupported(self.architecture, task, self.tasks)
        if dimensions is not None and not task.endswith("embed"):
            raise InvalidRequest(DIMENSIONS, f" apply to embeddings, not to the task {task}", param=DIMENSIONS)
        self.check_dimensions(dimensions)
        if dimensions is None and task.endswith("embed"):
            dimensions = self.dimensions
        return PoolingParams(
            task=task,
            pooling=self.pooling if task == "embed" else None,
            use_activation=self.use_activation if use_activation is None else use_activation,
            dimensions=None if dimensions == self.info.embedding_size else dimensions,
            label_token_ids=self.label_token_ids if task == "classify" else (),
        )

    def instruction(self, wanted: str | None) -> str | None:
        """Return the instruction for a score template: `wanted`, or the model's default prompt. Raises InvalidRequest if the
        template has none."""
        takes = self.score_template is not None and self.score_template.takes_instruction
        if wanted and not takes:
            raise InvalidRequest("instruction: this model's prompt format has no instruction", param="instruction")
        return (wanted or self.prompts.text(None, "instruction") or None) if takes else None

    def check_dimensions(self, wanted: int | None) -> None:
        """Raise InvalidRequest if embeddings cannot be cut to `wanted` dimensions."""
        size, trained = self.info.embedding_size, self.info.matryoshka_dimensions
        if wanted is None or wanted == size:
            return
        if wanted > size:
            raise InvalidRequest(
                DIMENSIONS, f" {wanted}: this model's embeddings have {size} dimensions", param=DIMENSIONS
            )
        if trained is None:
            raise InvalidRequest(
                DIMENSIONS, f" {wanted}: this model does not support fewer dimensions (Matryoshka) than {size}",
                param=DIMENSIONS,
            )  # fmt: skip
        if trained and wanted not in trained:
            known = ", ".join(map(str, sorted({*trained, size})))
            raise InvalidRequest(DIMENSIONS, f" {wanted}: this model was trained for {known}", param=DIMENSIONS)

    def num_numbers(self, params: PoolingParams, num_tokens: int) -> int:
        """Return the number of floats in the result for a prompt of `num_tokens` tokens."""
        embeds = params.task.endswith("embed")
        width = (params.dimensions or self.info.embedding_size) if embeds else max(1, len(self.labels))
        return width * num_tokens if params.task.startswith("token_") else width


def served_runner(asked: Runner, model: ModelInfo | ModelOutline, *, embeds: bool) -> Literal["generate", "pooling"]:
    """Return whether the model generates or pools. `asked`: value of --runner. `embeds`: whether the model's files are in
    sentence-transformers' format. Raises ValueError if generation is requested and not supported."""
    if asked == "generate" and not model.generates:
        raise ValueError(
            f"--runner generate: {model.architecture} generates no tokens; omit the option, or use --runner pooling"
        )
    if asked == "auto":
        return "generate" if model.generates and not embeds else "pooling"
    return asked


def pooled_tasks(model: ModelInfo | ModelOutline, config: PoolerConfig, convert: Convert) -> tuple[PoolingTask, ...]:
    """Return the pooling tasks that the model supports: only the task of its head, unless the model is converted. Raises
    ValueError."""
    info = model.pooler
    by_tokens = bool(config.classifier_from_token or info.label_token_ids)
    embeds: tuple[PoolingTask, ...] = ("embed", "token_embed")
    judges: tuple[PoolingTask, ...] = ("classify",) if by_tokens else tuple(t for t in info.tasks if t not in embeds)
    if convert == "classify" and not judges:
        raise ValueError(
            f"--convert classify: {model.architecture} has no classification head. A generating model needs --pooler-config "
            """'{"classifier_from_token": ["no", "yes"]}'"""
        )
    tasks = judges if judges and convert != "embed" else embeds
    wanted = config.wanted_task
    if wanted is None:
        return tasks
    if wanted not in tasks:
        raise ValueError(
            f"--pooler-config: {model.architecture} does not support the task {wanted}; it supports {', '.join(tasks)}"
        )
    return (wanted, *(task for task in tasks if task != wanted))
