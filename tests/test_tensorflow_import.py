"""What TensorFlow prints while it is imported: known lines are held back, all others are shown."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
KNOWN = (
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
    "I0000 00:00:1.2 3 port.cc:153] oneDNN custom operations are on. You may see slightly different results.\n"
    "I0000 00:00:1.2 3 cudart_stub.cc:31] Could not find cuda drivers on your machine, GPU will not be used.\n"
)
FAKE = f"import os, sys\nos.write(2, {KNOWN + 'first'!r}.encode()); os.write(2, b' error\\n')\nOTHER\n"


def imported(
    tmp_path, other="", program="import distloop.tensorflow_import as t; t.hold_back_known_lines()", **environ
):
    """Returns exit code and standard error of a program that imports something in TensorFlow's place."""
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text(FAKE.replace("OTHER", other))
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-c", f"{program}\nimport tensorflow\nprint('after', file=__import__('sys').stderr)"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path, **environ}, capture_output=True, text=True)
    return done.returncode, done.stderr


def test_the_known_lines_are_held_back_and_others_are_shown(tmp_path):
    assert imported(tmp_path, "print('second', file=sys.stderr)") == (0, "first error\nsecond\nafter\n")


def test_an_import_that_kills_the_process_shows_its_last_words(tmp_path):
    code, text = imported(tmp_path, "os.write(2, b'needs AVX\\n'); os.abort()")
    assert code < 0 and text.startswith("first error\nneeds AVX\n")


def test_an_error_in_the_import_is_shown_whole(tmp_path):
    code, text = imported(tmp_path, "raise ImportError('broken')")
    assert code == 1 and text.endswith("ImportError: broken\n") and "cudart" not in text


def test_a_machine_without_grep_shows_all(tmp_path):
    assert imported(tmp_path, PATH="") == (0, f"{KNOWN}first error\nafter\n")


@pytest.mark.parametrize(("level", "is_shown"), [("3", False), ("0", True)])
def test_distloop_holds_them_back_unless_the_user_wants_all_lines(tmp_path, level, is_shown):
    code, text = imported(tmp_path, program="import distloop", TF_CPP_MIN_LOG_LEVEL=level)
    assert code == 0 and ("cudart" in text) == is_shown
