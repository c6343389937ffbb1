"""GPU figures to reach, as data: key, vLLM's figure and our target. RESULTS.md has the reasons.

Peer: vLLM 0.26.0 on one NVIDIA H200 (FA3, torch.compile, full and piecewise graphs, max-model-len 16384). HTTP and costs were
measured on 2026-11-24, each server alone on the GPU, by vLLM's `bench serve`; steps in process on 2026-11-22. The `key` of a row
is the name of its figure in every record of `steps` and `gpu`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SMALL, LARGE = "qwen3-0.6b", "llama-3.1-8b"
MODELS = (SMALL, LARGE)
STEPS, HTTP, COSTS = "steps, in process", "HTTP", "costs"
PEER = "vLLM 0.26.0, 2026-11-24"
MARKS = {None: "", True: "✓", False: "✗"}  # of a target: none, met, missed


@dataclass(frozen=True, slots=True)
class Row:
    """Row of RESULTS.md. `vllm`, `target`: figures by model. A model without either figure does not have this row."""

    key: str
    title: str
    group: str
    digits: int = 2
    more_is_better: bool = False
    vllm: Mapping[str, float] = field(default_factory=dict)
    target: Mapping[str, float] = field(default_factory=dict)

    def shown(self, value: float | None) -> str:
        return "-" if value is None else f"{value:,.{self.digits}f}"

    def met(self, model: str, figure: float) -> bool | None:
        target = self.target.get(model)
        if target is None:
            return None
        return figure >= target if self.more_is_better else figure <= target


def _http(
    tok_per_s: float | None = None,
    ttft_p50: float | None = None,
    ttft_p99: float | None = None,
    tpot_p50: float | None = None,
    itl_p99: float | None = None,
    e2e_p99: float | None = None,
    cpu_us: float | None = None,
    wall_s: float | None = None,
) -> dict[str, float]:
    """Return the given figures of one workload by key. Units: tok/s, ms, us of server CPU per token, seconds."""
    values = (wall_s, tok_per_s, ttft_p50, ttft_p99, tpot_p50, itl_p99, e2e_p99, cpu_us)
    return {key: value for key, value in zip(_HTTP_TITLES, values, strict=True) if value is not None}


_HTTP_TITLES = {
    "wall_s": ("until the last token, s", 1),
    "out_tok_per_s": ("out tok/s", 0),
    "ttft_ms_p50": ("TTFT p50, ms", 1),
    "ttft_ms_p99": ("TTFT p99, ms", 1),
    "tpot_ms_p50": ("TPOT p50, ms", 2),
    "itl_ms_p99": ("ITL p99, ms", 1),
    "e2e_ms_p99": ("whole request p99, ms", 0),
    "server_cpu_us_per_token": ("server CPU per token, us", 1),
}  # fmt: skip

_BURST = "b512_1000-4000_64-256"  # 512 requests at once
VLLM: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    SMALL: {
        "c1_128_128": _http(565, 13.4, 16.7, 1.591, cpu_us=2_181),
        "c256_256_256": _http(23_356, 344, 645, 9.49, cpu_us=75.5),
        _BURST: _http(None, 3_300, 7_450, 37.0, cpu_us=225, wall_s=11.04),
    },
    LARGE: {
        "c32_512_128": _http(3_670, 286, 415, 6.42, 22, 1_163, 250),
        "c128_512_128": _http(6_144, 895, 1_657, 13.5, 190, 3_250, 177),
        "c256_256_256": _http(13_761, 1_008, 1_672, 14.5, 175, 4_860, 87),
        "p40_256_256": _http(8_866, 40.5, 87.9, 8.40, 22.4, 2_384, 145),
        _BURST: _http(None, 17_300, 37_500, 134, 250, 41_700, 269, wall_s=41.9),
    },
}
TARGETS: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    SMALL: {
        "c1_128_128": _http(2_000, 5, tpot_p50=0.85),
        "c32_512_128": _http(15_000, 50, tpot_p50=1.7),
        "c128_512_128": _http(27_000, 140, tpot_p50=3.6),
        "c256_256_256": _http(55_000, 200, tpot_p50=6.6, cpu_us=10),
        "c32_2048+128_64": _http(11_000, 40, tpot_p50=2.3),
        _BURST: _http(wall_s=8),
    },
    LARGE: {
        "c1_128_128": _http(232, 9, tpot_p50=4.25),
        "c32_512_128": _http(4_300, 150, tpot_p50=6.2, itl_p99=20),
        "c128_512_128": _http(6_900, 350, tpot_p50=14, e2e_p99=3_200),
        "c256_256_256": _http(15_800, 400, 1_600, 14.5, e2e_p99=4_800, cpu_us=12),
        "p40_256_256": _http(ttft_p99=35, cpu_us=20),
        "c32_2048+128_64": _http(4_700, 55, tpot_p50=5.6),
        _BURST: _http(wall_s=36),
    },
}


def _of_workload(workload: str) -> list[Row]:
    """Return the rows of a workload: one for each figure that has a vLLM figure or a target for any model."""
    vllm, target = ({model: all_of[model].get(workload, {}) for model in MODELS} for all_of in (VLLM, TARGETS))
    return [
        Row(
            f"{workload}.{key}", f"{workload} {title}", COSTS if key == "wall_s" else HTTP, digits, key == "out_tok_per_s",
            {model: figures[key] for model, figures in vllm.items() if key in figures},
            {model: figures[key] for model, figures in target.items() if key in figures},
        )
        for key, (title, digits) in _HTTP_TITLES.items()
        if any(key in figures for by_model in (vllm, target) for figures in by_model.values())
    ]  # fmt: skip


def _row(
    key: str, title: str, group: str, digits: int, small: tuple[float | None, float], large: tuple[float, float]
) -> Row:
    """Return a row. `small`, `large`: vLLM's figure (or None) and the target, for the small and the large model."""
    vllm = {model: pair[0] for model, pair in ((SMALL, small), (LARGE, large)) if pair[0] is not None}
    return Row(key, title, group, digits, "tok_per_s" in key, vllm, {SMALL: small[1], LARGE: large[1]})


