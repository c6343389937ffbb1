"""LLM: the HTTP path without HTTP, from scripts, from inside a running loop, and on the caller's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runtime.api import FinishReason, LoadProgress
from server import LLM, LoRARequest, SamplingParams
from server.api.openai.request_types import CompletionRequest
from server.config.server_config import ServerConfig
from server.llm.prepare import SAMPLING_FIELDS
from server.models.defaults import sampling_defaults
from server.models.lifecycle import LoadError
from server.models.model import LoadedModel
from tests.fake_adapters import FakeAdapters
from tests.fakes import FakeEngine, fake_model
from tests.server.tiny import END, EOS, VOCAB_SIZE, chatml, loaded_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]


class Fake:
    """What `LLM` loads here. `engine` answers a prompt with itself in upper case, then ends."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.engine: FakeEngine
        self.config: ServerConfig
        self.most_at_once = 0
        self.paused = False
        self.rows = 4

    async def load(self, config, report, cancel) -> LoadedModel:
        report(LoadProgress("weights"))
        if config.model == "broken":
            raise LoadError("model.safetensors is truncated")
        self.config = config
        model = fake_model(
            vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}), max_model_len=200, max_num_seqs=self.rows
        )
        self.engine = FakeEngine(self._say, model=model, paused=self.paused)
        return loaded_model(self.engine, self.tokenizer, chatml(self.tokenizer), sampling_defaults(), ("tiny",))

    def _say(self, request):
        self.most_at_once = max(self.most_at_once, len(self.engine.live))
        return [*self.tokenizer.encode(self.tokenizer.decode(request.prompt_ids).upper()), EOS]


@pytest.fixture
def fake(monkeypatch):
    fake = Fake(tiny_tokenizer())
    monkeypatch.setattr("server.llm.core.load", fake.load)
    return fake


@pytest.fixture
def llm(fake):
    with LLM("tiny") as llm:
        yield llm


def texts(outputs) -> list[str]:
    return [output.outputs[0].text for output in outputs]


# --- sync ---------------------------------------------------------------------------------------------------------


