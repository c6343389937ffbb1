"""Output items in progress. Each item collects text or a call, and returns its events. `events.py` numbers the events."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from server.api.frames import encoded
from server.api.responses import api_types
from server.api.responses.api_types import EventOfItem, ItemStatus, OutputItem
from server.api.responses.input_items import new_id, seal
from server.generate.custom_tools import InputReader
from server.generate.logprobs import SampledToken


class OpenItem:
    """Base class of output items in progress. `item`: current state of the item, as sent to clients."""

    id_prefix: str

    def __init__(self) -> None:
        self.id = new_id(self.id_prefix)
        self._pieces: list[str] = []

    @property
    def _text(self) -> str:
        return "".join(self._pieces)

    def item(self, status: ItemStatus) -> OutputItem:
        raise NotImplementedError

    def begin(self) -> list[EventOfItem]:
        return [api_types.OutputItemAdded(self.item("in_progress"))]

    def end(self, status: ItemStatus) -> list[EventOfItem]:
        return [api_types.OutputItemDone(self.item(status))]


class _TextItem(OpenItem):
    """Base class of output items with one text part."""

    def _part(self) -> api_types.OutputTextPart | api_types.ReasoningTextPart:
        raise NotImplementedError

    def _is_shown(self, status: ItemStatus) -> bool:
        return bool(self._pieces) or status != "in_progress"

    def begin(self) -> list[EventOfItem]:
        return [*super().begin(), api_types.ContentPartAdded(self.id, 0, self._part())]

    def end(self, status: ItemStatus) -> list[EventOfItem]:
        return [api_types.ContentPartDone(self.id, 0, self._part()), *super().end(status)]


class MessageItem(_TextItem):
    """Message in progress. Each log-probability is encoded only once."""

    id_prefix = "msg_"

    def __init__(self) -> None:
        super().__init__()
        self._logprobs: list[bytes] = []

    def add(self, text: str, logprobs: list[bytes]) -> EventOfItem:
        self._pieces.append(text)
        self._logprobs += logprobs
        return api_types.OutputTextDelta(self.id, 0, text, _joined(logprobs))

    def end(self, status: ItemStatus) -> list[EventOfItem]:
        done = api_types.OutputTextDone(self._text, _joined(self._logprobs), self.id, 0)
        return [done, *super().end(status)]

    def item(self, status: ItemStatus) -> OutputItem:
        content = [self._part()] if self._is_shown(status) else []
        return api_types.OutputMessage(id=self.id, status=status, content=content)

    def _part(self) -> api_types.OutputTextPart:
        return api_types.OutputTextPart(self._text, [], _joined(self._logprobs))


def _joined(pieces: list[bytes]) -> list[SampledToken]:
    found: list[SampledToken] = encoded(b"[" + b",".join(pieces) + b"]")
    return found


class ReasoningItem(_TextItem):
    """Reasoning in progress. `is_sealed`: `encrypted_content` has the text too, for clients that send only this field back."""

    id_prefix = "rs_"

    def __init__(self, *, is_sealed: bool = False) -> None:
        super().__init__()
        self._is_sealed = is_sealed

    def add(self, text: str) -> EventOfItem:
        self._pieces.append(text)
        return api_types.ReasoningTextDelta(self.id, 0, text)

    def end(self, status: ItemStatus) -> list[EventOfItem]:
        return [api_types.ReasoningTextDone(self._text, self.id, 0), *super().end(status)]

    def item(self, status: ItemStatus) -> OutputItem:
        content = [self._part()] if self._is_shown(status) else []
        sealed = seal(self._text) if self._is_sealed and status != "in_progress" else UNSET
        return api_types.ReasoningOutput(
            id=self.id, status=status, summary=[], content=content, encrypted_content=sealed
        )

    def _part(self) -> api_types.ReasoningTextPart:
        return api_types.ReasoningTextPart(self._text)


class CallItem(OpenItem):
    """Function call in progress; subclasses are other tool calls. `namespace`: namespace of the tool, or None."""

    id_prefix = "fc_"

    def __init__(self, call_id: str, name: str, namespace: str | None = None) -> None:
        super().__init__()
        self._call_id = call_id
        self._name = name
        self._namespace: str | UnsetType = UNSET if namespace is None else namespace

    def add(self, text: str) -> EventOfItem | None:
        self._pieces.append(text)
        return api_types.FunctionCallArgumentsDelta(self.id, text)

    def end(self, status: ItemStatus) -> list[EventOfItem]:
        return [api_types.FunctionCallArgumentsDone(self.id, self._name, self._text), *super().end(status)]

    def item(self, status: ItemStatus) -> OutputItem:
        return api_types.FunctionCallItem(
            id=self.id, call_id=self._call_id, name=self._name, namespace=self._namespace, status=status,
            arguments=self._text,
        )  # fmt: skip


class CustomCallItem(CallItem):
    """Call of a custom tool in progress. The input text is extracted from the JSON arguments."""

    id_prefix = "ctc_"

    def __init__(self, call_id: str, name: str, namespace: str | None = None) -> None:
        super().__init__(call_id, name, namespace)
        self._reader = InputReader()

    def add(self, text: str) -> EventOfItem | None:
        """Return the event for the input characters in `text`, a piece of the arguments, or None if there are none."""
        return self._delta(self._reader.feed(text))

    def _delta(self, text: str) -> EventOfItem | None:
        if not text:
            return None
        self._pieces.append(text)
        return api_types.CustomToolCallInputDelta(self.id, text)

    def end(self, status: ItemStatus) -> list[EventOfItem]:
        last = self._delta(self._reader.end())
        done = api_types.CustomToolCallInputDone(self.id, self._text)
        return [*([] if last is None else [last]), done, api_types.OutputItemDone(self.item(status))]

    def item(self, status: ItemStatus) -> OutputItem:
        return api_types.CustomToolCallItem(
            id=self.id, call_id=self._call_id, name=self._name, namespace=self._namespace, status=status, input=self._text
        )  # fmt: skip
