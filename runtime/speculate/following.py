"""Following: whether what makes drafts on the device computes steps too, by number of rows in powers of two.

A draft model, or a head, has to compute whatever the model does, or it cannot guess. Where drafts do not pay that is for nothing.
So once there were `_TRIED` steps of a size in which they did not, beyond `_PAID` for each in which they did, and some of which
checked a few all the same, it rests in steps of that size: these are what they would be without drafts. Texts change, so after
`_RESTS` of them it follows a while again: after more and more where that is in vain. Knows no tokens: what a sequence lacks since
then, the scheduler notes."""

from __future__ import annotations

_TRIED = 48
_PAID = 2  # where drafts seem to pay now and then, as by luck, following costs more
_PROBED = range(16, 24)  # of these, those in which some drafts are checked
_RESTS = (1024, 2048, 4096, 8192)  # steps, the first time and so on


class _Size:
    def __init__(self) -> None:
        self.num_refused = 0  # steps in which drafts did not pay, less what those count in which they did
        self.num_rests = 0  # since they last paid for long
        self.num_rested = 0  # steps


class Following:
    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}  # by the bit length of a number of rows

    def follows(self, num_rows: int) -> bool:
        """Whether a step of so many rows, which is next, is followed."""
        size = self._size(num_rows)
        if size.num_refused < _TRIED:
            return True
        size.num_rested += 1
        if size.num_rested <= _RESTS[min(size.num_rests, len(_RESTS) - 1)]:
            return False
        size.num_refused = size.num_rested = 0
        size.num_rests += 1
        return True

    def probes(self, num_rows: int) -> bool:
        """Whether some drafts are to be checked, pay they or not."""
        return self._size(num_rows).num_refused in _PROBED

    def note(self, num_rows: int, *, pays: bool) -> None:
        """Whether drafts were thought to pay in a step of so many rows."""
        size = self._size(num_rows)
        size.num_refused = max(0, size.num_refused + (-_PAID if pays else 1))
        if not size.num_refused:
            size.num_rests = 0

    def _size(self, num_rows: int) -> _Size:
        size = self._sizes.get(num_rows.bit_length())
        if size is None:
            size = self._sizes[num_rows.bit_length()] = _Size()
        return size
