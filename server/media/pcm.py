"""Decoder of raw audio streams (PCM, G.711), which decodes and resamples with FFmpeg's libraries (PyAV)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, cast

import numpy as np

from server.http.errors import MediaNotInstalled
from server.media.log_mel import Float32s

if TYPE_CHECKING:
    from av import AudioCodecContext, AudioFrame, AudioResampler

Encoding = Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
_CODECS: Final[dict[Encoding, str]] = {"audio/pcm": "pcm_s16le", "audio/pcmu": "pcm_mulaw", "audio/pcma": "pcm_alaw"}
_PIECE_BYTES: Final = 1 << 16


class PcmReader:
    """Streaming decoder of one audio channel. `encoding` and `rate`: input format and sampling rate in Hz. `to_rate`: sampling
    rate of the output, in Hz."""

    def __init__(self, encoding: Encoding, rate: int, to_rate: int) -> None:
        """Create the decoder. Raises MediaNotInstalled if PyAV is not installed."""
        try:
            import av
        except ImportError:
            raise MediaNotInstalled("PyAV is not installed: pip install 'oneloop[media]'", "session") from None
        self._packet = av.Packet
        self._decoder = cast("AudioCodecContext", av.CodecContext.create(_CODECS[encoding], "r"))
        self._decoder.sample_rate, self._decoder.layout = rate, "mono"
        self._to_rate = to_rate
        self._resampler = self._new_resampler()
        self.sample_bytes = 2 if encoding == "audio/pcm" else 1
        self._rest = b""

    def feed(self, data: bytes) -> Float32s:
        """Decode the next bytes of the stream. Return the output samples, float32 [N]. `data` may begin or end within a sample."""
        data = self._rest + data
        end = len(data) - len(data) % self.sample_bytes
        self._rest = data[end:]
        pieces = [data[start : min(start + _PIECE_BYTES, end)] for start in range(0, end, _PIECE_BYTES)]
        frames = [frame for piece in pieces for frame in self._decoder.decode(self._packet(piece))]
        return _joined([made for frame in frames for made in self._resampler.resample(frame)])

    def flush(self) -> Float32s:
        """Return the samples still buffered in the resampler, float32 [N], and reset the decoder for a new stream."""
        made = _joined(self._resampler.resample(None))
        self._resampler, self._rest = self._new_resampler(), b""
        return made

    def _new_resampler(self) -> AudioResampler:
        import av

        return av.AudioResampler(format="flt", layout="mono", rate=self._to_rate)


def _joined(frames: list[AudioFrame]) -> Float32s:
    if not frames:
        return np.zeros(0, np.float32)
    return np.concatenate([frame.to_ndarray()[0] for frame in frames])
