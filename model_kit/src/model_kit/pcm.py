"""Audio in steps: mono PCM of 16 bits (little-endian) and 16 kHz, as bytes of any length."""

import numpy as np

from model_kit.outcomes import InvalidInput

RATE_HZ = 16_000
BYTES_PER_SAMPLE = 2
MAX_STEP_S = 30

TOO_LONG = f"AUDIO is too long: at most {MAX_STEP_S} seconds in a step"
# All error texts of this module.
FAULTS = frozenset({TOO_LONG})


def audio_of(tensor: np.ndarray) -> bytes:
    """Returns the audio of a step from a BYTES tensor [1].

    Raises:
        InvalidInput: If it is longer than MAX_STEP_S.
    """
    audio = tensor.item()
    if len(audio) > MAX_STEP_S * RATE_HZ * BYTES_PER_SAMPLE:
        raise InvalidInput(TOO_LONG)
    return audio


class Frames:
    """Cuts audio into frames of one size. A frame may begin and end anywhere in a step, also inside a sample."""

    def __init__(self, samples: int) -> None:
        self._size = samples * BYTES_PER_SAMPLE
        self._rest = b""

    def whole(self, audio: bytes) -> bytes:
        """Returns the complete frames up to now, joined; keeps the rest for the next step."""
        audio = self._rest + audio
        end = len(audio) - len(audio) % self._size
        self._rest = audio[end:]
        return audio[:end]

    def last(self) -> bytes:
        """Returns the rest, filled with silence to one frame; nothing if there is no rest."""
        rest, self._rest = self._rest, b""
        return rest.ljust(self._size, b"\0") if rest else b""
