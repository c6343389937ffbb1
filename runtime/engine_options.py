"""EngineOptions: what a user can ask of the engine; one field is one option, with its help, its choices and its bounds.

`EngineConfig` is these and what the server knows of the model's text; the server's own configuration is these and its own. So an
option of the engine is written once. Standard library only: `--help` reads it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from runtime.speculate.config import MAX_DRAFTS, WITH_MODEL, SpeculativeConfig

MODEL, ENGINE, HTTP = "model", "engine", "HTTP"  # groups of --help

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "int8_per_token_head"]
SPECULATES_BY_MODEL = WITH_MODEL  # methods that --speculative-model is for
SpeculativeMethod = Literal["ngram", "suffix", "draft_model", "ngram_gpu", "ngram_cpu", "mtp", "eagle", "eagle3"]
SchedulingPolicy = Literal["fair", "fcfs", "priority"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes: "4096", "512MiB", "1.5GB" (K, M, G, T are powers of 1000, with an i powers of 1024)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("is not a size such as 512MiB or 2GiB")
    number, unit, binary = match.groups()
    scale = (1024 if binary else 1000) ** ("KMGT".index(unit.upper()) + 1) if unit else 1
    return int(float(number) * scale)


class Counts(tuple[int, ...]):
    """Whole numbers from 1 on, as a user writes them: "17,15", or a list of them in a program or a YAML file."""

    @classmethod
    def parse(cls, given: Any) -> Counts:
        counts = [*map(str, given)] if isinstance(given, list | tuple) else str(given).split(",")
        if not counts or not all(count.strip().isdecimal() and int(count) for count in counts):
            raise ValueError("is not a list of whole numbers from 1 on, such as 17,15")
        return cls(map(int, counts))


def option(
    default: Any,
    text: str,
    *,
    group: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    parse: Callable[[Any], Any] | None = None,
    metavar: str | None = None,
    secret: bool = False,
    aliases: tuple[str, ...] = (),
    name: str | None = None,
    several: bool = False,
) -> Any:
    """A dataclass field that is an option. `text`: its help. `minimum` and `maximum` are inclusive; `parse` reads text that the
    annotation alone cannot; what is `secret` stays out of complaints and of the configuration's repr; `aliases` are flags of other
    servers; `name` is the user's word for it, where the field has another; `several`: a flag takes as many values as follow it."""
    return field(
        default=default,
        repr=not secret,
        metadata={
            "text": text, "group": group, "minimum": minimum, "maximum": maximum, "parse": parse, "metavar": metavar,
            "secret": secret, "aliases": aliases, "name": name, "several": several,
        },
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """As asked: None and "auto" mean that the engine chooses."""

    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = option(
        "auto", "how weights are stored; dummy draws random ones", group=MODEL
    )
    model_impl: Literal["auto", "native", "transformers"] = option(
        "auto",
        "what computes the model: auto is our own where it is described, else modules of the transformers package",
        group=MODEL,
    )
    model_plugins: tuple[str, ...] = option(
        (),
        "serve also the models that an installed package brings under this name (entry points oneloop.models), may be "
        "given several times",
        group=MODEL,
        metavar="NAME",
        name="model_plugin",
    )
    dtype: Dtype = option(
        "auto", "type of weights and activations; a CPU keeps weights in it and computes in float32", group=MODEL
    )
    quantization: Literal["auto", "none", "int8", "int16", "fp8", "int4"] = option(
        "auto",
        "auto leaves weights in the bits they are stored in where a kernel reads those, none dequantises them; int8 and "
        "int16 (CPU), fp8 and int4 (GPU) round any weights at load, quantised ones too; int16 stays within a thousandth of float32",
        group=MODEL,
    )
    device: str = option(
        "auto",
        "where the model runs: cpu, cuda, the name of a platform that is installed, or auto for cuda where there is one",
        group=ENGINE,
        metavar="NAME",
    )
    tensor_parallel_size: int = option(
        1,
        "devices that share the model out, each with a part of every layer; on a CPU, threads of this process",
        group=ENGINE,
        minimum=1,
        maximum=64,
        aliases=("-tp",),
    )
    enable_expert_parallel: bool = option(
        False,
        "give each device of --tensor-parallel-size whole experts, in the place of a share of every expert's columns",
        group=ENGINE,
    )
    expert_placement: str | None = option(
        None,
        "which device has which experts: a JSON file with a list of numbers for each device, or an object of such lists by layer "
        "(default: neighbours together)",
        group=ENGINE,
        metavar="FILE",
    )
    enable_expert_distribution_metrics: bool = option(
        False,
        "count the tokens that each expert takes, and tell in /metrics how even that is, by layer and device; costs a little of "
        "each step",
        group=ENGINE,
    )
    pipeline_parallel_size: int = option(
        1,
        "stages of neighbouring layers, each on --tensor-parallel-size devices of its own, with a step under way in each; on a "
        "CPU, threads of this process",
        group=ENGINE,
        minimum=1,
        maximum=64,
        aliases=("-pp",),
    )
    pipeline_layers: Counts | None = option(
        None,
        "layers of each stage, such as 17,15 (default: so that each reads as many weights in a step)",
        group=ENGINE,
        parse=Counts.parse,
        metavar="N,N",
    )
    distributed_executor_backend: Literal["uni", "ray"] = option(
        "uni",
        "where the stages of --pipeline-parallel-size are: uni, all in this process; ray, each in a process of its own, an actor "
        "of a Ray cluster on a host of its own where there are so many, for a model that is larger than a host",
        group=ENGINE,
    )
    data_parallel_size: int = option(
        1,
        "copies of the model in this process, each on devices of its own, among which requests are shared out; on a CPU they share "
        "the cores",
        group=ENGINE,
        minimum=1,
        maximum=64,
        aliases=("-dp",),
    )
    max_model_len: int | None = option(
        None, "tokens of prompt and answer together (default: what the model was made for)", group=ENGINE, minimum=2
    )
    max_num_seqs: int | None = option(None, "sequences in one step", group=ENGINE, minimum=1)
    max_num_batched_tokens: int | None = option(None, "tokens in one step, prompts included", group=ENGINE, minimum=1)
    max_num_encoder_tokens: int | None = option(
        None,
        "maximum tokens of images, audio and video that are encoded beside one step; a single larger item is encoded by itself "
        "(default: --max-num-batched-tokens)",
        group=ENGINE,
        minimum=1,
    )
    enable_prompt_embeds: bool = option(
        False,
        "take prompts as embeddings (prompt_embeds), which nobody can read; for clients that are trusted",
        group=ENGINE,
    )
    encoder_cache_size: int = option(
        16384,
        "tokens of pictures and sounds that are kept on the device, for prompts that have them again",
        group=ENGINE,
        minimum=1,
    )
    max_itl: float | None = option(
        None,
        "maximum time of a step that mixes prompts with decodes, in ms; half of it while prompts meet --target-ttft (default: the "
        "time of 3072 prompt tokens, from 20 to 70; on a CPU up to 200, and 5 times a step without prompts)",
        group=ENGINE,
        minimum=1,
        maximum=60_000,
        metavar="MS",
    )
    target_ttft: float | None = option(
        None,
        "target time to compute waiting prompts, in ms; if they would take longer, steps grow up to --max-itl (default: 5 times "
        "--max-itl)",
        group=ENGINE,
        minimum=1,
        maximum=600_000,
        metavar="MS",
    )
    max_num_mixed_tokens: int | None = option(
        None,
        "maximum prompt tokens in a step that also decodes, however long they take (default: by --max-itl)",
        group=ENGINE,
        minimum=1,
    )
    kv_cache_bytes: int | None = option(
        None,
        "memory for the KV cache, such as 2GiB",
        group=ENGINE,
        minimum=1,
        parse=parse_size,
        metavar="SIZE",
        name="kv_cache_memory",
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of the GPU's memory that this server may use for everything, whatever others hold of it; 0 to 1",
        group=ENGINE,
        minimum=0.05,
        maximum=1.0,
        metavar="FRACTION",
    )
    kv_cache_dtype: KVCacheDtype = option(
        "auto",
        "type of the KV cache, by default the model's; in eight bits it holds twice the tokens of bfloat16: fp8 (e4m3, on GPUs, by "
        "the scales of the checkpoint where it has them), or int8_per_token_head, more exact and, on a GPU, somewhat slower",
        group=ENGINE,
    )
    num_kv_blocks: int | None = option(
        None, "blocks in the KV cache, of 16 tokens, or more where layers are recurrent", group=ENGINE, minimum=2
    )
    enable_prefix_caching: bool = option(True, "share the KV blocks of common prompt beginnings", group=ENGINE)
    scheduling_policy: SchedulingPolicy = option(
        "fair",
        "whose turn it is: fair shares tokens between clients (keys, or addresses where there are none) and takes the requests "
        "of one as they come; fcfs is first come, first served; priority goes by a request's priority",
        group=ENGINE,
    )
    steps_in_flight: int = option(
        2, "2 schedules a step while the one before runs, 1 waits for it", group=ENGINE, minimum=1, maximum=2
    )
    speculative_config: SpeculativeConfig | None = option(
        None,
        'guess several tokens and check them in one step, such as {"method": "ngram", "num_speculative_tokens": 3}; other keys are '
        "in runtime/speculate/README.md",
        group=ENGINE,
        parse=SpeculativeConfig.parse,
        metavar="JSON",
    )
    speculative_method: SpeculativeMethod | None = option(
        None,
        "guess tokens from what stands in prompt and answer (ngram: ngram_gpu on CUDA, else ngram_cpu), or in past answers too "
        "(suffix), by a smaller model (draft_model), or by layers that read the model's hidden states: of its own checkpoint "
        "(mtp), or of one made for it (eagle, eagle3); never changes an answer",
        group=ENGINE,
        aliases=("--spec-method",),
    )
    speculative_model: str | None = option(
        None,
        "what guesses tokens, a smaller model of the same vocabulary or a head made for this one (eagle, eagle3): a name, folder, "
        ".gguf file or hub id as --model takes it",
        group=ENGINE,
        metavar="NAME",
        aliases=("--spec-model",),
    )
    num_speculative_tokens: int | None = option(
        None,
        "tokens guessed for a sequence in one step at most (default: 8; by mtp, eagle and eagle3 3); fewer where fewer bring more",
        group=ENGINE,
        minimum=1,
        maximum=MAX_DRAFTS,
        aliases=("--spec-tokens",),
    )
    enable_lora: bool = option(
        False,
        "serve LoRA adapters beside the model: --lora-modules, --lora-resolver, POST /v1/load_lora_adapter",
        group=ENGINE,
    )
    max_loras: int = option(8, "adapters that one step may have, each in a slot of the device", group=ENGINE, minimum=1)
    max_cpu_loras: int | None = option(
        None, "adapters kept in memory, those in slots included (default: twice --max-loras)", group=ENGINE, minimum=1
    )
    max_lora_rank: int = option(
        16, "the greatest rank of an adapter; slots on a GPU have room for it", group=ENGINE, minimum=1, maximum=512
    )
    lora_experts: bool = option(
        False,
        "on a GPU, have room for adapters of experts, too, which every slot takes, whatever is in it; a CPU always has it, for "
        "nothing",
        group=ENGINE,
    )
    lora_vocabulary: bool = option(
        False,
        "on a GPU, have room for adapters of the embedding and the head, too, as --lora-experts does for experts",
        group=ENGINE,
    )
    stream_interval: int = option(
        1,
        "tokens that a stream gathers before they are sent, but for the first: more cost less CPU a token, and come less evenly",
        group=ENGINE,
        minimum=1,
        maximum=1000,
    )
    num_threads: int | None = option(
        None, "CPU threads for the model (default: all cores allowed)", group=ENGINE, minimum=1, name="threads"
    )
    kernels: Literal["auto", "native", "reference"] = option(
        "auto", "what computes; reference is plain torch, slow, to compare with", group=ENGINE
    )
    attention_backend: Literal["auto", "triton", "reference"] = option(
        "auto", "what computes attention on a GPU; reference is plain torch, without graphs", group=ENGINE
    )
    enforce_eager: bool = option(False, "launch every kernel by itself, without captured CUDA graphs", group=ENGINE)
    seed: int | None = option(
        None, "makes the draws of requests without a seed repeatable", group=ENGINE, minimum=0, maximum=2**63 - 1
    )
    sleep_after: float | None = option(
        None,
        "seconds without a request after which weights and KV cache are given back; the next request has them loaded again "
        "(default: never)",
        group=ENGINE,
        minimum=0.001,
        maximum=31_536_000,
        metavar="SECONDS",
    )
    max_queue: int = option(
        256,
        "waiting requests before new ones get 429; a client below its fair share of a full queue is still admitted",
        group=HTTP,
        minimum=1,
    )
    max_queued_tokens: int | None = option(
        None, "prompt tokens waiting before new requests get 429 (default: no limit)", group=HTTP, minimum=1
    )
    max_num_seqs_per_key: int | None = option(
        None,
        "sequences that one key, or one address where there are no keys, may have running and waiting before it gets 429",
        group=HTTP,
        minimum=1,
    )
    max_tokens_per_minute_per_key: int | None = option(
        None,
        "tokens, of prompts and generated, that one key or address may have in a minute before it gets 429",
        group=HTTP,
        minimum=1,
    )
    max_queue_time: float | None = option(
        None,
        "seconds that a request may wait to start before it is ended with 503 (default: no limit)",
        group=HTTP,
        minimum=0.001,
        maximum=86400,
        metavar="SECONDS",
    )

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """As the one option says, or the plain ones."""
        if self.speculative_method is None:
            return self.speculative_config
        return SpeculativeConfig.of(
            {
                "method": self.speculative_method,
                "model": self.speculative_model,
                "num_speculative_tokens": self.num_speculative_tokens,
            }
        )
