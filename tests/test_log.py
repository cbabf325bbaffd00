"""The log of the package: what a user reads on stderr."""

import logging
import os
import subprocess
import sys

import pytest

from distloop.log import log, print_line, printable, reason_of, say
from distloop.monitoring.console import Console
from tests.problems import full_disk


def test_a_warning_is_one_line_on_stderr_beside_absls_handler():
    program = (
        "from absl import logging; logging.use_absl_handler()\n"
        "from distloop.log import log; log.info('Read.'); log.warning('Restored %s.', 'best'); log.error('Full.')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900)
    assert result.stderr.splitlines() == ["distloop: warning: Restored best.", "distloop: error: Full."]


def test_a_program_may_silence_it(capsys, caplog):
    with caplog.at_level("ERROR", "distloop"):
        logging.getLogger("distloop").warning("Restored.")
    assert capsys.readouterr().err == ""
    logging.getLogger("distloop").warning("Restored.")
    assert capsys.readouterr().err == "distloop: warning: Restored.\n"


@pytest.mark.parametrize(("before", "after"), [("", "logger.setLevel('ERROR')"), ("logger.setLevel('ERROR')", "")])
def test_a_level_that_a_program_sets_stays(before, after):
    program = (
        f"import logging; logger = logging.getLogger('distloop'); {before}\n"
        f"import distloop; {after}\n"
        "distloop.Config(); logger.warning('Restored.'); logger.error('Full.')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900)
    assert result.stderr.splitlines() == ["distloop: error: Full."]


@pytest.mark.parametrize("keep", ["", "\n\t"])
def test_a_text_of_somebody_else_cannot_command_the_terminal(keep, capsys):
    text = "\x1b]0;title\x07\x1b[2Jloss\r\x9bm\u202e\x7f\ud800 é 漢 [red] \\x1b\n\t"
    escaped = r"\x1b]0;title\x07\x1b[2Jloss\r\x9bm\u202e\x7f\ud800 é 漢 [red] \x1b"
    assert printable(text, keep) == escaped + (keep or r"\n\t")
    assert printable(escaped) == escaped
    logging.getLogger("distloop").warning("No file %s.", "\x1b[2J")
    assert capsys.readouterr().err == "distloop: warning: No file \\x1b[2J.\n"


NODE = "{node x}"
IN_GRAPH = (
    "UnknownError: Graph execution error:\n\nDetected at node EagerPyFunc defined at (most recent call last):\n"
    '  File "program.py", line 3, in <module>\n<stack traces unavailable>\n'
)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("", ""),
        ("ValueError: Give {{node a/b}} rows.\nmore", "ValueError: Give rows"),
        (
            'in user code:\n\n    File "a.py", line 4, in f  *\n        a: int\n\n    NameError: no b\n',
            "NameError: no b",
        ),
        (f"{IN_GRAPH}RuntimeError: boom\nTraceback (most recent call last):", "RuntimeError: boom"),
        (f"{IN_GRAPH}2 root error(s) found.\n  (0) UNKNOWN:  boom [Op:f_1]\n\t [[{NODE}]]\n  (1) UNKNOWN:  b", "boom"),
    ],
)
def test_the_reason_of_an_error_is_its_first_line_without_operations(message, reason):
    assert reason_of(message) == reason


def test_a_full_disk_under_the_output_ends_no_run(tmp_path, monkeypatch):
    with open(tmp_path / "out.txt", "w") as out, full_disk():
        for stream in ("stdout", "stderr"):
            monkeypatch.setattr(sys, stream, out)
        for _ in range(5_000):  # more than a buffer
            say("one")
            log.error("two")
        Console(steps=2, stream=out).write(1, {"loss": 1.0})
    monkeypatch.undo()
    assert (tmp_path / "out.txt").read_text().startswith("distloop: one\n"), "there is room again"
    read_end, write_end = os.pipe()
    os.close(read_end)
    with pytest.raises(BrokenPipeError):
        print_line("three", os.fdopen(write_end, "w", closefd=False))
    os.close(write_end)