ROWS: tuple[Row, ...] = (
    _row("decode_ms.1", "decode, batch 1, ms", STEPS, 3, (1.659, 0.45), (4.960, 3.8)),
    _row("decode_ms.8", "decode, batch 8, ms", STEPS, 3, (1.915, 0.60), (5.229, 4.3)),
    _row("decode_ms.32", "decode, batch 32, ms", STEPS, 3, (2.397, 1.15), (5.855, 4.6)),
    _row("decode_ms.64", "decode, batch 64, ms", STEPS, 3, (3.099, 2.0), (6.630, 5.6)),
    _row("decode_ms.128", "decode, batch 128, ms", STEPS, 3, (4.564, 3.1), (8.919, 7.4)),
    _row("decode_ms.256", "decode, batch 256, ms", STEPS, 3, (6.940, 5.0), (14.17, 11.8)),
    _row("prefill_tok_per_s.8x8192", "prefill 8 x 8192, tok/s", STEPS, 0, (275_645, 300_000), (37_683, 39_000)),
    _row("prefill_tok_per_s.64x512", "prefill 64 x 512, tok/s", STEPS, 0, (356_451, 450_000), (42_816, 45_000)),
    _row("ttft_ms.128", "TTFT 1 x 128, ms", STEPS, 2, (11.56, 2.0), (10.09, 6.0)),
    _row("throughput_tok_per_s", "256 requests, 100-1024 in and out, tok/s", STEPS, 0, (23_124, 29_000), (9_491, 10_600)),
    *(row for workload in dict.fromkeys([*TARGETS[SMALL], *TARGETS[LARGE]]) for row in _of_workload(workload)),
    _row("start_warm_s", "start to /health 200, kernel caches full, s", COSTS, 1, (None, 3.5), (47.6, 4)),
    _row("start_cold_s", "start to /health 200, kernel caches empty, s", COSTS, 1, (99, 7), (88, 8)),
    _row("host_memory_gib", "host memory of all processes, GiB", COSTS, 2, (3.35, 1.2), (3.42, 1.2)),
    Row("idle_cpu_percent", "idle CPU, % of a core", COSTS, 1, target={SMALL: 0, LARGE: 0}),
    Row(
        "c256_256_256.loop_lag_ms_p99", "p99 loop lag at 256 streams, ms (bucket bound)", COSTS, 1,
        target={SMALL: 5, LARGE: 5},
    ),
)  # fmt: skip
