"""The log of the package: what a user reads on stderr."""

import logging
import subprocess
import sys


def test_a_warning_is_one_line_on_stderr_beside_absls_handler():
    program = (
        "from absl import logging; logging.use_absl_handler()\n"
        "from distloop.log import log; log.info('Read.'); log.warning('Restored %s.', 'best'); log.error('Full.')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.stderr.splitlines() == ["distloop: warning: Restored best.", "distloop: error: Full."]


def test_a_program_may_silence_it(capsys, caplog):
    with caplog.at_level("ERROR", "distloop"):
        logging.getLogger("distloop").warning("Restored.")
    assert capsys.readouterr().err == ""
    logging.getLogger("distloop").warning("Restored.")
    assert capsys.readouterr().err == "distloop: warning: Restored.\n"
