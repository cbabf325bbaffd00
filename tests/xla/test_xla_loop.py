"""The loop that XLA compiles: the laws hold bit for bit within the mode, the weights are those of the plain loop."""

import functools
import io
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data.source import Source
from distloop.training import loop
from distloop.training.loop import Diverged
from distloop.xla import xla_loop
from tests import problems
from tests.problems import (
    assert_close,
    assert_equal,
    batches,
    classification,
    classifier,
    everything,
    mostly_wide,
    on,
    refused,
    train,
    weights,
)

STEPS = 100
TOLERANCE = 1e-5  # of weights after so many steps, in float32


def by_xla(**settings):
    return on(1, jit_compile="loop", **settings)


def adam():
    return keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, STEPS))


def gan():
    """Two models whose updates alternate, the first one with a gradient_fn."""

    def model_fn():
        models = {
            name: keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, name="dense")], name=name) for name in "ab"
        }
        optimizers = {"a": keras.optimizers.Adam(0.1), "b": keras.optimizers.SGD(0.01)}

        def loss_of(name):
            return lambda batch, training: {"loss": tf.square(models[name](batch["x"])[:, 0] - batch["x"][:, 1])}

        updates = [distloop.Update(name, loss_of(name), optimizers[name], f"^{name}/") for name in "ab"]
        return distloop.ModelSpec(models, updates=updates)

    return model_fn


# Name -> model, settings, rows of the data; 67 rows leave an odd last batch of 3.
CASES = {
    "odd batches and weights": (classifier(is_weighted=True, l2=0.01), {}, 67),
    "microbatches of different sizes": (classifier(), {"microbatches": 3}, 67),
    "BatchNormalization and microbatches": (classifier(batch_norm="local"), {"microbatches": 2}, 64),
    "a schedule, clipping and an average": (classifier(optimizer=adam), {"clip_norm": 0.05, "average_decay": 0.9}, 64),
    "an average of the last steps": (classifier(), {"average_from": "50 %", "steps": STEPS}, 64),
    "the scale of gradient noise": (classifier(), {"microbatches": 2, "gradient_noise_every": 20}, 64),
    "skipping": (classifier(), {"on_nonfinite": "skip"}, 64),
    "two updates": (gan(), {"clip_variable_norm": 0.5}, 64),
    "virtual replicas": (classifier(batch_norm="local"), {"virtual_replicas": 2, "intra_op_threads": 1}, 64),
}


@pytest.mark.parametrize("case", mostly_wide(CASES, "microbatches of different sizes", "two updates"))
def test_weights_are_those_of_the_plain_loop(case):
    model_fn, settings, rows = CASES[case]
    runs = []
    for jit_compile in ("none", "loop"):
        trainer = distloop.Trainer(model_fn, on(1, jit_compile=jit_compile, log_every=20, **settings))
        numbers = trainer.fit(batches(rows=rows, shuffle=True), steps=STEPS)
        of_step = {name: np.float64(value) for name, value in numbers.items() if name in RECORDED}
        runs.append((weights(trainer), of_step))
    (found, numbers), (expected, expected_numbers) = runs[::-1]
    assert_close(found, expected, TOLERANCE)
    assert_close(numbers, expected_numbers, TOLERANCE)
    assert "loss" in numbers or "a/loss" in numbers


RECORDED = {"loss", "accuracy", "a/loss", "b/loss", "gradient_norm", "learning_rate", "weight_norm", "skipped_steps"}


