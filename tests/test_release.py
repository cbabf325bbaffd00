"""What a release says of itself: its version, and its page in an index, where links between files lead nowhere."""

import pathlib
import re

import pytest

import distloop

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_the_version_has_a_dated_section_in_the_changelog():
    heads = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert re.fullmatch(r"\d+\.\d+\.\d+ \(unreleased\)", heads[0])
    assert re.fullmatch(rf"{re.escape(distloop.__version__)} - \d{{4}}-\d\d-\d\d", heads[1])


def test_the_page_of_the_package_is_the_readme_without_links_between_files():
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    readme = page = (ROOT / "README.md").read_text(encoding="utf-8")
    for change in settings["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        page = re.sub(change["pattern"], change["replacement"], page)
    assert "](docs/" in readme and re.findall(r"\]\((?!https?:)[^)]*\)", page) == []
    assert page.startswith("# distloop\n") and "virtual_replicas" in page and len(page) > 0.8 * len(readme)
