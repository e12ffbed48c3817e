"""The segments of `voice_activity`, without its network: a chunk is 32 ms."""

import pytest


@pytest.fixture
def module(load):
    return load("voice_activity", "speech_segments")


@pytest.fixture
def segments(module):
    return module.SpeechSegments()


def found(segments):
    return [(round(float(start), 3), round(float(end), 3)) for start, end in segments.as_array()]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0.1] * 100, []),
        ([0.1] * 10 + [0.9] * 10 + [0.1] * 10, [(0.29, 0.67)]),  # with a margin on both sides
        ([0.9] * 10, [(0.0, 0.32)]),
        ([0.9] * 7 + [0.1] * 10, []),  # too short
    ],
)
def test_speech_is_a_segment(segments, scores, expected):
    segments.add(scores)
    assert found(segments) == expected
    segments.end()
    assert segments.as_array().shape == (len(expected), 2)


def test_an_open_segment_ends_now(segments):
    segments.add([0.1] * 10 + [0.9] * 10)
    assert found(segments) == [(0.29, 0.64)]
    segments.add([0.9] * 10)
    assert found(segments) == [(0.29, 0.96)]
    segments.end()
    assert found(segments) == [(0.29, 0.96)]


@pytest.mark.parametrize(("drop", "count"), [([0.4] * 20, 1), ([0.1] * 3, 1), ([0.1] * 4, 2)])
def test_short_drops_do_not_end_a_segment(segments, drop, count):
    segments.add([0.9] * 10 + drop + [0.9] * 10)
    assert len(found(segments)) == count


def test_the_number_of_segments_is_bounded(segments, module):
    for _ in range(module.MAX_SEGMENTS + 5):
        segments.add([0.9] * 10 + [0.1] * 10)
    assert len(found(segments)) == module.MAX_SEGMENTS
    assert found(segments)[-1][1] == pytest.approx((20 * (module.MAX_SEGMENTS + 5) - 10) * 0.032 + 0.03, abs=0.01)