def test_answers_come_in_the_order_of_the_prompts_however_many_there_are(llm, fake):
    prompts = ["x" * (1 + i * 7 % 11) for i in range(400)]
    outputs = llm.generate(prompts, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert texts(outputs) == [prompt.upper() for prompt in prompts]
    assert 1 < fake.most_at_once <= 8
    assert len({output.request_id for output in outputs}) == 400


def test_an_answer_carries_what_vllms_users_read(llm, fake):
    (output,) = llm.generate("Hi", SamplingParams(max_tokens=9), use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == ("Hi", fake.tokenizer.encode("Hi"))
    assert output.finished
    (choice,) = output.outputs
    assert (choice.index, choice.text, choice.finish_reason, choice.stop_reason) == (0, "HI", "stop", None)
    assert choice.token_ids == [*fake.tokenizer.encode("HI"), EOS]


def test_prompts_may_be_token_ids(llm, fake):
    one, other = fake.tokenizer.encode("ab"), fake.tokenizer.encode("cd")
    assert texts(llm.generate(one, use_tqdm=False)) == ["AB"]
    outputs = llm.generate([one, other], use_tqdm=False)
    assert texts(outputs) == ["AB", "CD"]
    assert [output.prompt for output in outputs] == [None, None]
    assert llm.generate([], use_tqdm=False) == []


def test_tokens_and_prompts_come_with_their_log_probabilities(llm, fake):
    params = SamplingParams(logprobs=1, prompt_logprobs=0)
    (output,) = llm.generate("ab", params, use_tqdm=False)
    (choice,) = output.outputs
    ids = [*fake.tokenizer.encode("AB"), EOS]
    assert [list(row) for row in choice.logprobs] == [[token_id, 0] for token_id in ids]
    assert choice.logprobs[0][ids[0]].decoded_token == "A"
    assert (choice.logprobs[0][ids[0]].rank, choice.logprobs[0][0].rank) == (3, 1)
    assert choice.cumulative_logprob == pytest.approx(sum(-token_id / 1000 for token_id in ids))
    first, second = output.prompt_logprobs
    assert first is None
    assert list(second) == [fake.tokenizer.encode("b")[0]]
    (chat,) = llm.chat([{"role": "user", "content": "x"}], params, use_tqdm=False)
    assert len(chat.prompt_logprobs) == len(chat.prompt_token_ids)
    (plain,) = llm.generate("ab", use_tqdm=False)
    assert (plain.prompt_logprobs, plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob) == (None, None, None)


def test_a_prompt_may_be_scored_and_nothing_generated(llm):
    (output,) = llm.generate("abc", SamplingParams(max_tokens=0, prompt_logprobs=1), use_tqdm=False)
    assert len(output.prompt_logprobs) == 3
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "length")


def test_the_best_of_several_come_when_all_are_complete(llm, fake):
    fake.engine.script = lambda request: [*fake.tokenizer.encode("zya"[int(request.id[-1]) % 3]), EOS]
    params = SamplingParams(best_of=3, n=2, logprobs=0)
    (output,) = llm.generate("p", params, use_tqdm=False)
    assert [(choice.index, choice.text) for choice in output.outputs] == [(0, "a"), (1, "y")]

    async def increments():
        return [output async for output in llm.agenerate("p", params)]

    (only,) = asyncio.run(increments())
    assert [choice.text for choice in only.outputs] == ["a", "y"]
    assert only.finished


def test_beams_are_searched_for_here_too(llm):
    params = SamplingParams(use_beam_search=True, n=2, max_tokens=3, ignore_eos=True, logprobs=0)
    (output,) = llm.generate("p", params, use_tqdm=False)
    assert [choice.token_ids for choice in output.outputs] == [[0, 0, 0], [0, 0, 1]]
    assert output.outputs[1].cumulative_logprob == -1.0
    assert output.finished


def test_n_answers_share_a_prompt_and_differ_in_their_seed(llm, fake):
    (output,) = llm.generate("Hi", SamplingParams(n=20, seed=7), use_tqdm=False)
    assert [choice.index for choice in output.outputs] == list(range(20))
    assert [choice.text for choice in output.outputs] == ["HI"] * 20
    assert [request.params.seed for request in fake.engine.submitted] == [7 + i for i in range(20)]


def test_a_prompt_may_be_cut_and_the_ids_allowed_be_named(llm, fake):
    params = SamplingParams(truncate_prompt_tokens=2, allowed_token_ids=[5, 6])
    (output,) = llm.generate("abcd", params, use_tqdm=False)
    assert output.prompt_token_ids == fake.tokenizer.encode("cd")
    assert texts([output]) == ["CD"]
    assert fake.engine.submitted[0].params.allowed_token_ids == {5, 6}


def test_each_prompt_may_have_its_own_params(llm):
    params = [SamplingParams(max_tokens=2), SamplingParams(stop="C")]
    outputs = llm.generate(["abcd", "abcd"], params, use_tqdm=False)
    assert texts(outputs) == ["AB", "AB"]
    first, second = outputs[0].outputs[0], outputs[1].outputs[0]
    assert (first.finish_reason, first.stop_reason) == ("length", None)
    assert (second.finish_reason, second.stop_reason) == ("stop", "C")
    with pytest.raises(ValueError, match="1 for 2 prompts"):
        llm.generate(["a", "b"], params[:1])


def test_what_the_engine_made_behind_a_stop_string_is_in_nobodys_answer(fake):
    fake.paused = True
    with LLM("tiny") as llm, in_thread(lambda: llm.generate("abcdef", SamplingParams(stop="C"), use_tqdm=False)) as end:
        llm._background.run(fake.engine.until(lambda: len(fake.engine.live) == 1))
        llm._background.run(step(fake.engine, 6))
        (output,) = end()
    assert output.outputs[0].token_ids == fake.tokenizer.encode("ABC")
    assert output.outputs[0].text == "AB"


def test_a_chat_goes_through_the_template_and_may_fill_the_context(llm, fake):
    (output,) = llm.chat([{"role": "user", "content": "Hi"}], use_tqdm=False)
    assert output.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert output.outputs[0].text == "USER\nHI\nASSISTANT\n"
    assert fake.engine.submitted[0].params.max_tokens == 200 - len(output.prompt_token_ids)
    two = llm.chat([[{"role": "user", "content": c}] for c in "ab"], SamplingParams(max_tokens=6), use_tqdm=False)
    assert texts(two) == ["USER\nA", "USER\nB"]
    (options,) = llm.chat(
        [{"role": "user", "content": "Hi"}], use_tqdm=False, chat_template_kwargs={"assistant": "model"}
    )
    assert options.prompt.endswith("<|im_start|>model\n")
    (bare,) = llm.chat([{"role": "user", "content": "Hi"}], use_tqdm=False, add_generation_prompt=False)
    assert bare.prompt_token_ids[-2] == END


def test_an_adapter_answers_where_it_is_asked_for(llm, fake, tmp_path):
    """Loaded by name and folder once, however many ask; one that is there is asked for by name alone."""
    fake.engine.adapters = FakeAdapters("known")
    mine, known = LoRARequest("mine", 1, str(tmp_path)), LoRARequest("known")
    llm.generate(["a", "b", "c"], lora_request=mine)
    assert fake.engine.adapters.loaded == [("mine", str(tmp_path))]
    llm.generate(["a", "b"], lora_request=[None, known])
    llm.chat([{"role": "user", "content": "d"}], lora_request=mine)
    names = [request.adapter and request.adapter.name for request in fake.engine.submitted]
    assert (names[:3], sorted(names[3:5], key=str), names[5:]) == (["mine"] * 3, [None, "known"], ["mine"])
    llm.generate("a", lora_request=LoRARequest("mine", 1, tmp_path / "other"))
    assert fake.engine.adapters.loaded[1:] == [("mine", str(tmp_path / "other"))]


def test_an_adapter_that_cannot_answer_is_a_value_error(llm, fake, tmp_path):
    with pytest.raises(ValueError, match=r"'mine': adapters are disabled: create the LLM with enable_lora=True"):
        llm.generate("a", lora_request=LoRARequest("mine", 1, "x"))
    fake.engine.adapters = FakeAdapters()
    (tmp_path / "bad").touch()
    for given, message in (
        (LoRARequest("mine", 1, tmp_path), "q_proj is of another shape"),
        (LoRARequest("nobody"), "nobody"),
        (LoRARequest("tiny", 1, tmp_path), "a name of the model"),
        ([], "0 lora_request for 1 prompts"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate("a", lora_request=given)
    with pytest.raises(ValueError, match="lora_name"):
        LoRARequest("")
    assert texts(llm.generate("a")) == ["A"]


async def test_the_sync_methods_work_inside_a_running_loop(llm):
    assert texts(llm.generate("hi", use_tqdm=False)) == ["HI"]


def test_the_bar_counts_prompts_and_tokens(llm, capsys):
    llm.generate(["ab", "cd"])
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tok/s" in shown
    llm.generate(["ab", "cd"], use_tqdm=False)
    assert capsys.readouterr().err == ""


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": float("inf")}, "min_p"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias"),
        ({"logit_bias": {5: 101}}, "logit_bias"),
        ({"n": 0}, "'n'"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"seed": object()}, "cannot be converted to JSON"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temprature": 1}, "did you mean temperature"),
        ({"stream": True}, "stream"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"length_penalty": float("nan"), "use_beam_search": True}, "length_penalty"),
        ({"echo": True}, "echo"),
    ],
)
def test_params_are_checked_as_http_checks_them_and_the_field_is_named(fields, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**fields)


