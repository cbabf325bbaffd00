"""Versions: what is too old is refused, what is too new is said to be untried, and all declarations agree."""

import importlib.metadata
import pathlib
import subprocess
import sys
import warnings

import pytest

from distloop import installed

ROOT = pathlib.Path(__file__).resolve().parent.parent


def install(monkeypatch, **distributions):
    def version(name):
        if name not in distributions:
            raise importlib.metadata.PackageNotFoundError(name)
        return distributions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize(
    "distributions",
    [{"tensorflow": "2.18.0", "keras": "3.12.0"}, {"tf-nightly-cpu": "2.22.0.dev20260905", "keras": "3.15.1"}, {}],
    ids=["the oldest", "the newest", "built by hand"],
)
def test_versions_that_were_tried_pass_without_a_word(distributions, monkeypatch):
    install(monkeypatch, **distributions)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        installed.require_supported()


def test_an_old_version_is_refused_in_a_sentence(monkeypatch):
    install(monkeypatch, tensorflow="2.21.0", keras="3.11.3")
    with pytest.raises(ImportError, match=r"^Keras 3\.11\.3 is installed, .*: install 'keras>=3\.12,<3\.16'\.$"):
        installed.require_supported()


def test_a_version_that_nobody_has_tried_is_a_warning(monkeypatch):
    install(monkeypatch, tensorflow="2.99.1", keras="3.15.1")
    with pytest.warns(UserWarning, match=r"^TensorFlow 2\.99\.1 is newer than the versions that distloop was tried"):
        installed.require_supported()


@pytest.mark.parametrize("package", installed.SUPPORTED)
def test_the_package_declares_the_same_bounds(package):
    least, untried = installed.SUPPORTED[package]
    assert f'"{package.lower()}>={least},<{untried}"' in (ROOT / "pyproject.toml").read_text()


def test_importing_distloop_checks_them():
    program = "import importlib.metadata as m; m.version = lambda name: '1.0.0'; import distloop"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "ImportError: TensorFlow 1.0.0 is installed, with which distloop does not work" in done.stderr
