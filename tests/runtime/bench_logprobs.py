"""What log-probabilities cost the engine: `python tests/runtime/bench_logprobs.py [--model NAME] [--rounds N] [--batch B]`.

By hand only; pytest does not collect it. In one process over one engine with one thread, the kinds of requests taken in turns.
Milliseconds of the process's CPU, which other processes cannot take away: per token of a decode (B prompts of 64 random ids,
greedy, from the first token to the last) and per prompt of 512 random ids with max_tokens 1. Medians over the rounds, and the
median of each round's ratio to requests that ask for nothing."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time

import torch

from runtime.api import Request, SamplingParams
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.start import start_engine
from runtime.weights.fetch import DEFAULT_MODEL, resolve

DECODE_TOKENS, DECODE_PROMPT, PROMPT_TOKENS = 48, 64, 512
DECODES = {"nothing": None, "logprobs 0": 0, "logprobs 1": 1, "logprobs 20": 20}
PROMPTS = {"nothing": None, "prompt_logprobs 0": 0, "prompt_logprobs 1": 1, "prompt_logprobs 20": 20}


async def decode_ms(engine: Engine, rng: random.Random, batch: int, logprobs: int | None) -> float:
    params = SamplingParams(DECODE_TOKENS + 1, temperature=0.0, ignore_eos=True, logprobs=logprobs)
    vocab = engine.model.vocab_size
    requests = [Request(str(i), [rng.randrange(vocab) for _ in range(DECODE_PROMPT)], params) for i in range(batch)]
    begun: set[int] = set()
    started = None
    async with engine.submit(requests) as stream:
        async for outputs in stream:
            begun |= {output.index for output in outputs if output.token_ids}
            if len(begun) == batch and started is None:
                started = time.process_time()
    assert started is not None
    return (time.process_time() - started) / (batch * DECODE_TOKENS) * 1e3


async def prompt_ms(engine: Engine, rng: random.Random, prompt_logprobs: int | None) -> float:
    params = SamplingParams(1, temperature=0.0, prompt_logprobs=prompt_logprobs)
    request = Request("p", [rng.randrange(engine.model.vocab_size) for _ in range(PROMPT_TOKENS)], params)
    started = time.process_time()
    async with engine.submit([request]) as stream:
        async for _ in stream:
            pass
    return (time.process_time() - started) * 1e3


def table(title: str, found: dict[str, list[float]]) -> None:
    print(f"\n{title:<34}{'CPU ms':>10}{'to nothing':>12}")
    for kind, times in found.items():
        ratio = statistics.median(own / usual for own, usual in zip(times, found["nothing"], strict=True))
        print(f"{kind:<34}{statistics.median(times):10.2f}{ratio:11.3f}x", flush=True)


async def main(args: argparse.Namespace) -> None:
    files = await asyncio.to_thread(resolve, args.model, None, lambda progress: None)
    torch.set_num_threads(1)
    config = EngineConfig(
        enable_prefix_caching=False, num_kv_blocks=512, max_model_len=1024, max_num_seqs=64, num_threads=1
    )
    engine = await start_engine(config, files, lambda progress: None)
    rng = random.Random(0)
    for batch in args.batch:
        found: dict[str, list[float]] = {kind: [] for kind in DECODES}
        for _ in range(args.rounds):
            for kind, logprobs in DECODES.items():
                found[kind].append(await decode_ms(engine, rng, batch, logprobs))
        table(f"a token of {batch} streams", found)
    found = {kind: [] for kind in PROMPTS}
    for _ in range(args.rounds):
        for kind, count in PROMPTS.items():
            found[kind].append(await prompt_ms(engine, rng, count))
    table(f"a prompt of {PROMPT_TOKENS} tokens", found)
    await engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    asyncio.run(main(parser.parse_args()))