def test_every_sampling_field_is_one_of_the_wire():
    wire = set(CompletionRequest.__struct_fields__)
    assert set(SAMPLING_FIELDS) <= wire
    assert SamplingParams(temperature=0, stop=None) == SamplingParams(temperature=0)
    assert repr(SamplingParams(n=2)) == "SamplingParams(n=2)"


@pytest.mark.parametrize(
    ("prompt", "fields", "words"),
    [
        ("", {}, "prompt is empty"),
        ("x" * 200, {}, "context"),
        ("x", {"max_tokens": 200}, "context"),
        ("x", {"stop_token_ids": [VOCAB_SIZE]}, "vocabulary"),
        ("x", {"min_tokens": 20}, "min_tokens"),
        ([VOCAB_SIZE], {}, "vocabulary"),
        ([-1], {}, "prompt"),
        ("x", {"priority": 3}, "priority"),
    ],
)
def test_what_does_not_fit_the_model_is_a_value_error_and_the_rest_goes_on(llm, prompt, fields, words):
    with pytest.raises(ValueError, match=words):
        llm.generate(prompt, SamplingParams(**fields), use_tqdm=False)
    with pytest.raises(ValueError, match=r"prompt 1: .*" + words):
        llm.generate(["a", prompt], [SamplingParams(), SamplingParams(**fields)], use_tqdm=False)
    assert texts(llm.generate("hi", use_tqdm=False)) == ["HI"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_seq": 3}, "did you mean max_num_seqs"),
        ({"port": 80}, "unknown option 'port'"),
        ({"max_num_seqs": 0}, "max_num_seqs: 0 is out of range"),
        ({"dtype": "int3"}, "dtype"),
        ({"kv_cache_memory": "1GiB", "num_kv_blocks": 4}, "num-kv-blocks"),
    ],
)
def test_options_are_the_servers_and_unknown_ones_are_refused_by_name(fake, options, words):
    with pytest.raises(ValueError, match=words):
        LLM("tiny", **options)


