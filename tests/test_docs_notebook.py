"""Functions of a notebook on several workers, and the notebook of the documents."""

import os
import pathlib
import pickle
import sys
import types

import pytest

import distloop
from distloop.launcher import notebook


def double(value):
    return 2 * value


def fail():
    raise ValueError("the labels are wrong")


@pytest.fixture
def launched(monkeypatch):
    """The launcher's commands; in place of it, worker 0 runs in this process."""
    commands = []

    def run(command):
        commands.append(command)
        try:
            notebook.work(command[-1])
        except SystemExit as leaves:
            return leaves.code
        return 0

    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setitem(sys.modules, "cloudpickle", types.SimpleNamespace(dumps=pickle.dumps))
    monkeypatch.setattr(notebook, "_run", run)
    return commands


def test_the_result_of_the_chief_is_returned(launched):
    assert distloop.notebook_launch(double, (21,), workers=3) == 42
    ((*_, launcher, workers, parent, _, module, _),) = launched
    assert (launcher, workers, module) == ("distloop.launch", "--workers=3", "distloop.launcher.notebook")
    assert parent == f"--parent={os.getpid()}"


def test_the_error_of_a_worker_is_a_sentence(launched):
    with pytest.raises(RuntimeError, match=r"^Worker 0 failed: ValueError: the labels are wrong$"):
        distloop.notebook_launch(fail)


def test_an_interrupted_launch_returns_nothing_and_a_crash_says_where_to_look(launched, monkeypatch):
    monkeypatch.setattr(notebook, "_run", lambda command: 75)
    assert distloop.notebook_launch(double, (21,)) is None
    monkeypatch.setattr(notebook, "_run", lambda command: 139)
    with pytest.raises(RuntimeError, match="exit code 139: the lines above"):
        distloop.notebook_launch(double, (21,))


def test_what_cannot_be_copied_is_refused(launched, monkeypatch):
    with pytest.raises(ValueError, match="cannot be copied to the workers .*: make models"):
        distloop.notebook_launch(lambda: 1)  # the real cloudpickle takes it
    with pytest.raises(ValueError, match="workers=0: give 1 or more"):
        distloop.notebook_launch(double, workers=0)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ValueError, match=r"pip install 'distloop\[notebook\]'"):
        distloop.notebook_launch(double)
    assert launched == []


def test_workers_import_modules_from_where_the_kernel_does(tmp_path, monkeypatch):
    (tmp_path / "module_of_the_kernel.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert notebook._run([sys.executable, "-c", "import module_of_the_kernel"]) == 0


@pytest.mark.slow
def test_the_notebook_of_the_documents_runs():
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel"), pytest.importorskip("matplotlib")
    path = pathlib.Path(__file__).parent.parent / "docs" / "notebook.ipynb"
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output.data for output in outputs if output.output_type == "display_data"]
    assert len(shown) == 1 and "Finished 200 steps" in shown[0]["text/plain"]
    results = [output.data for output in outputs if output.output_type == "execute_result"]
    assert len(results) == 3 and "'test/accuracy': 0.9" in results[0]["text/plain"] and "image/svg+xml" in results[2]
