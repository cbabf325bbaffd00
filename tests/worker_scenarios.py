"""Scenarios that tests/test_workers.py runs on several workers and in one process.

    python -m distloop.launch --workers=2 -m tests.worker_scenarios OUT DEVICES [SCENARIO ...]

Each returns arrays by name, which have to be the same everywhere, except for names that begin with `local/`.
"""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
import unittest.mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.actions.built_in import Utilization
from distloop.checkpoints.store import in_workdir
from distloop.data import iterators
from distloop.distributed import collectives, devices, strategies, tensorflow_internals
from distloop.model.saved_state import SavedState
from distloop.optimizers import gradients
from distloop.run import overview
from distloop.sharding import variable_shards
from distloop.tables import sparse_packing
from distloop.training.compiled_loop import CompiledLoop
from distloop.workdir import run_lock
from distloop.workdir.records import OF_THE_MACHINE
from distloop.workers import preemption
from tests import many_rows, test_bits, test_shares
from tests.problems import classification, classifier, every, everything, of_unknown_length, optimize_graphs, weights
from tests.sharding import test_sharding
from tests.tables import test_tables
from tests.training import test_tokens

ROWS = 67


def batches(size=16, rows=ROWS, **arguments):
    return distloop.make_dataset(classification(rows), size, **arguments)


def is_worker(trainer, index):
    return collectives.worker_index(trainer.strategy) == min(index, collectives.num_workers(trainer.strategy) - 1)


def in_small_messages():
    """Lets workers send the gradients and weights of these models in several messages."""
    return unittest.mock.patch.object(tensorflow_internals, "LARGEST_MESSAGE_BYTES", 256)


def averages_of(trainer):
    with trainer.state.averaged():
        return {f"average/{path}": value for path, value in weights(trainer).items()}


def different(found, expected):
    """Returns the names of what has other bits."""
    names = [name for name in expected if expected[name].tobytes() != found[name].tobytes()]
    return {"local/different": np.array(names)}


def replicas(make, workdir):
    """Weights, L2 terms, clipping, averages, an odd last batch that is smaller than the number of replicas."""
    trainer = make(classifier(is_weighted=True, l2=0.1), clip_norm=0.1, average_decay=0.9)
    with in_small_messages():
        metrics = trainer.fit(batches(), steps=12)
    return weights(trainer) | averages_of(trainer) | numbers(metrics)


def unequal_shares(make, workdir):
    """Replicas split batches unequally, of which each worker reads its part; the last one is odd."""
    replicas = make(classifier()).strategy.num_replicas_in_sync
    settings = dict(device_shares=[3, 1, 2, 1][:replicas], clip_norm=0.1, average_decay=0.9, microbatches=2)
    trainer = make(classifier(is_weighted=True, l2=0.1), **settings)
    trainer.fit(batches(shuffle=True), steps=12)
    gathered = make(test_shares.tables, device_shares=[3, 1, 2, 1][:replicas])
    gathered.fit(test_shares.table_rows(), steps=6)
    results = {f"gathered/{path}": value for path, value in weights(gathered).items()}
    results |= {"predictions": trainer.predict(batches(5)), **numbers(trainer.evaluate(batches(5)))}
    return weights(trainer) | averages_of(trainer) | results


def sharded(make, workdir):
    """Slots and averages on one device of all workers. Each worker tells the bytes that it has.

    A step is skipped, in which the last row of the batch, of the last worker's shard, is not finite.
    """
    rows = classification(ROWS)
    rows["x"][47] = np.inf
    with (
        in_small_messages(),
        unittest.mock.patch.object(variable_shards, "_SMALLEST_ROW", 48),  # one variable is cut between rows
        unittest.mock.patch.object(variable_shards, "_FEWEST_ROWS", 8),
        unittest.mock.patch.object(gradients, "LARGEST_PACKED_BYTES", 200),
    ):
        settings = dict(on_nonfinite="skip", microbatches=2, average_decay=0.9, check_replicas_every=4, clip_norm=0.05)
        path = os.path.join(workdir, "sharded")
        trainer = make(test_sharding.decaying, workdir=path, shard_optimizer=True, **settings)
        assert (trainer.state.slot_placement.num_shards == 1) == (collectives.num_workers(trainer.strategy) == 1)
        trainer.fit(distloop.make_dataset(rows, 16), steps=9)
    scores = trainer.evaluate(distloop.make_dataset(classification(20), 20))
    large = make(test_sharding.large, average_decay=0.9, shard_optimizer=True)
    sizes = test_sharding.shared(large).values()
    failing = make(test_sharding.decaying, clip_value=0.01, shard_optimizer=True)
    with pytest.raises(FloatingPointError) as error:
        failing.fit(distloop.make_dataset(rows, 16), steps=9)
    results = {"skipped": np.array(int(trainer.state.skipped_steps)), "local/bytes": np.array(list(sizes))}
    results |= {f"clipped/{name}": value for name, value in weights(failing).items()}
    results["local/error"] = np.array(str(error.value))
    results["local/lines"] = np.array(overview.console_lines(large.state, large.config, trainer._train_source))
    return values_of_checkpoint(trainer) | weights(trainer) | averages_of(trainer) | numbers(scores) | results


