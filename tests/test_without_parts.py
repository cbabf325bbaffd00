"""Parts: with the folder of one gone, the loop's laws hold, and what needs it says that it is not there."""

import os
import pathlib
import runpy
import sys

import pytest

import distloop
from tests import forked, without_part
from tests.problems import classifier, mostly_wide, on

PROGRAM = pathlib.Path(without_part.__file__)

# Each part, and what a user does that needs it.
PARTS = {
    "audit": lambda: distloop.Trainer(classifier(), on(1, fast_dev_run=True)),
    "launcher": lambda: runpy.run_module("distloop.launch"),
    "bucket": lambda: distloop.Trainer(classifier(), on(1, workdir="memory://runs/first")),
    "exports": lambda: distloop.Trainer(classifier(), on(1)).export("model"),
    "mixtures": lambda: distloop.Mixture,
    "pipeline": lambda: distloop.split,
    "recompute": lambda: distloop.Trainer(classifier(), on(1, recompute="hidden")),
    "records": lambda: distloop.open_records,
    "replay": lambda: distloop.Replay,
    "tables": lambda: distloop.LazyAdam,
    "sharding": lambda: distloop.Trainer(classifier(), on(2, shard_optimizer=True)),
    "trackers": lambda: distloop.WandbWriter,
}


@pytest.mark.slow
@pytest.mark.parametrize("part", mostly_wide([",".join(PARTS), *PARTS]))
def test_the_laws_of_the_loop_hold_without_a_part(part, tmp_path):
    done = forked.run([PROGRAM, part, tmp_path / "run"], env=os.environ, timeout=120)
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
