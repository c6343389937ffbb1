"""GBNF as llama.cpp has it: what it lets through and what not, and what is refused instead of being read as something else."""

from __future__ import annotations

import json

import llguidance
import pytest

from server.generate.structured.grammar import GrammarError, Rules, lark_of
from tests.server.tiny import EOS, VOCAB_SIZE, tiny_tokenizer


class _Vocabulary:
    """The tiny tokenizer as llguidance reads it: special tokens, then every byte."""

    eos_token_id, bos_token_id = EOS, None
    special_token_ids = (0, 1, 2)

    def __init__(self) -> None:
        tokenizer = tiny_tokenizer()
        self.tokens = [b"<s%d>" % id if id < 3 else tokenizer.token_bytes(id) for id in range(VOCAB_SIZE)]
        self.encode = tokenizer.encode

    def __call__(self, text: bytes) -> list[int]:
        return self.encode(text.decode())


VOCABULARY = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Vocabulary()))


def takes(grammar: str, text: str) -> bool:
    source = json.dumps({"grammars": [{"lark_grammar": lark_of(grammar)}]})
    matcher = llguidance.LLMatcher(VOCABULARY, source)
    assert not matcher.is_error(), matcher.get_error()
    ids = tiny_tokenizer().encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= ("yes" | "no") "!"?', ["yes", "no!"], ["maybe", "yes!!"]),
        (r'root ::= "\u0041"', ["A"], ["B"]),
        (r"root ::= [\u0041-\u0043]+", ["ABC"], ["D", ""]),
        (r'root ::= "\U0001F600"', ["😀"], ["x"]),
        (r"root ::= [\u002D\u005Da]", ["-", "]", "a"], ["b"]),
        (r'root ::= "\u000a" "\u0022" "\u005c"', ['\n"\\'], ["n"]),
        (r"root ::= [^\u0041]", ["B", "ü", "\n"], ["A"]),
        ("root ::= .", ["a", "\n", "ü", "/"], ["ab", ""]),
        ('root ::= ".[x]" # no dot . here', [".[x]"], ["a[x]"]),
        ("root ::= [.]", ["."], ["a"]),
        ("root ::= [a&&b~~c]", ["a", "&", "~", "c"], ["d"]),
        ('root ::= "a"{,3}', ["", "aaa"], ["aaaa"]),
        ('root ::= "a"{2} "b"{1,} "c"{0,1}', ["aab", "aabbbc"], ["ab", "aab" + "cc"]),
        (
            'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"',
            ["12", "1+(2+3)"],
            ["1+", "("],
        ),
        ('root ::= (\n  "1. " move\n  | "none"\n)\nmove ::= [a-h] [1-8]', ["1. e4", "none"], ["1. z9"]),
        (
            r'root ::= "{" ws "\"a\"" ws ":" ws [0-9]+ ws "}"' + "\nws ::= [ \\t\\n]*",
            ['{"a":1}', '{ "a" : 12\n}'],
            ["{}"],
        ),
    ],
)
def test_a_grammar_takes_what_llama_cpp_takes(grammar, good, bad):
    assert [text for text in good if not takes(grammar, text)] == []
    assert [text for text in bad if takes(grammar, text)] == []


@pytest.mark.parametrize(
    "grammar",
    ['root ::= <think> "a"', "root ::= !<[5]>", r'root ::= "\ud800"', "root ::= x", 'root ::= "a" <', 'root ::= "a'],
)
def test_what_cannot_be_converted_is_refused(grammar):
    with pytest.raises(GrammarError, match="cannot be read"):
        Rules(grammar).lark()


def test_rules_of_either_kind_are_told_apart():
    assert Rules('start: "a"').lark() == 'start: "a"'
    assert 'start: "a"' in Rules('root ::= "a"').lark()
