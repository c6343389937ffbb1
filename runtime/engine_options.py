"""Options of the engine. Each field declares one option, with its help text, choices and bounds.

`EngineConfig` and the server's configuration inherit the fields, so each option is declared once. Imports the standard library
only, because `--help` imports this module."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from runtime.speculate.config import MAX_DRAFTS, WITH_MODEL, SpeculativeConfig

MODEL, ENGINE, HTTP = "model", "engine", "HTTP"  # groups of --help

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "int8_per_token_head"]
SPECULATES_BY_MODEL = WITH_MODEL  # methods that need --speculative-model
SpeculativeMethod = Literal["ngram", "suffix", "draft_model", "ngram_gpu", "ngram_cpu", "mtp", "eagle", "eagle3"]
SchedulingPolicy = Literal["fair", "fcfs", "priority"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the number of bytes of "4096", "512MiB" or "1.5GB". K, M, G and T are powers of 1000; Ki, Mi, Gi, Ti of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("is not a size such as 512MiB or 2GiB")
    number, unit, binary = match.groups()
    scale = (1024 if binary else 1000) ** ("KMGT".index(unit.upper()) + 1) if unit else 1
    return int(float(number) * scale)


def option(
    default: Any,
    text: str,
    *,
    group: str = ENGINE,
    minimum: float | None = None,
    maximum: float | None = None,
    parse: Callable[[Any], Any] | None = None,
    metavar: str | None = None,
    secret: bool = False,
    aliases: tuple[str, ...] = (),
    name: str | None = None,
    several: bool = False,
) -> Any:
    """Return a dataclass field that declares an option with help text `text`.

    `minimum` and `maximum` are inclusive. `parse` converts the text of a value if the annotation does not suffice. A `secret`
    value appears neither in errors nor in the configuration's repr. `aliases` are flag names from other servers. `name` is the
    option's name if it differs from the field's. `several`: the flag takes all values that follow it."""
    return field(
        default=default,
        repr=not secret,
        metadata={
            "text": text, "group": group, "minimum": minimum, "maximum": maximum, "parse": parse, "metavar": metavar,
            "secret": secret, "aliases": aliases, "name": name, "several": several,
        },
    )  # fmt: skip


def seconds(default: float | None, text: str, *, group: str = HTTP, minimum: float = 0, maximum: float = 86400) -> Any:
    """Return a dataclass field that declares an option whose value is a time in seconds."""
    return option(default, text, group=group, minimum=minimum, maximum=maximum, metavar="SECONDS")


def size(default: int | None, text: str, *, group: str = HTTP, minimum: int = 1, name: str | None = None) -> Any:
    """Return a dataclass field that declares an option whose value is a number of bytes."""
    return option(default, text, group=group, minimum=minimum, parse=parse_size, metavar="SIZE", name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Engine options as given by the user. The engine chooses the value of options that are None or "auto"."""

    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = option(
        "auto", "format of the weights; dummy draws random weights", group=MODEL
    )
    model_impl: Literal["auto", "native", "transformers"] = option(
        "auto", "implementation of the model; auto prefers the native one", group=MODEL
    )
    model_plugins: tuple[str, ...] = option(
        (), "installed package with more models; repeatable", group=MODEL, metavar="NAME", name="model_plugin"
    )
    dtype: Dtype = option("auto", "type of weights and activations; a CPU computes in float32", group=MODEL)
    quantization: Literal["auto", "none", "int8", "int16", "fp8", "int4"] = option(
        "auto",
        "auto keeps quantised weights, none dequantises them; int8, int16 (CPU), fp8 and int4 (GPU) round at load",
        group=MODEL,
    )
    device: str = option("auto", "cpu, cuda or an installed platform; auto is cuda if there is a GPU", metavar="NAME")
    tensor_parallel_size: int = option(
        1, "number of devices that share each layer; on a CPU, of threads", minimum=1, maximum=64, aliases=("-tp",)
    )
    enable_expert_parallel: bool = option(
        False, "place whole experts on each device of --tensor-parallel-size, instead of a slice of every expert"
    )
    expert_placement: str | None = option(
        None,
        "JSON file with the experts of each device, for all layers or by layer (default: in order)",
        metavar="FILE",
    )
    enable_expert_distribution_metrics: bool = option(
        False, "count tokens by expert, layer and device for /metrics; makes steps a little slower"
    )
    pipeline_parallel_size: int = option(
        1, "stages of layers, each on its own devices; on a CPU, threads", minimum=1, maximum=64, aliases=("-pp",)
    )
    distributed_executor_backend: Literal["uni", "ray"] = option(
        "uni", "pipeline stages in this process (uni), or one process for each on the hosts of a Ray cluster (ray)"
    )
    data_parallel_size: int = option(
        1,
        "copies of the model, each on its own devices; on a CPU they share cores",
        minimum=1,
        maximum=64,
        aliases=("-dp",),
    )
    max_model_len: int | None = option(
        None, "maximum tokens of prompt and answer together (default: the model's context)", minimum=2
    )
    max_num_seqs: int | None = option(None, "maximum sequences in a step (default: by device)", minimum=1)
    max_num_batched_tokens: int | None = option(None, "maximum tokens in a step (default: by device)", minimum=1)
    max_num_encoder_tokens: int | None = option(
        None,
        "maximum encoder tokens of media per step, except for one larger item (default: --max-num-batched-tokens)",
        minimum=1,
    )
    enable_prompt_embeds: bool = option(
        False, "accept embeddings as prompts (prompt_embeds); only if all clients are trusted"
    )
    encoder_cache_size: int = option(16384, "encoder tokens of media cached on the device", minimum=1)
    max_itl: float | None = option(
        None,
        "maximum time of a step that mixes prompts with decodes, in ms (default: by model, 20 to 70; on a CPU up to 200)",
        minimum=1,
        maximum=60_000,
        metavar="MS",
    )
    target_ttft: float | None = option(
        None,
        "target time to compute waiting prompts, in ms; steps grow to meet it (default: 5 times --max-itl)",
        minimum=1,
        maximum=600_000,
        metavar="MS",
    )
    kv_cache_bytes: int | None = size(
        None, "memory for the KV cache, such as 2GiB (default: by device)", group=ENGINE, name="kv_cache_memory"
    )
    gpu_memory_utilization: float = option(
        0.9, "share of the GPU's memory for this server, from 0.05 to 1", minimum=0.05, maximum=1.0, metavar="FRACTION"
    )
    kv_cache_dtype: KVCacheDtype = option(
        "auto",
        "type of the KV cache (auto: the model's); fp8 (GPU) and int8_per_token_head hold twice the tokens of bfloat16",
    )
    num_kv_blocks: int | None = option(
        None, "blocks in the KV cache, of 16 tokens each; larger for recurrent layers", minimum=2
    )
    enable_prefix_caching: bool = option(True, "reuse the KV cache of common prompt prefixes")
    kv_host_bytes: int | None = size(
        None, "host memory for KV blocks that the KV cache evicts, such as 64GiB (default: none)", group=ENGINE
    )
    kv_disk: str | None = option(
        None, "folder for KV blocks that are kept across restarts; several servers can share it", metavar="DIR"
    )
    kv_disk_bytes: int = size(100 << 30, "maximum size of the --kv-disk folder, such as 100GiB", group=ENGINE)
    scheduling_policy: SchedulingPolicy = option(
        "fair",
        "order of requests: by arrival (fcfs), by priority (priority), or equal numbers of tokens for each client (fair)",
    )
    speculative_config: SpeculativeConfig | None = option(
        None,
        'speculative decoding, such as {"method": "ngram"}; runtime/speculate/README.md lists the keys',
        parse=SpeculativeConfig.parse,
        metavar="JSON",
    )
    speculative_method: SpeculativeMethod | None = option(
        None,
        "source of draft tokens: the text (ngram), past answers (suffix), a small model (draft_model), a head (mtp, eagle, eagle3)",
        aliases=("--spec-method",),
    )
    speculative_model: str | None = option(
        None, "draft model or head, in any form that --model takes", metavar="NAME", aliases=("--spec-model",)
    )
    num_speculative_tokens: int | None = option(
        None,
        "maximum draft tokens of a sequence in a step (default: 8; mtp, eagle, eagle3: 3)",
        minimum=1,
        maximum=MAX_DRAFTS,
        aliases=("--spec-tokens",),
    )
    enable_lora: bool = option(False, "serve LoRA adapters: --lora-modules, --lora-resolver, /v1/load_lora_adapter")
    max_loras: int = option(8, "maximum adapters in one step; each reserves device memory", minimum=1)
    max_cpu_loras: int | None = option(
        None,
        "adapters kept in host memory, including those of the current step (default: twice --max-loras)",
        minimum=1,
    )
    max_lora_rank: int = option(16, "maximum rank of an adapter", minimum=1, maximum=512)
    lora_experts: bool = option(False, "reserve GPU memory in every slot for adapters of experts; no effect on a CPU")
    lora_vocabulary: bool = option(
        False, "reserve GPU memory in every slot for adapters of embedding and head; no effect on a CPU"
    )
    stream_interval: int = option(
        1,
        "tokens in each event of a stream, after the first token; larger values cost less CPU",
        minimum=1,
        maximum=1000,
    )
    num_threads: int | None = option(None, "CPU threads for the model (default: all cores)", minimum=1, name="threads")
    kernels: Literal["auto", "native", "reference"] = option(
        "auto", "kernels; reference is plain torch, for comparison"
    )
    attention_backend: Literal["auto", "triton", "reference"] = option(
        "auto", "attention on a GPU; reference is plain torch, without CUDA graphs"
    )
    enforce_eager: bool = option(False, "run without CUDA graphs")
    seed: int | None = option(None, "seed for requests without one (default: random)", minimum=0, maximum=2**63 - 1)
    sleep_after: float | None = seconds(
        None,
        "seconds without a request until model and KV cache are unloaded (default: never)",
        group=ENGINE,
        minimum=0.001,
        maximum=31_536_000,
    )
    max_queue: int = option(
        256,
        "waiting requests before new ones get 429, unless their client is below its fair share",
        group=HTTP,
        minimum=1,
    )
    max_queued_tokens: int | None = option(
        None, "waiting prompt tokens before new requests get 429 (default: no limit)", group=HTTP, minimum=1
    )
    max_num_seqs_per_key: int | None = option(
        None,
        "sequences of a key, or an address without keys, before it gets 429 (default: no limit)",
        group=HTTP,
        minimum=1,
    )
    max_tokens_per_minute_per_key: int | None = option(
        None, "tokens of a key or address in a minute before it gets 429 (default: no limit)", group=HTTP, minimum=1
    )
    max_queue_time: float | None = seconds(
        None, "seconds until a waiting request ends with 503 (default: no limit)", minimum=0.001
    )

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """Settings of speculative decoding, from `speculative_config` or from the single options; None if disabled."""
        if self.speculative_method is None:
            return self.speculative_config
        return SpeculativeConfig.of(
            {
                "method": self.speculative_method,
                "model": self.speculative_model,
                "num_speculative_tokens": self.num_speculative_tokens,
            }
        )
