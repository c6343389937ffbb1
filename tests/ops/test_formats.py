"""One table of weight formats: what is generated from it is current, and every type in it has what its kernels need."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ops.blocks import DECODERS
from ops.stored import BLOCKS, CODED

GENERATOR = Path(__file__).parents[2] / "csrc" / "generate.py"


def test_the_generated_header_is_current():
    spec = importlib.util.spec_from_file_location("generate", GENERATOR)
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.HEADER.read_text() == generate.header(), "run python csrc/generate.py"


def test_every_type_that_becomes_codes_has_a_decoder():
    assert {kind.name for kind in BLOCKS} == DECODERS.keys()
    assert {each.codes for each in BLOCKS.values()} <= CODED
