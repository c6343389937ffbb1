"""Random combinations of features over tiny models, each compared with the plain engine: one request at a time, no drafts.

`python -m tests.random_features --draws 1000 --seed 7` tries seeds 7 to 1006. A failure prints its seed and options, and
`--seed N` alone tries that draw again. Steps and drafts are bounded by numbers, not by measured time, so a draw repeats itself
apart from threads: masks, adapters and ranks. What cannot go together has to be refused by an error that names the options."""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import count
from pathlib import Path
from pprint import pformat
from typing import Any
from unittest.mock import patch

import torch
import transformers

from runtime.api import FinishReason, Request, SamplingParams
from runtime.batch import ScheduledBatch
from runtime.config import INT8_CACHE, EngineConfig, PlanError
from runtime.engine import Engine
from runtime.kv.kinds import State
from runtime.lora.targets import targets_of
from runtime.models.implementation import describe
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.model import UnsupportedModel
from runtime.parallel.replicas import Replicas
from runtime.policy.fairness import POLICIES
from runtime.scheduler import Scheduler
from runtime.speculate.config import SpeculativeConfig
from runtime.speculate.scheduling import DraftScheduling
from runtime.start import plan_engine, start_replicas
from runtime.tiers.scheduling import TierScheduling
from runtime.weights.fetch import ModelFiles, resolve
from tests.equality.adapters import linear_modules, write_adapter
from tests.equality.greedy import TIE
from tests.equality.test_families import FAMILIES, SMALL, VOCAB, drawn
from tests.fake_runner import Rule
from tests.features import has_feature
from tests.invariants import check_pool, check_tables

CHOSEN = ("llama, biases, tied", "gemma 3", "deepseek v3", "mamba 2", "falcon-h1", "qwen 3 next")
ADAPTERS = ("a0", "a1", "a2")
MAX_MODEL_LEN = 96
HANGS_S = 600  # a draw takes a second
INT8_TIE = (
    0.05  # between the two best logits: where numbers are rounded to 8 bits, another order of sums moves them so far
)


def unlike_the_last(ids: list[int]) -> set[int]:
    return {token for token in range(3, VOCAB) if (token + len(ids)) % 4 and (not ids or token != ids[-1])}


