"""The page on what `make wide` has tried: counted from the file that pytest writes."""

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
RAN = """<testsuites><testsuite name="pytest" time="90.0">
<testcase classname="tests.data.test_order" name="test_a[1]" time="1.5"/>
<testcase classname="tests.data.test_order" name="test_b" time="2.0"><failure message="no"/></testcase>
<testcase classname="tests.data.test_order.TestRows" name="test_c" time="0.5"><skipped/></testcase>
<testcase classname="tests.test_laws" name="test_d" time="3.0"/>
<testcase classname="tests.test_laws" name="test_d" time="0.0"><error message="no"/></testcase>
</testsuite></testsuites>"""


def test_cases_are_counted_by_folder_and_file_and_those_that_fell_are_named(tmp_path):
    spec = importlib.util.spec_from_file_location("evidence", ROOT / "docs" / "evidence.py")
    evidence = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(evidence)
    (tmp_path / "wide.xml").write_text(RAN)
    text = evidence.render(*evidence.read(str(tmp_path / "wide.xml")))
    assert "5 tests\nin 2 minutes, 2 failed, 1 were skipped" in text
    assert "| `tests/data` | the folder `distloop/data` | 3 | 1 | 1 | 4 |\n" in text
    assert "| `tests/test_laws.py` | " in text and " | 2 | 1 | 0 | 3 |\n" in text
    assert text.endswith("- `tests/data/test_order.py::test_b`\n- `tests/test_laws.py::test_d`\n")
    again = evidence.render_again(*evidence.read(str(tmp_path / "wide.xml")))
    assert "5 tests of `tests/data`, `tests/test_laws.py`\nin 2 minutes, 2 failed, 1 were skipped." in again
    assert again.endswith("- failed: `tests/data/test_order.py::test_b`\n- failed: `tests/test_laws.py::test_d`\n")
