"""Preemption: runs that are stopped in different ways and continued end like a run that was never stopped."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.workers import preemption
from distloop.workers.preemption import EXIT_CODE, StopRequests
from tests import forked
from tests.problems import assert_close, assert_equal, classification, classifier, mostly_wide, on, rows_of, weights

PROGRAM = """
    import os, signal, sys
    import keras, numpy as np
    import distloop
    from distloop import atomic_files
    from tests import problems

    workdir, replicas, how, when = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    config = distloop.Config(
        workdir=workdir, device="cpu", num_devices=replicas, precision="mixed_float16", steps=30, log_every=7,
        checkpoint_every=3, average_decay=0.9, clip_norm=0.5,
    )
    distloop.prepare(config)
    rate = distloop.make_schedule(0.05, 30, warmup=5)

    def model_fn():
        a, b = (problems.classifier(dropout=0.5, batch_norm="local", l2=0.01)() for _ in range(2))
        def second(batch, training):
            logits, other = (m(batch["x"], training=training) for m in (b.model, a.model))
            return {"loss": keras.losses.mean_squared_error(other, logits)}
        optimizers = [
            distloop.LossScaleOptimizer(keras.optimizers.SGD(rate, momentum=0.9), growth_steps=4) for _ in range(2)
        ]
        return distloop.ModelSpec({"a": a.model, "b": b.model}, updates=[
            distloop.Update("first", a.loss_fn, optimizers[0], "^a/"),
            distloop.Update("second", second, optimizers[1], "^b/"),
        ])

    def act(report):
        if how == "SIGKILL" and report.step == when:
            os.kill(os.getpid(), signal.SIGKILL)
    act.every = 1

    sync, calls = atomic_files.sync, []
    def dying_sync(path):  # in the middle of a save
        calls.append(path)
        if how == "SAVE" and len(calls) == when:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(path)
    atomic_files.sync = dying_sync

    data = distloop.make_dataset(problems.classification(67), 16, shuffle=True)
    trainer = distloop.Trainer(model_fn, config)
    metrics = trainer.fit(data, actions=[act])
    np.savez(os.path.join(workdir, "end.npz"), **problems.everything(trainer))
    print("reached the end")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "kills"),
    mostly_wide([*((seed, ["SIGKILL", "SAVE"]) for seed in range(13)), (20, ["SAVE"]), (21, ["SAVE"])], (21, ["SAVE"])),
)
def test_a_run_that_is_killed_ends_bit_for_bit_like_one_that_was_not(seed, kills, tmp_path):
    replicas = 2 - seed % 2
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    result = forked.run_program(straight, PROGRAM, replicas, "", 0)
    assert result.returncode == 0, result.stderr[-3000:]
    draw = random.Random(seed)
    step = 0
    for how in kills:  # tests/campaigns/nemesis sends other signals
        # A save is five calls to the disk: it may die in any of them, of the first or a later save of the process.
        when = draw.randint(1, 12) if how == "SAVE" else step + draw.randint(1, 6)
        result = forked.run_program(stopped, PROGRAM, replicas, how, when)
        assert result.returncode == -signal.SIGKILL, (how, when, result.stdout[-2000:], result.stderr[-3000:])
        assert "Traceback" not in result.stderr
        (stopped / "checkpoints").mkdir(exist_ok=True)  # the first one may die before it saves
        done = max((int(name) for name in os.listdir(stopped / "checkpoints") if name.isdigit()), default=0)
        assert done >= step
        step = done
    result = forked.run_program(stopped, PROGRAM, replicas, "", 0)
    assert result.returncode == 0 and "reached the end" in result.stdout, result.stderr[-3000:]
    assert_equal(*(dict(np.load(workdir / "end.npz")) for workdir in (stopped, straight)))
    assert [row["step"] for row in rows_of(stopped)] == list(range(1, 31))
    assert rows_of(stopped) == rows_of(straight)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", mostly_wide([1, 3], 3))
def test_a_checkpoint_of_two_replicas_continues_on_any_number(replicas, tmp_path):
    def model_fn():
        spec = classifier(is_weighted=True, l2=0.1)()

        def loss_fn(batch, training):
            return {**spec.loss_fn(batch, training), "row": batch["row"]}

        return distloop.ModelSpec(spec.model, spec.optimizer, loss_fn)

    def fit(name, replicas, steps):
        data = distloop.make_dataset({**classification(67), "row": np.arange(67.0)}, 16, shuffle=True)
        config = on(replicas, workdir=str(tmp_path / name), log_every=1, average_decay=0.9, clip_norm=0.5)
        trainer = distloop.Trainer(model_fn, config)
        trainer.fit(data, steps=steps)
        return weights(trainer), {row["step"]: row["row"] for row in rows_of(tmp_path / name)}  # mean row numbers

    expected, order = fit("straight", 2, 20)
    fit("stopped", 2, 9)
    continued, seen = fit("stopped", replicas, 20)
    assert [*seen] == [*order] == list(range(1, 21))
    np.testing.assert_allclose([*seen.values()], [*order.values()], rtol=1e-6)
    assert_close(continued, expected)


