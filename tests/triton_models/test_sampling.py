import numpy as np
import pytest


@pytest.fixture(scope="module")
def sampling(load):
    return load("tokens_generate", "tokens_sampling")


LOGITS = np.log(np.array([0.1, 0.6, 0.3], np.float32))


def shares(sampling, temperature):
    chance = sampling.generator_of(0)
    drawn = [sampling.pick(LOGITS, temperature, chance) for _ in range(4000)]
    return np.bincount(drawn, minlength=3) / 4000


def test_temperature_one_draws_by_likelihood(sampling):
    np.testing.assert_allclose(shares(sampling, 1.0), [0.1, 0.6, 0.3], atol=0.03)


def test_temperature_two_flattens_the_distribution(sampling):
    expected = np.sqrt([0.1, 0.6, 0.3])
    np.testing.assert_allclose(shares(sampling, 2.0), expected / expected.sum(), atol=0.03)


@pytest.mark.parametrize("temperature", [0, 1e-300, 5e-324])
def test_a_very_low_temperature_picks_the_most_likely_token(sampling, temperature):
    assert sampling.pick(LOGITS, temperature, sampling.generator_of(1)) == 1


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 2**80])
def test_any_integer_is_a_seed(sampling, seed):
    assert sampling.generator_of(seed).random() == sampling.generator_of(seed).random()


def test_without_a_seed_every_generator_differs(sampling):
    assert sampling.generator_of(None).random() != sampling.generator_of(None).random()