def values_of_checkpoint(trainer):
    """Returns what a checkpoint holds of variables."""
    state = SavedState(trainer.state)
    snapshot = {n: v for n, v in state.snapshot().items() if v.dtype != tf.string}
    of_chief = state.snapshot(is_needed=trainer.workers.is_chief)  # workers that differ do not wait for each other
    assert len(of_chief) == len(state.snapshot()) or not trainer.workers.is_chief
    return {n: v.numpy() for n, v in snapshot.items() if n.startswith(("model/", "optimizer/", "average/"))}


def synchronized_norm(make, workdir):
    # The serial executor, the default in one process, fuses operations differently: a difference of 1.5e-6 here.
    trainer = make(classifier(batch_norm="synchronized"), executor="parallel")
    trainer.fit(batches(rows=71), steps=12)
    return weights(trainer)


def two_updates(make, workdir):
    def model_fn():
        a, b = (classifier(l2=0.01)() for _ in range(2))

        def second(batch, training):
            logits, other = (m(batch["x"], training=training) for m in (b.model, a.model))
            return {"loss": keras.losses.mean_squared_error(other, logits)}

        updates = [distloop.Update("first", a.loss_fn, keras.optimizers.SGD(0.1), "^a/")]
        updates += [distloop.Update("second", second, keras.optimizers.SGD(0.1), "^b/")]
        return distloop.ModelSpec({"a": a.model, "b": b.model}, updates=updates)

    trainer = make(model_fn)
    metrics = trainer.fit(batches(), steps=10)
    return weights(trainer) | numbers(metrics)


def tables(make, workdir, rows=10, microbatches=1):
    """A sparse gradient, of which replicas have unequal parts."""
    merged = []
    with (
        unittest.mock.patch.object(gradients, "LARGEST_PACKED_BYTES", 64),
        unittest.mock.patch.object(sparse_packing, "merge", test_tables.recorded(merged)),
    ):
        trainer = make(test_tables.model_fn(("lazy",)), microbatches=microbatches)
        trainer.fit(test_tables.data(2 * rows, rows, drop_remainder=True), steps=4)
    assert merged, "the gradient was dense"
    return test_tables.values_of(trainer)


def tables_in_microbatches(make, workdir):
    return tables(make, workdir, rows=24, microbatches=2)


def float16(make, workdir):
    """An overflow in the last row of a batch, which is in the last worker's shard."""
    rows = classification(ROWS)
    rows["x"][31] = np.inf
    results = {}
    for precision, on_nonfinite in (("float32", "skip"), ("mixed_float16", "raise")):
        trainer = make(classifier(dropout=0.2, batch_norm="local"), precision=precision, on_nonfinite=on_nonfinite)
        data = distloop.make_dataset(rows, 16)
        trainer.fit(data, steps=1)
        before = everything(trainer)
        trainer.fit(data, steps=2)
        after = everything(trainer)
        changed = {name.partition("@")[0] for name in different(after, before)["local/different"]}
        results[f"{precision}/changed"] = np.array(sorted(changed))
        results[f"{precision}/skipped"] = np.array(int(trainer.state.skipped_steps))
        if precision == "mixed_float16":
            results["scale"] = np.array([before["loss_scale/@0"], after["loss_scale/@0"]])
    return results


def statistics_and_seeds(make, workdir):
    """BatchNormalization that is not synchronized, whose moving statistics are the mean over all replicas; dropout."""
    trainer = make(classifier(dropout=0.5, batch_norm="local"))
    trainer.fit(batches(), steps=3)
    norm = trainer.model.get_layer("norm")
    seeds = {f"local/seeds/{name}": value for name, value in everything(trainer).items() if "seed" in name}
    saved = SavedState(trainer.state).snapshot()  # on every worker the first one's random streams
    of_first = {name: value.numpy() for name, value in saved.items() if "seeds/" in name}
    assert of_first
    statistics = {"mean": norm.moving_mean.numpy(), "variance": norm.moving_variance.numpy()}
    return seeds | of_first | {f"local/statistics/{name}": value for name, value in statistics.items()}


