"""Speech for tests: ten texts, spoken by Debian's espeak-ng in several voices and converted by sox. Nothing is stored."""

from __future__ import annotations

import shutil
import subprocess
import wave
from pathlib import Path
from typing import NamedTuple

import numpy as np

RATE = 16_000
MISSING = [program for program in ("espeak-ng", "sox") if shutil.which(program) is None]
VOICES = (("en-us", 150), ("en-us", 165), ("en-gb", 150), ("en-us+f3", 150), ("en-gb+m3", 140))
TEXTS = (
    "The birch canoe slid on the smooth planks. Glue the sheet to the dark blue background. It is easy to tell the depth of a "
    "well. These days a chicken leg is a rare dish. Rice is often served in round bowls.",
    "A large size in stockings is hard to sell. The boy was there when the sun rose. A rod is used to catch pink salmon. The "
    "source of the huge river is the clear spring. Kick the ball straight and follow through.",
    "Good morning, and welcome to the weekly meeting. Today we will talk about the budget, the new office and the plans for the "
    "summer. Please keep your questions for the end.",
    "Take the second street on the left, walk past the church and the market, and you will see the station in front of you. The "
    "next train leaves in twenty minutes.",
    "The weather will be cold and dry in the north, with strong wind near the coast. In the south, we expect some rain in the "
    "afternoon and clear skies at night.",
    "My grandmother kept bees behind her house. Every summer she gave us a jar of honey, and every winter she told us the same "
    "story about the bear that came down from the mountain.",
    "To make the bread, mix the flour with warm water, salt and a little sugar. Let the dough rest for an hour. Then put it into "
    "a hot oven until the top is brown.",
    "A computer follows a list of simple steps. It reads a number from memory, adds another number to it, and writes the result "
    "back. It does this many million times in one second.",
)
LONG = (
    "The old lighthouse stood on a rock at the end of the bay. For more than a hundred years its lamp showed ships the way into "
    "the harbour. The keeper and his family lived in a small white house below the tower. Twice a week a boat brought them food, "
    "letters and oil for the lamp. When the storms came in autumn, no boat could land for many days, and the family ate what was "
    "left in the cellar. The children learned to read from old newspapers. In the evening their father took them up the stairs, "
    "and they watched the light turn over the dark sea. Later the lamp was replaced by an electric one, and nobody had to live "
    "there any more. The house stood empty until a painter from the city bought it. She repaired the roof, planted roses in the "
    "garden, and invited the children of the village to draw the sea with her. Today the tower is a museum, and the painter's "
    "pictures of the storms hang on its walls.",
    "Before a new bridge can be built, engineers have to study the river. They measure how deep the water is, how fast it flows, "
    "and what lies under the ground. Then they compare several designs. A short bridge may rest on simple beams. A longer one "
    "needs arches, or cables that hang from high towers. Every design must carry its own weight, the weight of the traffic and "
    "the force of the wind. Models are tested in a tunnel where the wind is stronger than in any storm. Only when the numbers "
    "agree does the work begin. First the foundations are laid, often far below the river. Then the towers rise, piece by piece. "
    "At last the deck is lifted into place from boats. The whole work takes several years, and hundreds of people take part in "
    "it. When it is finished, heavy trucks drive over the bridge for a day to test it, and after that the road is opened.",
)  # fmt: skip


class Spoken(NamedTuple):
    """A text, and its samples at 16 kHz."""

    text: str
    samples: np.ndarray


def spoken(folder: Path) -> list[Spoken]:
    """Speak all texts into files of `folder`: eight of 9 to 15 s, and two of about a minute."""
    return [_spoken(text, folder / f"{number}.wav", number) for number, text in enumerate((*TEXTS, *LONG))]


def _spoken(text: str, file: Path, number: int) -> Spoken:
    voice, words_per_minute = VOICES[number % len(VOICES)]
    raw = file.with_suffix(".raw.wav")
    subprocess.run(["espeak-ng", "-v", voice, "-s", str(words_per_minute), "-w", raw, text], check=True)
    subprocess.run(["sox", "-G", raw, "-r", str(RATE), "-b", "16", "-c", "1", "-D", file], check=True)
    with wave.open(str(file)) as reader:
        data = reader.readframes(reader.getnframes())
    return Spoken(text, (np.frombuffer(data, "<i2") / 32768).astype(np.float32))
