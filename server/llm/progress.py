"""Progress bar of many requests, made with tqdm, in a terminal or a notebook. It shows tokens per second."""

from __future__ import annotations

import time

from tqdm.auto import tqdm


class Progress:
    """Progress bar. `total`: number of requests, None if unknown. `shown`: None shows the bar on a terminal only."""

    def __init__(self, total: int | None, unit: str, *, shown: bool | None) -> None:
        self._bar = tqdm(total=total, unit=unit, disable=None if shown is None else not shown, dynamic_ncols=True)
        self._began_s = time.monotonic()
        self.num_tokens = 0
        self.num_done = 0
        self.num_failed = 0

    def done(self, num_tokens: int, *, failed: bool = False) -> None:
        """Count a request as finished. `num_tokens`: number of tokens that it generated."""
        self.num_done += 1
        self.num_failed += failed
        self.num_tokens += num_tokens
        failures = f", {self.num_failed} failed" if self.num_failed else ""
        self._bar.set_postfix_str(f"{self.tokens_per_s:.1f} tok/s{failures}", refresh=False)
        self._bar.update()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / max(self.elapsed_s, 1e-9)

    def close(self) -> None:
        self._bar.close()
