"""Fill in the middle: the special tokens of each family in the order it was trained on, and a 400 where a model has none."""

from __future__ import annotations

import pytest
from tokenizers import pre_tokenizers

from server.generate import plain_prompts
from server.models.infill import infill_format
from server.models.tokenizer import Tokenizer
from tests.server.text.made_tokenizers import llama_like
from tests.server.tiny import EOS, tiny_tokenizer

QWEN = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
STARCODER = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<repo_name>", "<file_sep>")


def prompt_of(tokenizer: Tokenizer, prefix: str, suffix: str, **more) -> str:
    """The prompt, its special tokens spelled out."""
    infill = infill_format(tokenizer)
    assert infill is not None

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return tokenizer.decode(infill.ids(encode, encode(prefix), suffix, **more), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        (QWEN, "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"),
        (QWEN[:3], "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"),
        (STARCODER, "<fim_prefix>a<fim_suffix>b<fim_middle>"),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>"),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]b[PREFIX]a"),
        (("[PREFIX]", "[SUFFIX]", "[MIDDLE]"), "[SUFFIX]b[PREFIX]a"),
        (("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), "<[fim-suffix]>b<[fim-prefix]>a<[fim-middle]>"),
        (("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"), "▁<PRE>a▁<SUF>b▁<MID>"),
        (("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"), "<|code_prefix|>a<|code_suffix|>b<|code_middle|>"),
    ],
)
def test_each_family_has_its_order(special, expected):
    assert prompt_of(tiny_tokenizer(*special), "a", "b") == expected


@pytest.mark.parametrize(
    "special", [(), QWEN[:1], QWEN[:2], ("[PREFIX]",), ("<|fim_prefix|>", "<fim_suffix>", "<|fim_middle|>")]
)
def test_half_of_a_family_is_none(special):
    assert infill_format(tiny_tokenizer(*special)) is None


def test_what_surrounds_the_middle_is_no_part_of_it():
    tokenizer = tiny_tokenizer(*QWEN)
    assert infill_format(tokenizer).stop_ids == tokenizer.ids_of(QWEN)


def test_further_files_go_before_as_repositories_have_them():
    extra = [("a.py", "import b"), ("b.py", "pass")]
    assert prompt_of(tiny_tokenizer(*QWEN), "p", "s", extra=extra, middle="m") == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\nimport b\n<|file_sep|>b.py\npass\n<|file_sep|>filename\n"
        "<|fim_prefix|>p<|fim_suffix|>s<|fim_middle|>m"
    )
    assert prompt_of(tiny_tokenizer(*QWEN[:3]), "p", "s", extra=extra) == (
        "import b\npass\n<|fim_prefix|>p<|fim_suffix|>s<|fim_middle|>"
    )


def test_codellamas_suffix_begins_without_the_space_that_sentencepiece_puts_before_a_text():
    backend = llama_like()
    backend.add_special_tokens(["▁<PRE>", "▁<SUF>", "▁<MID>"])
    tokenizer = Tokenizer(backend, {})
    infill = infill_format(tokenizer)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    assert tokenizer.token_string(encode("dog")[0]).startswith("▁"), "the tokenizer puts a space there"
    ids = infill.ids(encode, encode("dog"), "dog")
    pieces = tokenizer.token_strings(ids)
    suffix = pieces[pieces.index("▁<SUF>") + 1 : pieces.index("▁<MID>")]
    assert "".join(suffix) == "dog"
    assert "".join(pieces[1 : pieces.index("▁<SUF>")]) == "▁dog"