def test_options_reach_the_engine(fake):
    with LLM("tiny", limit_mm_per_prompt={"image": 1}, max_image_pixels=9):
        assert (fake.config.limit_mm_per_prompt, fake.config.max_image_pixels) == ('{"image": 1}', 9)
        assert fake.config.enable_mm_embeds
    with LLM(Path("tiny"), max_num_seqs=3, enable_prefix_caching=False, kv_cache_memory="1GiB", dtype=None):
        config = fake.config
    assert (config.model, config.max_num_seqs, config.enable_prefix_caching) == ("tiny", 3, False)
    assert config.kv_cache_bytes == 2**30


def test_a_model_that_cannot_load_says_why_and_leaves_no_thread(fake):
    with pytest.raises(LoadError, match="truncated"):
        LLM("broken")
    assert not ours()


# --- async --------------------------------------------------------------------------------------------------------


async def step(engine: FakeEngine, num_tokens: int = 1) -> None:
    engine.step(num_tokens)


async def test_increments_come_to_the_callers_loop_and_add_up_to_the_answer(llm, fake):
    increments = [increment async for increment in llm.agenerate("hello")]
    assert "".join(i.outputs[0].text for i in increments) == "HELLO"
    assert [id for i in increments for id in i.outputs[0].token_ids] == [*fake.tokenizer.encode("HELLO"), EOS]
    assert [i.finished for i in increments] == [False] * (len(increments) - 1) + [True]
    assert len(increments) > 1
    chat = [i async for i in llm.achat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=4))]
    assert "".join(i.outputs[0].text for i in chat) == "USER"


async def test_leaving_the_iteration_takes_the_request_back(fake):
    fake.paused = True
    with LLM("tiny") as llm:
        async with contextlib.aclosing(llm.agenerate("hello")) as increments:
            first = asyncio.ensure_future(anext(increments))
            await asyncio.sleep(0)
            llm._background.run(fake.engine.until(lambda: len(fake.engine.live) == 1))
            llm._background.run(step(fake.engine))
            assert (await first).outputs[0].text == "H"
        llm._background.run(fake.engine.until(lambda: not fake.engine.live))
    assert [reason for _, reason in fake.engine.ended] == [FinishReason.ABORT]


async def test_async_refusals_are_value_errors_too(llm):
    with pytest.raises(ValueError, match="context"):
        await anext(llm.agenerate("x" * 300))
    with pytest.raises(ValueError, match="role"):
        llm.achat([{"role": "wizard", "content": "Hi"}])