@pytest.mark.parametrize("precision", mostly_wide(["mixed_float16", "mixed_bfloat16"]))
def test_half_precision_learns_what_the_plain_loop_does(precision):
    losses = []
    for jit_compile in ("none", "loop"):
        trainer = distloop.Trainer(classifier(), on(1, jit_compile=jit_compile, precision=precision))
        losses.append(trainer.fit(batches(rows=64), steps=STEPS)["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_a_loss_that_reads_the_step_sees_each_step():
    def run(jit_compile):
        def model_fn():
            spec = classifier()()

            def loss_fn(batch, training):
                warm = tf.minimum(1.0, tf.cast(trainer.state.step, tf.float32) / STEPS)
                return {name: warm * value for name, value in spec.loss_fn(batch, training).items()}

            return distloop.ModelSpec(spec.model, spec.optimizer, loss_fn)

        trainer = distloop.Trainer(model_fn, on(1, jit_compile=jit_compile))
        trainer.fit(batches(rows=64), steps=STEPS)
        return everything(trainer)

    assert_close(run("loop"), run("none"), TOLERANCE)


def test_how_a_run_is_cut_changes_no_bit(monkeypatch, tmp_path):
    def run(**cut):
        settings = {"average_decay": 0.9, "microbatches": 2, **cut}
        trainer = distloop.Trainer(classifier(dropout=0.5, batch_norm="local", l2=0.1), by_xla(**settings))
        data = batches(shuffle=True)
        trainer.fit(data, steps=11, evals={"test": batches()})
        trainer.fit(data, steps=43)
        return everything(trainer)

    expected = run()
    assert_equal(run(log_every=7, steps_per_loop=5, eval_every=4), expected)
    monkeypatch.setattr(loop, "_LOOP_SECS", 0.0)  # every loop ends after its first call of the program
    monkeypatch.setattr(xla_loop, "_CALL_SECS", 0.0)  # which has one step
    assert_equal(run(workdir=str(tmp_path), log_every=3, checkpoint_every=10), expected)


def test_a_row_has_the_means_since_the_row_before(tmp_path):
    def rows(name, log_every):
        config = by_xla(workdir=str(tmp_path / name), log_every=log_every)
        train(classifier(), config, batches(rows=64), 30)
        return problems.rows_of(tmp_path / name)

    each_step, others = rows("each", 1), rows("others", 8)
    assert [row["step"] for row in others] == [8, 16, 24, 30]
    for row, begin in zip(others, (0, 8, 16, 24), strict=True):
        for name in ("loss", "accuracy"):
            mean = np.mean([one[name] for one in each_step[begin : row["step"]]])
            assert row[name] == pytest.approx(mean, rel=1e-12)
        assert row["weight_norm"] == each_step[row["step"] - 1]["weight_norm"]
        assert row["examples_seen"] == 16 * row["step"]


@pytest.mark.parametrize("data", mostly_wide(["by number", "tf.data"]))
def test_a_stopped_run_goes_on_bit_for_bit(data, tmp_path):
    def dataset():
        if data == "by number":
            return batches(shuffle=True)
        return tf.data.Dataset.from_tensor_slices(classification(67)).shuffle(67, seed=3).batch(16)

    def run(name, *stops):
        for steps in stops:
            config = by_xla(workdir=str(tmp_path / name), average_decay=0.9)
            trainer = train(classifier(dropout=0.5, optimizer=adam), config, dataset(), steps)
        return everything(trainer)

    assert_equal(run("stopped", 7, 20, 43), run("whole", 43))


def test_the_data_goes_on_from_one_fit_to_the_next():
    def run(jit_compile):
        trainer = distloop.Trainer(classifier(), on(1, jit_compile=jit_compile))
        data = tf.data.Dataset.from_tensor_slices(classification(67)).shuffle(67, seed=3).batch(16)
        for steps in (3, 4, 21):
            trainer.fit(data, steps=steps)
        return weights(trainer)

    assert_close(run("loop"), run("none"), TOLERANCE)


@pytest.mark.parametrize("precision", mostly_wide(["mixed_float16", "float32"]))
def test_a_step_that_is_not_finite_changes_nothing(precision):
    rows = classification(40)
    rows["x"][16 + 3, 0] = np.inf  # in the third batch of five
    settings = {} if precision == "mixed_float16" else {"on_nonfinite": "skip"}
    config = by_xla(precision=precision, average_decay=0.9, microbatches=2, **settings)
    trainer = distloop.Trainer(classifier(batch_norm="local", dropout=0.5, l2=0.1), config)
    looks = problems.looks(trainer, distloop.make_dataset(rows, 8), 4, 1, lambda report: everything(trainer))
    counts = {"step@0", "skipped_steps@0", *(name for name in looks[0] if name.startswith(("loss_scale", "streak")))}
    before, after, later = ({k: v for k, v in look.items() if k not in counts} for look in looks[1:])
    assert_equal(after, before)
    assert int(trainer.state.skipped_steps) == 1 and trainer.step == 4
    assert any(not np.array_equal(later[name], after[name]) for name in later)
    if precision == "mixed_float16":
        assert looks[2]["loss_scale/@0"] == looks[1]["loss_scale/@0"] / 2


def test_the_first_step_that_is_not_finite_ends_the_run_within_a_call():
    rows = classification(80)
    rows["x"][8 * 6 + 3, 0] = np.nan
    trainer = distloop.Trainer(classifier(), by_xla())
    plain = distloop.Trainer(classifier(), on(1))
    messages = []
    for each in (trainer, plain):
        fit = functools.partial(each.fit, distloop.make_dataset(rows, 8), steps=10)
        messages.append(refused(fit, "Step 7 is the first", "x", kind=Diverged))
        assert each.step == 7
    assert messages[0] == messages[1]
    assert_close(weights(trainer), weights(plain), TOLERANCE)


def test_the_console_says_what_was_compiled(capfd):
    trainer = distloop.Trainer(classifier(), by_xla(console="lines"))
    trainer.fit(batches(), steps=6)
    lines = capfd.readouterr().out
    assert "train step compiled by XLA for batches of 16 in " in lines
    assert "train step compiled by XLA for batches of 3 in " in lines


def test_a_console_that_is_gone_after_the_first_loop_loses_no_step(tmp_path, monkeypatch):
    class Pipe(io.StringIO):
        def write(self, text):
            if "compiled by XLA" in text:
                raise BrokenPipeError("nobody reads")
            return super().write(text)

    def run(name, steps):
        config = by_xla(workdir=str(tmp_path / name), console="lines")
        return everything(train(classifier(), config, batches(shuffle=True), steps))

    with monkeypatch.context() as patch, pytest.raises(BrokenPipeError):
        patch.setattr(sys, "stdout", Pipe())
        run("gone", 6)
    assert_equal(run("gone", 12), run("straight", 12))
    rows = [problems.rows_of(tmp_path / name)[-1] for name in ("gone", "straight")]
    assert rows[0]["examples_seen"] == rows[1]["examples_seen"]


def test_a_resume_in_the_other_mode_says_that_last_bits_differ(tmp_path, capfd):
    for jit_compile, steps in (("none", 3), ("loop", 6), ("loop", 9)):
        config = on(1, jit_compile=jit_compile, workdir=str(tmp_path), console="lines")
        train(classifier(), config, batches(rows=64), steps)
    restored, again = [line for line in capfd.readouterr().out.splitlines() if "restored from" in line]
    assert "jit_compile was none until here, and is loop: from here on, last bits differ" in restored
    assert "jit_compile" not in again


def test_a_step_is_replayed_in_its_mode(tmp_path):
    config = by_xla(workdir=str(tmp_path), log_every=5, checkpoint_every=10, steps=22)
    rows = batches(shuffle=True)
    before = weights(train(classifier(dropout=0.3), config, rows, 22))
    replayed = distloop.Trainer(classifier(dropout=0.3), config).replay(rows, step=22)
    assert not replayed.differences
    assert_equal({path: np.asarray(value) for path, value in replayed.weights_after.items()}, before)
    plain = distloop.Trainer(classifier(dropout=0.3), on(1, workdir=str(tmp_path), log_every=5, steps=22))
    (difference,) = plain.replay(rows, step=20).differences  # it draws other numbers for dropout
    assert "the run had jit_compile='loop', and this is 'none'" in difference


class Convolution(keras.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(3, 1, 4), name="kernel")

    def call(self, x):
        return tf.reduce_mean(tf.nn.conv1d(x[..., tf.newaxis], self.kernel, 1, "SAME"), 1)


def with_layer(layer):
    def model_fn():
        model = keras.Sequential([keras.Input((8,)), layer(), keras.layers.Dense(4)])
        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), problems.loss_fn_of(model))

    return model_fn


