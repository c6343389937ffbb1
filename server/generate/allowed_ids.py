"""The ids that alone may be drawn, of a request that names them: checked off the event loop, since there may be very many."""

from __future__ import annotations

from server.generate.request import GenerateRequest
from server.generate.sampling import check_token_ids
from server.http.errors import Field, InvalidRequest
from server.http.offload import Offload

IDS_PER_CHAR = 10  # looked at while a character is tokenised
ALLOWED = Field("allowed_token_ids")


async def allowed_token_ids(request: GenerateRequest, offload: Offload, vocab_size: int) -> frozenset[int] | None:
    """What alone may be drawn, None where that is everything. Once for all prompts of a request: there may be as many ids as the
    vocabulary has.

    Raises InvalidRequest."""
    ids = request.sampling.allowed_token_ids
    if ids is None:
        return None
    if len(ids) > vocab_size:
        raise InvalidRequest(ALLOWED, f" has {len(ids)} ids; the vocabulary has {vocab_size} tokens", param=ALLOWED)

    def checked() -> frozenset[int]:
        check_token_ids(ids, vocab_size, ALLOWED)
        return frozenset(ids)

    return await offload.run(len(ids) // IDS_PER_CHAR, checked)
