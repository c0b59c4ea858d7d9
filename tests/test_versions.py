"""Requirements in the metadata of plugins, compared with the installed versions."""

import importlib_metadata as metadata
import pytest

from rlcore.errors import ConfigError
from rlcore.registry.versions import check_versions

REQUIRES = ["numpy>=1", "peft>=0.21 ; extra == 'lora'"]


@pytest.fixture
def installed(monkeypatch):
    """Package -> installed version; REQUIRES are the package's requirements."""
    found = {"numpy": "2.1", "peft": "0.22"}

    def version(name):
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "requires", lambda package: REQUIRES)
    monkeypatch.setattr(metadata, "version", version)
    return found


def test_installed_versions_pass_and_extras_are_checked_on_request(installed):
    check_versions("some-plugin", "backend=some", "lora")
    del installed["peft"]
    check_versions("some-plugin", "backend=some")

    with pytest.raises(ConfigError) as refused:
        check_versions("some-plugin", "backend=some", "lora")

    assert str(refused.value) == (
        "backend=some needs peft>=0.21, which is not installed\nType  pip install 'some-plugin[lora]'"
    )


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "backend=some needs numpy>=1, which is not installed\nType  pip install 'some-plugin'"),
        ("0.9", "backend=some was written for numpy>=1, and numpy 0.9 is installed\nType  pip install 'numpy>=1'"),
    ],
)
def test_missing_package_or_wrong_version_is_named(version, message, installed):
    installed["numpy"] = version
    if version is None:
        del installed["numpy"]

    with pytest.raises(ConfigError) as refused:
        check_versions("some-plugin", "backend=some")

    assert str(refused.value) == message
