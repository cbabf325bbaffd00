"""Parts: with the folder of one gone, the loop's laws hold, and what needs it says that it is not there."""

import os
import pathlib
import sys

import keras
import pytest

import distloop
from tests import forked, without_part
from tests.problems import classification, classifier, mostly_wide, on

PROGRAM = pathlib.Path(without_part.__file__)


def distiller():
    networks = [keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]) for _ in range(2)]
    model = keras.distillation.Distiller(*networks, keras.distillation.FeatureDistillation())
    model.compile("sgd", "mse")
    return model


def of_several_optimizers():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD())), "mse")
    return model


# Each part, and what a user does that needs it.
PARTS = {
    "audit": lambda: distloop.Trainer(classifier(), on(1, fast_dev_run=True)),
    "histograms": lambda: distloop.ActivationHistograms,
    "keras_callbacks": lambda: distloop.from_callback,
    "launcher": lambda: distloop.launch.main(["--workers=1", "program.py"]),
    "bucket": lambda: distloop.Trainer(classifier(), on(1, workdir="memory://runs/first")),
    "distillation": lambda: distloop.from_keras(distiller)(),
    "exports": lambda: distloop.Trainer(classifier(), on(1)).export("model"),
    "examples": lambda: distloop.ExampleHistory,
    "mixtures": lambda: distloop.Mixture,
    "multi_optimizer": lambda: distloop.from_keras(of_several_optimizers)(),
    "pipeline": lambda: distloop.split,
    "processes": lambda: distloop.make_dataset([{"x": 1.0}], 1, processes=2),
    "recompute": lambda: distloop.Trainer(classifier(), on(1, recompute="hidden")),
    "records": lambda: distloop.open_records,
    "replay": lambda: distloop.Replay,
    "reports": lambda: distloop.report.main(["runs"]),
    "schedule_free": lambda: distloop.Trainer(classifier(optimizer=keras.optimizers.ScheduleFreeAdamW), on(1)),
    "step_fn": lambda: distloop.GradientStep,
    "tables": lambda: distloop.LazyAdam,
    "sidecar": lambda: distloop.Trainer(classifier(), on(1, workdir="runs/a")).evaluate_checkpoints(classification(8)),
    "sharding": lambda: distloop.Trainer(classifier(), on(2, shard_optimizer=True)),
    "testing": lambda: distloop.smoke.main([]),
    "trackers": lambda: distloop.WandbWriter,
    "warm_start": lambda: distloop.Trainer(classifier(), on(1)).restore("model.npz"),
    "xla": lambda: distloop.Trainer(classifier(), on(1, jit_compile="loop")).fit(classification(8), steps=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", mostly_wide([",".join(PARTS), *PARTS]))
def test_the_laws_of_the_loop_hold_without_a_part(part, tmp_path):
    done = forked.run([PROGRAM, part, tmp_path / "run"], env=os.environ)
    assert done.returncode == 0 and done.stdout.endswith("held\n"), done.stderr


@pytest.mark.parametrize("part", PARTS)
def test_what_needs_a_part_says_that_it_is_not_there(part, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(f"distloop.{part}")]:
        monkeypatch.delitem(sys.modules, name)
    for name, value in list(vars(distloop).items()):  # names that were used before
        if getattr(value, "__module__", "").startswith(f"distloop.{part}."):
            monkeypatch.delattr(distloop, name)
    monkeypatch.delattr(distloop, part, raising=False)
    monkeypatch.setattr(sys, "meta_path", [without_part.Gone(part), *sys.meta_path])
    sentence = f"needs the part '{part}' of distloop, and there is no fold|No module named 'distloop.{part}'"
    with pytest.raises((ValueError, AttributeError, ModuleNotFoundError), match=sentence):
        PARTS[part]()


def test_importing_distloop_imports_no_part(tmp_path):
    program = """
        import sys
        for name in [name for name in sys.modules if name.partition(".")[0] == "distloop"]:
            del sys.modules[name]  # of the process that this one is a fork of
        import distloop, distloop.trainer
        print(*(name.split(".")[1] for name in sys.modules if name.startswith("distloop.")))
    """
    done = forked.run_program(tmp_path, program)
    assert done.returncode == 0, done.stderr
    assert "trainer" in done.stdout.split() and not set(PARTS) & set(done.stdout.split())
