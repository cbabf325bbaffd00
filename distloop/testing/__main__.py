"""Calls the function that another process has stored: the program that `distloop.testing` starts."""

import argparse
import pathlib
import pickle

from distloop.distributed import collectives, strategies
from distloop.settings.config import Config
from distloop.testing import CALL, RESULT
from distloop.workers.preemption import end_with


def main() -> None:
    """Calls the function, and stores what it returns for `run_on_devices` or `run_in_workers`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--num_devices", type=int, default=1)
    parser.add_argument("--parent", type=int)
    options = parser.parse_args()
    if options.parent is not None:  # a worker ends with its launcher
        end_with(options.parent, 0.0)
    # One thread within an operation: `assert_same_bits` needs it, and it is set before TensorFlow starts.
    config = Config(device="cpu", num_devices=options.num_devices, intra_op_threads=1)
    strategies.prepare(config)  # before the function's module is imported, which may make tensors
    index = collectives.worker_index(strategies.make_strategy(config))
    fn, arguments = pickle.loads(pathlib.Path(options.directory, CALL).read_bytes())
    pathlib.Path(options.directory, RESULT.format(index)).write_bytes(pickle.dumps(fn(*arguments)))


if __name__ == "__main__":
    main()
