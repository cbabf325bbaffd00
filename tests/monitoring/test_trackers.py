"""Writers for W&B and MLflow, against fakes with the calls of wandb 0.31 and mlflow 3.17, which were tried for real."""

import sys
import types

import pytest

import distloop
from distloop.monitoring.deliveries import Deliveries


@pytest.fixture
def wandb(monkeypatch):
    """A fake of wandb; `runs` has the arguments, rows and exit code of each `init`."""
    fake = types.ModuleType("wandb")
    fake.runs = []

    def init(**arguments):
        run = types.SimpleNamespace(id=arguments["id"] or f"new{len(fake.runs)}", arguments=arguments, rows=[])
        run.log = lambda row, step: run.rows.append((step, row))
        run.finish = lambda exit_code: setattr(run, "exit_code", exit_code)
        fake.runs.append(run)
        return run

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def mlflow(monkeypatch):
    """A fake of MLflow; `runs` has the runs by id."""
    fake, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
    fake.runs, fake.experiments, fake.uris = {}, [], []
    for name in ("Metric", "Param", "RunTag"):
        setattr(entities, name, type(name, (), {"__init__": lambda self, *args: setattr(self, "args", args)}))

    class MlflowClient:
        def __init__(self, tracking_uri):
            fake.uris.append(tracking_uri)

        def get_experiment_by_name(self, name):
            ids = [str(i) for i, known in enumerate(fake.experiments) if known == name]
            return types.SimpleNamespace(experiment_id=ids[0]) if ids else None

        def create_experiment(self, name):
            fake.experiments.append(name)
            return str(len(fake.experiments) - 1)

        def create_run(self, experiment_id, run_name, tags):
            info = types.SimpleNamespace(run_id=f"run{len(fake.runs)}", experiment_id=experiment_id, run_name=run_name)
            data = types.SimpleNamespace(tags=dict(tags))
            run = types.SimpleNamespace(info=info, data=data, params=[], metrics=[], status="RUNNING")
            fake.runs[info.run_id] = run
            return run

        def get_run(self, run_id):
            return fake.runs[run_id]

        def update_run(self, run_id, status):
            fake.runs[run_id].status = status

        set_terminated = update_run

        def log_batch(self, run_id, metrics=(), params=(), tags=()):
            run = fake.runs[run_id]
            run.metrics += [metric.args for metric in metrics]
            run.params += [param.args for param in params]
            run.data.tags.update(tag.args for tag in tags)

    fake.MlflowClient, fake.entities = MlflowClient, entities
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return fake


def deliver(writer, steps, workdir, error=None):
    settings = {"workdir": str(workdir), "steps": 4}
    with Deliveries([writer], str(workdir)).open(0, settings) as opened:
        for step in steps:
            opened.write(step, {"loss": 0.5, "acc@1": 1.0}, 1e9 + step)
        if error:
            raise error


def test_wandb_gets_rows_with_their_time_and_the_settings_as_config(wandb, tmp_path):
    deliver(distloop.WandbWriter("digits", name="mine", mode="offline"), [1, 2], tmp_path)
    (run,) = wandb.runs
    assert run.rows[1] == (2, {"loss": 0.5, "acc@1": 1.0, "_timestamp": 1e9 + 2}) and run.exit_code == 0
    arguments = {"project": "digits", "name": "mine", "mode": "offline", "id": None, "dir": str(tmp_path)}
    assert arguments.items() <= run.arguments.items() and run.arguments["config"]["steps"] == 4


def test_wandb_goes_on_with_the_run_of_the_workdir(wandb, tmp_path):
    with pytest.raises(SystemExit):
        deliver(distloop.WandbWriter(), [1, 2], tmp_path, error=SystemExit(75))
    with pytest.raises(KeyError):
        deliver(distloop.WandbWriter(), [2, 3], tmp_path, error=KeyError("x"))
    deliver(distloop.WandbWriter(), [4], tmp_path)
    assert [run.id for run in wandb.runs] == ["new0"] * 3 and {run.arguments["resume"] for run in wandb.runs} == {
        "allow"
    }
    assert [step for run in wandb.runs for step, _ in run.rows] == [1, 2, 3, 4]
    assert [run.exit_code for run in wandb.runs] == [75, 1, 0]


def test_mlflow_goes_on_with_the_run_of_the_workdir(mlflow, tmp_path):
    def writer():
        return distloop.MLflowWriter("digits", tracking_uri="http://there", run_name="mine", tags={"team": "a"})

    with pytest.raises(KeyError):
        deliver(writer(), [1, 2], tmp_path, error=KeyError("x"))
    assert mlflow.runs["run0"].status == "FAILED"
    with pytest.raises(SystemExit):
        deliver(writer(), [2, 3], tmp_path, error=SystemExit(75))
    assert mlflow.runs["run0"].status == "KILLED"
    deliver(writer(), [3, 4], tmp_path)
    ((run_id, run),) = mlflow.runs.items()
    assert (
        run_id == "run0" and run.status == "FINISHED" and run.info.run_name == "mine" and run.data.tags["team"] == "a"
    )
    assert [metric for metric in run.metrics if metric[0] == "loss"] == [
        ("loss", 0.5, 1_000_000_000_000 + 1000 * step, step) for step in (1, 2, 3, 4)
    ]
    assert ("acc_1", 1.0, 1_000_000_001_000, 1) in run.metrics  # @ is no character of a name there
    assert ("steps", "4") in run.params and len(run.params) == 2
    assert mlflow.experiments == ["digits"] and set(mlflow.uris) == {"http://there"}


def test_a_row_that_mlflow_has_is_not_repeated_even_if_the_workdir_has_no_note_of_it(mlflow, tmp_path):
    deliver(distloop.MLflowWriter(), [1, 2], tmp_path)
    notes = tmp_path / "writers.json"
    notes.write_text(notes.read_text().replace('"step": 2', '"step": 1'))  # killed before the note
    deliver(distloop.MLflowWriter(), [2, 3], tmp_path)
    assert [step for name, _, _, step in mlflow.runs["run0"].metrics if name == "loss"] == [1, 2, 3]


@pytest.mark.parametrize("package, name", [("wandb", "WandbWriter"), ("mlflow", "MLflowWriter")])
def test_a_package_that_is_missing_is_named_with_what_installs_it(package, name, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf'{name} needs {package}, .*: pip install "distloop\[{package}\]"'):
        getattr(distloop, name)()
