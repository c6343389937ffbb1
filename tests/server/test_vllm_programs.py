"""What the example programs of vLLM do, with the import changed: a test is one of them in small. Table: server/llm/README.md."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle

import pytest

import oneloop
from oneloop import (
    LLM,
    AsyncEngineArgs,
    Counter,
    EngineArgs,
    FlexibleArgumentParser,
    Gauge,
    Histogram,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
    Vector,
)
from server.config import vllm_keywords
from server.config.parse import keyword_options
from tests.server.test_llm import fake, llm, texts  # noqa: F401


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch):
    monkeypatch.setattr(vllm_keywords, "_told", set())


def test_every_name_is_there_and_no_other():
    for name in dir(oneloop):
        assert getattr(oneloop, name) is not None
    with pytest.raises(AttributeError, match="'server' has no attribute 'LLMEngine'"):
        _ = oneloop.LLMEngine
    assert AsyncEngineArgs is EngineArgs


def test_generate_begins_with_the_models_own_sampling_and_changes_it(fake):  # noqa: F811
    """basic/generate.py, basic/chat.py."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="tiny")
    group = parser.add_argument_group("Sampling parameters")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--temperature", type=float)
    given = [
        "--max_tokens=2",
        "--enforce-eager",
        "--max-model-len",
        "64",
        "--trust-remote-code",
        "--limit-mm-per-prompt={}",
    ]
    args = vars(parser.parse_args(given))
    max_tokens, temperature = args.pop("max_tokens"), args.pop("temperature")
    assert temperature is None
    with LLM(**args) as llm:  # noqa: F811
        assert (fake.config.enforce_eager, fake.config.max_model_len) == (True, 64)
        params = llm.get_default_sampling_params()
        params.max_tokens = max_tokens
        assert texts(llm.generate(["abc", TextPrompt(prompt="def")], params, use_tqdm=False)) == ["AB", "DE"]


def test_a_chat_takes_a_template(llm):  # noqa: F811
    """basic/chat.py, chat_with_tools.py."""
    (output,) = llm.chat(
        [{"role": "user", "content": "Hi"}], use_tqdm=False, chat_template="{{ messages[0].content }}!"
    )
    assert (output.prompt, output.outputs[0].text) == ("Hi!", "HI!")
    with pytest.raises(ValueError, match="template"):
        llm.chat([{"role": "user", "content": "Hi"}], use_tqdm=False, chat_template="{% if")


def test_metrics_are_objects_by_their_kind(llm):  # noqa: F811
    """metrics.py."""
    llm.generate("a", use_tqdm=False)
    kinds = {metric.name: metric for metric in llm.get_metrics()}
    assert {type(metric) for metric in kinds.values()} == {Counter, Gauge, Histogram}
    assert not any(isinstance(metric, Vector) for metric in kinds.values())
    assert kinds["oneloop:num_requests_running"].value == 0
    steps = kinds["oneloop:step_time_seconds"]
    assert (steps.count, steps.sum, steps.buckets) == (6, 4.5, {"0.1": 3, "1.0": 5, "+Inf": 6})
    done = {each.labels["finished_reason"]: each.value for each in llm.get_metrics() if isinstance(each, Counter)}
    assert done["stop"] == 1


