"""Selection of the served model or adapter that a request names."""

from __future__ import annotations

from runtime.api import AdapterRefused
from server.http.call import Call
from server.http.errors import InvalidRequest, ModelNotFound, TaskNotSupported
from server.models.model import LoadedModel
from server.models.prompt import NO_TEMPLATE
from server.models.swaps import Outline

_NAMED_AT_MOST = 20  # adapters in a message


async def named(call: Call, loaded: LoadedModel, wanted: str | None, *, to_chat: bool = False) -> LoadedModel:
    """Return the model for a request that names `wanted`.

    If `wanted` is None or a name of `loaded`, the result is `loaded`. It can also be a model that is always loaded in addition,
    or one of several models (loaded now if it never was). If `wanted` is an adapter, the result is `loaded` with that adapter,
    which is loaded if necessary. `to_chat`: the request is a conversation, so a model that cannot chat is not loaded. Raises
    ModelNotFound, InvalidRequest for an adapter that cannot be served, or an error of `SwappedModel.enter`."""
    if wanted is None or wanted in loaded.names:
        return loaded
    for beside in loaded.besides:
        if wanted in beside.names:
            return beside
    for other in loaded.others:
        if other.name == wanted:
            if to_chat and other.outline is not None:
                _check_chats(other.name, other.outline)
            return await other.once_loaded(call)
    adapters = loaded.engine.adapters
    adapter = None if adapters is None else adapters.find(wanted)
    if adapter is None and adapters is not None and loaded.resolver is not None:
        try:
            adapter = await loaded.resolver.find(wanted)
        except AdapterRefused as error:
            raise InvalidRequest(f"the adapter cannot be served: {error}", param="model") from None
    if adapter is None and loaded.takes_any_name:
        return loaded
    if adapter is None:
        others = () if adapters is None else adapters.all()[:_NAMED_AT_MOST]
        raise ModelNotFound(wanted, (*loaded.all_names, *(each.name for each in others)))
    return loaded.with_adapter(adapter)


def _check_chats(name: str, outline: Outline) -> None:
    """Raise InvalidRequest if the model `name`, described by `outline`, cannot chat."""
    if "generate" not in outline.tasks:
        raise TaskNotSupported(name, "generate", outline.tasks)
    if not outline.chats:
        raise InvalidRequest(NO_TEMPLATE, param="model")


async def pooled_by(call: Call, loaded: LoadedModel, wanted: str | None) -> LoadedModel:
    """Return the model for a pooling request. If `wanted` is not a known name, it is the pooling model in `loaded.besides`, if
    any; else the result of `named`."""
    pooled = next((each for each in loaded.besides if each.pooling is not None), None)
    return pooled if pooled is not None and _is_open(loaded, wanted) else await named(call, loaded, wanted)


async def transcribed_by(call: Call, loaded: LoadedModel, wanted: str | None) -> LoadedModel:
    """Return the model for a transcription. If `wanted` is not a known name, it is the speech model in `loaded.besides`, if any;
    else the result of `named`."""
    hearing = next((each for each in loaded.besides if each.speech is not None), None)
    return hearing if hearing is not None and _is_open(loaded, wanted) else await named(call, loaded, wanted)


def _is_open(loaded: LoadedModel, wanted: str | None) -> bool:
    """Return whether any model may serve the request: `wanted` is None, or an accepted unknown name."""
    return wanted is None or (loaded.takes_any_name and not loaded.knows(wanted))
