"""`oneloop lora inspect`: what an adapter holds, and whether it fits."""

from __future__ import annotations

import json

import pytest

from server.cli import lora
from server.config.server_options import ConfigError

FOUND = {
    "path": "p", "num_parameters": 12345, "dtypes": ["F32"], "refusal": None, "base": "", "rank": 8, "alpha": 16.0, "rslora": True,
    "rank_pattern": {"q_proj": 4}, "alpha_pattern": {}, "targets": {"q_proj": 2},
}  # fmt: skip


def test_it_says_what_there_is(capsys):
    assert lora.main(["inspect", "p"], lambda *given: FOUND) == 0
    said = capsys.readouterr().out
    assert "12,345 numbers in F32" in said
    assert "rank 8, alpha 16, scaled by alpha / sqrt(rank)" in said
    assert "rank 4 for q_proj" in said
    assert "adapts 2 q_proj" in said
    asked = []
    assert (
        lora.main(
            ["inspect", "p", "--model", "m", "--max-lora-rank", "9", "--json"], lambda *a: asked.append(a) or FOUND
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out) == FOUND
    assert asked == [("p", "m", 9)]


def test_what_cannot_be_served_or_read_is_an_exit_code(capsys):
    assert lora.main(["inspect", "p"], lambda *given: FOUND | {"refusal": "DoRA"}) == 1
    assert "cannot be served: DoRA" in capsys.readouterr().out

    def missing(*given):
        raise ValueError("no such folder")

    assert lora.main(["inspect", "p"], missing) == 1
    assert "no such folder" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="COMMAND"):
        lora.main([], missing)
