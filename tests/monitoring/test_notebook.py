"""What a cell shows: one output for a run, drawn in place."""

import sys
import types

import pytest

from distloop.monitoring import console as console_module
from distloop.monitoring import timing
from distloop.monitoring.console import Console, is_notebook, make_console


@pytest.fixture
def outputs(monkeypatch):
    """A kernel whose outputs are in the list: for each, what was drawn in it."""
    drawn, shell = [], types.SimpleNamespace(kernel="a kernel")

    def display(content, raw, display_id=None):
        drawn.append([content])
        return types.SimpleNamespace(update=lambda content, raw: drawn[-1].append(content))

    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    return drawn


def test_a_run_in_a_cell_is_one_output_of_its_last_lines(outputs, capsys, monkeypatch):
    monkeypatch.setattr(console_module, "_CELL_SECS", 0.0)
    console = make_console(300, 0, evals=["test"], may_draw=True)
    for step in range(20, 320, 20):
        console.show_progress(step - 10, "tracing")
        console.write(step, {"loss": 1 / step, "steps_per_sec": 9.0, "test/loss": 0.5})
    console.close()
    console.summarize(timing.Clock())
    (drawn,) = outputs
    assert len(drawn) > 15 and drawn[0]["text/plain"] == "step 10/300  tracing\n"
    *_, last, finished, _, _, time = drawn[-1]["text/plain"].splitlines()
    assert last.startswith("step 300/300  loss 0.003333  test/loss 0.5  9 steps/s")
    assert finished.startswith("distloop: Finished 300 steps in") and time.startswith("distloop: time:")
    assert "test/loss 0.5, best 0.5 at step 20" in drawn[-1]["text/plain"]
    assert len(drawn[-1]["text/plain"].splitlines()) <= 25 and capsys.readouterr().out == ""


def test_drawings_are_half_a_second_apart(outputs):
    console = make_console(300, 0, may_draw=True)
    for step in range(100):
        console.write(step, {"loss": 1.0})
    assert len(outputs[0]) < 10 and len(outputs) == 1


def test_without_a_kernel_the_console_is_the_terminals(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not is_notebook() and type(make_console(3, 0, may_draw=True)) is Console
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    assert not is_notebook()
