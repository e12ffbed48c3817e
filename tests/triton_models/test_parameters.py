import pytest


@pytest.fixture(scope="module")
def parameters(load):
    return load("tokens_generate", "tokens_parameters")


def test_defaults(parameters):
    assert parameters.wishes_of({}) == parameters.Wishes(max_tokens=64, temperature=0.8, seed=None, chunk_tokens=1)


def test_known_parameters_are_read_and_others_ignored(parameters):
    sent = {"max_tokens": 512, "temperature": 0, "seed": -4, "chunk_tokens": 64, "traceparent": "00-1"}
    assert parameters.wishes_of(sent) == parameters.Wishes(max_tokens=512, temperature=0.0, seed=-4, chunk_tokens=64)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 513),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "8"),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", False),
        ("seed", 1.0),
        ("seed", "secret"),
        ("chunk_tokens", 0),
        ("chunk_tokens", 65),
    ],
)
def test_the_error_names_the_parameter_but_not_its_value(parameters, name, value):
    with pytest.raises(Exception, match=f"^{name} must be") as caught:
        parameters.wishes_of({name: value})
    assert type(caught.value).__name__ == "InvalidInput"
    assert "secret" not in str(caught.value)
