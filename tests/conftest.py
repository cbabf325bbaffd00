"""Four virtual CPUs for every test: strategies over 1 to 4 of them live side by side in one process.

TensorFlow's collectives would clash between strategies over the same devices; those of distloop on CPUs use none.
"""

import faulthandler
import gc
import itertools
import os
import re
import tempfile
import threading

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest  # noqa: E402

import distloop  # noqa: E402
from distloop.log import log  # noqa: E402

is_ending = threading.Event()
ends = []  # how each process of tests ended, as text


def pytest_addoption(parser):
    parser.addoption("--wide", action="store_true", help="run the tests marked wide too, as `make wide` does")
    parser.addoption("--slow_in", help="files whose slow tests run, joined by `:`, as `make check` chooses them")
    parser.addoption("--gpu", action="store_true", help="run what asks for virtual CPUs on four parts of the first GPU")
    parser.addoption("--collectives", action="store_true", help="let virtual CPUs add as GPUs do")


def pytest_configure(config):
    log.propagate = True  # to pytest's caplog
    if not hasattr(config, "workerinput") and config.getoption("tx", None):
        return  # the process that hands tests to others needs no TensorFlow, which takes 5 CPU seconds to import
    if config.getoption("gpu"):
        use_gpu()
    if config.getoption("collectives"):
        add_by_collectives()
    distloop.prepare(distloop.Config(device="cpu", num_devices=4, intra_op_threads=1))  # as virtual replicas need it
    gc.freeze()  # what TensorFlow and Keras made at their import is never garbage, and takes long to look through
    gc.disable()
    thread = threading.Thread(target=collect_garbage, daemon=True)
    thread.start()
    config.add_cleanup(lambda: end(thread))


def use_gpu():
    """Gives tests that ask for virtual CPUs parts of the first GPU, which are few enough for 12 processes on 80 GB."""
    import tensorflow as tf

    from distloop.distributed import devices

    devices._create_virtual_cpus(distloop.Config(num_devices=4))  # for those that name them
    devices.split_first_gpu(4, 1024)
    devices.choose_device_type = lambda config: "GPU"
    tf.config.experimental.enable_tensor_float_32_execution(False)  # its rounding exceeds the tolerances


def add_by_collectives():
    """Lets mirrored replicas add by TensorFlow's collectives, which are NCCL between GPUs, unless bits count."""
    from distloop.distributed import strategies

    choose = strategies._choose_reduction
    strategies._choose_reduction = lambda names, *needs: choose(names, *needs) if any(needs) else None


def collect_garbage():
    """Deletes the objects that tracebacks of errors held, in a thread: deleting an old iterator may take a minute."""
    while not is_ending.wait(40):
        gc.collect()


def end(thread):
    is_ending.set()
    thread.join(60)  # a thread that is inside TensorFlow when Python ends may abort the process


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_configure_node(node):
    """Makes a file for what the threads of a process of tests run when a signal ends it."""
    node.workerinput["stacks"] = tempfile.NamedTemporaryFile("r", delete=False).name


def pytest_sessionstart(session):
    if path := getattr(session.config, "workerinput", {}).get("stacks"):
        faulthandler.enable(open(path, "w"))


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_testnodedown(node, error):
    """Keeps how a process of tests ended, and what its threads ran when a signal ended it."""
    code = node.gateway._io.popen.wait(60) if error else 0
    with open(node.workerinput["stacks"]) as file:
        lines = [line for line in file if not re.search("/(_pytest|pluggy|xdist|execnet)/|^Extension modules", line)]
    os.remove(node.workerinput["stacks"])
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    ends.append(f"The process ended {how}.\n{''.join(lines)[:3000]}")


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_handlecrashitem(report):
    report.longrepr = f"{report.longrepr}\n{ends[-1]}"


# Where numbers are compared closely, or a graph is looked at, TensorFlow optimizes graphs as it does for a user. In all
# other files it does not, which saves a tenth of their time, but for `make wide`.
OPTIMIZED = ["test_laws", "test_bits", "test_virtual_replicas", "test_step", "test_pipeline"]
OPTIMIZED += ["test_gathering", "test_testing", "test_supervised", "test_gradient_step", "test_compiled_loop"]
OPTIMIZED += ["test_documents", "test_public_models", "test_keras_fuzz", "test_mirrored_loop", "test_wgan"]
OPTIMIZED += ["test_vae", "test_audit", "test_profiler", "test_tensorboard_server", "test_following"]
OPTIMIZED += ["test_failures", "test_slot_store", "test_shares", "test_smoke_checks"]


@pytest.fixture(autouse=True, scope="module")
def graphs_are_optimized_where_it_matters(request):
    import tensorflow as tf  # not where tests are handed to others

    is_off = request.path.stem not in OPTIMIZED and not request.config.getoption("wide")
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": is_off})


@pytest.fixture(scope="module")
def graphs_of_other_tests_are_optimized():
    """Virtual replicas turn TensorFlow's graph optimizers off in a process; turns them on again after a file."""
    from tests.problems import optimize_graphs

    yield
    optimize_graphs()


# The files that take longest, which the processes had better begin with.
LONG = ["test_workers", "test_settings_law", "test_settings_draws", "test_arguments_law", "test_laws", "test_failures"]
LONG += ["test_experiments", "test_bits", "test_testing", "test_documents"]
LONG += ["test_step", "test_nonfinite", "test_saved_state", "test_gradient_step", "test_virtual_replicas"]
LONG += ["test_pipeline", "test_variable_writes", "test_out_of_memory", "test_overview", "test_preemption"]
LONG += ["test_resume", "test_trainer", "test_keras_fuzz", "test_nemesis", "test_tensorboard_server", "test_loss_scale"]
LONG += ["test_replay", "test_rerun_faults", "test_example_history", "test_shares", "test_run_card", "test_xla_loop"]
LONG += ["test_distiller_values", "test_schedule_free_weights", "test_own_step", "test_tables", "test_row_processes"]


def pytest_collection_modifyitems(config, items):
    order = {name: position for position, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))
    if config.getoption("gpu") or config.getoption("collectives"):
        for item in items:
            if marker := item.get_closest_marker("not_by_collectives"):
                item.add_marker(pytest.mark.skip(reason=marker.args[0]))
    if config.getoption("slow_in") is not None:
        chosen = config.getoption("slow_in").split(":")
        is_left_out = [bool(item.get_closest_marker("slow")) and str(item.path) not in chosen for item in items]
        config.hook.pytest_deselected(items=list(itertools.compress(items, is_left_out)))
        items[:] = [item for item, is_out in zip(items, is_left_out, strict=True) if not is_out]
    if not config.getoption("wide"):
        wide = [item for item in items if item.get_closest_marker("wide")]
        config.hook.pytest_deselected(items=wide)
        items[:] = [item for item in items if not item.get_closest_marker("wide")]
