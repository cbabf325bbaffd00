"""The crash matrix, each operation once or twice, and what it assumes; the campaign tries all of them."""

import os
import pathlib
import signal
import tempfile
import textwrap
import xml.etree.ElementTree

import pytest

from distloop.checkpoints import checkpoint
from tests import forked
from tests.campaigns.crash_matrix.faults import EIO, ENOSPC, KILL, Faults
from tests.campaigns.crash_matrix.picture import FILLS, draw, tables
from tests.campaigns.crash_matrix.power_loss import Disk
from tests.campaigns.crash_matrix.scenarios import BEFORE, LOST, NEW, SCENARIOS, cells, power_cells
from tests.problems import mostly_wide


@pytest.fixture
def place(monkeypatch, caplog):
    """A directory in memory, where flushing costs nothing."""
    monkeypatch.setattr(checkpoint, "_PAUSES_SECS", (0,))
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as directory, caplog.at_level("CRITICAL", "distloop"):
        yield pathlib.Path(directory)


def assert_saved(cells):
    assert {cell.colour for cell in cells} == {NEW, BEFORE}, [c for c in cells if c.colour not in (NEW, BEFORE)]


# The pairs of keep, fault and number of the process are spread over the scenarios.
SPREAD = {
    "new step": (1, [(KILL, True)]),
    "replaced step": (3, [(KILL, False), (EIO, True)]),
    "after going back": (1, [(KILL, True), (ENOSPC, False)]),
    "rollback": (3, [(EIO, False)]),
    "new export": (1, [(KILL, False), (EIO, True), (ENOSPC, False)]),
    "replaced export": (1, [(KILL, True), (EIO, False), (ENOSPC, True)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_wide(SCENARIOS, "replaced step", "replaced export"))
def test_whatever_operation_fails_the_run_goes_on(name, place):
    keep, columns = SPREAD[name]
    assert_saved(cells(SCENARIOS[name], keep, place, columns))


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_wide(["replaced step", "after going back", "replaced export"], "replaced step"))
def test_whenever_power_is_lost_the_run_goes_on(name, place):
    assert_saved(power_cells(SCENARIOS[name], 1, place))


def test_what_was_not_flushed_may_be_lost(tmp_path):
    template, directory = tmp_path / "template", tmp_path / "run"
    template.mkdir()
    with Faults(str(directory)) as faults:
        os.mkdir(directory)
        with open(directory / "file.tmp", "w") as file:
            file.write("new")
        os.rename(directory / "file.tmp", directory / "file")
    disk = Disk(str(template), str(directory))
    for operation in faults.operations[1:]:
        disk.do(operation)
    after = list(disk.after_power_loss())
    assert {"file": b""} in after and {"file": b"new"} in after  # renamed before it was flushed
    assert {"file.tmp": b"new"} in after and {} in after  # the directory was not


def test_a_matrix_without_flushing_has_lost_saves(place, monkeypatch):
    monkeypatch.setattr("distloop.atomic_files.sync", lambda path: None)
    colours = {cell.colour for cell in power_cells(SCENARIOS["replaced export"], 1, place)}
    assert colours - {NEW, BEFORE}


def test_the_picture_and_the_tables_show_each_cell():
    rows = [
        {"who": who, "what": "new step", "keep": 1, "number": number, "operation": "write a<b", "fault": KILL}
        | {"is_same": False, "colour": colour}
        for who in ("distloop", "other")
        for number, colour in enumerate((NEW, BEFORE, LOST))
    ]
    squares = [node for node in xml.etree.ElementTree.fromstring(draw(rows)).iter() if node.get("class") == "cells"]
    assert [square.attrib["fill"] for square in squares] == [FILLS[row["colour"]] for row in rows]
    assert "| distloop | new step, keep 1 | 1 | 1 | 1 |  |  |" in tables(rows)
    assert "| other | new step | kill | loses a save | write a<b |" in tables(rows)


PROGRAM = """
    import os, signal, sys
    from tests.campaigns.crash_matrix import faults, scenarios

    class Dying(faults.Faults):
        def do(self, operation):
            if len(self.operations) == int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGKILL)
            super().do(operation)

    with Dying(sys.argv[1]):
        scenarios.SCENARIOS["new step"].act(sys.argv[1], 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("at", mostly_wide([3, 18, 30], 18))
def test_a_killed_process_leaves_what_the_matrix_supposes(at, tmp_path):
    run, program = tmp_path / "run", tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    SCENARIOS["new step"].prepare(str(run), 1)
    result = forked.run([program, run, at], env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert SCENARIOS["new step"].judge(str(run), 1, None, False) in (NEW, BEFORE)
