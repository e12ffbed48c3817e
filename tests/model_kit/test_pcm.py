import random

import numpy as np
import pytest
from model_kit.outcomes import InvalidInput
from model_kit.pcm import FAULTS, Frames, audio_of


def test_frames_do_not_depend_on_the_sizes_of_steps():
    audio, chance = random.Random(1).randbytes(5_000), random.Random(2)
    frames, whole, start = Frames(10), b"", 0
    while start < len(audio):
        size = chance.randrange(60)
        whole += frames.whole(audio[start : start + size])
        assert len(whole) % 20 == 0
        start += size
    assert whole == audio


def test_the_rest_is_filled_with_silence():
    frames = Frames(4)
    assert frames.whole(b"12345678abc") == b"12345678"
    assert frames.last() == b"abc\0\0\0\0\0"
    assert frames.last() == b""


def tensor_of(audio):
    array = np.empty(1, dtype=np.object_)
    array[0] = audio
    return array


def test_audio_of_a_step_is_bounded():
    longest = bytes(30 * 32_000)
    assert audio_of(tensor_of(longest)) == longest
    with pytest.raises(InvalidInput) as refusal:
        audio_of(tensor_of(longest + b"\0"))
    assert str(refusal.value) in FAULTS
