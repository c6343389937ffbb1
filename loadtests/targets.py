"""The GPU rows to beat, as data: what is measured, vLLM's figure and ours to reach. The floors and the reasons stand in RESULTS.md.

Peer: vLLM 0.26.0 on one NVIDIA H200, measured 2026-11-22 (FA3, torch.compile, full + piecewise graphs, max-model-len 16384, 512
sequences; HTTP by its own `bench serve`, one process, which was 81 % busy at c256). A row's `key` is the name its figure has in
every record of `steps` and `gpu`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SMALL, LARGE = "qwen3-0.6b", "llama-3.1-8b"
MODELS = (SMALL, LARGE)
STEPS, HTTP, COSTS = "steps, in process", "HTTP", "costs"
PEER = "vLLM 0.26.0, 2026-11-22"


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


def _large(key: str, title: str, vllm: float, target: float) -> Row:
    """Of the large model alone, milliseconds over HTTP."""
    return Row(key, title, HTTP, 1, vllm={LARGE: vllm}, target={LARGE: target})


ROWS: tuple[Row, ...] = (
    _row("decode_ms.1", "decode, batch 1, ms", STEPS, 3, (1.659, 0.60), (4.960, 4.0)),
    _row("decode_ms.8", "decode, batch 8, ms", STEPS, 3, (1.915, 0.80), (5.229, 4.3)),
    _row("decode_ms.32", "decode, batch 32, ms", STEPS, 3, (2.397, 1.35), (5.855, 4.8)),
    _row("decode_ms.64", "decode, batch 64, ms", STEPS, 3, (3.099, 2.0), (6.630, 5.6)),
    _row("decode_ms.128", "decode, batch 128, ms", STEPS, 3, (4.564, 3.1), (8.919, 7.4)),
    _row("decode_ms.256", "decode, batch 256, ms", STEPS, 3, (6.940, 5.4), (14.17, 12.2)),
    _row("prefill_tok_per_s.8x8192", "prefill 8 x 8192, tok/s", STEPS, 0, (275_645, 300_000), (37_683, 39_000)),
    _row("prefill_tok_per_s.64x512", "prefill 64 x 512, tok/s", STEPS, 0, (356_451, 450_000), (42_816, 45_000)),
    _row("ttft_ms.128", "TTFT 1 x 128, ms", STEPS, 2, (11.56, 2.0), (10.09, 6.0)),
    _row("throughput_tok_per_s", "256 requests, 100-1024 in and out, tok/s", STEPS, 0, (23_124, 29_000), (9_491, 10_600)),
    *_workload("c1_128_128", 462, 16.6, 2.04, 1_150, 5, 0.85, 209, 15.5, 4.68, 232, 9, 4.25),
    *_workload("c32_512_128", 9_526, 113, 2.48, 15_000, 50, 1.7, 3_769, 296, 6.2, 4_300, 150, 6.0),
    *_workload("c128_512_128", 15_710, 308, 5.8, 27_000, 140, 3.6, 6_201, 862, 13.9, 6_700, 350, 14),
    *_workload("c256_256_256", 16_851, 405, 13.6, 34_000, 200, 6.6, 13_698, 1_043, 14.7, 14_800, 400, 14.5),
    *_workload("c32_2048+128_64", 4_707, 122, 4.7, 11_000, 40, 2.3, 3_630, 67, 7.3, 4_700, 55, 5.6),
    _row("b512_1000-4000_64-256.wall_s", "burst of 512, 1,000-4,000 in, 64-256 out, s", HTTP, 1, (11.5, 9), (42.7, 38)),
    _large("c128_512_128.ttft_ms_p99", "c128_512_128 TTFT p99, ms", 1_651, 1_651),
    _large("c256_256_256.ttft_ms_p99", "c256_256_256 TTFT p99, ms", 1_747, 1_747),
    _large("c256_256_256.e2e_ms_p99", "c256_256_256 whole request p99, ms", 4_880, 4_880),
    _large("c256_256_256@70%.ttft_ms_p99", "Poisson at 70 % of that, TTFT p99, ms", 273, 45),
    _row("start_warm_s", "start to /health 200, kernel caches full, s", COSTS, 1, (70, 7), (70, 7)),
    _row("start_cold_s", "start to /health 200, kernel caches empty, s", COSTS, 1, (114, 14), (103, 14)),
    _row("host_memory_gib", "host memory of all processes, GiB", COSTS, 2, (3.2, 1.3), (3.3, 1.3)),
    _row("c256_256_256.server_cpu_us_per_token", "server CPU per streamed token at c256, us", COSTS, 1, (103, 12), (92, 12)),
    Row("idle_cpu_percent", "idle CPU, % of a core", COSTS, 1, target={SMALL: 0, LARGE: 0}),
    Row(
        "c256_256_256.loop_lag_ms_p99", "p99 loop lag at 256 streams, ms (bucket bound)", COSTS, 1,
        target={SMALL: 5, LARGE: 5},
    ),
)  # fmt: skip
