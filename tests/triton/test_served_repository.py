import pytest

from app.launcher.machine import RepositoryUnservable
from app.triton.repository import served_repository

COMPLETE = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [-1] }
output { name: "Y" data_type: TYPE_FP32 dims: [-1] }
"""


@pytest.fixture
def add_model(tmp_path):
    def add_model(name, config=None, file="model.py"):
        version = tmp_path / name / "1"
        version.mkdir(parents=True)
        (version / file).touch()
        if config is not None:
            (version.parent / "config.pbtxt").write_text(config)

    return add_model


def test_models_are_the_sorted_folders(add_model, tmp_path):
    """Triton loads a folder with any name, and does not start if one is no model."""
    for name in ("b", "a", ".c"):
        add_model(name, COMPLETE)
    (tmp_path / "README.md").touch()
    assert served_repository(tmp_path).models == (".c", "a", "b")


def test_complete_configurations_are_recognized(add_model, tmp_path):
    add_model("a", COMPLETE)
    add_model("b", COMPLETE.replace('backend: "python"', 'platform: "ensemble"'))
    assert served_repository(tmp_path).is_complete


@pytest.mark.parametrize(
    "config",
    [
        None,
        "",
        COMPLETE.replace('backend: "python"', ""),
        COMPLETE.replace("output", "input"),
        COMPLETE.replace("data_type: TYPE_FP32", "", 1),
        COMPLETE.replace("dims: [-1]", "", 1),
    ],
)
def test_one_incomplete_configuration_is_recognized(add_model, tmp_path, config):
    add_model("a", COMPLETE)
    add_model("b", config)
    assert not served_repository(tmp_path).is_complete


@pytest.mark.parametrize(
    ("config", "file", "backend"),
    [
        ('backend: "onnxruntime"', "model.onnx", "onnxruntime"),
        ('platform: "tensorrt_plan"', "model.plan", "tensorrt"),
        (None, "model.pt", "pytorch"),
    ],
)
def test_the_error_for_another_backend_names_the_triton_image(add_model, tmp_path, config, file, backend):
    add_model("detector", config, file)
    with pytest.raises(RepositoryUnservable) as refused:
        served_repository(tmp_path)
    assert all(text in str(refused.value) for text in ("'detector'", f"'{backend}'", "tritonserver image"))


def test_the_error_for_an_invalid_configuration_has_its_place(add_model, tmp_path):
    add_model("a", COMPLETE + "\nnonsense: 1")
    with pytest.raises(RepositoryUnservable, match=r"'a'.*config.pbtxt.*nonsense"):
        served_repository(tmp_path)


def test_a_missing_or_empty_repository_is_an_error(tmp_path):
    with pytest.raises(RepositoryUnservable, match="no model repository"):
        served_repository(tmp_path / "absent")
    with pytest.raises(RepositoryUnservable, match="contains no models"):
        served_repository(tmp_path)


def test_a_python_model_without_its_script_is_an_error(add_model, tmp_path):
    add_model("a", COMPLETE, file="other.py")
    with pytest.raises(RepositoryUnservable, match=r"Model 'a': .*/a/1/model\.py does not exist\."):
        served_repository(tmp_path)
    (tmp_path / "a" / "config.pbtxt").write_text(COMPLETE + 'default_model_filename: "other.py"')
    assert served_repository(tmp_path).models == ("a",)


def test_a_name_that_a_shell_splits_is_an_error(add_model, tmp_path):
    """Triton 2.51 would wait for the model's process without end."""
    add_model("bert base", COMPLETE)
    with pytest.raises(RepositoryUnservable, match=r"'bert base': the folder is 'bert base', and Triton 2.51 never"):
        served_repository(tmp_path)