def resume(make, workdir):
    def fit(name, steps):
        model_fn = classifier(dropout=0.3, batch_norm="local", metrics=True)
        settings = dict(average_decay=0.9, checkpoint_every=4, log_every=7)
        trainer = make(model_fn, workdir=os.path.join(workdir, name), **settings)
        metrics = trainer.fit(batches(shuffle=True), steps=steps)
        return everything(trainer) | numbers(metrics)

    straight = fit("straight", 20)
    fit("stopped", 6)
    return different(fit("stopped", 20), straight)


def elastic(make, workdir, steps=12):
    """Continues from a checkpoint of one process in the workdir, and saves one."""
    model_fn = classifier(batch_norm="synchronized", l2=0.1, metrics=True)
    trainer = make(model_fn, workdir=os.path.join(workdir, "elastic"), average_decay=0.9, log_every=100)
    trainer.fit(batches(rows=71, shuffle=True), steps=steps)
    return weights(trainer)


def position(make, workdir, begins_at=many_rows.PER_EPOCH - 8, **ends):
    """Goes on from a checkpoint of one process that is a few steps before the end of an epoch of 10 million rows."""
    path = os.path.join(workdir, "position")
    begins_at = None if os.path.exists(path) else begins_at
    return many_rows.over_the_end_of_an_epoch(lambda path: make(classifier(), workdir=path), path, begins_at, **ends)


def mixed_rows(make, workdir):
    """A function over batches mixes rows of all workers."""

    def mix(batch):
        return {**batch, "x": 0.75 * batch["x"] + 0.25 * tf.reverse(batch["x"], [0])}

    trainer = make(classifier())
    trainer.fit(batches(shuffle=True).map(mix), steps=5)
    return weights(trainer)


def tokens(make, workdir):
    """A run in tokens, with a warm-up in tokens, ends with the same step."""
    trainer = make(test_tokens.model_fn)
    trainer.fit(test_tokens.data(), until="300 tokens")
    return weights(trainer) | {"step": np.array(trainer.step)}


def rollback(make, workdir):
    def poison(number, batch):
        is_bad = (number == 13) & (tf.range(16) == 15)  # a row in the last worker's shard
        return {**batch, "x": tf.where(is_bad[: tf.shape(batch["x"])[0], None], np.nan, batch["x"])}

    settings = dict(on_divergence="rollback", checkpoint_every=5, locate_nonfinite=True)
    trainer = make(classifier(), workdir=os.path.join(workdir, "rollback"), **settings)
    trainer.fit(batches(shuffle=True, rows=64).repeat().enumerate().map(poison), steps=20)
    return weights(trainer)


def evaluation(make, workdir, size=5):
    trainer = make(classifier(is_weighted=True, metrics=True, batch_norm="synchronized"))
    before = everything(trainer)
    results = numbers(trainer.evaluate(batches(size)))
    assert not different(everything(trainer), before)["local/different"].size
    return results


def evaluation_in_one_batch(make, workdir):
    return evaluation(make, workdir, size=100)


def prediction(make, workdir, size=5):
    def model_fn():
        spec = classifier()()

        def predict_fn(batch):
            logits = spec.model(batch["x"], training=False)
            return {"logits": logits, "row": batch["row"], "is_even": batch["row"] % 2 == 0}

        return distloop.ModelSpec(spec.model, spec.optimizer, spec.loss_fn, predict_fn=predict_fn)

    trainer = make(model_fn)
    rows = {**classification(ROWS), "row": np.arange(ROWS)}
    results = dict(trainer.predict(distloop.make_dataset(rows, size)))
    trainer.predict(distloop.make_dataset(rows, 16), path=os.path.join(workdir, "predictions"), batches=3)
    trainer.workers.barrier()
    results["first rows"] = np.load(os.path.join(workdir, "predictions", "row.npy"))  # [48]
    data = distloop.make_dataset(rows, 16)
    evals = {"all": distloop.Evaluation(data, rows_fn=lambda outputs: {"value": outputs["row"] @ np.arange(ROWS)})}
    results["value of all rows"] = np.array(trainer.fit(data, steps=1, evals=evals)["all/value"])
    return results


