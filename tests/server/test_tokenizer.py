"""Our tokenizer against transformers' on SmolLM2, folders in Hugging Face format, and what a tokenizer says about itself."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from server.models.tokenizer import Tokenizer, TokenizerError
from tests.server import smollm2
from tests.server.text.made_tokenizers import CORPUS, gemma_like, made

HARD = [
    *CORPUS,
    "",
    " ",
    "   leading and trailing   ",
    "tabs\t\tand\r\nnew\n\n\nlines \n ",
    "a  b   c    d     e",
    "import os\n\nclass A(B):\n    def __init__(self, x: int = 3) -> None:\n        self.x = {'a': [1, 2, 3.14e-10]}\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <repo_name><file_sep><|im_end",
    "0123456789 3.14159 1,000,000 12:34:56 +49-30-1234 0xDEADBEEF 1e9",
    "½ ² Ⅷ ٣٤٥ १२३ ①②③ 十二 𝟙𝟚𝟛",
    "don't DON'T it'll we've I'd you're 'tis ''quoted''",
    "naïve café e\u0301 a\u0308\u0323 ﬁ ﷽ \u200b\u200d\ufeff\u00a0x\u3000y",
    "العربية עברית हिन्दी ไทย தமிழ் 한국어 日本語 中文 Ελληνικά Русский",
    "😀😃👩‍👩‍👧‍👦🏳️‍🌈🇩🇪👍🏽 🫠",
    "𠜎𠜱𝒳𐍈 \U0010ffff \x00\x01\x7f",
    "!!!???...---===###@@@$$$%%%^^^&&&***((()))[[[]]]{{{}}}",
    "https://example.com/a?b=c&d=%20#e user@host.org C:\\Users\\x",
    "word" * 400,
    "\n" * 70 + " " * 90 + "\t" * 9,
]


def random_texts(count: int) -> list[str]:
    rng = random.Random(5)
    alphabet = "aZé漢😀 \n\t1٣.,'-_<|>▁Ġ\u0301\u200d"
    return ["".join(rng.choices(alphabet, k=rng.randrange(1, 60))) for _ in range(count)]


@pytest.fixture(scope="module")
def theirs() -> Any:
    """transformers' tokenizer of the GGUF file, with the pre-tokenizer of SmolLM2's own tokenizer.json: transformers does
    not know the name "smollm" and takes GPT-2's, which does not keep digits apart."""
    tokenizer = smollm2.transformers_own()
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    return tokenizer


@pytest.mark.parametrize("text", HARD, ids=[ascii(text[:30]) for text in HARD])
def test_smollm2_encodes_and_decodes_as_transformers_does(theirs, text):
    tokenizer = smollm2.ours()
    ids = theirs(text)["input_ids"]
    assert tokenizer.encode(text) == ids
    assert tokenizer.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert tokenizer.token_strings(ids) == theirs.convert_ids_to_tokens(ids)


def test_smollm2_encodes_random_texts_as_transformers_does(theirs):
    for text in random_texts(400):
        assert smollm2.ours().encode(text) == theirs(text)["input_ids"], ascii(text)


def test_smollm2_keeps_blanks_before_a_digit_together_as_it_was_trained():
    one = smollm2.ours().token_strings(smollm2.ours().encode("steps:\n\n1. go  2"))
    assert one == ["steps", ":", "ĊĊ", "1", ".", "Ġgo", "ĠĠ", "2"]


def test_smollm2_knows_its_special_tokens():
    tokenizer = smollm2.ours()
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.eos_token_ids == {0, 2}
    assert tokenizer.special_ids == set(range(17))
    assert tokenizer.named_tokens["unk_token"] == "<|endoftext|>"
    assert isinstance(tokenizer.chat_template, str)


@given(numbers=st.lists(st.integers(0, 49152 + 100), max_size=40), size=st.integers(1, 5), skip=st.booleans())
def test_smollm2_streams_any_ids_to_what_decode_gives(numbers, size, skip):
    tokenizer = smollm2.ours()
    detokenizer = tokenizer.table.detokenizer(skip_special_tokens=skip)
    streamed = (
        "".join(detokenizer.feed(numbers[at : at + size]) for at in range(0, len(numbers), size)) + detokenizer.flush()
    )
    assert streamed == tokenizer.decode(numbers, skip_special_tokens=skip)


@pytest.mark.parametrize("text", HARD, ids=[ascii(text[:30]) for text in HARD])
def test_smollm2_streams_hard_texts_token_by_token(text):
    tokenizer = smollm2.ours()
    ids = tokenizer.encode(text)
    detokenizer = tokenizer.table.detokenizer(skip_special_tokens=False)
    assert "".join(detokenizer.feed([id]) for id in ids) + detokenizer.flush() == tokenizer.decode(
        ids, skip_special_tokens=False
    )


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(ValueError, match="lone surrogate"):
        smollm2.ours().encode("a\ud800b")


def test_ids_outside_the_vocabulary_give_no_text_and_impossible_ones_are_refused():
    tokenizer = smollm2.ours()
    assert tokenizer.decode([10**6, tokenizer.encode("hi")[0], 2**32 - 1]) == "hi"
    assert tokenizer.token_strings([-1, 10**6, 2**40]) == ["", "", ""]
    assert tokenizer.token_bytes(-1) == b""
    for impossible in ([-1], [2**32]):
        with pytest.raises(ValueError, match="token id"):
            tokenizer.decode(impossible)


# --- BOS ----------------------------------------------------------------------------------------------------------


def with_bos() -> Tokenizer:
    backend = gemma_like()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


def test_bos_is_added_once_and_only_when_asked():
    tokenizer = with_bos()
    text = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("a") == [1, *text]
    assert tokenizer.encode("<s>a", add_special_tokens=False) == [1, *text]