@dataclass(frozen=True)
class Asked:
    """A request. `adapter`: a name. `after`: the number of the request whose first token it waits for. `leaves_after`: tokens after
    which its reader leaves. `slips`: a seed for errors in its prediction, which is the plain answer; None for no prediction."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    rest: dict[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    after: int | None = None
    leaves_after: int | None = None
    slips: int | None = None

    def predicting(self, token_ids: list[int]) -> Asked:
        """With a prediction that is `token_ids` but for some of them: so n-grams and suffixes guess, and some guesses are wrong."""
        if self.slips is None:
            return self
        rng = random.Random(self.slips)
        ids = [token_id if rng.random() < 0.8 else rng.randrange(VOCAB) for token_id in token_ids]
        return replace(self, rest=self.rest | {"prediction": tuple(ids)})


@dataclass(frozen=True)
class Draw:
    """`options`: of the engine. `spare_blocks`: of the KV cache, beside those of the longest sequence. `draft`: of what family the
    draft model is. `num_preemptions`: so often the last in line starts over."""

    seed: int
    family: str
    options: dict[str, Any]
    spare_blocks: int
    draft: str | None
    num_preemptions: int
    asked: tuple[Asked, ...]

    @classmethod
    def of(cls, seed: int) -> Draw:
        rng = random.Random(seed)
        family = rng.choice(CHOSEN)
        seqs = rng.randint(2, 8)
        budget = rng.randint(seqs + 1, 64) if rng.random() < 0.98 else rng.randint(1, seqs)
        options: dict[str, Any] = {
            "tensor_parallel_size": rng.choice((1, 1, 2)),
            "pipeline_parallel_size": rng.choice((1, 1, 2)),
            "data_parallel_size": rng.choice((1, 1, 2)),
            "enable_expert_parallel": rng.random() < 0.05,
            "enable_prefix_caching": rng.random() < 0.7,
            "max_model_len": MAX_MODEL_LEN if rng.random() < 0.98 else 1000,
            "max_num_seqs": seqs,
            "max_num_batched_tokens": budget,
            "max_num_mixed_tokens": rng.randint(1, budget),
            "steps_in_flight": rng.randint(1, 3),
            "stream_interval": rng.choice((1, 1, 3)),
            "scheduling_policy": rng.choice([*POLICIES]),
            "quantization": rng.choices(("auto", "int8", "int16", "fp8"), (74, 12, 12, 2))[0],
            "kv_cache_dtype": rng.choices(("auto", INT8_CACHE, "fp8"), (80, 18, 2))[0],
            "speculative_config": None,
        }
        draft = None
        if (method := rng.choice((None, "ngram", "suffix", "draft_model", "ngram_gpu"))) is not None:
            given = {"method": method, "num_speculative_tokens": rng.randint(1, 6), "adaptive": False}
            if method == "draft_model":
                draft = rng.choices(("small", family), (3, 1))[0]
                given["model"] = draft
            elif method != "suffix":
                given |= {"prompt_lookup_min": 1, "prompt_lookup_max": rng.randint(1, 4)}
            options["speculative_config"] = SpeculativeConfig.of(given)
        if rng.random() < (0.3 if options["pipeline_parallel_size"] == 1 else 0.1):
            options |= {
                "enable_lora": True, "max_loras": rng.randint(1, 3), "max_cpu_loras": rng.randint(2, 4), "max_lora_rank": 4,
            }  # fmt: skip
        if random.Random(f"tiers {seed}").random() < 0.4:
            options["kv_host_bytes"] = 1 << 22
        num_preemptions, spare_blocks = rng.choice((0, 0, 10)), rng.choice((0, 1, 2, 5, 10, 40))
        rounds = options["quantization"] != "auto" or options["kv_cache_dtype"] != "auto"
        asked = _requests(rng, adapters="enable_lora" in options, only_greedy=rounds)
        return cls(seed, family, options, spare_blocks, draft, num_preemptions, tuple(asked))

    @property
    def is_rounded(self) -> bool:
        return self.options["quantization"] != "auto" or self.options["kv_cache_dtype"] != "auto"

    @property
    def plain_options(self) -> dict[str, Any]:
        """Those that change numbers. Shards of a matrix are rounded in blocks of their own."""
        options = {name: self.options[name] for name in ("quantization", "kv_cache_dtype")}
        if options["quantization"] != "auto":
            options["tensor_parallel_size"] = self.options["tensor_parallel_size"]
            options["enable_expert_parallel"] = self.options["enable_expert_parallel"]
        if "enable_lora" in self.options:
            options |= {"enable_lora": True, "max_loras": len(ADAPTERS), "max_lora_rank": 4}
        return options

    def __str__(self) -> str:
        asked = [_given(one) | {"params": _given(one.params)} for one in self.asked]
        text = pformat(_given(self) | {"asked": asked}, width=150, compact=True, sort_dicts=False)
        return f"python -m tests.random_features --seed {self.seed}\n{text}"


def _given(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not as they are by default."""
    found = {each.name: getattr(value, each.name) for each in fields(value)}
    defaults = {each.name: each.default for each in fields(value)}
    return {name: one for name, one in found.items() if one != defaults[name] and one not in ({}, ())}


def _requests(rng: random.Random, *, adapters: bool, only_greedy: bool) -> Iterator[Asked]:
    shared = [rng.randrange(VOCAB) for _ in range(48)]
    for number in range(rng.randint(2, 9)):
        prompt = [*shared[: rng.choice((0, 0, 17, 33, 48))], *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 20)))]
        if rng.random() < 0.4:  # of which n-grams find something
            prompt = (prompt[-5:] * 6)[: rng.randint(8, 30)]
        rest: dict[str, Any] = {"priority": rng.randrange(3), "speculative": rng.random() < 0.9}
        if rng.random() < 0.2:
            rest["cache_salt"] = "salt"
        if rng.random() < 0.4:
            rest["caller"] = rng.choice((b"one", b"two"))
        yield Asked(
            tuple(prompt),
            SamplingParams(rng.choice((1, 8, 16, 30)), **_params(rng, only_greedy=only_greedy)),
            rest,
            rng.choice((None, *ADAPTERS)) if adapters else None,
            rng.randrange(number) if number and rng.random() < 0.3 else None,
            rng.randint(1, 8) if rng.random() < 0.15 else None,
            rng.randrange(100) if rng.random() < 0.6 else None,
        )


