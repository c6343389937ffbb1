"""vLLM's idioms on LLM: dict prompts, its tokenizer, beams, a prefix cache that forgets, and clear words for what is not there."""

from __future__ import annotations

import pytest

from server import LLM, BeamSearchParams, SamplingParams
from server.config.parse import from_keywords
from tests.server.test_llm import fake, llm, texts  # noqa: F401
from tests.server.tiny import EOS


def test_dict_prompts_are_text_or_ids(llm, fake):  # noqa: F811
    ids = fake.tokenizer.encode("cd")
    prompts = [{"prompt": "ab"}, {"prompt_token_ids": ids}, {"prompt_token_ids": ids, "prompt": "as shown"}, "ef"]
    outputs = llm.generate(prompts, use_tqdm=False)
    assert texts(outputs) == ["AB", "CD", "CD", "EF"]
    assert [output.prompt for output in outputs] == ["ab", None, "as shown", "ef"]
    assert texts(llm.generate({"prompt": "ab", "multi_modal_data": {}, "cache_salt": "s"}, use_tqdm=False)) == ["AB"]
    assert fake.engine.submitted[-1].cache_salt == "s"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt": "a", "multi_modal_data": {"smell": 1}}, "multi_modal_data has no key 'smell'"),
        (
            {"prompt": "a", "multi_modal_data": {"image": b"a"}},
            "multi_modal_data.image has type 'image'; the model accepts",
        ),
        ({"prompt": "a", "multi_modal_data": {"image": "/no/such"}}, "multi_modal_data.image: /no/such cannot be read"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"image": b"a"}}, "requires a text prompt"),
        ({"promt": "a"}, "no key 'promt' (did you mean prompt?)"),
        ({}, "needs 'prompt', 'prompt_token_ids' or 'prompt_embeds'"),
        ({"prompt": [1, 2]}, "'prompt' must be text, not list"),
        ({"prompt_token_ids": "12"}, "cannot be interpreted as an integer"),
    ],
)
def test_a_dict_that_says_something_else_is_refused(llm, fake, prompt, words):  # noqa: F811
    with pytest.raises((ValueError, TypeError)) as refused:
        llm.generate([prompt], use_tqdm=False)
    assert words in str(refused.value)
    assert fake.engine.submitted == []


def test_the_tokenizer_is_one_of_transformers(llm, fake):  # noqa: F811
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("Hello", add_special_tokens=False)
    assert ids == fake.tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.decode(ids) == "Hello"
    assert tokenizer.eos_token_id == fake.tokenizer.eos_token_id == EOS


def test_beams_come_as_vllms_do(llm):  # noqa: F811
    (found,) = llm.beam_search([{"prompt": "ab"}], BeamSearchParams(beam_width=3, max_tokens=2))
    assert len(found.sequences) == 3
    sums = [sequence.cum_logprob for sequence in found.sequences]
    assert sums == sorted(sums, reverse=True)
    for sequence in found.sequences:
        assert sequence.text.startswith("ab")
        assert len(sequence.logprobs) == len(sequence.tokens) - 2


def test_the_prefix_cache_forgets(llm, fake):  # noqa: F811
    assert llm.reset_prefix_cache() is True
    assert fake.engine.num_resets == 1


def test_keywords_of_vllm_are_taken_where_they_ask_for_nothing_more(fake):  # noqa: F811
    with LLM("tiny", tensor_parallel_size=1, distributed_executor_backend="mp", trust_remote_code=False) as llm:  # noqa: F811
        assert texts(llm.generate("a", SamplingParams(max_tokens=3), use_tqdm=False)) == ["A"]
    for keyword in ({"distributed_executor_backend": "ray"}, {"cpu_offload_gb": 4}, {"task": "embed"}):
        with pytest.raises(ValueError, match=f"{next(iter(keyword))}=.* is not supported: "):
            LLM("tiny", **keyword)


def test_what_a_model_is_served_for_is_the_servers_own_option():
    assert from_keywords({"model": "tiny", "runner": "pooling"}).runner == "pooling"
