"""What worker processes cannot import is refused before the first step."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests import forked
from tests.processes.python_sources import Waves

PROGRAM = """
    import distloop

    class Rows(list):
        pass

    distloop.make_dataset(Rows([1, 2, 3]), 2, processes=2)
    """


@pytest.mark.parametrize(
    "source, arguments, words",
    [
        (Waves(), {"map_fn": lambda e, _: {"x": np.asarray(e["x"])}}, "Waves given or map_fn cannot be pickled .*lamb"),
        (Waves(file=sys.stdout), {}, r"pickled for the worker processes \(TypeError: .*open files in __getitem"),
        ({"x": np.zeros(4)}, {}, "processes=2 was given with arrays, which TensorFlow reads"),
        (tf.data.Dataset.range(3), {}, "map_fn, lengths, processes or a batch_size that changes were given with"),
    ],
)
def test_what_cannot_be_is_refused(source, arguments, words):
    with pytest.raises(ValueError, match=words):
        distloop.make_dataset(source, 2, **{"processes": 2} | arguments)


def test_a_program_without_a_guard_is_refused(tmp_path):
    done = forked.run_program(tmp_path, PROGRAM)
    words = "import the file of the program, in which the Rows given or map_fn is defined, so they would run it again"
    assert done.returncode == 1 and words in done.stderr and "__mp_main__" not in done.stderr


def test_a_class_of_a_prompt_is_refused():
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert "the Rows given or map_fn is defined in a notebook or at a prompt" in done.stderr, done.stderr


def test_a_class_that_is_not_found_is_named(tmp_path):
    text = """
        import distloop

        if __name__ == "__main__":
            class Rows(list):
                pass

            next(iter(distloop.make_dataset(Rows([1, 2, 3]), 2, processes=2)))
        """
    done = forked.run_program(tmp_path, text)
    assert done.returncode == 1, done.stderr
    assert "Rows" in done.stderr
