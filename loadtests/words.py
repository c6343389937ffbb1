"""English words from which prompts are drawn. They are short and common, so that any tokenizer needs few tokens."""

from __future__ import annotations

import random

_TEXT = (
    "able action age animal answer apple arm art autumn baby ball bank base bed bird blood blue board boat body bone book "
    "bottle box boy bread bridge brother brown building bus camera car card cat center chair chance child church city class "
    "clock cloud coat coffee color corner country cow cup dance dark daughter day desk dinner doctor dog door dream dress "
    "drink ear earth east edge egg engine evening eye face family farm father field fire fish floor flower food foot forest "
    "friend fruit game garden gate girl glass gold grass green ground group hair hall hand hat head heart hill history home "
    "horse hospital hotel hour house ice island job king kitchen lake land language leaf letter library light line lion "
    "machine map market milk minute moment money month moon morning mother mountain mouth movie music name nation night "
    "north ocean office paper park party person picture plan plant player poem pool queen question rain river road rock "
    "room rose salt school sea season shadow ship shoe shop silver sister sky snow song south spring star station stone "
    "storm story street summer sun table teacher team tree truck village wall war watch water week west wind window winter "
    "woman wood word work world year"
)
WORDS = _TEXT.split()


def drawn(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def number(rng: random.Random) -> str:
    """Return the first word of a prompt, a random number. Prompts thus differ from the start, and the prefix cache has no hits."""
    return f"({rng.randrange(100_000, 1_000_000)})"


def story(rng: random.Random, num_words: int) -> str:
    """Return a prompt that requests a long text."""
    return f"{number(rng)} Write a long story using these words: {drawn(rng, num_words)}"
