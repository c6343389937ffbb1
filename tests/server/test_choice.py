"""One answer on its way: which of the tokens that settled are text of the answer."""

from __future__ import annotations

import pytest

from runtime.api import FinishReason, Output
from server.generate.generation import Choice, TextOptions
from tests.server.tiny import EOS, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
AB = TOKENIZER.encode("ab")


def fed(options: TextOptions, *outputs: Output) -> tuple[str, str | None, int]:
    choice = Choice(TOKENIZER, options, lambda: None)
    text = "".join(choice.feed(output) for output in outputs)
    return text, choice.finish_reason, choice.num_tokens


@pytest.mark.parametrize("stop", [(), ("z",)])
def test_the_token_that_ended_an_answer_is_none_of_its_text_but_a_complete_answer_has_no_such_token(stop):
    options = TextOptions(stop=stop, skip_special_tokens=False)
    assert fed(options, Output(0, [*AB, EOS], FinishReason.STOP)) == ("ab", "stop", 3)
    assert fed(options, Output(0, AB, FinishReason.STOP, complete=True)) == ("ab", "stop", 2)
    assert fed(options, Output(0, AB), Output(0, [], FinishReason.STOP, complete=True)) == ("ab", "stop", 2)
