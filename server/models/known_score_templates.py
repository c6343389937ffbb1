"""Rerankers whose prompts are known by name, for --chat-template: what their authors have published of them as code, where the
model's own files do not say it.

A template has the two texts as messages of the roles "query" and "document", and an instruction, if there is one, as a "system"
message before them. It writes all special tokens of the prompt itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownReranker:
    """`answers`: what a checkpoint that still generates answers with, as its vocabulary spells it; the last means yes."""

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
