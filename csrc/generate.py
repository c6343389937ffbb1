"""Write cpu/block_types.h from ops/formats.json: `python csrc/generate.py`. tests/ops/test_formats.py fails if it is stale."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEADER = ROOT / "csrc" / "cpu" / "block_types.h"


def header() -> str:
    """Return the header: ggml's types that have a CPU kernel, and the numbers of E2M1."""
    written = json.loads((ROOT / "ops" / "formats.json").read_text())
    rows = []
    for name, each in written["blocks"].items():
        if "bits" not in each:
            continue
        minimum = str(each.get("minimum", False)).lower()
        columns, blocks = each["columns"], each["columns"] // 32
        halves = each["groups"] // blocks
        rows.append(
            f"X({name}, {each['id']}, {columns}, {each['bytes']}, {each['bits']}, {minimum}, {str(blocks > 1).lower()}, {halves})"
        )
    numbers = ", ".join(f"{number}f" for number in written["tables"]["e2m1"])
    return f"""// Made by csrc/generate.py from ops/formats.json.
#pragma once

// clang-format off
// X(name, ggml's id, columns of a block, bytes of a block, bits, minimum, super, halves): the last four as of QuantLayout.
#define ONELOOP_BLOCK_TYPES(X) \\
    {f" {chr(92)}{chr(10)}    ".join(rows)}
namespace oneloop {{

constexpr float kE2m1[16] = {{{numbers}}};

}}  // namespace oneloop
// clang-format on
"""


if __name__ == "__main__":
    HEADER.write_text(header())