def test_structured_outputs_have_a_class_of_their_own(llm):  # noqa: F811
    """structured_outputs.py."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["AB"]), max_tokens=5)
    assert params.structured_outputs.choice == ["AB"]
    with pytest.raises(TypeError, match="choices"):
        StructuredOutputsParams(choices=["AB"])


def test_engine_args_become_keywords(fake):  # noqa: F811
    """vision_language.py: `LLM(**(asdict(engine_args) | {…}))`."""
    args = EngineArgs(
        model="tiny", max_num_seqs=2, limit_mm_per_prompt={"image": 1}, mm_processor_kwargs={"do_pan": True}
    )
    with LLM(**dataclasses.asdict(args) | {"seed": 3, "mm_processor_cache_gb": 0}):
        assert (fake.config.max_num_seqs, fake.config.seed) == (2, 3)
        assert fake.config.limit_mm_per_prompt == '{"image": 1}'
    args.max_num_seqs = 5
    with LLM.from_engine_args(args):
        assert fake.config.max_num_seqs == 5
    with pytest.raises(ValueError, match=r"unknown option 'max_num_seq' \(did you mean max_num_seqs\?\)"):
        EngineArgs(model="tiny", max_num_seq=2)


def test_prompts_of_tokens_are_typed(llm, fake):  # noqa: F811
    """prefix_caching.py, llm.generate(TokensPrompt(…))."""
    assert texts(llm.generate(TokensPrompt(prompt_token_ids=fake.tokenizer.encode("ab")), use_tqdm=False)) == ["AB"]


@pytest.mark.parametrize("name", vllm_keywords.WITHOUT_EFFECT)
def test_a_harmless_keyword_is_taken_with_one_warning(fake, caplog, name):  # noqa: F811
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "oneloop.config"), LLM("tiny", **{name: True}):
            pass
    (told,) = caplog.messages
    assert told.startswith(f"{name}=True has no effect: ")


def test_what_is_the_default_anyway_is_taken_without_a_word(fake, caplog):  # noqa: F811
    given = {
        "tokenizer_mode": "auto",
        "cpu_offload_gb": 0,
        "hf_overrides": {},
        "disable_log_stats": False,
        "swap_space": None,
    }
    with LLM("tiny", kv_cache_memory_bytes="1GiB", trust_remote_code=False, **given):
        assert fake.config.kv_cache_bytes == 2**30
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("keyword", "words"),
    [
        ({"cpu_offload_gb": 4}, r"cpu_offload_gb=4 is not supported: weights stay on the device"),
        ({"kv_transfer_config": {"kv_role": "kv_both"}}, "kv_transfer_config=.* KV connectors are not supported"),
        ({"worker_cls": "mine"}, "worker_cls='mine' is not supported"),
        ({"enable_chunked_prefil": True}, "unknown option 'enable_chunked_prefil'"),
        ({"max_modle_len": 5}, r"unknown option 'max_modle_len' \(did you mean max_model_len\?\)"),
    ],
)
def test_what_is_not_done_is_refused_by_name(keyword, words):
    with pytest.raises(ValueError, match=words):
        LLM("tiny", **keyword)


def test_no_option_of_ours_is_taken_for_one_of_vllms():
    assert keyword_options().keys() & vllm_keywords.NAMES == {"distributed_executor_backend"}


@pytest.mark.parametrize("name", ["llm_engine", "collective_rpc", "apply_model", "start_profile", "reward"])
def test_what_the_llm_lacks_is_said_in_one_line(llm, name):  # noqa: F811
    """llm_engine_example.py, rlhf.py, simple_profiling.py."""
    with pytest.raises(AttributeError, match=f"LLM has no {name}: "):
        getattr(llm, name)
    assert not hasattr(llm, "nothing_at_all")


def test_params_can_be_read_set_copied_and_sent():
    params = SamplingParams(temperature=0.5, stop=["x"])
    assert (params.temperature, params.n, params.top_p) == (0.5, 1, None)
    params.max_tokens = 5
    assert params == SamplingParams(temperature=0.5, stop=["x"], max_tokens=5)
    params.temperature = None
    assert params.fields == {"stop": ["x"], "max_tokens": 5}
    with pytest.raises(ValueError, match="temperature"):
        params.temperature = 9
    with pytest.raises(ValueError, match=r"no field 'max_token' \(did you mean max_tokens\?\)"):
        params.max_token = 5
    with pytest.raises(AttributeError, match="no field 'maximum'"):
        _ = params.maximum
    for other in (params.clone(), copy.copy(params), pickle.loads(pickle.dumps(params))):
        assert other == params
    other = params.clone()
    other.stop.append("y")
    assert params.stop == ["x"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guided_decoding": {"json": {}}}, "its name is structured_outputs"),
        ({"logits_processors": [print]}, "no Python function sees logits"),
        ({"detokenize": False}, "an answer is always text"),
    ],
)
def test_a_field_of_vllms_params_that_is_not_done_is_refused_by_name(fields, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**fields)
    assert SamplingParams(detokenize=True, skip_clone=True, logits_processors=None) == SamplingParams()


def test_no_limit_of_tokens_means_the_rest_of_the_context(llm, fake):  # noqa: F811
    llm.generate(["ab", "ab"], [SamplingParams(max_tokens=None), SamplingParams()], use_tqdm=False)
    assert [request.params.max_tokens for request in fake.engine.submitted] == [198, 16]
