"""EngineConfig: the requested options. EnginePlan: the values that the engine chose for this model and machine. Both are
immutable. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from hashlib import sha256

from runtime.engine_options import EngineOptions
from runtime.kv.kinds import KVDtype, MemoryKind, Nothing, State
from runtime.kv.layout import KVLayout
from runtime.policy.fairness import POLICIES, Policy
from runtime.policy.step_budget import FixedBudget, Goals, PlatformSteps, StepBudget, TimedBudget
from runtime.policy.step_cost import StepCost, TimedSteps
from runtime.speculate.config import LookupLengths, SpeculativeConfig
from runtime.speculate.methods import speculation_of
from runtime.speculate.speculation import Speculation

GIB = 1 << 30
_DISK_BUFFER_BYTES = GIB  # host memory if only --kv-disk is given
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


INT8_CACHE = "int8_per_token_head"
SEQUENCES_BESIDE = 16  # sequences in the KV cache of a model that shares the device with another generating model
_ONLINE = {"int8": "int8", "int16": "int16", "fp8": "fp8", "int4": "w4"}  # by --quantization
FP8_CACHES = ("fp8", "fp8_e4m3")  # two names of one dtype, as in vLLM
CACHE_TYPES = {
    **{name: KVDtype(name, size) for name, size in ELEMENT_BYTES.items()},
    **dict.fromkeys(FP8_CACHES, KVDtype("float8_e4m3fn", 1)),
    INT8_CACHE: KVDtype("int8", 1, scale_bytes=4),
}


class PlanError(ValueError):
    """Error: the options do not fit the model or the machine. The message names the option to change."""


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """Limits of LoRA adapters, with vLLM's option names. `max_loras`: maximum adapters in one step; each uses a slot on the
    device. `max_cpu_loras`: maximum adapters in host memory, including those in slots. `max_lora_rank`: maximum rank of each.
    `lora_experts`, `lora_vocabulary`: allocate device memory for adapters of experts, or of the embedding and the output head."""

    max_loras: int
    max_cpu_loras: int
    max_lora_rank: int
    lora_experts: bool = False
    lora_vocabulary: bool = False

    def __post_init__(self) -> None:
        if self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras ({self.max_cpu_loras}) must be at least max_loras ({self.max_loras})")


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Limits of one engine's KV tiers. `host_bytes`: host memory. `folder`, `disk_bytes`: folder and maximum size of the disk
    tier; `folder` None: no disk tier. `fingerprint`: 32 bytes, unique to a model, dtype and layout. `num_ranks`: number of
    tensor-parallel ranks; a stored block contains the data of all."""

    host_bytes: int
    folder: str | None
    disk_bytes: int
    fingerprint: bytes
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineOptions):
    """Engine options, and settings that the server and its tests add.

    `end_token_ids`: tokens that end a sequence, in addition to those of the model's files. `beside`: another engine generates
    on the same device, so steps are short and the KV cache holds one step and the longest prompt. `pools`: prompts are pooled
    and nothing is sampled, so captured steps end at hidden states. `cache_key`: key of the prefix cache, shared by engines that
    get the same prepared prompts. `kv_fingerprint`: digest of the model's files, for KV blocks on disk. `steps_in_flight`: if
    2, a step is scheduled while the previous one runs. `max_num_mixed_tokens`: maximum number of prompt tokens in a step with
    decodes, or None for a time limit."""

    end_token_ids: frozenset[int] = frozenset()
    beside: bool = False
    pools: bool = False
    cache_key: bytes | None = field(default=None, repr=False)
    kv_fingerprint: bytes = b""
    steps_in_flight: int = 2
    max_num_mixed_tokens: int | None = None

    @classmethod
    def of(
        cls, options: EngineOptions, *, end_token_ids: frozenset[int], beside: bool = False, pools: bool = False
    ) -> EngineConfig:
        given = {spec.name: getattr(options, spec.name) for spec in fields(EngineOptions)}
        return cls(**given, end_token_ids=end_token_ids, beside=beside, pools=pools)

    @property
    def num_devices(self) -> int:
        """Number of devices that one engine uses."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def stages_apart(self) -> bool:
        """True if each pipeline stage has its own process."""
        return self.distributed_executor_backend != "uni"

    @property
    def num_stages_here(self) -> int:
        """Number of pipeline stages of one engine that run in this process."""
        return 1 if self.stages_apart else self.pipeline_parallel_size

    @property
    def lora(self) -> LoraLimits | None:
        """Limits of adapters, or None if adapters are disabled. Raises PlanError if they contradict each other."""
        if not self.enable_lora:
            return None
        try:
            max_cpu_loras = self.max_cpu_loras or 2 * self.max_loras
            return LoraLimits(
                self.max_loras, max_cpu_loras, self.max_lora_rank, self.lora_experts, self.lora_vocabulary
            )
        except ValueError as error:
            raise PlanError(str(error)) from error

    @property
    def online(self) -> str | None:
        """Format to which weights are quantised while loading, or None."""
        return _ONLINE.get(self.quantization)

    @property
    def captures(self) -> bool:
        """True if steps are captured in CUDA graphs. The reference attention reads lengths on the host, so it is not captured."""
        return not (self.enforce_eager or "reference" in (self.kernels, self.attention_backend))


@dataclass(frozen=True, slots=True)
class WeightPolicy:
    """Storage format of weight matrices. `dense_dtype`: dtype of unquantised matrices; "stored": as in the checkpoint.
    `keep_quantized`: keep quantised matrices if a kernel reads their format. `online`: format to which all matrices are
    quantised while loading: "int8", "int16" (CPU), "fp8" or "w4"; None: no quantisation."""

    dense_dtype: str
    keep_quantized: bool = False
    online: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """Default limits of one kind of device, such as CPU or CUDA."""

    dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes: Callable[[int], int]  # from the memory that is free after loading
    looks_up: bool = False  # n-gram speculation, if no option disables it


@dataclass(frozen=True, slots=True)
class EnginePlan:
    dtype: str  # dtype of activations
    weights: WeightPolicy
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    step_budget: Callable[[], StepBudget]  # limit of prompt tokens in steps with decodes
    layout: KVLayout
    kv_cache_dtype: str
    num_kv_blocks: int
    enable_prefix_caching: bool
    policy: Callable[[], Policy]
    steps_in_flight: int
    speculative: SpeculativeConfig | None
    notes: tuple[str, ...]  # limits that were reduced to fit, for the log
    lora: LoraLimits | None = None
    enable_prompt_embeds: bool = False
    max_num_encoder_tokens: int = 0
    encoder_cache_size: int = 0
    kv_cache_note: str = ""  # type of the KV cache and its gain, if not `dtype`
    num_stages: int = 1
    tiers: TierLimits | None = None
    token_s: float = 0.0  # measured time of a prompt's token
    draft_share: float = 0.1  # assumed cost of a draft, in steps of one row
    max_drafted_tokens: int | None = None  # tokens of the longest captured step with drafts

    def for_layers(self, kinds: tuple[MemoryKind, ...]) -> EnginePlan:
        """Return the plan of another pipeline stage. `kinds`: memory kind of each of its layers; the same set as here, so that
        block tables fit both."""
        dtype = CACHE_TYPES[self.kv_cache_dtype]
        return replace(self, layout=KVLayout.of(tuple(kind.with_dtype(dtype) for kind in kinds)))

    def timed(self, config: EngineConfig, timed: TimedSteps, weights_bytes: int, platform: PlatformSteps) -> EnginePlan:
        """Return the plan with step budgets computed from `timed`, the step times measured at start-up."""
        max_itl_s, target_ttft_s = (None if ms is None else ms / 1000 for ms in (config.max_itl, config.target_ttft))
        goals = Goals.resolve(max_itl_s, target_ttft_s, timed.token_s, platform)
        self = replace(self, token_s=timed.token_s, draft_share=timed.token_s / timed.smallest_s)
        if config.beside and config.pools:
            self = self._no_longer_than(goals.max_itl_s / 2, timed)
        if config.max_num_mixed_tokens is not None or config.pools or self.layout.in_one_step:
            return self  # the limit is fixed, or no decodes run in the same steps
        kv_bytes = self.layout.block_bytes / self.layout.block_size
        cost = StepCost.assumed(timed, kv_bytes / max(1, weights_bytes))
        note = (
            f"steps that mix prompts with decodes take at most {1000 * goals.max_itl_s:.0f} ms (--max-itl), and half of that while "
            f"prompts finish within {1000 * goals.target_ttft_s:.0f} ms (--target-ttft)"
        )
        if goals.slowdown is not None:
            note += f"; a single prompt makes them at most {goals.slowdown.by_one:g} times as long as decodes alone"
        least = min(platform.least_tokens, self.max_num_batched_tokens)
        budget = partial(TimedBudget, cost, goals, least=least, lead=platform.lead)
        return replace(self, step_budget=budget, notes=(*self.notes, note))

    def _no_longer_than(self, step_s: float, timed: TimedSteps) -> EnginePlan:
        """Return the plan with steps of at most `step_s` seconds. If prompts cannot be split, a step can still contain the
        longest prompt."""
        needed = self.max_model_len if self.layout.in_one_step else 2
        tokens = max(needed, min(self.max_num_batched_tokens, int((step_s - timed.smallest_s) / timed.token_s)))
        return replace(self, max_num_batched_tokens=tokens, max_num_seqs=min(self.max_num_seqs, tokens))

    def speculation(self, follow_share: float = 0.0) -> Speculation | None:
        """Return the controller of speculative decoding, or None if it is disabled. `follow_share`: assumed time of the draft
        model or head after a step, as a fraction of the step's time."""
        if self.speculative is None:
            return None
        return speculation_of(self.speculative, self.draft_share, follow_share, self.max_drafted_tokens)

    @property
    def max_proposed(self) -> int:
        """Maximum number of draft tokens per row that a draft model or head makes after a step; 0 if drafts come from the host."""
        return self.speculative.num_speculative_tokens if self.speculative and self.speculative.on_device else 0

    @property
    def lookup(self) -> LookupLengths | None:
        return None if self.speculative is None else self.speculative.lookup(self.max_model_len)

    @property
    def kv_cache_bytes(self) -> int:
        return self.num_kv_blocks * self.layout.block_bytes

    @property
    def max_concurrency(self) -> float:
        """Number of sequences of `max_model_len` tokens that fit in the KV cache; without a cache, the number of rows."""
        blocks = self.layout.max_blocks(self.max_model_len, self.max_num_batched_tokens)
        return self.num_kv_blocks / blocks if blocks else float(self.max_num_seqs)

    @classmethod
    def resolve(
        cls, config: EngineConfig, *, dtype: str, layers: tuple[MemoryKind, ...], model_len: int,
        defaults: DeviceDefaults, free_bytes: int, weights: WeightPolicy | None = None,
    ) -> EnginePlan:  # fmt: skip
        """Return the plan for a model. `model_len`: the model's context length, in tokens. `free_bytes`: memory left after
        loading the weights. `weights`: storage format; None: unquantised as `dtype`. Raises PlanError."""
        kv_cache_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        kinds = tuple(layer.with_dtype(CACHE_TYPES[kv_cache_dtype]) for layer in layers)
        _refuse(kinds)
        layout = KVLayout.of(kinds)
        max_num_seqs = config.max_num_seqs or defaults.max_num_seqs
        budget = config.max_num_batched_tokens or max(defaults.max_num_batched_tokens, max_num_seqs + 1)
        if config.max_num_batched_tokens is not None and config.max_num_seqs is None:
            max_num_seqs = min(max_num_seqs, budget - 1)
        needed = (config.max_model_len or model_len) if layout.in_one_step else 0
        if needed and layout.block_bytes:  # it generates: running streams continue during the longest prompt
            needed += max_num_seqs
        if config.max_num_batched_tokens is None:
            budget = max(budget, needed)
        elif budget < needed:
            raise PlanError(
                f"--max-num-batched-tokens ({budget}) is less than the model's longest text ({needed}), which it computes in one "
                "step: raise it, or lower --max-model-len"
            )
        if not 0 < max_num_seqs < budget:
            raise PlanError(f"--max-num-batched-tokens ({budget}) must be above --max-num-seqs ({max_num_seqs})")
        if config.max_model_len is not None and config.max_model_len > model_len:
            raise PlanError(f"--max-model-len {config.max_model_len} is more than the model's {model_len}")
        if config.num_kv_blocks is not None:
            num_blocks = config.num_kv_blocks
        else:
            given = config.kv_cache_bytes
            if config.beside and given is None and layout.block_bytes:
                longest = layout.max_blocks(config.max_model_len or model_len, budget)
                if config.pools:
                    blocks = longest + layout.max_blocks(budget, budget)
                else:
                    blocks = longest * min(max_num_seqs, SEQUENCES_BESIDE)
                given = min(blocks * layout.block_bytes, defaults.kv_cache_bytes(free_bytes))
            num_bytes = defaults.kv_cache_bytes(free_bytes) if given is None else given
            num_blocks = num_bytes // layout.block_bytes if layout.block_bytes else 0
        max_model_len, notes = config.max_model_len or model_len, []
        if len(layout.groups) > 1:
            notes.append(layout.describe())
        if config.enable_prefix_caching and layout.no_prefix_reason:
            notes.append(f"prefix caching is off: {layout.no_prefix_reason}")
        tiers = _tiers(config, layout, dtype)
        speculative = config.speculation
        if speculative is not None:
            speculative = speculative.where(on_device=defaults.looks_up and config.num_devices == 1)
        capacity = layout.longest(num_blocks, budget, max_model_len)
        if capacity < max_model_len:
            if config.max_model_len is not None or capacity < layout.block_size:
                needed_bytes = layout.max_blocks(max_model_len, budget) * layout.block_bytes
                raise PlanError(
                    f"the KV cache holds {capacity} tokens, fewer than --max-model-len {max_model_len}: raise --kv-cache-memory "
                    f"to {needed_bytes / GIB:.2f}GiB or lower --max-model-len"
                )
            notes.append(f"max-model-len is {capacity}, not the model's {model_len}: that is what the KV cache holds")
            max_model_len = capacity
        return cls(
            dtype=dtype,
            weights=weights or WeightPolicy(dtype, config.quantization != "none", config.online),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            step_budget=partial(FixedBudget, config.max_num_mixed_tokens),
            layout=layout,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_note=_kv_cache_note(layout, kv_cache_dtype, layers, dtype),
            num_kv_blocks=num_blocks,
            enable_prefix_caching=config.enable_prefix_caching and layout.no_prefix_reason is None,
            policy=POLICIES[config.scheduling_policy],
            steps_in_flight=config.steps_in_flight + config.pipeline_parallel_size - 1,
            num_stages=config.pipeline_parallel_size,
            speculative=speculative,
            notes=tuple(notes),
            lora=config.lora,
            tiers=None if layout.no_prefix_reason else tiers,
            enable_prompt_embeds=config.enable_prompt_embeds,
            max_num_encoder_tokens=config.max_num_encoder_tokens or budget,
            encoder_cache_size=config.encoder_cache_size,
        )


