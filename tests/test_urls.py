"""URLs: which package is missing, and where the files of a run are staged."""

import importlib
import os
import sys

import pytest

from distloop import Config, urls


def test_a_url_has_a_staging_directory_of_its_own_and_a_directory_has_none(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    staged = urls.staging_directory("s3://bucket/runs/a")
    assert staged == urls.staging_directory("s3://bucket/runs/a/") == Config(workdir="s3://bucket/runs/a").local_workdir
    assert os.path.dirname(staged) == "/cache/distloop" and staged != urls.staging_directory("gs://bucket/runs/a")
    assert Config(workdir="/runs/a").local_workdir == "/runs/a"


@pytest.mark.parametrize(
    "url, missing, words",
    [
        ("s3://bucket/run", "fsspec", r"needs fsspec: pip install 'distloop\[remote\]'"),
        ("s3://bucket/run", "s3fs", "cannot be opened: Install s3fs to access S3"),
        ("nothing://bucket/run", "", "cannot be opened: Protocol not known: nothing"),
    ],
)
def test_what_is_missing_for_a_url_is_named(url, missing, words, monkeypatch):
    opened = importlib.import_module("fsspec.registry")._registry  # by other tests
    monkeypatch.delitem(opened, "s3", raising=False)
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match=words):
        urls.file_system(url, "remote")
