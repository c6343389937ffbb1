"""Ranks whose clocks differ take the same steps while they are timed, or they would exchange tensors of different steps."""

from __future__ import annotations

import threading

import torch
import transformers

from runtime.config import EngineConfig
from runtime.platform import cpu
from runtime.start import start_engine
from runtime.weights.fetch import resolve


async def test_ranks_of_which_one_takes_its_steps_for_long_ones_start(tmp_path, monkeypatch):
    config = transformers.LlamaConfig(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    readings: dict[int, float] = {}

    class Clock:
        """Of the first thread that asks a second passes between two readings, of every other a millisecond."""

        @staticmethod
        def perf_counter() -> float:
            me = threading.get_ident()
            readings[me] = readings.get(me, 0.0) + (1.0 if me == next(iter(readings), me) else 1e-3)
            return readings[me]

    monkeypatch.setattr(cpu, "time", Clock)
    options = EngineConfig(device="cpu", num_kv_blocks=16, max_model_len=64, tensor_parallel_size=2)
    engine = await start_engine(options, resolve(str(tmp_path), None, lambda progress: None), lambda progress: None)
    assert len(readings) == 2
    await engine.close()