def _tiers(config: EngineConfig, layout: KVLayout, dtype: str) -> TierLimits | None:
    """Return the limits of the KV tiers, or None if they are disabled. Raises PlanError if the options contradict each other."""
    if config.kv_host_bytes is None and config.kv_disk is None:
        return None
    option = "kv-disk" if config.kv_host_bytes is None else "kv-host-bytes"
    if not config.enable_prefix_caching:
        raise PlanError(f"--{option} extends the prefix cache: leave it or --no-enable-prefix-caching out")
    if config.pipeline_parallel_size > 1:
        raise PlanError(f"--{option} is not supported with --pipeline-parallel-size: leave one of them out")
    about = (config.kv_fingerprint, layout, dtype, config.quantization, config.tensor_parallel_size, config.kernels)
    host_bytes = (config.kv_host_bytes or _DISK_BUFFER_BYTES) // config.data_parallel_size
    slot_bytes = layout.block_bytes * config.tensor_parallel_size
    widest = max(group.width for group in layout.groups)
    if host_bytes < 2 * widest * slot_bytes:
        raise PlanError(
            f"--kv-host-bytes {host_bytes} holds fewer than two KV blocks of {widest * slot_bytes} bytes: raise it"
        )
    return TierLimits(
        host_bytes,
        config.kv_disk,
        config.kv_disk_bytes // config.data_parallel_size,
        sha256(repr(about).encode()).digest(),
        config.tensor_parallel_size,
    )


def _kv_cache_note(layout: KVLayout, kv_cache_dtype: str, layers: tuple[MemoryKind, ...], dtype: str) -> str:
    if kv_cache_dtype == dtype or not layout.block_bytes:
        return ""
    usual = KVLayout.of(tuple(layer.with_dtype(CACHE_TYPES[dtype]) for layer in layers))
    gain = usual.block_bytes / usual.block_size / (layout.block_bytes / layout.block_size)
    return f"{kv_cache_dtype}, {gain:.2f} times the tokens of {dtype}"


def _refuse(kinds: tuple[MemoryKind, ...]) -> None:
    """Raise PlanError for layer kinds that no kernel or block format supports."""
    attention = [kind.kv for kind in kinds if not isinstance(kind, State | Nothing)]
    scaled = [kv for kv in attention if kv.known_dtype.scale_bytes]
    if any(kv.latent for kv in scaled):
        raise PlanError(f"kv-cache-dtype {INT8_CACHE} does not support latent attention: leave kv-cache-dtype out")
    if scaled and len({(kv.head_size, kv.known_dtype) for kv in attention}) > 1:  # no block would suit them all
        raise PlanError(f"kv-cache-dtype {INT8_CACHE} requires the same head size in all layers")
