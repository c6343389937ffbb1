"""Connections from the process that schedules a model to the processes of its other stages. Messages are sent as bytes.

A connection requires the model's secret. Messages (`messages.py`) are encoded as msgpack, each after its length in bytes. They
are plain data: numbers, texts, tuples, lists, mappings, frozen sets, arrays of numbers, and instances of the classes of
`MODULES`. Decoding creates nothing else, and runs only the constructors of these classes. Both ends need the same release. Rows
of a step are encoded by columns, since in most steps all rows have the same value in most columns."""

from __future__ import annotations

import asyncio
import hmac
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum, IntEnum
from functools import partial
from itertools import chain, repeat
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from runtime import api, batch, config, engine_options, fault, step
from runtime.batch import ScheduledRow, columns
from runtime.constrain import masks
from runtime.kv import block_table, kinds, layout
from runtime.parallel import messages, stages
from runtime.policy import fairness, step_budget, step_cost
from runtime.speculate import config as speculate_config

MODULES: tuple[ModuleType, ...] = (
    messages, stages,
    batch, step, block_table, masks, fault, api, config, engine_options, layout, kinds, fairness, step_budget, step_cost,
    speculate_config,
)  # fmt: skip
_CLASSES: dict[str, type] = {
    name: each
    for module in MODULES
    for name, each in vars(module).items()
    if isinstance(each, type) and f"{each.__module__}.".startswith(f"{module.__name__}.")
}


class _Parts(NamedTuple):
    """Codec of a class. `of`: returns the field values of an instance, in order. `whole`: creates an instance from them."""

    of: Callable[[Any], Iterable[Any]]
    whole: Callable[[Any], Any]


def _parts(kind: type) -> _Parts | None:
    """Return the codec of a class of plain data, or None for other classes."""
    if issubclass(kind, Enum):
        return _Parts(lambda value: (value.value,), lambda given: kind(*given))
    if issubclass(kind, tuple):
        return _Parts(tuple, getattr(kind, "_make", kind))
    if is_dataclass(kind):
        names = [each.name for each in fields(kind)]
        return _Parts(
            lambda value: [getattr(value, name) for name in names],
            lambda given: kind(**dict(zip(names, given, strict=True))),
        )
    return None


_PARTS = {name: parts for name, each in _CLASSES.items() if (parts := _parts(each)) is not None}
_SCALARS = frozenset((type(None), bool, int, float, str, bytes))
_INT64 = 1 << 63


class _Tag(IntEnum):
    """First element of an encoded list: the type of the encoded value. A text in its place is the name of a class."""

    TUPLE = 0
    LIST = 1
    SET = 2
    MAPPING = 3
    ARRAY = 4
    CLASS = 5
    PARTIAL = 6
    INTEGER = 7
    ROWS = 8
    SCALARS = 9  # a tuple of numbers or texts
    NESTED = 10  # a list of numbers or texts, or of such lists


_EMPTY = [_Tag.SCALARS, ()]


def packed(message: object) -> bytes:
    """Encode a message. Raises TypeError if it contains anything but plain data."""
    return _encoder.encode(_said(message))


def unpacked(data: bytes | memoryview) -> Any:
    """Decode a message. Raises ValueError, TypeError or LookupError if `data` was not encoded by `packed`."""
    return _made(_decoder.decode(data))


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder()


def _are_scalars(values: Sequence[Any]) -> bool:
    kinds = set(map(type, values))
    if not kinds <= _SCALARS:
        return False
    whole = values if kinds == {int} else [value for value in values if type(value) is int]
    return not whole or (min(whole) >= -_INT64 and max(whole) < _INT64)