async def test_many_at_once_share_the_engine(llm, fake):
    async def whole(prompt: str) -> str:
        return "".join([i.outputs[0].text async for i in llm.agenerate(prompt)])

    prompts = ["y" * (1 + i % 5) for i in range(50)]
    assert await asyncio.gather(*map(whole, prompts)) == [p.upper() for p in prompts]
    assert fake.most_at_once <= 8


# --- ending -------------------------------------------------------------------------------------------------------


def ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("oneloop-llm")]


@contextlib.contextmanager
def in_thread(work):
    """Runs `work` beside the block, which gets a function that waits for its result, or raises its error."""
    result: list = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            result.append(error)

    def end():
        thread.join()
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield end
    finally:
        thread.join()


def test_closing_ends_what_is_in_flight_and_the_thread(fake):
    fake.paused = True
    llm = LLM("tiny")
    with in_thread(lambda: llm.generate("hello", use_tqdm=False)) as end:
        llm._background.run(fake.engine.until(lambda: len(fake.engine.live) == 1))
        llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            end()
    assert fake.engine.closed
    assert not ours()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("hello")
    with pytest.raises(RuntimeError, match="closed"):
        llm.agenerate("hello")


def test_an_engine_that_fails_is_a_runtime_error(fake):
    fake.paused = True

    async def fail() -> None:
        fake.engine.fail("out of memory")

    with LLM("tiny") as llm, in_thread(lambda: llm.generate(["a", "b"], use_tqdm=False)) as end:
        llm._background.run(fake.engine.until(lambda: len(fake.engine.live) == 2))
        llm._background.run(fail())
        with pytest.raises(RuntimeError, match="out of memory"):
            end()


def test_a_constraint_that_cannot_be_kept_is_a_value_error(fake):
    fake.paused = True

    async def refuse() -> None:
        fake.engine.refuse_constraints("12001 items")

    with LLM("tiny") as llm, in_thread(lambda: llm.generate("a", use_tqdm=False)) as end:
        llm._background.run(fake.engine.until(lambda: len(fake.engine.live) == 1))
        llm._background.run(refuse())
        with pytest.raises(ValueError, match="12001 items"):
            end()


def test_dropping_the_last_reference_closes(fake):
    llm = LLM("tiny")
    llm.generate("hello", use_tqdm=False)
    del llm
    gc.collect()
    assert fake.engine.closed
    assert not ours()


def test_ctrl_c_takes_the_requests_back_and_the_llm_goes_on(fake):
    fake.paused = True
    with LLM("tiny") as llm:

        def interrupt() -> None:
            llm._background.run(fake.engine.until(lambda: len(fake.engine.live) == 3))
            os.kill(os.getpid(), signal.SIGINT)

        with in_thread(interrupt), pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], use_tqdm=False)
        assert fake.engine.live == []
        assert [reason for _, reason in fake.engine.ended] == [FinishReason.ABORT] * 3
        with in_thread(lambda: llm.generate("ab", use_tqdm=False)) as end:
            llm._background.run(fake.engine.until(lambda: len(fake.engine.live) == 1))
            llm._background.run(step(fake.engine, 3))
            assert texts(end()) == ["AB"]


SCRIPT = """
import asyncio, sys
import server.llm.core
from tests.server.test_llm import Fake
from tests.server.tiny import tiny_tokenizer, loaded_model
server.llm.core.load = Fake(tiny_tokenizer()).load
from server import LLM
llm = LLM("tiny")
print(llm.generate("hi", use_tqdm=False)[0].outputs[0].text)
running = llm.agenerate("an answer that nobody waits for")
asyncio.run(running.__anext__())
"""


def test_a_script_that_closes_nothing_ends_by_itself():
    ended = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "HI\n"), ended.stderr
    for scare in ("Traceback", "pending", "Exception", "Error"):
        assert scare not in ended.stderr


def test_importing_the_package_imports_nothing_heavy():
    check = (
        "import sys, server; heavy = {'torch', 'starlette', 'tokenizers', 'msgspec', 'server.llm.llm'} & set(sys.modules); "
        "assert not heavy, heavy; assert 'LLM' in dir(server); from server import LLM; assert 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        __import__("server").nothing  # noqa: B018