def _params(rng: random.Random, *, only_greedy: bool) -> dict[str, Any]:
    """`only_greedy`: without what moves logits, so that what is shown of them says how near the second best was."""
    params: dict[str, Any] = {"temperature": 0.0, "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.2:
        params["prompt_logprobs"] = rng.randrange(3)
    if rng.random() < 0.2:
        params["stop_token_ids"] = frozenset({rng.randrange(VOCAB) for _ in range(8)})
    if only_greedy or rng.random() < 0.4:
        return params
    if rng.random() < 0.5:
        params |= {"temperature": rng.choice((0.5, 1.0, 1.5)), "seed": rng.randrange(100)}
        params |= rng.choice(({}, {"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.1}))
    params |= rng.choice(
        (
            {},
            {"repetition_penalty": 1.3},
            {"presence_penalty": 0.5, "frequency_penalty": 0.4},
            {"logit_bias": {9: 4.0, 11: -4.0}},
            {"allowed_token_ids": frozenset(range(3, VOCAB, 2))},
            {"min_tokens": 4},
            {"matchers": (_unlike_the_last,)},
        )
    )
    return params


def _unlike_the_last() -> Rule:
    return Rule(unlike_the_last, VOCAB)


class Models:
    """Checkpoints of the chosen families, a small draft model and adapters, written below `folder` when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files = cache(self._files)
        self.adapter = cache(self._adapter)

    def spec(self, family: str) -> DecoderSpec:
        spec = describe(self.files(family).config, "native")
        assert isinstance(spec, DecoderSpec)
        return spec

    def _files(self, family: str) -> ModelFiles:
        if family == "small":
            torch.manual_seed(6)
            config = transformers.LlamaConfig(**SMALL | {"num_hidden_layers": 1, "initializer_range": 0.25})
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        else:
            model = drawn(FAMILIES[family])
        folder = self._folder / family
        model.save_pretrained(folder)
        return resolve(str(folder), None, _quiet)

    def _adapter(self, family: str, name: str) -> Path:
        folder, number = self._folder / f"{family} {name}", ADAPTERS.index(name)
        modules = linear_modules(drawn(FAMILIES[family]), targets_of(self.spec(family)))
        write_adapter(folder, modules, number, rank=2 + number)
        return folder


def refusals(draw: Draw, models: Models) -> list[tuple[str, ...]]:
    """What the error that refuses the draw has to name, for each reason that there is; none where it has to start."""
    options, spec, found = draw.options, models.spec(draw.family), []
    kinds = list(spec.memory_kinds())
    if draft := draw.draft:
        drafts = models.spec(draft).memory_kinds()
        if any(isinstance(kind, State) for kind in drafts):
            found.append(("draft model", "recurrent layers"))
        kinds += drafts
    attention = [kind.kv for kind in kinds if not isinstance(kind, State)]
    differ = any(kv.latent for kv in attention) or len({kv.head_size for kv in attention}) > 1
    if options["kv_cache_dtype"] == INT8_CACHE and differ:
        found.append(("kv-cache-dtype",))
    if options["kv_cache_dtype"] == "fp8":
        found.append(("kv-cache-dtype", "fp8"))
    if options["quantization"] == "fp8":
        found.append(("quantization", "fp8"))
    if options["enable_expert_parallel"]:
        if options["tensor_parallel_size"] == 1:
            found.append(("enable-expert-parallel", "tensor-parallel-size"))
        elif not (experts := [*spec.experts()]):
            found.append(("enable-expert-parallel", "no experts"))
        elif any(each.num_experts % options["tensor_parallel_size"] for each in experts):
            found.append(("enable-expert-parallel", "tensor-parallel-size"))
    if options["max_model_len"] > spec.max_model_len:
        found.append(("max-model-len",))
    if options["max_num_batched_tokens"] <= options["max_num_seqs"]:
        found.append(("max-num-batched-tokens", "max-num-seqs"))
    if "kv_host_bytes" in options:
        if not options["enable_prefix_caching"]:
            found.append(("kv-host-bytes", "enable-prefix-caching"))
        if options["pipeline_parallel_size"] > 1:
            found.append(("kv-host-bytes", "pipeline-parallel-size"))
    if "enable_lora" in options:
        if options["pipeline_parallel_size"] > 1:
            found.append(("enable-lora", "pipeline-parallel-size"))
        if options["max_cpu_loras"] < options["max_loras"]:
            found.append(("max_cpu_loras", "max_loras"))
    return found


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    prompt_logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)  # of each token's logit and the next best

    def has(self, other: Answer, asked: Asked, tie: float) -> str | None:
        """How `other` differs, apart from ties between the two best tokens; None where it does not."""
        for place, (token_id, theirs) in enumerate(zip(self.token_ids, other.token_ids, strict=False)):
            if token_id != theirs:
                if place < len(self.margins) and self.margins[place] < tie:
                    return None
                margin = self.margins[place] if place < len(self.margins) else "unknown"
                return (
                    f"output {place} is {theirs}, not {token_id} (margin {margin}): {other.token_ids}, {self.token_ids}"
                )
        num = len(self.token_ids)
        if asked.leaves_after is not None and len(other.token_ids) >= min(asked.leaves_after, num):
            return None
        if (len(other.token_ids), other.finish) != (num, self.finish):
            return f"{len(other.token_ids)} tokens and {other.finish}, not {num} and {self.finish}"
        pairs = zip(self.prompt_logprobs, other.prompt_logprobs, strict=True)
        worst = max((abs(one - two) for one, two in pairs), default=0.0)
        return f"prompt log-probabilities differ by {worst}" if worst > 10 * tie else None


async def answers(engine: Engine | Replicas, asked: Sequence[Asked], *, alone: bool) -> list[Answer]:
    """`alone`: one request after another, to their ends, with the margin of each greedy token."""
    found, begun = [Answer() for _ in asked], [asyncio.Event() for _ in asked]

    async def answer(number: int, one: Asked) -> None:
        if one.after is not None and not alone:
            await begun[one.after].wait()
        adapter = None if one.adapter is None else engine.adapters.find(one.adapter)
        params, mine = one.params, found[number]
        moves = params.penalized or params.logit_bias or params.min_tokens or params.matchers
        has_margins = alone and params.greedy and not moves and params.allowed_token_ids is None
        if has_margins:
            params = replace(params, logprobs=2)
        request = Request(str(number), list(one.prompt_ids), params, adapter=adapter, **one.rest)
        try:
            async with engine.submit([request]) as stream:
                async for (output,) in stream:
                    assert output.error is None, f"request {number}: {output.error}"
                    begun[number].set()
                    mine.token_ids += output.token_ids
                    mine.finish = output.finish
                    mine.prompt_logprobs += [each.logprob for each in output.prompt_logprobs or ()]
                    if has_margins:
                        mine.margins += [each.top[0][1] - each.top[1][1] for each in output.logprobs or ()]
                    if not alone and one.leaves_after is not None and len(mine.token_ids) >= one.leaves_after:
                        break
        finally:
            begun[number].set()

    if alone:
        for number, one in enumerate(asked):
            await answer(number, one)
    else:
        await asyncio.gather(*(answer(number, one) for number, one in enumerate(asked)))
    return found


def checked(scheduler: Scheduler, num_preemptions: int) -> None:
    """Check the scheduler's books behind each step that it decides. In every fourth the last in line is preempted first, until
    that has happened so often."""
    schedule, calls = scheduler.schedule, count(1)

    def schedule_checked() -> ScheduledBatch | None:
        if next(calls) % 4 == 0 and scheduler.running and scheduler.sequences.num_preemptions < num_preemptions:
            scheduler.sequences.preempt(scheduler.running[-1])
        batch = schedule()
        check_pool(scheduler)
        check_tables(scheduler, drafting=has_feature(scheduler, DraftScheduling))
        if batch is not None:
            assert all(row.num_tokens > 0 for row in batch.rows)
            assert sum(row.num_tokens for row in batch.rows) <= scheduler.limits.max_num_batched_tokens
        return batch

    scheduler.schedule = schedule_checked  # type: ignore[method-assign]


async def started(draw: Draw, models: Models) -> Engine | Replicas:
    config = EngineConfig(device="cpu", dtype="float32", num_threads=1, num_kv_blocks=1000, **draw.options)
    files, draft = models.files(draw.family), None if draw.draft is None else models.files(draw.draft)
    plan = plan_engine(config, files, _quiet, draft).plan
    num_blocks = plan.layout.max_blocks(plan.max_model_len, plan.max_num_batched_tokens) + draw.spare_blocks
    return await start_replicas(replace(config, num_kv_blocks=num_blocks), files, _quiet, draft)


async def with_adapters(engine: Engine | Replicas, draw: Draw, models: Models) -> Engine | Replicas:
    if "enable_lora" in draw.options:
        for name in ADAPTERS:
            await engine.adapters.load(name, str(models.adapter(draw.family, name)))
    return engine


async def plain_answers(draw: Draw, models: Models) -> list[Answer]:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        num_threads=1,
        num_kv_blocks=64,
        max_model_len=MAX_MODEL_LEN,
        **draw.plain_options,
    )
    engine = await start_replicas(config, models.files(draw.family), _quiet)
    try:
        return await answers(await with_adapters(engine, draw, models), draw.asked, alone=True)
    finally:
        await engine.close()


async def compare(draw: Draw, models: Models) -> bool:
    """Whether the draw started, and was not refused. Raises AssertionError where it says otherwise than the plain engine."""
    expected = refusals(draw, models)
    try:
        engine = await started(draw, models)
    except (PlanError, UnsupportedModel) as error:
        if any(all(name in str(error) for name in names) for names in expected):
            return False
        raise
    try:
        assert not expected, f"not refused, although an error has to name one of {expected}"
        await with_adapters(engine, draw, models)
        wanted = await plain_answers(draw, models)
        for each in engine.replicas:
            checked(each._scheduler, draw.num_preemptions)
            for feature in each._scheduler.features:
                if isinstance(feature, TierScheduling):
                    feature.lookup.token_s = 3600.0  # reading is always worth it: of tiny models, computing is as fast
        asked = [one.predicting(answer.token_ids) for one, answer in zip(draw.asked, wanted, strict=True)]
        found = await answers(engine, asked, alone=False)
    finally:
        await engine.close()
    for each in engine.replicas:
        assert each._scheduler.blocks.pool.num_free == each._scheduler.blocks.pool.num_blocks
    tie = INT8_TIE if draw.is_rounded else TIE
    for number, (one, ours, theirs) in enumerate(zip(draw.asked, found, wanted, strict=True)):
        assert (differs := theirs.has(ours, one, tie)) is None, f"request {number}: {differs}"
    return True


def _quiet(progress: object) -> None:
    pass


def try_draw(seed: int, models: Models) -> bool:
    """As `compare`; the error says how to try the draw again."""
    draw = Draw.of(seed)
    try:
        with patch("runtime.constrain.mask_maker.LIMIT_S", 60.0):
            return asyncio.run(asyncio.wait_for(compare(draw, models), HANGS_S))
    except Exception as error:
        raise AssertionError(f"{error!r}\n{draw}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(".")[0])
    parser.add_argument("--draws", type=int, default=1, metavar="N", help="how many seeds, one after another")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first")
    given = parser.parse_args()
    num_started, failed = 0, []
    with tempfile.TemporaryDirectory() as folder:
        models = Models(Path(folder))
        for seed in range(given.seed, given.seed + given.draws):
            try:
                num_started += try_draw(seed, models)
            except AssertionError:
                traceback.print_exc()
                failed.append(seed)
    print(
        f"{given.draws} draws: {num_started} compared, {given.draws - num_started - len(failed)} refused, failed: {failed}"
    )
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