def _said(value: Any) -> Any:
    kind = type(value)
    if kind is int and not -_INT64 <= value < _INT64:
        return [_Tag.INTEGER, str(value)]
    if kind in _SCALARS:
        return value
    if kind is tuple:
        if not value:
            return _EMPTY
        if _are_scalars(value):
            return [_Tag.SCALARS, value]
        if type(value[0]) is ScheduledRow:
            return [_Tag.ROWS, len(value), list(map(_said_column, columns(value)))]
        return [_Tag.TUPLE, *map(_said, value)]
    if kind is list:
        if _are_scalars(value):
            return [_Tag.NESTED, value]
        if {list}.issuperset(map(type, value)) and _are_scalars([*chain.from_iterable(value)]):
            return [_Tag.NESTED, value]
        return [_Tag.LIST, *map(_said, value)]
    if kind is dict or kind is MappingProxyType:
        return [_Tag.MAPPING, [[_said(key), _said(each)] for key, each in value.items()]]
    if kind is frozenset:
        return [_Tag.SET, *map(_said, value)]
    if kind is np.ndarray:
        return [_Tag.ARRAY, value.dtype.str, value.shape, value.tobytes()]
    if kind is partial:
        return [_Tag.PARTIAL, *map(_said, (value.func, value.args, value.keywords))]
    if kind.__name__ in _PARTS and _CLASSES[kind.__name__] is kind:
        return [kind.__name__, *map(_said, _PARTS[kind.__name__].of(value))]
    if isinstance(value, type) and _CLASSES.get(value.__name__) is value:
        return [_Tag.CLASS, value.__name__]
    if isinstance(value, Sequence) and not isinstance(value, tuple):  # a prompt's ids may be any sequence type
        return _said(list(value))
    raise TypeError(f"a {kind.__qualname__} is no plain data")


def _said_column(column: tuple[Any, ...]) -> Any:
    """Encode a column of values: the common value of all rows, or a list."""
    first = column[0]
    if column.count(first) == len(column):
        return [_said(first)]
    if _are_scalars(column):
        return [None, column]
    return [None, None, list(map(_said, column))]


def _made(said: Any) -> Any:
    if type(said) is not list:
        return said
    tag, *rest = said
    if type(tag) is str:
        return _PARTS[tag].whole(map(_made, rest))
    match tag:
        case _Tag.SCALARS:
            return tuple(rest[0])
        case _Tag.NESTED:
            return rest[0]
        case _Tag.TUPLE:
            return tuple(map(_made, rest))
        case _Tag.LIST:
            return list(map(_made, rest))
        case _Tag.ROWS:
            num, said_columns = rest
            each = (_made_column(column, num) for column in said_columns)
            return tuple(map(ScheduledRow._make, zip(*each, strict=True)))
        case _Tag.MAPPING:
            return {_made(key): _made(each) for key, each in rest[0]}
        case _Tag.SET:
            return frozenset(map(_made, rest))
        case _Tag.ARRAY:
            dtype, shape, data = rest
            return np.frombuffer(bytearray(data), np.dtype(dtype)).reshape(shape)  # writable
        case _Tag.PARTIAL:
            function, arguments, named = map(_made, rest)
            return partial(function, *arguments, **named)
        case _Tag.CLASS:
            return _CLASSES[rest[0]]
        case _Tag.INTEGER:
            return int(rest[0])
    raise ValueError(f"{tag!r} says nothing")


def _made_column(said: Any, num: int) -> Any:
    match said:
        case [value]:
            return repeat(_made(value), num)
        case [None, values]:
            return values
        case [None, None, values]:
            return map(_made, values)
    raise ValueError("no column")


_SIZE = struct.Struct("<Q")


class PeerConnection(asyncio.Protocol):
    """One end of a connection, on the event loop. `on_message`: called with each message. `on_lost`: called once when the
    connection has ended. The connecting side sends its secret first; the other side replies with its own."""

    def __init__(
        self, secret: bytes, on_message: Callable[[PeerConnection, Any], None], on_lost: Callable[[PeerConnection], None], *,
        connects: bool,
    ) -> None:  # fmt: skip
        self._secret, self._connects = secret, connects
        self._on_message, self._on_lost = on_message, on_lost
        self._unread = bytearray()
        self._is_known = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._connects:
            self._transport.write(self._secret)

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost(self)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        start = 0
        if not self._is_known:
            start = len(self._secret)
            if len(self._unread) < start:
                return
            if not hmac.compare_digest(bytes(self._unread[:start]), self._secret):
                self.abort()
                return
            self._is_known = True
            if not self._connects and self._transport is not None:
                self._transport.write(self._secret)
        while len(self._unread) - start >= _SIZE.size:
            end = start + _SIZE.size + _SIZE.unpack_from(self._unread, start)[0]
            if end > len(self._unread):
                break
            with memoryview(self._unread)[start + _SIZE.size : end] as frame:
                message = unpacked(frame)
            start = end
            self._on_message(self, message)
        del self._unread[:start]

    def send(self, message: object) -> None:
        assert self._transport is not None, "it is connected"
        data = packed(message)
        self._transport.write(_SIZE.pack(len(data)) + data)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close the connection after all sent data has been written."""
        if self._transport is not None:
            self._transport.close()