def in_python(x):
    y = tf.py_function(lambda t: t * 2.0, [x], tf.float32)
    y.set_shape(x.shape)
    return x + tf.stop_gradient(y)


def texts():
    rows = classification(16)
    return tf.data.Dataset.from_tensor_slices(rows | {"text": ["a"] * 16}).batch(8)


def of_lengths():
    data = tf.data.Dataset.from_tensor_slices(classification(16)).batch(8, drop_remainder=True)
    return data.map(lambda rows: rows | {"tokens": tf.zeros([8, tf.random.uniform([], 1, 9, tf.int32)])})


def generated():
    yield {"x": np.zeros([4, 8], np.float32), "label": np.zeros([4], np.int32)}


@pytest.mark.parametrize(
    ("model_fn", "data", "settings", "parts"),
    [
        (classifier(), texts, {}, ["the entry text holds texts"]),
        (classifier(), of_lengths, {}, ["the entry tokens has the shape [8, None]"]),
        (classifier(), lambda: generated, {}, ["batches that Python makes", "distloop.make_dataset"]),
        (classifier(metrics=True), batches, {}, ["the Keras metric 'auc'"]),
        (with_layer(lambda: keras.layers.Lambda(in_python)), batches, {}, ["a py_function"]),
        (with_layer(Convolution), batches, {}, ["a Conv2D", "80 times slower on CPUs"]),
        (classifier(), batches, {"num_devices": 2}, ["2 replicas", "one device", "num_devices=1"]),
        (classifier(), batches, {"locate_nonfinite": True}, ["locate_nonfinite=True and jit_compile=loop"]),
        (classifier(), batches, {"eager": True}, ["eager=True and jit_compile=loop"]),
    ],
    ids=["texts", "lengths", "generator", "metric", "py_function", "convolution", "devices", "locate", "eager"],
)
def test_what_xla_cannot_run_is_refused_before_the_first_step(model_fn, data, settings, parts):
    def fit():
        trainer = distloop.Trainer(model_fn, by_xla(**settings))
        trainers.append(trainer)
        trainer.fit(data(), steps=2)

    trainers = []
    refused(fit, *parts)
    assert all(trainer.step == 0 for trainer in trainers)


@pytest.mark.parametrize(
    ("data", "num_batches"),
    [
        (lambda rows: rows.batch(2**11), 4),  # of 2 MB
        (lambda rows: tf.data.Dataset.range(1).interleave(lambda _: rows.batch(2**11)), 1),
    ],
    ids=["known", "unknown"],
)
def test_a_stack_holds_8_mb_at_most(data, num_batches, caplog):
    rows = tf.data.Dataset.from_tensors(tf.zeros([256])).repeat(2**14)
    source = Source(data(rows), tf.distribute.get_strategy(), is_stacked=True)
    assert len(source.stack(0).sizes) == num_batches
    assert ("batch size TensorFlow does not know" in caplog.text) == (num_batches == 1)


def test_what_xla_does_not_know_is_one_sentence():
    def lengths(x):
        return x + tf.cast(tf.strings.length(tf.strings.as_string(x)), tf.float32)

    trainer = distloop.Trainer(with_layer(lambda: keras.layers.Lambda(lengths)), by_xla())
    refused(lambda: trainer.fit(batches(), steps=2), "jit_compile=loop", "XLA cannot compile the step", "=none")
    assert trainer.step == 0 and trainer.state.may_be_saved
