"""The models of sessions hear espeak-ng, on a real Triton: voice activity, transcription, and both in `listen`.

It speaks in a quiet room instead of digital silence: PocketSphinx recognizes few words of a voice without any noise,
because it was trained with recordings. ``python -m tests.live.test_speech`` writes ``samples/speech.wav``.
"""

import io
import itertools
import random
import shutil
import subprocess
import wave
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput

from app.launcher.embedded_triton import EmbeddedTriton
from tests.conftest import Require
from tests.toolkit.processes import ROOT

SAMPLE = ROOT / "samples" / "speech.wav"
SAMPLE_TEXT = "good morning how are you today"
RATE_HZ = 16_000
VOICE = ("-v", "en-us", "-s", "130")
GAIN = 0.25
NOISE = 30
"""The standard deviation of the room's noise, in steps of 16 bits."""
BYTES_PER_S = 2 * RATE_HZ
PHRASES = ("good morning how are you", "we are going to the market tomorrow", "i would like a cup of coffee")
IDS = itertools.count(1)

Answer = dict[str, np.ndarray]


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


class Sequence:
    """A sequence of a model, step by step."""

    def __init__(self, client: InferenceServerClient, model: str) -> None:
        self._client = client
        self._model = model
        self._id = next(IDS)
        self._is_open = False

    def step(self, audio: bytes, *, ends: bool = False) -> Answer:
        tensor = InferInput("AUDIO", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([audio], dtype=np.object_))
        control = {"sequence_id": self._id, "sequence_start": not self._is_open, "sequence_end": ends}
        self._is_open = True
        result = self._client.infer(self._model, [tensor], **control)
        return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}

    def steps(self, parts: Iterable[bytes]) -> list[Answer]:
        """Sends all parts, and an empty one with the end flag."""
        return [*map(self.step, parts), self.step(b"", ends=True)]


@pytest.fixture(scope="module")
def client(triton: EmbeddedTriton) -> Iterator[InferenceServerClient]:
    with InferenceServerClient(triton.grpc_url) as session:
        yield session


@pytest.fixture(scope="module")
def phrases(require: Require) -> list[np.ndarray]:
    require(has_espeak(), "there is no espeak-ng: `make system-packages` installs it")
    return [speak(text) for text in PHRASES]


@pytest.fixture(scope="module")
def spoken(phrases: list[np.ndarray]) -> bytes:
    """One phrase in a quiet room."""
    return room(silence(0.5), phrases[1], silence(0.75))


def cut(audio: bytes, size: int = 3_200) -> list[bytes]:
    return [audio[start : start + size] for start in range(0, len(audio), size)]


def text_of(answer: Answer) -> str:
    return answer["TEXT"].item().decode()


def whole(answers: list[Answer]) -> tuple[list[float], list[list[float]]]:
    """All probabilities, and the segments after the last step."""
    return np.concatenate([each["SPEECH"] for each in answers]).tolist(), answers[-1]["SEGMENTS"].tolist()


def test_speech_is_found_where_it_is(client: InferenceServerClient, phrases: list[np.ndarray]) -> None:
    audio = room(silence(1), phrases[0], silence(1.5), phrases[1], silence(1))
    first_ends = 1 + len(phrases[0]) / RATE_HZ
    second_ends = first_ends + 1.5 + len(phrases[1]) / RATE_HZ
    probabilities, segments = whole(Sequence(client, "voice_activity").steps(cut(audio)))
    assert segments == [
        [pytest.approx(1, abs=0.3), pytest.approx(first_ends, abs=0.5)],
        [pytest.approx(first_ends + 1.5, abs=0.3), pytest.approx(second_ends, abs=0.5)],
    ]
    assert len(probabilities) == -(-len(audio) // 1_024)
    assert np.median(probabilities[40 : int(first_ends / 0.032) - 10]) > 0.9


@pytest.mark.parametrize("audio", [bytes(2 * BYTES_PER_S), room(silence(2))], ids=["digital", "noise"])
def test_silence_has_low_scores_and_no_text(client: InferenceServerClient, audio: bytes) -> None:
    answers = Sequence(client, "listen").steps(cut(audio))
    probabilities, segments = whole(answers)
    assert max(probabilities) < 0.3
    assert segments == []
    assert text_of(answers[-1]) == ""


def test_partial_text_grows_and_becomes_text(client: InferenceServerClient, spoken: bytes) -> None:
    answers = Sequence(client, "transcribe").steps(cut(spoken))
    partials = [each["PARTIAL"].item().decode() for each in answers]
    counts = [len(each.split()) for each in partials]
    assert set(counts) >= {0, 1, 2, 3, 4, 5}
    assert counts.index(1) < counts.index(3) < counts.index(5)
    assert partials[-1] == ""
    assert len(text_of(answers[-1]).split()) >= 5


def test_sizes_of_steps_do_not_matter(client: InferenceServerClient, spoken: bytes) -> None:
    """Steps of 0 to 0.3 s may end inside a sample."""
    expected, chance, ends = Sequence(client, "listen").steps([spoken]), random.Random(1), [0]
    while ends[-1] < len(spoken):
        ends.append(ends[-1] + chance.randrange(9_600))
    answers = Sequence(client, "listen").steps(spoken[start:end] for start, end in itertools.pairwise(ends))
    probabilities, segments = whole(answers)
    assert probabilities == pytest.approx(whole(expected)[0], abs=1e-4)
    assert segments == whole(expected)[1]
    assert text_of(answers[-1]) == text_of(expected[-1])


if __name__ == "__main__":
    SAMPLE.write_bytes(wave_file(room(silence(0.3), speak(SAMPLE_TEXT), silence(0.4))))
