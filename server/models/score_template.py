"""Score template: prompt format in which an LLM-based cross-encoder receives a query and a document.

A score template is a chat template with the roles "query" and "document", and "system" for an instruction, as in
sentence-transformers and vLLM. It writes all special tokens itself. Rerankers whose prompt format was published only as code are
built in (`KNOWN_RERANKERS`, for --chat-template). Independent of token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from server.models.control_tokens import Shield
from server.models.prompt import ChatTemplate, PromptError

_PROBES = ("qx7", "dy8", "iz9")
_NAMES_BOTH = [re.compile(f"""["']{role}["']""") for role in ("query", "document")]


@dataclass(frozen=True, slots=True)
class ScoreTemplate:
    """Score template of a model. `add_special_tokens`: the tokenizer adds its special tokens around the prompt, but not a second
    BOS. `kwargs`: further variables of the template. `takes_instruction`: whether the template writes an instruction."""

    template: ChatTemplate
    add_special_tokens: bool
    kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    takes_instruction: bool = field(init=False)

    def __post_init__(self) -> None:
        """Raise PromptError if the template does not write both query and document."""
        query, document, instruction = _PROBES
        text, _ = self.render(None, query, document, None)
        if query not in text or document not in text:
            raise PromptError("the chat template does not write messages of the roles query and document")
        try:
            takes = instruction in self.render(None, query, document, instruction)[0]
        except PromptError:
            takes = False
        object.__setattr__(self, "takes_instruction", takes)

    @classmethod
    def of_option(cls, template: ChatTemplate) -> ScoreTemplate | None:
        """Return `template`, the value of `--chat-template`, as a score template; None if it does not write query and document."""
        return _if_any(template, add_special_tokens=True)

    @classmethod
    def of_files(cls, template: ChatTemplate, kwargs: Mapping[str, Any]) -> ScoreTemplate | None:
        """Return `template`, from the model's files, as a score template; None unless it names both roles. A template that
        accepts any role comes from the reranker's base model."""
        named = template and all(role.search(template.source) for role in _NAMES_BOTH)
        return _if_any(template, add_special_tokens=False, kwargs=kwargs) if named else None

    def render(
        self, shield: Shield | None, query: str, document: str, instruction: str | None
    ) -> tuple[str, str | None]:
        """Return the prompt of a query and a document; see `ChatTemplate.render_shielded`. Raises PromptError."""
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        given: dict[str, Any] = {"add_generation_prompt": False, **self.kwargs}
        if instruction is not None:  # in either of the two places where templates look for it
            messages.insert(0, {"role": "system", "content": instruction})
            given["instruction"] = instruction
        return self.template.render_shielded(shield, messages, **given)


def _if_any(template: ChatTemplate, **options: Any) -> ScoreTemplate | None:
    try:
        return ScoreTemplate(template, **options)
    except PromptError:
        return None


# --- known by name ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KnownReranker:
    """Prompt format of a reranker. `answers`: answer tokens of a checkpoint that still generates; the last one means yes."""

    template: str
    answers: tuple[str, ...]


_QUERY = '{{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}'
_DOCUMENT = '{{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}'
_INSTRUCTION = 'messages | selectattr("role", "eq", "system") | map(attribute="content") | first'

# https://huggingface.co/Qwen/Qwen3-Reranker-0.6B
_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    f"<Instruct>: {{{{ {_INSTRUCTION} "
    '| default("Given a web search query, retrieve relevant passages that answer the query", true) }}\n'
    f"<Query>: {_QUERY}\n<Document>: {_DOCUMENT}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n{{{{ '' }}}}"
)
# https://huggingface.co/BAAI/bge-reranker-v2-gemma
_BGE_GEMMA = (
    f"{{{{ bos_token }}}}A: {_QUERY}\nB: {_DOCUMENT}\nGiven a query A and a passage B, determine whether the passage contains "
    "an answer to the query by providing a prediction of either 'Yes' or 'No'."
)
# https://huggingface.co/mixedbread-ai/mxbai-rerank-base-v2
_MXBAI_V2 = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    f"{{% if messages[0].role == 'system' %}}instruction: {{{{ {_INSTRUCTION} }}}}\n{{% endif %}}"
    f"query: {_QUERY}\ndocument: {_DOCUMENT}\n"
    "You are a search relevance expert who evaluates how well documents match search queries. For each query-document pair, "
    "carefully analyze the semantic relationship between them, then provide your binary relevance judgment (0 for not "
    "relevant, 1 for relevant).\nRelevance:<|im_end|>\n<|im_start|>assistant\n{{ '' }}"
)

KNOWN_RERANKERS = {
    "qwen3-reranker": KnownReranker(_QWEN3, ("no", "yes")),
    "bge-reranker-v2-gemma": KnownReranker(_BGE_GEMMA, ("Yes",)),
    "mxbai-rerank-v2": KnownReranker(_MXBAI_V2, ("0", "1")),
}
