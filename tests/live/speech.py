"""English speech for the tests: espeak-ng speaks, in a quiet room instead of digital silence.

PocketSphinx recognizes few words of a voice without any noise, because it was trained with recordings.

``python -m tests.live.speech`` writes ``samples/speech.wav``.
"""

import io
import shutil
import subprocess
import wave
from pathlib import Path

import numpy as np

SAMPLE = Path(__file__).parents[2] / "samples" / "speech.wav"
SAMPLE_TEXT = "good morning how are you today"
RATE_HZ = 16_000
VOICE = ("-v", "en-us", "-s", "130")
GAIN = 0.25
NOISE = 30
"""The standard deviation of the room's noise, in steps of 16 bits."""


def has_espeak() -> bool:
    return shutil.which("espeak-ng") is not None


def speak(text: str) -> np.ndarray:
    """Returns the samples of a spoken text, without noise."""
    command = ["espeak-ng", "--stdout", *VOICE, text]
    with wave.open(io.BytesIO(subprocess.run(command, capture_output=True, check=True).stdout)) as sound:
        samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2")
        return resampled(samples, sound.getframerate()) * GAIN


def silence(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * RATE_HZ))


def room(*sounds: np.ndarray) -> bytes:
    """Returns PCM of the sounds one after the other, with the same noise each time."""
    joined = np.concatenate(sounds)
    return (joined + np.random.default_rng(0).normal(0, NOISE, len(joined))).astype("<i2").tobytes()


def resampled(samples: np.ndarray, rate_hz: int) -> np.ndarray:
    """Removes what 16 kHz cannot carry, then interpolates."""
    spectrum = np.fft.rfft(samples)
    spectrum[np.fft.rfftfreq(len(samples), 1 / rate_hz) >= RATE_HZ / 2] = 0
    count = len(samples) * RATE_HZ // rate_hz
    return np.fft.irfft(spectrum[: count // 2 + 1], count) * count / len(samples)


def wave_file(pcm: bytes) -> bytes:
    """Returns a WAV file with one channel."""
    content = io.BytesIO()
    with wave.open(content, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(RATE_HZ)
        sound.writeframes(pcm)
    return content.getvalue()


if __name__ == "__main__":
    SAMPLE.write_bytes(wave_file(room(silence(0.3), speak(SAMPLE_TEXT), silence(0.4))))
