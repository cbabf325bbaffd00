import os

import pytest

from distloop.records.file_ranges import LocalFiles, expand, open_files


def test_ranges_of_many_files_are_read_and_end_where_the_file_does(tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        with open(path, "w") as file:
            file.write(f"the text of {path[-1]}")
    files = open_files(paths)
    assert list(files.read([(1, 0, 3), (0, 12, 13), (1, 4, 99), (0, 50, 60)])) == [b"the", b"a", b"text of b", b""]
    assert files.stat(0)[0] == 13


def test_a_read_that_the_system_cuts_short_is_continued(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"0123456789")
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: pread(file, min(size, 3), offset))
    assert list(LocalFiles([str(tmp_path / "a")]).read([(0, 1, 9), (0, 5, 20)])) == [b"12345678", b"56789"]


def test_patterns_are_sorted_and_lists_are_not(tmp_path, monkeypatch):
    for name in ("c", "a", "b[1]", ".hidden"):
        (tmp_path / name).touch()
    (tmp_path / "directory").mkdir()
    names = [str(tmp_path / name) for name in ("a", "b[1]", "c")]
    assert expand(tmp_path / "*") == names
    assert expand([names[2], tmp_path / "a*"]) == [names[2], names[0]]
    assert expand(names[1]) == [names[1]]  # a name before a pattern
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand("~/a") == [names[0]]


def test_a_file_that_is_missing_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(LocalFiles([str(tmp_path / "a")]).read([(0, 0, 1)]))
