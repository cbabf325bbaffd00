"""The page on what `make wide` has tried: counted from the files that pytest writes."""

from tests import wide

RAN = """<testsuites><testsuite name="pytest" time="90.0">
<testcase classname="tests.data.test_order" name="test_a[1]" time="1.5"/>
<testcase classname="tests.data.test_order" name="test_b" time="2.0"><failure message="no"/></testcase>
<testcase classname="tests.data.test_order.TestRows" name="test_c" time="0.5"><skipped/></testcase>
<testcase classname="tests.test_laws" name="test_d" time="3.0"/>
<testcase classname="tests.test_laws" name="test_d" time="0.0"><error message="no"/></testcase>
</testsuite></testsuites>"""


def test_cases_are_counted_by_folder_and_failed_or_missing_ones_named(tmp_path):
    for name in ["files", "campaigns", "folders a-d.cut", "folders e-m", "folders n-z", "collectives"]:
        (tmp_path / f"{name}.xml").write_text(RAN)
    text = wide.render(tmp_path)
    assert "25\ntests in 8 minutes, 10 failed, 5 were skipped" in text
    assert "| `tests/data` | the folder `distloop/data` | 15 | 5 | 5 | 20 |\n" in text
    assert "| `tests/test_laws.py` | " in text and " | 10 | 5 | 0 | 15 |\n" in text
    again = "5 tests of `tests/data`, `tests/test_laws.py` in 2 minutes, 2 failed, 1 were skipped."
    assert again in " ".join(text.split())
    assert text.count("- `tests/data/test_order.py::test_b`\n") == text.count("- `tests/test_laws.py::test_d`\n") == 6
    assert text.endswith("\nNot run:\n\n- folders a-d, not all tests of it\n")


def test_a_part_whose_tests_end_is_whole_and_one_whose_process_dies_is_not(tmp_path, monkeypatch):
    for code, name in [(1, "files.xml"), (2, "files.cut.xml")]:

        def call(command, cwd, code=code):
            (option,) = [option for option in command if option.startswith("--junitxml=")]
            open(option.partition("=")[2], "w").close()
            assert "--wide" in command and any(path.endswith("/test_bits.py") for path in command)
            return code

        monkeypatch.setattr(wide.subprocess, "call", call)
        wide.run("files", tmp_path, ["-n1"])
        assert (tmp_path / name).exists()
    assert not (tmp_path / "files.xml").exists()


def test_every_test_belongs_to_a_part_of_wide():
    tests = wide.ROOT / "tests"
    files = {path for path in tests.rglob("test_*.py")}
    for _, patterns in wide.PARTS.values():
        for found in [path for pattern in patterns for path in tests.glob(pattern)]:
            files -= {found, *found.rglob("test_*.py")}
    assert not files
