"""The GPU rows to beat, as data: what is measured, vLLM's figure and ours to reach. The floors and the reasons stand in RESULTS.md.

Peer: vLLM 0.26.0 on one NVIDIA H200, measured 2026-11-21 (FA3, torch.compile, full + piecewise graphs, max-model-len 16384,
max-num-seqs 512, memory 0.85). A row's `key` is the name its figure has in every record of `steps` and `gpu`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SMALL, LARGE = "qwen3-0.6b", "llama-3.1-8b"
MODELS = (SMALL, LARGE)
STEPS, HTTP, COSTS = "steps, in process", "HTTP", "costs"
PEER = "vLLM 0.26.0, 2026-11-21"


@dataclass(frozen=True, slots=True)
class Row:
    """`vllm` and `target` by model; a model without a target has no such row on the page."""

    key: str
    title: str
    group: str
    digits: int = 2
    more_is_better: bool = False
    vllm: Mapping[str, float] = field(default_factory=dict)
    target: Mapping[str, float] = field(default_factory=dict)

    def met(self, model: str, figure: float) -> bool | None:
        target = self.target.get(model)
        if target is None:
            return None
        return figure >= target if self.more_is_better else figure <= target


def _row(key: str, title: str, group: str, digits: int, small: tuple[float, float], large: tuple[float, float]) -> Row:
    """Each pair is vLLM's figure and the target."""
    return Row(
        key, title, group, digits, "tok_per_s" in key,
        {SMALL: small[0], LARGE: large[0]}, {SMALL: small[1], LARGE: large[1]},
    )  # fmt: skip


def _workload(name: str, *figures: float) -> list[Row]:
    """Figures of the small model, then of the large one: vLLM's tok/s, TTFT, TPOT, then the three targets."""
    small, large = figures[:6], figures[6:]
    kinds = (("out_tok_per_s", "out tok/s", 0), ("ttft_ms_p50", "TTFT p50, ms", 1), ("tpot_ms_p50", "TPOT p50, ms", 2))
    return [
        _row(f"{name}.{key}", f"{name} {title}", HTTP, digits, (small[i], small[i + 3]), (large[i], large[i + 3]))
        for i, (key, title, digits) in enumerate(kinds)
    ]


ROWS: tuple[Row, ...] = (
    _row("decode_ms.1", "decode, batch 1, ms", STEPS, 3, (1.647, 0.75), (4.905, 4.2)),
    _row("decode_ms.8", "decode, batch 8, ms", STEPS, 3, (1.675, 0.90), (5.116, 4.4)),
    _row("decode_ms.32", "decode, batch 32, ms", STEPS, 3, (2.182, 1.45), (5.772, 4.9)),
    _row("decode_ms.64", "decode, batch 64, ms", STEPS, 3, (2.913, 2.1), (6.665, 5.6)),
    _row("decode_ms.128", "decode, batch 128, ms", STEPS, 3, (4.145, 3.3), (8.556, 7.4)),
    _row("decode_ms.256", "decode, batch 256, ms", STEPS, 3, (6.993, 5.8), (13.535, 12.0)),
    _row("prefill_tok_per_s.8x8192", "prefill 8 x 8192, tok/s", STEPS, 0, (281_833, 300_000), (38_588, 39_000)),
    _row("prefill_tok_per_s.64x512", "prefill 64 x 512, tok/s", STEPS, 0, (418_828, 450_000), (44_065, 45_000)),
    _row("ttft_ms.128", "TTFT 1 x 128, ms", STEPS, 2, (6.46, 2.5), (9.79, 7.5)),
    _row("throughput_tok_per_s", "256 requests, 100-1024 in and out, tok/s", STEPS, 0, (24_088, 32_000), (9_861, 11_500)),
    *_workload("c1_128_128", 603, 12.5, 1.56, 1_150, 5, 0.85, 211, 14.2, 4.65, 232, 9, 4.25),
    *_workload("c32_512_128", 10_787, 82.6, 2.18, 15_000, 50, 1.7, 3_826, 290, 6.12, 4_300, 250, 5.5),
    *_workload("c128_512_128", 20_068, 208.8, 4.73, 27_000, 140, 3.6, 6_473, 734, 13.9, 8_500, 550, 11),
    *_workload("c256_256_256", 25_983, 305.3, 8.49, 34_000, 200, 6.6, 14_605, 744, 14.4, 16_500, 550, 13),
    *_workload("c32_2048+128_64", 6_165, 77.2, 3.70, 11_000, 40, 2.3, 3_900, 52.9, 7.04, 4_700, 40, 5.6),
    _row("start_warm_s", "start to /health 200, kernel caches full, s", COSTS, 1, (84, 8), (73, 8)),
    _row("start_cold_s", "start to /health 200, kernel caches empty, s", COSTS, 1, (84, 25), (73, 25)),
    _row("host_memory_gib", "host memory of all processes, GiB", COSTS, 2, (3.2, 1.5), (3.2, 1.5)),
    Row(
        "c256_256_256.server_cpu_us_per_token", "server CPU per streamed token at c256, us", COSTS, 1,
        vllm={SMALL: 67}, target={SMALL: 25},
    ),
    Row("idle_cpu_percent", "idle CPU, % of a core", COSTS, 1, target={SMALL: 0, LARGE: 0}),
    Row(
        "c256_256_256.loop_lag_ms_p99", "p99 loop lag at 256 streams, ms (bucket bound)", COSTS, 1,
        target={SMALL: 5, LARGE: 5},
    ),
)  # fmt: skip