def prediction_in_one_batch(make, workdir):
    return prediction(make, workdir, size=100)


def shards(make, workdir):
    """A function of InputContext that returns shards of unequal length; together they are all rows."""

    def shard(context):
        rows = tf.data.Dataset.from_tensor_slices({**classification(ROWS), "row": np.arange(ROWS)})
        # The first worker has a third of the 67 rows, however many workers there are.
        count, index = context.num_input_pipelines, context.input_pipeline_id
        cuts = [0, *range(ROWS // 3, ROWS, -(-2 * ROWS // (3 * (count - 1)))), ROWS] if count > 1 else [0, ROWS]
        return rows.skip(cuts[index]).take(cuts[index + 1] - cuts[index]).batch(4)

    def model_fn():
        spec = classifier(metrics=True)()

        def loss_fn(batch, training):
            return {**spec.loss_fn(batch, training), "row": batch["row"]}

        settings = dict(predict_fn=lambda batch: batch["row"], metrics=spec.metrics)
        return distloop.ModelSpec(spec.model, spec.optimizer, loss_fn, **settings)

    trainer = make(model_fn)
    results = {f"evaluation/{name}": value for name, value in numbers(trainer.evaluate(shard)).items()}
    results["rows predicted"] = np.sort(trainer.predict(shard))
    metrics = trainer.fit(shard, epochs=1)
    results["mean row of an epoch"] = np.array(metrics["row"])  # each row once
    results["local/steps"] = np.array(trainer.step)
    return results


def equal_shards(make, workdir):
    """Each worker's part of every batch, from a function of InputContext, in microbatches, trains as whole batches."""

    def shard(context):
        count, index = context.num_input_pipelines, context.input_pipeline_id

        def part(batch):
            size = tf.shape(batch["x"])[0]
            return {name: value[index * size // count : (index + 1) * size // count] for name, value in batch.items()}

        return batches(shuffle=True).map(part)

    for precision in ("mixed_bfloat16", "float32"):
        trainer = make(classifier(is_weighted=True, l2=0.1), clip_norm=0.1, precision=precision, microbatches=3)
        trainer.fit(shard, steps=12)
    return weights(trainer)


def stops(make, workdir):
    """The chief profiles steps 4 and 5, which every worker runs by themselves; the last worker alone ends the run.

    Each batch has one row, fewer than several workers have replicas. What is due at the end alone is called then, on
    every worker.
    """
    trainer = make(classifier(), workdir=os.path.join(workdir, "stops"), profile="3:5", log_every=4)

    def stop(report):
        if report.step == 8 and is_worker(trainer, 99):
            raise distloop.StopTraining("this worker has seen enough")

    class Rows:
        steps = []

        def write(self, step, numbers, time):
            self.steps.append(step)

        def close(self):
            self.steps.append(-1)

    def count(report):
        return {"workers": float(len(trainer.workers.gather(report.step)))}  # all workers must call it

    evals = {"test": distloop.Evaluation(batches(1, 3), every=0)}
    actions = [every(4, stop), every(0, count)]
    last = trainer.fit(batches(1, 3), steps=40, evals=evals, actions=actions, writers=[Rows()])
    local = {"local/rows": np.array(Rows.steps), "local/workers": np.array(last["workers"])}
    return {"step": np.array(trainer.step), "test/loss": np.array(last["test/loss"]), **local, **weights(trainer)}


def by_time(make, workdir):
    """The last worker's loops take longer by its own clock; all have the chief's steps and time."""
    loops, asked_at, run_steps = [], [], CompiledLoop.run
    trainer = make(classifier())

    def run_slowly(*args, **kwargs):
        loops.append(args[2])
        rows = run_steps(*args, **kwargs)
        if is_worker(trainer, 99):
            rows[0] = dataclasses.replace(rows[0], seconds=rows[0].seconds + 1e3)
            trainer._train_loop._started_at -= 1e3
        return rows

    def note(report):
        asked_at.append(report.step)

    with unittest.mock.patch.object(CompiledLoop, "run", run_slowly):
        trainer.fit(batches(), steps=60, actions=[every("0.2 s", note)])
    return {"step": np.array(trainer.step), "local/loops": np.array(loops), "local/asked at": np.array(asked_at)}


def terminate():
    """Sends this process SIGTERM, and returns once its run knows: a thread hears of signals."""
    os.kill(os.getpid(), signal.SIGTERM)
    while preemption._live[-1].reason is None:
        time.sleep(0.001)


def interrupts_between_loops(make, workdir):
    """SIGTERM comes to the last worker alone, between two loops, and then while it skips batches already seen."""
    data, read = of_unknown_length(batches(rows=160)), []

    def stop(report):
        if report.step == 8 and is_worker(trainer, 99):
            terminate()

    def note(x):
        read.append(len(read))
        if len(read) == 3 and trainer.step == 8 and is_worker(trainer, 99):
            terminate()
        return x

    def note_batch(batch):
        return {**batch, "x": tf.ensure_shape(tf.numpy_function(note, [batch["x"]], tf.float32), batch["x"].shape)}

    def fit(trainer):
        trainer.fit(data.map(note_batch), steps=400, actions=[every(4, stop)])

    path, results = os.path.join(workdir, "interrupts between loops"), {}
    with unittest.mock.patch.object(iterators, "_PIECE_SECS", 0.0):
        for name in ("between two loops", "skipping"):
            trainer = make(classifier(), workdir=path, log_every=4, steps_per_loop=4)
            with pytest.raises(SystemExit) as stopped:
                fit(trainer)
            results |= {f"code/{name}": np.array(stopped.value.code), f"step/{name}": np.array(trainer.step)}
            results[f"local/{name}"] = np.array(str(stopped.value.__context__))
            read.clear()
    return results


def interrupts(make, workdir):
    """SIGTERM comes to the last worker alone, in an evaluation that would take minutes."""
    trainer = make(classifier(), workdir=os.path.join(workdir, "interrupts"), log_every=4, steps_per_loop=4)
    rows, read = {name: values[:8] for name, values in classification().items()}, []

    def many():
        for number in range(1_000_000):
            if number == 3 and trainer.step == 8 and is_worker(trainer, 99):
                os.kill(os.getpid(), signal.SIGTERM)
            read.append(number)
            yield rows

    spec = {name: tf.TensorSpec(values.shape, values.dtype) for name, values in rows.items()}
    data = tf.data.Dataset.from_generator(many, output_signature=spec)
    try:
        trainer.fit(batches(), steps=400, evals={"test": distloop.Evaluation(data, every=8)})
        code = 0
    except SystemExit as stopped:
        code = stopped.code
    return {"code": np.array(code), "step": np.array(trainer.step), "local/is_left": np.array(len(read) < 1_000_000)}


def failures(make, workdir):
    """The last worker fails by Ctrl-C between two loops, without any actions: all save the run.

    In the next start, an operation fails within a step on all workers: nobody saves it. In the third, the last worker
    fails in the `rows_fn` of the evaluation at the end: all save the run. The fourth ends it with the bits of a run in
    which nobody failed.
    """
    failing, results = "", {}

    def rows_fn(outputs):
        if failing == "rows_fn" and is_worker(trainer, 99):
            raise RuntimeError("mine")
        return {"value": float(np.abs(outputs).sum())}

    def press(values, _):  # TensorFlow computes: Python calls the handler when the loop has ended
        if failing == "Ctrl-C" and trainer.step > 4 and is_worker(trainer, 99):
            os.kill(os.getpid(), signal.SIGUSR1)
        if failing == "step" and trainer.step > 8:
            raise OSError("mine")
        return values

    def model_fn():
        spec = classifier(dropout=0.3, batch_norm="local", metrics=True)()

        def loss_fn(batch, training):
            outputs = spec.loss_fn(batch, training)
            moved = tf.convert_to_tensor(spec.model.get_layer("norm").moving_mean)  # so that the step has written
            pressed = tf.numpy_function(press, [tf.stop_gradient(outputs["loss"]), moved], tf.float32)
            return {**outputs, "loss": outputs["loss"] + 0.0 * tf.ensure_shape(pressed, outputs["loss"].shape)}

        settings = dict(predict_fn=spec.predict_fn, metrics=spec.metrics)
        return distloop.ModelSpec(spec.model, spec.optimizer, loss_fn, **settings)

    def start(name):
        path = os.path.join(workdir, "failures", name)
        trainer = make(model_fn, workdir=path, steps_per_loop=3, checkpoint_every=0, average_decay=0.9)
        evals = {"test": distloop.Evaluation(batches(), every=0, rows_fn=rows_fn)} if failing in ("", "rows_fn") else {}
        return trainer, lambda: trainer.fit(batches(shuffle=True), steps=12, evals=evals)

    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    for failing in ("Ctrl-C", "step", "rows_fn"):
        trainer, fit = start("failing")
        with pytest.raises((RuntimeError, KeyboardInterrupt, SystemExit, tf.errors.OpError)) as ended:
            fit()
        trainer.workers.barrier()
        results[f"local/{failing}"] = np.array(f"{ended.typename} {ended.value}")
        results[f"{failing}/saved"] = np.array(in_workdir(os.path.join(workdir, "failures", "failing")).steps)
    signal.signal(signal.SIGUSR1, before)
    failing = ""
    (trainer, fit), (straight, fit_straight) = start("failing"), start("straight")
    values = [fit()["test/value"], fit_straight()["test/value"]]
    return results | {"local/values": np.array(values)} | different(everything(trainer), everything(straight))


def files(make, workdir):
    """Only the chief opens, renames or deletes anything in the workdir."""
    workdir = os.path.join(workdir, "files")
    touched = []

    def note(event, arguments):
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            writes = event != "open" or (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
            if writes and str(arguments[0]).startswith(workdir):
                touched.append(f"{event} {arguments[0]}")

    sys.addaudithook(note)
    trainer = make(classifier(metrics=True), workdir=workdir, checkpoint_every=3, log_every=2, keep_checkpoints=1)

    def write(path):  # as trainer.export does, on the chief alone
        if trainer.workers.is_chief:
            os.makedirs(path)

    bests = []

    def fail(path):  # once, on the last worker
        bests.append(failing.get_state()["best"])
        if len(bests) == 1 and is_worker(trainer, 99):
            raise OSError("no space")

    exports = distloop.Export(write, os.path.join(workdir, "exports"), every=4, keep=1)
    failing = distloop.Export(fail, os.path.join(workdir, "failing"), metric="test/loss")
    actions = [distloop.SaveBest("test/loss"), exports, failing]
    trainer.fit(batches(), steps=10, evals={"test": distloop.Evaluation(batches(), every=3)}, actions=actions)
    trainer.save()
    trainer.restore()
    trainer.export(os.path.join(workdir, "export"))
    return {"local/touched": np.array(touched), "bests before each export": np.array(bests, float)}


def messages_of_several_dtypes(strategy):
    """Returns sums over replicas; a large tensor is cut, and small ones would be joined whatever their dtype."""
    given = [tf.range(9.0), tf.constant([1.0, 2.0], tf.float64), tf.constant([3.0])]
    total = sum(range(1, strategy.num_replicas_in_sync + 1))

    def add():
        factor = tf.distribute.get_replica_context().replica_id_in_sync_group + 1
        return tensorflow_internals.sum_over_replicas([tf.cast(factor, tensor.dtype) * tensor for tensor in given])

    with unittest.mock.patch.object(tensorflow_internals, "LARGEST_MESSAGE_BYTES", 16):
        sums = tf.function(lambda: strategy.run(add), autograph=False)()
    of_first = [strategy.experimental_local_results(found)[0] / total for found in sums]
    assert [found.dtype for found in of_first] == [tensor.dtype for tensor in given]
    return {f"sum/{i}": found.numpy() for i, found in enumerate(of_first)}


def gpus_of_workers(trainer):
    """Returns what a row holds of the GPUs of all workers, of which each has one more than the one before."""
    calls = []

    def gpu_use():  # a fake of the driver; from call to call each GPU takes half a kilowatt-hour
        calls.append(None)
        return [
            {"gpu_utilization": 0.5 + 0.1 * gpu, "gpu_memory_gb": 10.0 + gpu, "energy_kwh": 0.5 * len(calls)}
            for gpu in range(trainer.workers.index + 1)
        ]

    with (
        unittest.mock.patch.object(strategies, "has_gpus", lambda strategy: True),
        unittest.mock.patch.object(devices, "gpu_use", gpu_use),
    ):
        numbers = Utilization(strategy=trainer.strategy)(distloop.Report(10, 100, {}, state=None, time=5.0))
    return {name: value for name, value in numbers.items() if "gpu" in name or name == "energy_kwh"}


def exchange(make, workdir):
    """Values of any size and kind, after steps and in an action; an error on one worker is one on all.

    With a timeout, TensorFlow would start a sleeping thread for each collective of a step.
    """
    trainer = make(classifier())
    results = {}

    def share(report):
        step = trainer.workers.broadcast(report.step if trainer.workers.is_chief else None)
        results["step"] = np.array(step)

    trainer.fit(batches(), steps=2, actions=[every(2, share)])
    before = len(os.listdir("/proc/self/task"))
    trainer.fit(batches(), steps=102)
    results["local/new threads"] = np.array(len(os.listdir("/proc/self/task")) - before)
    trainer.workers.barrier()
    index = trainer.workers.index
    values = trainer.workers.gather({"index": index, "rows": np.full([index, 2], np.nan), "name": "é" * 1000 * index})
    results["local/indices"] = np.array([value["index"] for value in values])
    results["local/shapes"] = np.array([value["rows"].shape[0] for value in values])
    results["local/lengths"] = np.array([len(value["name"]) for value in values])
    large = np.arange(300_000, dtype=np.float32)  # more than one collective
    assert all(np.array_equal(value, large + i) for i, value in enumerate(trainer.workers.gather(large + index)))
    results["large"] = trainer.workers.broadcast(large)
    results |= messages_of_several_dtypes(trainer.strategy)
    results["local/gpus"] = np.array(json.dumps(gpus_of_workers(trainer)))
    try:
        trainer.workers.gather(object() if is_worker(trainer, 99) else "text")
    except ValueError as error:
        results["local/error"] = np.array(str(error))
    return results


def differences(make, workdir):
    """What the last worker does otherwise is an error on all workers, before they wait for each other."""
    results = {}

    def model_fn():
        spec = classifier()()

        def loss_fn(batch, training):
            outputs = spec.loss_fn(batch, training)
            return {**outputs, "extra": outputs["loss"]} if is_other else outputs

        predict_fns = {"all": spec.predict_fn, "narrow": lambda batch: spec.predict_fn(batch)[:, : 4 - is_other]}
        return distloop.ModelSpec(spec.model, spec.optimizer, loss_fn, predict_fn=predict_fns)

    def act(report):
        return None

    def partly_frozen():
        spec = classifier(optimizer=lambda: keras.optimizers.SGD(0.1))()  # without slots, whose number would differ
        spec.model.get_layer("hidden").trainable = not is_other
        return spec

    def move(report):
        if is_other:
            bias = report.state.model.get_layer("logits").bias.value
            trainer.strategy.experimental_local_results(bias)[-1].assign_add(tf.ones([4]))

    def meet(**facts):
        collectives.require_same(trainer.strategy, "count", facts)

    def other_draws():
        spec = classifier()()
        spec.model.set_weights([value + is_other for value in spec.model.get_weights()])
        return spec

    def with_other_model():
        head = keras.layers.Dense(4, kernel_initializer="ones" if is_other else "zeros")
        model = keras.Sequential([keras.Input((8,)), head], name="net")
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return make(distloop.from_keras(model))

    def with_other_file():
        spec, path = classifier()(), os.path.join(workdir, f"weights of {is_other}.npz")
        np.savez(path, **{v.path: np.full(v.shape, is_other, np.float32) for v in spec.model.variables})
        return make(classifier(), init_from=path)

    trainer = make(model_fn)
    is_other = trainer.workers.index > 0
    rows, saved = classification(16), make(classifier(), workdir=os.path.join(workdir, f"host {int(is_other)}"))
    saved.fit(batches(), steps=1)  # the chief alone saves, and each worker has a disk of its own
    few, checked = batches(4).take(2 + is_other), make(classifier(), check_replicas_every=2)
    for name, call in {
        "values of training": lambda: trainer.fit(batches(), steps=2),
        "values of evaluation": lambda: trainer.evaluate(batches()),
        "steps": lambda: trainer.fit(batches(), steps=2 + is_other),
        "actions": lambda: trainer.fit(batches(), steps=2, actions=[] if is_other else [every(2, act)]),
        "evals": lambda: trainer.fit(batches(), steps=2, evals={"b" if is_other else "a": batches()}),
        "batches": lambda: trainer.evaluate(few),
        "outputs": lambda: trainer.predict(batches(), signature="narrow"),
        "batches of unknown number": lambda: trainer.predict(of_unknown_length(few), signature="all"),
        "what to do": lambda: trainer.predict(batches(7)) if is_other else trainer.evaluate(batches(7)),
        "a long text": lambda: meet(steps=5, model="x" * 300 + "y" * is_other),
        "a fact that others lack": lambda: meet(**({"more": 1} if is_other else {})),
        "variables": lambda: checked.fit(batches(), steps=2, actions=[every(1, move)]),
        "a checkpoint": lambda: trainer.restore(os.path.join(saved.config.workdir, "checkpoints", "1")),
        "layers": lambda: make(partly_frozen).fit(batches(), steps=2),
        "weights": lambda: make(other_draws).fit(batches(), steps=2),
        "weights of a compiled model": lambda: with_other_model().fit(rows["x"], rows["label"], steps=2),
        "weights of a file": lambda: with_other_file().fit(batches(), steps=2),
    }.items():
        try:
            call()
        except ValueError as error:
            results[f"local/{name}"] = np.array(str(error))
    return results


def refusals(make, workdir):
    """What one process alone can do is refused on every worker, before any waits for another."""
    trainer = make(classifier(), workdir=os.path.join(workdir, "refusals"))
    results = {}
    calls = {
        "audit": lambda: trainer.audit(batches()),
        "autotune_batch": lambda: distloop.autotune_batch(trainer, batches()),
        "evaluate_checkpoints": lambda: trainer.evaluate_checkpoints(batches()),
        "replay": lambda: trainer.replay(batches(), step=1),
        "eager": lambda: make(classifier(), eager=True).fit(batches(), steps=1),
    }
    for name, call in calls.items() if trainer.workers.count > 1 else ():
        with pytest.raises(ValueError) as error:
            call()
        results[f"local/{name}"] = np.array(str(error.value))
    with run_lock.RunLock(trainer.config.workdir) if trainer.workers.is_chief else contextlib.nullcontext():
        trainer.workers.barrier()
        with pytest.raises(ValueError) as error:
            trainer.fit(batches(), steps=1)
        results["local/lock"] = np.array(str(error.value))
        trainer.workers.barrier()
    return results


def bits(make, workdir, steps=12):
    """Virtual replicas; goes on from a checkpoint of one process if there is one in the workdir.

    On two workers slots and averages are sharded.
    """
    case = test_bits.CASES["convolution, statistics, dropout"]
    return bits_of(case, make, workdir, steps, average_decay=0.9, checkpoint_every=5)


def bits_of_float16(make, workdir, steps=12):
    return bits_of(test_bits.CASES["float16, an overflow"], make, workdir, steps, precision="mixed_float16")


def bits_of(case, make, workdir, steps, **settings):
    name = case.model_fn.__name__
    path = os.path.join(workdir, f"bits {name}")
    keras.utils.clear_session(free_memory=False)  # layers without a name get the same ones again
    try:
        cluster = json.loads(os.environ.get("TF_CONFIG", "{}")).get("cluster", {})
        settings |= dict(shard_optimizer=len(cluster.get("worker", [])) == 2, check_replicas_every=4)
        trainer = make(case.model_fn, workdir=path, virtual_replicas=test_bits.V, log_every=4, **settings)
        test = distloop.make_dataset(case.rows, 9)
        trainer.fit(case.data(), steps=steps, evals={"test": distloop.Evaluation(test, every=4)})
        found = values_of_checkpoint(trainer)
        if np.isfinite(case.rows.get("x", 0.0)).all():
            found |= {**numbers(trainer.evaluate(test)), "predictions": trainer.predict(test)}
        trainer.workers.barrier()  # until the chief has written its rows
        found["rows"] = np.array([json.dumps(row) for row in test_bits.rows_of(path)])
    finally:  # of the scenarios after it
        optimize_graphs()
    return found


SCENARIOS = [
    exchange, differences, refusals, replicas, unequal_shares, sharded, synchronized_norm, two_updates, tables,
    tables_in_microbatches, float16, statistics_and_seeds, resume, elastic, tokens, position, mixed_rows, rollback,
    evaluation, evaluation_in_one_batch, prediction, prediction_in_one_batch, shards, equal_shards, stops, interrupts,
    interrupts_between_loops, failures, by_time, files, bits, bits_of_float16,
]  # fmt: skip


def numbers(metrics):
    return {f"number/{name}": np.array(value) for name, value in metrics.items() if name not in OF_THE_MACHINE}


def run(scenario, num_devices, workdir, **settings):
    def make(model_fn, **settings):
        config = distloop.Config(device="cpu", num_devices=num_devices, **{"log_every": 0, **settings})
        return distloop.Trainer(model_fn, config)

    return scenario(make, str(workdir), **settings)


def main(out, num_devices, *names):
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    distloop.prepare(distloop.Config(device="cpu", num_devices=num_devices, intra_op_threads=1))  # for `bits`
    for scenario in [scenario for scenario in SCENARIOS if not names or scenario.__name__ in names]:
        try:
            results = run(scenario, num_devices, out)
        except Exception:
            results = {"error": np.array(traceback.format_exc())}
        np.savez(os.path.join(out, f"{scenario.__name__}.{index}.npz"), **results)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