def test_a_text_that_begins_with_bos_does_not_get_another():
    tokenizer = with_bos()
    assert tokenizer.encode("<s>a") == tokenizer.encode("a")
    assert tokenizer.encode("<s><s>a") == [1, *tokenizer.encode("a")]
    assert tokenizer.encode("") == [1]


def test_where_an_answer_is_several_messages_the_end_of_one_ends_no_text():
    fields = smollm2.metadata()
    tokens = list(fields["tokenizer.ggml.tokens"])
    end = tokens.index("<file_sep>")
    tokens[end] = "<|end|>"
    assert end in Tokenizer.from_gguf({**fields, "tokenizer.ggml.tokens": tokens}).eos_token_ids
    tokens[tokens.index("<repo_name>")] = "<|channel|>"
    assert end not in Tokenizer.from_gguf({**fields, "tokenizer.ggml.tokens": tokens}).eos_token_ids


# --- folders ------------------------------------------------------------------------------------------------------


def write_folder(folder, backend: Backend, config: dict[str, Any] | None = None, **files: str):
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


def test_a_folder_transformers_saved_is_read_as_transformers_reads_it(tmp_path, theirs):
    theirs.save_pretrained(tmp_path)
    tokenizer, again = Tokenizer.from_folder(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in HARD:
        assert tokenizer.encode(text) == again(text)["input_ids"]
    assert tokenizer.named_tokens == {
        key: value for key, value in again.special_tokens_map.items() if isinstance(value, str)
    }
    assert tokenizer.chat_template == again.chat_template
    assert tokenizer.eos_token_ids == {again.eos_token_id}


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "BertTokenizer"},
        {"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids", "attention_mask"]},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"tokenizer_class": "TokenizersBackend"},
        {"tokenizer_class": "TokenizersBackend", "model_input_names": ["input_ids", "token_type_ids"]},
        {"model_input_names": ["input_ids"]},
        {},
    ],
)
def test_a_pair_has_token_types_where_transformers_gives_them(tmp_path, config):
    backend = Backend(models.WordLevel({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4}, unk_token="[UNK]"))
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 1), ("[SEP]", 2)]
    )
    transformers.BertConfig().save_pretrained(write_folder(tmp_path, backend, config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)("a", "b")
    ids, types = Tokenizer.from_folder(tmp_path).framing.framed_pair([3], [4])
    assert (ids, types) == (theirs["input_ids"], theirs.get("token_type_ids"))


def test_settings_of_a_training_run_do_not_cut_or_pad(tmp_path):
    backend = Backend.from_str(made("byte level").to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("The quick brown fox")) == "The quick brown fox"
    assert len(tokenizer.encode("a")) == 1


def test_texts_are_lowered_where_sentence_transformers_lowers_them(tmp_path):
    folder = write_folder(tmp_path, Backend.from_str(made("byte level").to_str()))
    usual = Tokenizer.from_folder(folder).encode("the quick")
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    assert Tokenizer.from_folder(folder).encode("The QUICK") == usual


def test_tokens_only_the_configuration_knows_are_added(tmp_path):
    backend = Backend.from_str(made("byte level").to_str())
    size = backend.get_vocab_size()
    entry = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    config = {
        "eos_token": {"content": "<|eot|>"},
        "bos_token": "the",
        "pad_token": "<nowhere>",
        "added_tokens_decoder": {str(size): {"content": "<|eot|>", "special": True, **entry}},
    }
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend, config))
    assert tokenizer.encode("<|eot|>") == [size]
    assert tokenizer.eos_token_ids == {size}
    assert tokenizer.special_ids >= {size, tokenizer.bos_token_id}
    assert tokenizer.vocab_size == size + 1


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({}, {}, None),
        ({"chat_template": "C"}, {}, "C"),
        ({"chat_template": "C"}, {"chat_template__jinja": "J"}, "J"),
        ({}, {"chat_template__json": '{"chat_template": "P"}'}, "P"),
        (
            {"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]},
            {},
            {"default": "D", "tool_use": "T"},
        ),
    ],
)
def test_the_chat_template_is_found_where_it_may_be(tmp_path, config, files, expected):
    assert Tokenizer.from_folder(write_folder(tmp_path, made("byte level"), config, **files)).chat_template == expected


def test_further_templates_come_from_their_folder(tmp_path):
    write_folder(tmp_path, made("byte level"), chat_template__jinja="D")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    assert Tokenizer.from_folder(tmp_path).chat_template == {"default": "D", "tool_use": "T"}


def test_gguf_templates_come_by_name_too():
    extra = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "T"}
    template = Tokenizer.from_gguf(smollm2.metadata() | extra).chat_template
    assert template == {"default": smollm2.metadata()["tokenizer.chat_template"], "tool_use": "T"}


def test_a_folder_without_a_tokenizer_says_what_is_missing(tmp_path):
    with pytest.raises(TokenizerError, match="is not a folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json; give a tokenizer with --tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(TokenizerError, match=r"has tokenizer\.model but no tokenizer\.json.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("broken", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a":' * 50_000], ids=["nothing", "open", "a list", "deep"])
def test_a_broken_file_is_named(tmp_path, broken, content):
    write_folder(tmp_path, made("byte level"), {})
    (tmp_path / broken).write_text(content)
    with pytest.raises(TokenizerError, match=broken.replace(".", r"\.")):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("entries", [[1], {"x": {"content": "a"}}, {"1": {}}, {"1": "a"}])
def test_a_malformed_configuration_is_named(tmp_path, entries):
    write_folder(tmp_path, made("byte level"), {"added_tokens_decoder": entries})
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is malformed"):
        Tokenizer.from_folder(tmp_path)
