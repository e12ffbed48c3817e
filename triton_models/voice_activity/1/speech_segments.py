"""Probabilities of speech, chunk by chunk -> the segments with speech, as Silero's own iterator finds them."""

from collections import deque

import numpy as np

CHUNK_SAMPLES = 512
CHUNK_S = CHUNK_SAMPLES / 16_000
# A segment starts at the first and ends at a lower probability, so that it does not end at each short drop.
STARTS_AT = 0.5
ENDS_BELOW = 0.35
LEAST_SPEECH_S = 0.25
LEAST_SILENCE_S = 0.1
MARGIN_S = 0.03
MAX_SEGMENTS = 1_000


class SpeechSegments:
    """The newest MAX_SEGMENTS segments. A segment counts once it has LEAST_SPEECH_S of speech."""

    def __init__(self):
        self._ended = deque(maxlen=MAX_SEGMENTS)
        self._chunks = 0
        self._speech_from = None
        self._silence_from = None

    def add(self, probabilities):
        for probability in probabilities:
            self._add(probability)

    def end(self):
        """Ends the segment that is still open."""
        if self._speech_from is not None:
            self._close(self._now_s() if self._silence_from is None else self._silence_from)

    def as_array(self):
        """Start and end in seconds, float32 [n, 2]. An open segment ends now, or where its silence began."""
        segments = list(self._ended)
        if self._speech_from is not None:
            segments += self._counted(self._now_s() if self._silence_from is None else self._silence_from)
        return np.array(segments, np.float32).reshape(-1, 2)

    def _add(self, probability):
        begin_s = self._now_s()
        self._chunks += 1
        if probability >= STARTS_AT:
            self._silence_from = None
            if self._speech_from is None:
                self._speech_from = begin_s
        elif probability < ENDS_BELOW and self._speech_from is not None:
            if self._silence_from is None:
                self._silence_from = begin_s
            if self._now_s() - self._silence_from >= LEAST_SILENCE_S:
                self._close(self._silence_from)

    def _close(self, end_s):
        self._ended.extend(self._counted(end_s))
        self._speech_from = self._silence_from = None

    def _counted(self, end_s):
        """Returns the open segment with a margin on both sides, or nothing if it is too short."""
        if end_s - self._speech_from < LEAST_SPEECH_S:
            return []
        return [(max(0.0, self._speech_from - MARGIN_S), min(end_s + MARGIN_S, self._now_s()))]

    def _now_s(self):
        return self._chunks * CHUNK_S
