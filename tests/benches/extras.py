"""Cost of a request's extras: `python -m tests.benches.extras logprobs|schema [--model NAME] [--rounds N] [--batch B]`.

By hand only; pytest does not collect it. In one process over one engine with one thread for its steps, the kinds of requests taken
in turns: B greedy prompts of 64 random ids, from the first token to the last. CPU: of the process, which other processes cannot
take away, per token. Step: from one token to the next, by the clock. Both in milliseconds, medians over the rounds; and the median
of each round's ratio to requests that ask for nothing. `logprobs` also takes prompts of 512 random ids with one token to generate.
`schema` holds rows to a list of objects that is longer than what is generated, so that every step needs its mask."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from runtime.api import Request, SamplingParams
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.start import start_engine
from runtime.weights.fetch import DEFAULT_MODEL, resolve
from server.generate.structured.compiler import Grammars
from server.generate.structured.grammar import JsonSchema
from server.models.tokenizer import Tokenizer

DECODE_TOKENS, DECODE_PROMPT, PROMPT_TOKENS = 48, 64, 512
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}  # fmt: skip
SCHEMA = JsonSchema({"type": "array", "items": PERSON, "minItems": 100})


class Cost(NamedTuple):
    cpu_ms: float
    step_ms: float


async def decode(engine: Engine, rng: random.Random, rows: Sequence[SamplingParams]) -> Cost:
    """`rows`: the params of each request."""
    vocab = engine.model.vocab_size
    requests = [
        Request(str(i), [rng.randrange(vocab) for _ in range(DECODE_PROMPT)], params) for i, params in enumerate(rows)
    ]
    begun: set[int] = set()
    started: tuple[float, float] | None = None
    async with engine.submit(requests) as stream:
        async for outputs in stream:
            begun |= {output.index for output in outputs if output.token_ids}
            if len(begun) == len(rows) and started is None:
                started = time.process_time(), time.perf_counter()
    assert started is not None
    cpu_s, clock_s = time.process_time() - started[0], time.perf_counter() - started[1]
    return Cost(cpu_s / (len(rows) * DECODE_TOKENS) * 1e3, clock_s / DECODE_TOKENS * 1e3)


async def prompt(engine: Engine, rng: random.Random, params: SamplingParams) -> Cost:
    request = Request("p", [rng.randrange(engine.model.vocab_size) for _ in range(PROMPT_TOKENS)], params)
    started = time.process_time(), time.perf_counter()
    async with engine.submit([request]) as stream:
        async for _ in stream:
            pass
    return Cost((time.process_time() - started[0]) * 1e3, (time.perf_counter() - started[1]) * 1e3)


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": DECODE_TOKENS + 1, "temperature": 0.0, "ignore_eos": True, **fields})  # type: ignore[arg-type]


Kinds = Mapping[str, Callable[[], Awaitable[Cost]]]


async def compare(title: str, kinds: Kinds, rounds: int) -> None:
    found: dict[str, list[Cost]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, measure in kinds.items():
            found[kind].append(await measure())
    print(f"\n{title:<28}{'CPU ms':>10}{'to nothing':>12}{'step ms':>10}{'to nothing':>12}")
    for kind, costs in found.items():
        columns = ""
        for which in (0, 1):
            usual = [cost[which] for cost in found["nothing"]]
            ratio = statistics.median(own[which] / base for own, base in zip(costs, usual, strict=True))
            columns += f"{statistics.median(cost[which] for cost in costs):10.2f}{ratio:11.3f}x"
        print(f"{kind:<28}{columns}", flush=True)


async def compare_logprobs(engine: Engine, rng: random.Random, args: argparse.Namespace) -> None:
    wanted = {"nothing": None, "logprobs 0": 0, "logprobs 1": 1, "logprobs 20": 20}
    for batch in args.batch:
        rows = {kind: [params(logprobs=count)] * batch for kind, count in wanted.items()}
        kinds = {kind: partial(decode, engine, rng, fields) for kind, fields in rows.items()}
        await compare(f"a token of {batch} streams", kinds, args.rounds)
    prompts = {kind: params(max_tokens=1, prompt_logprobs=count) for kind, count in wanted.items()}
    kinds = {kind: partial(prompt, engine, rng, fields) for kind, fields in prompts.items()}
    await compare(f"a prompt of {PROMPT_TOKENS} tokens", kinds, args.rounds)


async def compare_schema(engine: Engine, rng: random.Random, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    grammars = Grammars(tokenizer, engine.model.eos_token_ids)
    grammars.warm()
    began = time.perf_counter()
    form = await grammars.factory(SCHEMA)
    print(f"compiled in {(time.perf_counter() - began) * 1e3:.1f} ms")
    for batch in args.batch:
        counts = {"nothing": 0, "schema in one row": 1, "schema in every row": batch}
        rows = {
            kind: [params(matchers=(form,))] * count + [params()] * (batch - count) for kind, count in counts.items()
        }
        kinds = {kind: partial(decode, engine, rng, fields) for kind, fields in rows.items()}
        await compare(f"a token of {batch} streams", kinds, args.rounds)


async def main(args: argparse.Namespace) -> None:
    files = await asyncio.to_thread(resolve, args.model, None, lambda progress: None)
    torch.set_num_threads(1)
    config = EngineConfig(
        enable_prefix_caching=False, num_kv_blocks=512, max_model_len=1024, max_num_seqs=64, num_threads=1
    )
    engine = await start_engine(config, files, lambda progress: None)
    rng = random.Random(0)
    if args.extra == "logprobs":
        await compare_logprobs(engine, rng, args)
    else:
        gguf = files.gguf
        tokenizer = Tokenizer.from_folder(files.tokenizer_path) if gguf is None else Tokenizer.from_gguf(gguf.metadata)
        await compare_schema(engine, rng, tokenizer, args)
    await engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extra", choices=["logprobs", "schema"])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    asyncio.run(main(parser.parse_args()))
