import pytest


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def cancellations(load, clock):
    return load("tokens_generate", "tokens_cancellation").Cancellations(clock)


def test_only_the_named_request_is_cancelled(cancellations):
    mine, other = cancellations.watch("mine"), cancellations.watch("other")
    cancellations.cancel("mine")
    assert mine.is_set()
    assert not other.is_set()


def test_an_early_cancellation_is_kept_for_a_minute(cancellations, clock):
    cancellations.cancel("early")
    clock.now_s += 59
    assert cancellations.watch("early").is_set()
    clock.now_s += 1
    assert not cancellations.watch("early").is_set()


def test_a_waiting_request_stays_cancelled(cancellations, clock):
    waiting = cancellations.watch("waiting")
    cancellations.cancel("waiting")
    clock.now_s += 600
    cancellations.cancel("another")
    assert waiting.is_set()


@pytest.mark.parametrize("request_id", ["", "x" * 257])
def test_an_invalid_request_id_is_an_error(cancellations, request_id):
    with pytest.raises(Exception, match="CANCEL must be"):
        cancellations.cancel(request_id)
