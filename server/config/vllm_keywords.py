"""Keyword arguments of vLLM's LLM that are not options of this server. They are accepted so that programs written for vLLM run.

A keyword that changes nothing is accepted. A keyword without effect in this engine is accepted with a warning. A value that
requests an unsupported feature is rejected with the reason. Any other name is unknown."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from server.config.server_options import ConfigError

logger = logging.getLogger("oneloop.config")

RENAMED: Mapping[str, str] = {"kv_cache_memory_bytes": "kv_cache_memory", "override_pooler_config": "pooler_config"}

# Keywords with the values that match the behaviour here, and why no other value is supported.
DEFAULTS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "code_revision": ((), "code that comes with a model is never run"),
    "config_format": (("auto", "hf"), "a model's configuration is config.json, or in the GGUF file"),
    "cpu_offload_gb": ((0,), "weights stay on the device; quantization=… makes them smaller"),
    "data_parallel_backend": (("mp",), "all replicas run in one process; oneloop ray runs one process for each"),
    "disable_log_requests": ((True, False), ""),
    "disable_log_stats": ((True, False), ""),
    "distributed_executor_backend": (("mp", "uni"), "separate processes for stages are supported by oneloop serve only"),
    "ec_transfer_config": ((), "KV connectors are not supported"),
    "enable_eplb": ((False,), "expert_placement=… places experts as a file describes"),
    "enable_sleep_mode": ((True, False), ""),
    "hf_config_path": ((), "a model's configuration is in its folder"),
    "hf_overrides": (({},), "change the model's config.json"),
    "hf_token": ((), "set HF_TOKEN in the environment"),
    "io_processor_plugin": ((), "there are no input/output plugins"),
    "kv_events_config": ((), "KV events are not published"),
    "kv_transfer_config": ((), "KV connectors are not supported"),
    "logits_processors": ((), "Python functions cannot change logits"),
    "lora_dtype": (("auto",), "adapters are computed in the model's dtype"),
    "num_gpu_blocks_override": ((), "num_kv_blocks=… sets the number of blocks, each of kv_block_size tokens"),
    "override_generation_config": (({},), "generation_config='none' leaves the model's defaults out; SamplingParams set others"),
    "rope_scaling": (({},), "change the model's config.json"),
    "rope_theta": ((), "change the model's config.json"),
    "scheduler_cls": ((), "there is only one scheduler"),
    "skip_tokenizer_init": ((False,), "the tokenizer is always needed"),
    "task": (("auto", "generate"), "use runner='pooling' for a pooling model, and convert for its task"),
    "tokenizer_mode": (("auto", "hf", "fast", "slow"), "tokenizers are read from tokenizer.json or the GGUF file"),
    "tokenizer_revision": ((), "use tokenizer=… with a folder that has the revision"),
    "use_tqdm_on_load": ((True, False), ""),
    "worker_cls": ((), "there are no worker processes"),
    "worker_extension_cls": ((), "there are no worker processes"),
}  # fmt: skip

# Keywords that have no effect here, and why none is needed.
WITHOUT_EFFECT: Mapping[str, str] = {
    "async_scheduling": "the next step is always scheduled during the current one",
    "block_size": "the engine chooses the size of its blocks",
    "calculate_kv_scales": "scales come from the checkpoint or are measured",
    "compilation_config": "the engine chooses kernels and captures graphs by itself",
    "disable_cascade_attn": "attention is chosen by attention_backend",
    "disable_custom_all_reduce": "the engine chooses how devices exchange tensors",
    "download_dir": "HF_HOME sets the folder of downloads",
    "enable_chunked_prefill": "prompts are always computed in chunks",
    "fully_sharded_loras": "adapters are sharded like the model",
    "guided_decoding_backend": "llguidance constrains outputs",
    "long_prefill_token_threshold": "max_itl limits prompt tokens in steps with decodes",
    "max_logprobs": "each request may set up to 20",
    "max_long_partial_prefills": "max_itl limits prompt tokens in steps with decodes",
    "max_num_partial_prefills": "max_itl limits prompt tokens in steps with decodes",
    "max_parallel_loading_workers": "weights are read by several threads",
    "max_seq_len_to_capture": "CUDA graphs work for any length",
    "mm_encoder_tp_mode": "encoders are sharded like the model",
    "mm_processor_cache_type": "processed media are kept in this process",
    "num_scheduler_steps": "the next step is always scheduled during the current one",
    "optimization_level": "the engine chooses kernels and captures graphs by itself",
    "preemption_mode": "preempted requests are computed again",
    "served_model_name": "names are needed by HTTP clients only",
    "skip_mm_profiling": "memory for media is planned, not measured",
    "structured_outputs_config": "llguidance constrains outputs",
    "swap_space": "preempted requests are computed again",
    "trust_remote_code": "code that comes with a model is never run; models that need it cannot be served",
    "use_v2_block_manager": "there is one block manager",
    "worker_use_ray": "there are no worker processes",
}

NAMES = (*DEFAULTS, *WITHOUT_EFFECT)
_told: set[str] = set()


def is_taken(name: str, value: Any) -> bool:
    """Return whether `name` is an accepted keyword of vLLM. Logs a warning, once, if it has no effect. Raises ConfigError if
    `value` requests an unsupported feature."""
    if name in DEFAULTS:
        allowed, why = DEFAULTS[name]
        if value is not None and value not in allowed:
            raise ConfigError(f"{name}={value!r} is not supported: {why}")
        return True
    if name not in WITHOUT_EFFECT:
        return False
    if value not in (None, False) and name not in _told:
        _told.add(name)
        logger.warning("%s=%r has no effect: %s", name, value, WITHOUT_EFFECT[name])
    return True