def gguf_tokenizer(tokens: list[str], **ids: int) -> Tokenizer:
    """A byte-level tokenizer as a GGUF file has it, with `tokens` as control tokens behind the bytes and one merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*alphabet, "Ġa", *tokens],
        "tokenizer.ggml.token_type": [1] * (len(alphabet) + 1) + [3] * len(tokens),
        "tokenizer.ggml.merges": ["Ġ a"],
    }
    first = len(alphabet) + 1
    return Tokenizer.from_gguf(metadata | {f"tokenizer.ggml.{name}_token_id": first + at for name, at in ids.items()})


def test_a_gguf_file_names_its_tokens():
    tokenizer = gguf_tokenizer(["<P>", "<S>", "<M>", "<X>"], fim_pre=0, fim_suf=1, fim_mid=2, fim_pad=3)
    assert prompt_of(tokenizer, "p", "s") == "<P>p<S>s<M>"
    assert infill_format(tokenizer).stop_ids == tokenizer.ids_of(["<P>", "<S>", "<M>", "<X>"])


def test_a_gguf_file_that_names_none_is_known_by_its_tokens():
    assert prompt_of(gguf_tokenizer([*STARCODER]), "p", "s") == "<fim_prefix>p<fim_suffix>s<fim_middle>"


def test_a_gguf_files_codestral_keeps_its_order():
    tokenizer = gguf_tokenizer(["[PREFIX]", "[SUFFIX]", "[MIDDLE]"], fim_pre=0, fim_suf=1, fim_mid=2)
    assert prompt_of(tokenizer, "p", "s") == "[SUFFIX]s[PREFIX]p"


# --- /v1/completions ----------------------------------------------------------------------------------------------


async def test_a_completion_with_a_suffix_stands_between(serve):
    speaks = tiny_tokenizer(*QWEN)
    server = await serve("return a", speaks=speaks)
    async with server.openai() as client:
        answer = await client.completions.create(model="tiny", prompt="def f(a):\n", suffix="\n\nf(1)")
    assert answer.choices[0].text == "return a"
    request = server.engine.submitted[0]
    assert speaks.decode(request.prompt_ids, skip_special_tokens=False) == (
        "<|fim_prefix|>def f(a):\n<|fim_suffix|>\n\nf(1)<|fim_middle|>"
    )
    assert request.params.stop_token_ids == speaks.ids_of(QWEN)


async def test_an_answer_ends_where_the_model_begins_another_file(serve):
    speaks = tiny_tokenizer(*QWEN)
    (separator,) = speaks.ids_of(["<|file_sep|>"])
    server = await serve(
        script=lambda request: [*speaks.encode("x"), separator, *speaks.encode("y"), EOS], speaks=speaks
    )
    choice = (await server.complete(suffix="z")).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("x", "stop")


async def test_prompts_of_ids_and_several_prompts_have_the_suffix_each(serve):
    speaks = tiny_tokenizer(*QWEN)
    server = await serve(speaks=speaks)
    assert (await server.complete(prompt=["a", "b"], suffix="c")).status_code == 200
    assert (await server.complete(prompt=speaks.encode("d"), suffix="c")).status_code == 200
    shown = [speaks.decode(request.prompt_ids, skip_special_tokens=False) for request in server.engine.submitted]
    assert shown == [f"<|fim_prefix|>{prefix}<|fim_suffix|>c<|fim_middle|>" for prefix in "abd"]


async def test_special_tokens_that_somebody_writes_about_are_text(serve):
    speaks = tiny_tokenizer(*QWEN)
    server = await serve(speaks=speaks)
    texts = {"prompt": 'PRE = "<|fim_prefix|>"', "suffix": '# <|fim_middle|> "<|eos|>"'}
    assert (await server.complete(**texts)).status_code == 200
    ids = list(server.engine.submitted[0].prompt_ids)
    assert speaks.decode(ids, skip_special_tokens=False) == (
        f"<|fim_prefix|>{texts['prompt']}<|fim_suffix|>{texts['suffix']}<|fim_middle|>"
    )
    assert [id for id in ids if id in speaks.special_ids] == [
        speaks.id_of(name) for name in ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    ]


async def test_a_suffix_is_tokenised_once_however_many_prefixes_there_are(serve, monkeypatch):
    server = await serve(speaks=tiny_tokenizer(*QWEN))
    encoded: list[str] = []
    real = plain_prompts.encode

    def counting(loaded, text, **options):
        encoded.append(text)
        return real(loaded, text, **options)

    monkeypatch.setattr(plain_prompts, "encode", counting)
    assert (await server.complete(prompt=["a", "b", "c"], suffix="behind")).status_code == 200
    assert encoded.count("behind") == 1


async def test_a_model_without_the_tokens_refuses_the_suffix_by_name(serve):
    server = await serve()
    response = await server.complete(suffix="x")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "suffix"
    assert "fill-in-the-middle" in response.json()["error"]["message"]
    assert (await server.complete(suffix="")).status_code == 200


async def test_a_suffix_cannot_be_echoed_and_counts_against_the_context(serve):
    server = await serve(speaks=tiny_tokenizer(*QWEN), max_model_len=64)
    assert (await server.complete(suffix="x", echo=True)).json()["error"]["param"] == "echo"
    refused = (await server.complete(suffix="x" * 100)).json()["error"]
    assert refused["code"] == "context_length_exceeded"
    refused = (await server.complete(suffix="x" * 10_000)).json()["error"]
    assert refused["code"] == "context_length_exceeded"
