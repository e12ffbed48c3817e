from itertools import islice

from app.triton.embedded.backoff import delays_s


def test_delay_doubles_up_to_the_longest():
    assert list(islice(delays_s(0.5, 3.0), 5)) == [0.5, 1.0, 2.0, 3.0, 3.0]
