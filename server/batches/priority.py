"""The priority of a batch's lines, where the engine goes by priorities: behind whoever does not say one."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from server.batches.lines import LineRequest

BEHIND = 1000  # lower runs first; requests that say nothing have 0


def behind_others(request: LineRequest) -> LineRequest:
    """`request` with a priority, unless its body has one, or is no object at all."""
    try:
        fields = msgspec.json.decode(request.body, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return request
    fields.setdefault("priority", msgspec.Raw(b"%d" % BEHIND))
    return replace(request, body=msgspec.json.encode(fields))
