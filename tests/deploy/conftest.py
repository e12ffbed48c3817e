import importlib.util
from collections.abc import Iterator
from types import ModuleType

import pytest


@pytest.fixture(scope="package")
def bootstrap(pytestconfig: pytest.Config) -> Iterator[ModuleType]:
    """``deploy/bootstrap.py`` as a module of its own."""
    spec = importlib.util.spec_from_file_location("bootstrap", pytestconfig.rootpath / "deploy" / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(importlib.sys.modules, "bootstrap", module)
        spec.loader.exec_module(module)
        yield module
