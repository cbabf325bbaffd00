"""URLs: which package is missing, and where the files of a run are staged."""

import importlib
import os
import sys

import pytest

from distloop import Config, urls


def test_a_url_has_a_staging_directory_of_its_own_and_a_directory_has_none(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    staged = urls.local_directory("s3://bucket/runs/a")
    assert staged == urls.local_directory("s3://bucket/runs/a/") == Config(workdir="s3://bucket/runs/a").local_workdir
    assert os.path.dirname(staged) == "/cache/distloop" and staged != urls.local_directory("gs://bucket/runs/a")
    assert Config(workdir="/runs/a").local_workdir == "/runs/a"


@pytest.mark.parametrize(
    "url, missing, words",
    [
        ("s3://bucket/run", "fsspec", "needs fsspec: pip install fsspec, or"),
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
        urls.file_system(url)


@pytest.mark.parametrize(
    "url, shown",
    [
        ("sftp://me:pa55word@host/run", "sftp://me@host/run"),
        ("ftp://me:p@ss:w@host:21/a@b", "ftp://me@host:21/a@b"),
        ("sftp://me@host:22/run", "sftp://me@host:22/run"),
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("https://host/run?name=a&X-Amz-Signature=ab/c&sv=1", "https://host/run?name=a&X-Amz-Signature=***&sv=1"),
        ("https://host/run?access_token=abc", "https://host/run?access_token=***"),
        ("https://host/run?a=1;pwd=abc#id_token=abc", "https://host/run?a=1;pwd=***#id_token=***"),
        ("sftp://me@domain:pa55@host/run", "sftp://me@domain@host/run"),
        ("sftp://me:pa55@[::1]:22/a@b", "sftp://me@[::1]:22/a@b"),
        ("https://ghp_abc@host/run", "https://***@host/run"),
        ("abfs://container@account/a", "abfs://container@account/a"),
        ("zip://a.zip::https://me:pa55@host/a@b", "zip://a.zip::https://***@host/a@b"),
    ],
)
def test_a_url_is_shown_without_its_password_and_keys(url, shown):
    assert urls.without_credentials(url) == urls.without_credentials(shown) == shown
    assert urls.without_credentials(f"cannot open {url!r}.") == f"cannot open {shown!r}."


@pytest.mark.parametrize(
    "url, words",
    [
        (
            "sftp://me:pass@host/run",
            "begins with sftp:// has a password, which files of the run would hold: give it in",
        ),
        ("sftp://me:pa/ss@host/run", "begins with sftp:// has a password"),
        ("https://me:pa?ss@host/run", "begins with https:// has a password"),
        ("sftp://me:p ss@[::1]:22/a@b", "begins with sftp:// has a password"),
        ("s3://bucket/run?X-Amz-Signature=abc", r"'s3://bucket/run\?X-Amz-Signature=\*\*\*' has a key or token, which"),
        (
            "https://ghp_abc@host/run",
            r"'https://\*\*\*@host/run' has a key or token, which files of the run would hold",
        ),
    ],
)
@pytest.mark.parametrize("name", ["workdir", "init_from"])
def test_a_url_with_a_password_key_or_token_is_refused_without_it(name, url, words):
    with pytest.raises(ValueError, match=words) as refused:
        Config(**{name: url})
    assert "ss@" not in str(refused.value) and "abc" not in str(refused.value)


@pytest.mark.parametrize("url", ["sftp://me@host:22/run", "s3://bucket/a:b@c", "abfs://container@account/a"])
def test_a_url_with_a_user_alone_is_taken_as_it_is(url):
    assert Config(workdir=url).workdir == url


def test_a_path_that_is_not_utf8_is_refused_in_a_sentence(tmp_path, monkeypatch):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/a\xff")
    words = r"The path '.*a\\udcff.*' has a name that is not UTF-8: rename it, or give another path\."
    for take in (lambda path: Config(workdir=path), lambda path: Config(init_from=path), urls.expand):
        with pytest.raises(ValueError, match=words):
            take(odd)
    os.mkdir(odd)
    monkeypatch.chdir(odd)
    with pytest.raises(ValueError, match=words):
        urls.absolute("run")


def test_where_the_current_directory_is_gone_only_whole_paths_are_taken(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert urls.absolute("/runs/a") == "/runs/a"
    with pytest.raises(ValueError, match="'run' is relative, and the current directory was deleted: give it whole"):
        urls.absolute("run")
