"""A run compared with expected numbers: exit code and first number that differs."""

import json

import pytest

from distloop import report
from tests.problems import write_run

ROWS = [{"step": i, "loss": 1.0 / i, "test/accuracy": 0.5 if i % 2 else None, "steps_per_sec": 9.0} for i in (1, 2, 3)]


@pytest.fixture
def compare(tmp_path, capsys):
    """Returns a function that compares a run with expected rows; it returns the exit code and what is printed."""
    run = write_run(tmp_path / "run", ROWS)

    def compare(expected, *options):
        content = expected if isinstance(expected, str) else "".join(json.dumps(row) + "\n" for row in expected)
        (tmp_path / "expected.jsonl").write_text(content)
        code = report.main(["--diff", str(run), str(tmp_path / "expected.jsonl"), *options])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return compare


def test_measurements_of_the_machine_may_be_other_than_expected(compare):
    code, printed = compare([row | {"time": 7.0, "steps_per_sec": 1.0} for row in ROWS])
    assert code == 0 and printed.startswith("The run has the numbers of ")


@pytest.mark.parametrize(
    ("changed", "printed"),
    [
        ({"loss": 0.5001}, "step 2: loss is 0.5 and was expected to be 0.5001\n"),
        ({"test/accuracy": 0.5}, "step 2: test/accuracy is nan and was expected to be 0.5\n"),
        ({"auc": 0.5}, "step 2: auc is missing and was expected to be 0.5\n"),
        ({"step": 4}, "step 4: loss is missing and was expected to be 0.5\n"),
    ],
)
def test_the_first_number_that_differs_is_named_and_the_code_is_1(compare, changed, printed):
    assert compare([ROWS[0], ROWS[1] | changed, ROWS[2] | {"loss": 9.0}], "--tolerance=1e-5") == (1, printed)


def test_the_tolerance_is_relative(compare):
    expected = [row | {"loss": row["loss"] * (1 + 1e-6)} for row in ROWS]
    assert compare(expected, "--tolerance=1e-5")[0] == 0
    assert compare(expected, "--tolerance=1e-7")[0] == compare(expected)[0] == 1


@pytest.mark.parametrize(
    ("expected", "options", "message"),
    [
        ("", (), "holds no expected number: give lines such as"),
        ('{"step": 1}\n\n', (), "holds no expected number: give lines such as"),
        (ROWS, ("--tolerance=-1",), "--tolerance=-1.0 was given: give a number from 0 to 1 beside --diff RUN FILE"),
        (ROWS, ("--tolerance=nan",), "--tolerance=nan was given: give a number from 0 to 1 beside --diff RUN FILE"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(compare, expected, options, message):
    code, printed = compare(expected, *options)
    assert code == 2 and message in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("step 2 loss 0.5", "is no JSON object"),
        ('{"step": 2, "lo', "is no JSON object"),
        ("[", "is no JSON object"),
        ('[{"step": 2, "loss": 0.5}]', "is no JSON object"),
        ('{"loss": 0.5}', "has the step None, which is no whole number from 0"),
        ('{"step": "2", "loss": 0.5}', "has the step '2', which is no whole number from 0"),
        ('{"step": 2.5, "loss": 0.5}', "has the step 2.5, which is no whole number from 0"),
        ('{"step": Infinity, "loss": 0.5}', "has the step inf, which is no whole number from 0"),
        ('{"step": true, "loss": 1.0}', "has the step True, which is no whole number from 0"),
        ('{"step": 2, "loss": "0.5"}', "has the value '0.5' of 'loss', which is no number"),
        ('{"step": 2, "loss": [0.5]}', "has the value [0.5] of 'loss', which is no number"),
        ('{"step": 1, "loss": true}', "has the value True of 'loss', which is no number"),
        (f'{{"step": 1, "test/accuracy": 1{"0" * 400}}}', "which is no number"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(compare, line, message):
    first = json.dumps(ROWS[0])
    for content in (f"{first}\n\n{line}", f"{first}\n\n{line}\n{{}}\n"):
        code, printed = compare(content)
        assert code == 2 and printed.count("\n") == 1 and printed.startswith("distloop.report: line 3 of '"), printed
        assert message in printed and printed.endswith('give lines such as {"step": 100, "loss": 0.5}.\n')


def test_a_step_may_be_a_float_and_a_measurement_any_value(compare):
    assert compare([row | {"step": float(row["step"]), "test/steps_per_sec": "-"} for row in ROWS])[0] == 0
    assert compare([ROWS[0], {"step": 2.0, "loss": 99}])[1] == "step 2: loss is 0.5 and was expected to be 99.0\n"
    assert compare('{"step": 1, "loss": 1, "test/accuracy": 0.5}\r\n{"step": 2, "test/accuracy": NaN}')[0] == 0


def test_a_tolerance_beside_two_runs_is_refused(tmp_path, capsys):
    run = str(write_run(tmp_path / "run", ROWS))
    assert report.main(["--diff", run, run, "--tolerance=1e-5"]) == 2
    assert "beside --diff RUN FILE" in capsys.readouterr().err
    for options in (["--tolerance=1e-5"], []):
        assert report.main(["--diff", run, str(tmp_path / "nofile.jsonl"), *options]) == 2
        assert "nofile.jsonl' was given, and there is no such file or directory" in capsys.readouterr().err
