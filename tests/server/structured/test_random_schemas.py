"""Whatever the schema and whatever is drawn: what comes out is JSON, and valid."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from runtime.api import FinishReason, Request, SamplingParams
from runtime.batch import ScheduledRow
from runtime.step import MaskWords
from server.generate.structured.compiler import Grammars
from server.generate.structured.grammar import JsonSchema
from server.models.tokenizer import Tokenizer
from tests.fake_runner import FakeRunner, make_engine, model_info
from tests.server import smollm2
from tests.server.structured.random_schemas import Writer, random_schema
from tests.server.structured.reading import TOKENIZER
from tests.server.tiny import EOS, VOCAB_SIZE
from tests.tiers import on_push


def once(pairs: list[tuple[str, object]]) -> dict:
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names)), names
    return dict(pairs)


def check(text: str, schema: dict) -> None:
    """It is JSON without a key that comes twice, and valid."""
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(
        json.loads(text, object_pairs_hook=once)
    )


async def drawn(grammars: Grammars, writer: Writer, schema: dict, tokenizer: Tokenizer) -> str:
    make = await grammars.factory(JsonSchema(schema))
    return tokenizer.decode(writer.write(make()), skip_special_tokens=False)


@pytest.mark.parametrize("part", on_push(range(10), 0, 1))
async def test_bytes_drawn_at_random_under_random_schemas_are_valid(part):
    grammars = Grammars(TOKENIZER, frozenset({EOS}))
    for seed in range(part * 50, part * 50 + 50):
        rng = random.Random(seed)
        schema = random_schema(rng)
        check(await drawn(grammars, Writer(TOKENIZER, frozenset({EOS}), rng), schema, TOKENIZER), schema)


async def test_tokens_of_a_real_vocabulary_drawn_at_random_are_valid():
    tokenizer = smollm2.ours()
    grammars = Grammars(tokenizer, tokenizer.eos_token_ids)
    for seed in range(1000, 1040):
        rng = random.Random(seed)
        schema = random_schema(rng)
        check(
            await drawn(grammars, Writer(tokenizer, tokenizer.eos_token_ids, rng, patience=10), schema, tokenizer),
            schema,
        )


class Drawing(FakeRunner):
    """A model that draws like a Writer where it is masked, and else counts up."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.writer = Writer(tokenizer, frozenset({EOS}), random.Random(1), patience=40)

    def choose(self, row: ScheduledRow, mask: MaskWords) -> int:
        return self.writer.next(mask.tobytes(), row.end - self.num_prompt_tokens[row.number])


@pytest.mark.parametrize("num_blocks", [4000, 250])
async def test_many_schemas_in_one_batch_through_the_engine_preempted_or_not(num_blocks):
    grammars = Grammars(TOKENIZER, frozenset({EOS}))
    schemas = [random_schema(random.Random(seed)) for seed in range(2000, 2060)]
    runner = Drawing(TOKENIZER)
    model = model_info(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}), max_model_len=900)
    engine = make_engine(runner, num_blocks=num_blocks, max_num_seqs=32, budget=512, model=model)
    requests = []
    for number, schema in enumerate(schemas):
        params = SamplingParams(800, matchers=(await grammars.factory(JsonSchema(schema)),))
        requests += [Request(f"{number}", [5, 6, 7], params), Request(f"free {number}", [5, 6, 7], SamplingParams(50))]
    ids: list[list[int]] = [[] for _ in requests]
    async with engine.submit(requests) as stream:
        async for outputs in stream:
            for output in outputs:
                ids[output.index] += output.token_ids
                wanted = FinishReason.LENGTH if output.index % 2 else FinishReason.STOP
                assert output.finish in (None, wanted)
    for number, schema in enumerate(schemas):
        check(TOKENIZER.decode(ids[2 * number][:-1], skip_special_tokens=False), schema)
        assert ids[2 * number + 1] == list(range(3, 53))
    assert (engine._scheduler.sequences.num_preemptions > 0) == (num_blocks < 4000)
    await engine.close()