def wait_for_a_reason(requests):
    deadline = time.monotonic() + 300
    while requests.reason is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return requests.reason


def test_the_first_signal_is_caught_and_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequests() as requests:
        assert requests.reason is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_for_a_reason(requests) == "by SIGTERM"
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_signals_within_a_second_count_as_one():
    with StopRequests() as requests:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            time.sleep(0.05)
        assert wait_for_a_reason(requests) == "by SIGTERM"


def run_plain(program):
    """Runs a program without TensorFlow; returns the completed process."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once():
    result = run_plain("""
        import os, signal, time
        from distloop.workers.preemption import StopRequests
        with StopRequests() as requests:
            print("not flushed", end="")
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1.2)
            time.sleep(60)
    """)
    assert result.returncode == 128 + signal.SIGINT and result.stdout == "not flushed"
    assert result.stderr.splitlines() == [
        "distloop: Stopping: saving after this step. Press Ctrl-C again to quit now.",
        "distloop: quitting now, without saving.",
    ]


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", -signal.SIGTERM), ("SIGINT", 130)])
def test_a_signal_to_a_forked_child_ends_the_child_alone(number, code):
    result = run_plain(f"""
        import os, signal, time
        from distloop.workers.preemption import StopRequests
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have commands behind & ignore it
        ready, in_child = os.pipe()
        number_open = len(os.listdir("/proc/self/fd"))
        with StopRequests() as outer, StopRequests() as inner:
            child = os.fork()
            if not child:
                try:
                    print(len(os.listdir("/proc/self/fd")) - number_open, signal.set_wakeup_fd(-1), flush=True)
                    os.write(in_child, b"x")
                    time.sleep(60)
                except KeyboardInterrupt:
                    os._exit(130)
            os.read(ready, 1)
            os.kill(child, signal.{number})
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            time.sleep(0.1)
            print(outer.reason, inner.reason)
    """)
    assert result.stdout.splitlines() == ["0 -1", str(code), "None None"], result


def test_max_secs_is_a_request_to_stop():
    assert StopRequests(max_secs=1000).reason is None
    requests = StopRequests(max_secs=0.01)
    time.sleep(0.02)
    assert requests.reason == "after 0.01 seconds"
    with pytest.raises(ValueError, match="max_secs=5 was given without a workdir"):
        on(1, max_secs=5)


@pytest.mark.slow
def test_a_run_that_is_out_of_time_is_saved_and_left(tmp_path, capsys):
    trainer = distloop.Trainer(classifier(), on(1, workdir=str(tmp_path), max_secs=1e-6, steps_per_loop=5))
    data = distloop.make_dataset(classification(67), 16)
    with pytest.raises(SystemExit) as caught:
        trainer.fit(data, steps=20)
    assert caught.value.code == EXIT_CODE == 75
    assert trainer.step == 5 and os.listdir(tmp_path / "checkpoints") == ["5"]
    said = "distloop: Interrupted after 1e-06 seconds at step 5, checkpoint saved. Run the same command to resume."
    assert said in capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_without_a_workdir_signals_are_not_caught():
    def act(report):
        assert signal.getsignal(signal.SIGINT) == before
        acted.append(report.step)

    act.every, acted, before = 1, [], signal.getsignal(signal.SIGINT)
    distloop.Trainer(classifier(), on(1)).fit(tf.data.Dataset.from_tensors(classification(8)), steps=1, actions=[act])
    assert acted == [1]


def test_a_signal_stops_every_run_of_the_process_those_that_catch_none_too():
    with preemption.StopRequests() as outer, preemption.StopRequests(catch_signals=False) as inner:
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_for_a_reason(outer) == inner.reason == "by SIGTERM"
    assert not preemption._live and preemption.StopRequests().reason is None


@pytest.mark.parametrize(("code", "error"), [(preemption.EXIT_CODE, preemption.Interrupted), (1, SystemExit)])
def test_an_interrupted_fit_within_another_interrupts_that_one(code, error):
    with pytest.raises(error), preemption.interrupted_together(7):
        raise SystemExit(code)
