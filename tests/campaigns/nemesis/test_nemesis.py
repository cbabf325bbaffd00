"""Two rounds of the nemesis with chosen faults, and how its workers begin; `__main__` draws more rounds."""

import os
import subprocess
import sys

import pytest

from tests import forked
from tests.campaigns.nemesis import checker, faults, kernel, rounds
from tests.campaigns.nemesis.__main__ import read_outputs
from tests.campaigns.nemesis.schedule import Life, Plan, Strike
from tests.campaigns.nemesis.setting import Setting
from tests.problems import mostly_wide

pytestmark = pytest.mark.slow

ROUNDS = {
    "alone": (
        Setting("alone", 1, keep=2, child_of=0, is_first_process=kernel.can_number_processes()),
        [
            Life((Strike(faults.KillChief(0), after_steps=11),), flips_byte=True),
            Life((Strike(faults.TerminateChild(), after_steps=1), Strike(faults.Terminate(0, True), after_steps=3))),
            Life(()),
        ],
    ),
    "two workers": (
        Setting("launcher", 2, checkpoint_every=3, keep=1),
        [Life((Strike(faults.KillWorker(1), after_steps=7),)), Life((Strike(faults.StartTwice(), after_steps=1),))],
    ),
}
STEP_SECS = 0.2  # so long that a busy machine strikes before the run ends


@pytest.mark.parametrize("name", mostly_wide(ROUNDS, "alone"))
def test_a_run_loses_nothing(name, tmp_path):
    setting, lives = ROUNDS[name]
    reference = rounds.run_undisturbed(setting.reference, str(tmp_path / "undisturbed"))
    plan = Plan(0, 0, setting, tuple(lives))
    events = rounds.run_round(plan, str(tmp_path / "round"), step_secs=STEP_SECS)
    outputs = read_outputs(str(tmp_path / "round"), len(lives) + rounds.EXTRA_LIVES)
    assert checker.check(plan, events, outputs, reference) == []
    strikes = [event["fault"] for event in events if event["event"] == "strike"]
    # Of two strikes of a life, a busy machine may come to the later one first.
    assert sorted(strikes) == sorted(strike.fault.name for life in lives for strike in life.strikes)


def test_a_forked_worker_ignores_what_a_new_interpreter_ignores(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import signal\nprint(signal.getsignal(signal.SIGPIPE))\n")
    new = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True).stdout
    assert forked.launch(["--workers=1", program], env=os.environ).stdout == f"[worker 0] {new}"
