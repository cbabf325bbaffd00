"""The history of examples: each value at its row and epoch, the same file on any devices and after any stop."""

import os
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.training.loop import Diverged
from tests import forked
from tests.problems import classification, classifier, mostly_wide, on, refused

ROWS, SIZE, STEPS = 61, 15, 12  # 5 batches an epoch, the last one of a single row


def rows_of(count=ROWS, **changes):
    return {**classification(count), "row": np.arange(count), **changes}


def data(size=SIZE, count=ROWS, **changes):
    return distloop.make_dataset(rows_of(count, **changes), size, shuffle=True, seed=3)


def looking_around(step):
    """A step whose second pass is at other weights."""
    gradients = step.gradients()
    with step.moved({path: tf.ones_like(gradient) for path, gradient in gradients.items()}):
        step.gradients()
    return gradients


def model_fn_of(kind=""):
    """A `model_fn` whose values are the loss, the row itself, the row as tokens, and the loss with weights."""

    def model_fn():
        dropout = [keras.layers.Dropout(0.3)] if kind == "dropout" else []
        layers = [keras.Input((8,)), keras.layers.Dense(16, "tanh"), *dropout, keras.layers.Dense(4)]
        net = keras.Sequential(layers)

        def loss_fn(batch, training):
            logits = net(batch["x"], training=training)
            if kind == "gathers":
                logits -= tf.reduce_mean(distloop.gather_rows(logits)[0])
            loss = keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)
            row = tf.cast(batch["row"], tf.float32)
            tokens = distloop.weighted(
                tf.stack([row, row + 1, row], 1), tf.constant([[1.0, 0.0, 3.0]]) * (row[:, None] + 1)
            )
            return {"loss": loss, "row": row, "tokens": tokens, "weighted": distloop.weighted(loss, batch["weight"])}

        step_fn = looking_around if kind == "two passes" else None
        return distloop.ModelSpec(net, keras.optimizers.SGD(0.1, momentum=0.9), loss_fn, step_fn=step_fn)

    return model_fn


VALUES = ("loss", "row", "tokens", "weighted")


def history_of(workdir):
    return np.load(os.path.join(workdir, "examples.npy"))


def bytes_of(workdir):
    with open(os.path.join(workdir, "examples.npy"), "rb") as file:
        return file.read()


def train(workdir, replicas=1, *, kind="", dataset=None, steps=STEPS, every="1 epoch", actions=(), **settings):
    config = on(replicas, workdir=str(workdir), steps=steps, **settings)
    history = distloop.ExampleHistory(VALUES, every=every)
    distloop.Trainer(model_fn_of(kind), config).fit(data() if dataset is None else dataset, actions=[*actions, history])
    return history_of(workdir)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """The workdir of a run on two replicas."""
    workdir = tmp_path_factory.mktemp("two")
    train(workdir, 2, log_every=1)
    return workdir


@pytest.fixture(scope="module")
def of_virtual_replicas(tmp_path_factory):
    """The bytes of the file that a run on one device writes, with dropout and four virtual replicas."""
    workdir = tmp_path_factory.mktemp("one")
    train(workdir, 1, kind="dropout", virtual_replicas=4, log_every=3)
    return bytes_of(workdir)


@pytest.mark.parametrize(
    ("replicas", "kind", "settings"),
    mostly_wide(
        [
            (1, "", {}),
            (3, "", {"microbatches": 2}),
            (2, "", {"virtual_replicas": 4, "microbatches": 2}),
            (1, "gathers", {"virtual_replicas": 2}),
            (2, "two passes", {"microbatches": 3}),
            (1, "two passes", {"virtual_replicas": 4}),
            (2, "dropout", {"jit_compile": "pass"}),
            (2, "", {"eager": True}),
            (2, "", {"precision": "mixed_float16"}),
            (1, "", {"log_every": 1, "steps_per_loop": 2}),
        ],
        (2, "", {"virtual_replicas": 4, "microbatches": 2}),
        (2, "two passes", {"microbatches": 3}),
    ),
)
def test_each_value_stands_at_its_row_and_epoch(tmp_path, replicas, kind, settings):
    assert_each_stands_at_its_row(train(tmp_path, replicas, kind=kind, **settings))


def assert_each_stands_at_its_row(history):
    assert history.shape == (3, ROWS) and history.dtype.names == VALUES
    rows = np.arange(ROWS, dtype=np.float32)
    for name in ("row", "tokens"):
        assert np.array_equal(history[name][0], rows) and np.array_equal(history[name][1], rows)
        seen = ~np.isnan(history[name][2])
        assert np.array_equal(history[name][2][seen], rows[seen]) and seen.sum() == 2 * SIZE
    order = data().order
    for step in range(5):
        (numbers, epochs) = order.rows(tf.constant(step, tf.int64))
        assert not np.any(epochs) and np.all(np.isfinite(history["loss"][0][numbers.numpy()]))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", mostly_wide([2, 1, 3]))
def test_the_means_of_a_row_of_the_run_are_those_of_its_examples(tmp_path, replicas, of_two):
    if replicas != 2:
        train(tmp_path, replicas, log_every=1)
    workdir = of_two if replicas == 2 else tmp_path
    history, order = history_of(workdir), data().order
    assert_each_stands_at_its_row(history)
    for row in distloop.read_metrics(str(workdir)):
        numbers, epochs = (t.numpy() for t in order.rows(tf.constant(row["step"] - 1, tf.int64)))
        assert np.mean(history["loss"][epochs, numbers]) == pytest.approx(row["loss"], rel=1e-5)


def test_an_example_without_weight_has_no_value_of_that_step(tmp_path):
    weight = np.where(np.arange(ROWS) % 4 == 1, 0.0, 2.5).astype("float32")
    history = train(tmp_path, 2, dataset=data(weight=weight), steps=5)
    assert np.array_equal(np.isnan(history["weighted"][0]), weight == 0)
    assert np.array_equal(history["weighted"][0][weight > 0], history["loss"][0][weight > 0])  # bit for bit


@pytest.mark.slow
def test_a_source_that_a_mixture_reads_again_has_its_own_epochs(tmp_path):
    rows = rows_of()
    small, large = ({name: value[part] for name, value in rows.items()} for part in (slice(0, 7), slice(7, None)))
    mixed = distloop.make_dataset(distloop.Mixture({"small": small, "large": large}, {"small": 0.5, "large": 0.5}), 14)
    history = train(tmp_path, 2, dataset=mixed, steps=9)  # 63 examples of each source
    assert history.shape == (9, ROWS)
    assert np.array_equal(history["row"][:, :7], np.tile(np.arange(7), (9, 1)))
    assert np.array_equal(history["row"][0], np.arange(ROWS)) and np.isnan(history["row"][2, 7:]).all()
    assert (~np.isnan(history["row"][1, 7:])).sum() == 63 - (ROWS - 7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_wide(["dropout", ""]))
def test_the_file_is_the_same_on_any_devices_to_the_bit(tmp_path, kind, of_virtual_replicas):
    settings = {"virtual_replicas": 4, "kind": kind}
    if kind != "dropout":
        train(tmp_path / "one", 1, **settings)
    train(tmp_path / "moved", 2, **settings, every="4 steps", steps=7)
    train(tmp_path / "moved", 4, **settings)
    expected = of_virtual_replicas if kind == "dropout" else bytes_of(tmp_path / "one")
    assert bytes_of(tmp_path / "moved") == expected


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dropout", ""])
def test_runs_on_two_devices_and_from_four_to_one_write_the_same_file(tmp_path, kind):
    settings = {"virtual_replicas": 4, "kind": kind, "log_every": 3}
    train(tmp_path / "one", 1, **settings)
    train(tmp_path / "two", 2, **settings, every="4 steps")
    assert bytes_of(tmp_path / "two") == bytes_of(tmp_path / "one")
    train(tmp_path / "moved", 4, **settings, steps=7)
    train(tmp_path / "moved", 1, **settings)
    assert bytes_of(tmp_path / "moved") == bytes_of(tmp_path / "one")


@pytest.mark.slow
def test_replicas_that_add_in_another_order_write_the_same_to_1e_6(tmp_path, of_two):
    three = train(tmp_path, 3)
    assert np.allclose(history_of(of_two)["loss"], three["loss"], rtol=1e-6, atol=1e-6, equal_nan=True)


PROGRAM = """
import os, signal, sys
import distloop
from tests.examples import test_example_history as tests
from tests.problems import every

workdir, devices, killed_at = sys.argv[1], *map(int, sys.argv[2:])
distloop.prepare(tests.on(devices, virtual_replicas=4))

def kill(report):
    if report.step == killed_at:
        os.kill(os.getpid(), signal.SIGKILL)

settings = {"virtual_replicas": 4, "checkpoint_every": 4, "actions": [every(1, kill)]}
tests.train(workdir + "/run", devices, kind="dropout", **settings)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "steps"), mostly_wide([("1", ["2", "9"]), ("2", ["2", "6", "9", "11"])]))
def test_a_run_that_is_killed_at_any_step_writes_the_same_file(tmp_path, devices, steps, of_virtual_replicas):
    for step in steps:
        assert forked.run_program(tmp_path, PROGRAM, devices, step).returncode == -9
    done = forked.run_program(tmp_path, PROGRAM, devices, "0")
    assert done.returncode == 0, done.stderr
    assert bytes_of(tmp_path / "run") == of_virtual_replicas


def on_workers(workdir):
    train(workdir, 1, kind="dropout", virtual_replicas=4, strategy="multi_worker")


@pytest.mark.slow
def test_workers_write_the_same_file_to_the_bit(tmp_path, of_virtual_replicas):
    forked.run_in_workers(on_workers, 2, str(tmp_path))
    assert bytes_of(tmp_path) == of_virtual_replicas


@pytest.mark.slow
def test_after_an_error_the_file_has_the_steps_of_the_checkpoint(tmp_path, of_two):
    def fail(report):
        if report.step == 7:
            raise ValueError("planted.")

    fail.every = 1
    with pytest.raises(ValueError, match="planted"):
        train(tmp_path, 2, actions=[fail])
    assert (~np.isnan(history_of(tmp_path)["row"][1])).sum() == 2 * SIZE
    train(tmp_path, 2)
    assert bytes_of(tmp_path) == bytes_of(of_two)


@pytest.mark.slow
def test_a_run_that_goes_back_leaves_the_batch_out_that_failed(tmp_path):
    x = np.array(rows_of()["x"])
    x[17] = np.nan
    dataset = data(x=x)
    history = train(tmp_path, 2, dataset=dataset, on_divergence="rollback", checkpoint_every=2, steps=10)
    left_out = np.isnan(history["row"][0])
    assert left_out.sum() == SIZE and left_out[17] and np.isnan(history["row"][1]).sum() == SIZE
    with pytest.raises(Diverged):
        train(tmp_path / "raises", 1, dataset=dataset)


@pytest.mark.slow
def test_a_second_fit_goes_on_and_one_without_the_action_records_nothing(tmp_path, of_two):
    trainer = distloop.Trainer(model_fn_of(), on(2, workdir=str(tmp_path)))
    dataset, history = data(), distloop.ExampleHistory(VALUES)
    trainer.fit(dataset, steps=3, actions=[history], evals={"test": dataset})
    trainer.fit(dataset, steps=STEPS, actions=[history], evals={"test": dataset})
    assert bytes_of(tmp_path) == bytes_of(of_two)
    assert "example history" not in trainer.evaluate(dataset)
    trainer.fit(dataset, steps=15)
    assert bytes_of(tmp_path) == bytes_of(of_two)
    refused(
        lambda: trainer.fit(data(), steps=20, actions=[history]),
        "other data at step 15 than ",
        "examples.npy",
        "move the file away",
    )


@pytest.mark.slow
def test_the_weights_are_those_of_the_run_without_it(tmp_path):
    def digest(**arguments):
        trainer = distloop.Trainer(classifier(dropout=0.4, metrics=True), on(2, workdir=arguments.pop("workdir", "")))
        trainer.fit(data(), steps=9, **arguments)
        return distloop.digest(trainer.model)

    assert digest() == digest(workdir=str(tmp_path), actions=[distloop.ExampleHistory()])


@pytest.mark.slow
def test_one_update_of_several_is_recorded_by_its_name(tmp_path):
    def model_fn():
        models = {name: keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]) for name in ("a", "b")}

        def loss_of(name):
            return lambda batch, training: {
                "loss": models[name](batch["x"])[:, 0] ** 2,
                "row": tf.cast(batch["row"], tf.float32),
            }

        updates = [distloop.Update(n, loss_of(n), keras.optimizers.SGD(0.01), f"^{n}/") for n in models]
        return distloop.ModelSpec(models, updates=updates)

    def fit(values):
        trainer = distloop.Trainer(model_fn, on(2, workdir=str(tmp_path)))
        trainer.fit(data(), steps=5, actions=[distloop.ExampleHistory(values)])

    refused(lambda: fit(("a/loss", "b/loss")), "values=['a/loss', 'b/loss'], which no loss_fn returns", "['a', 'b']")
    fit(("b/row", "b/loss"))
    assert np.array_equal(history_of(tmp_path)["b/row"][0], np.arange(ROWS))


REFUSALS = {
    "no names": ({"values": "loss"}, {}, "values='loss'; give names"),
    "no workdir": ({}, {"workdir": ""}, "there is none: give workdir="),
    "no such value": ({"values": ("margin",)}, {}, "the value 'margin', and loss_fn returns ['loss', 'row'"),
    "a number": ({"values": 3}, {}, "values=3; give names"),
    "by time": ({"every": "10 min"}, {}, "every='10 min'; it takes steps, epochs or examples"),
    "at the end": ({"every": 0}, {}, "every=0; it takes steps, epochs or examples"),
    "loop": ({}, {"jit_compile": "loop", "num_devices": 1}, "with jit_compile=loop", "use jit_compile=pass"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_it_cannot_record_is_refused_before_the_first_step(tmp_path, case):
    arguments, settings, *words = REFUSALS[case]
    trainer = distloop.Trainer(model_fn_of(), on(**{"replicas": 2, "workdir": str(tmp_path), "steps": 3} | settings))
    refused(lambda: trainer.fit(data(), actions=[distloop.ExampleHistory(**arguments)]), *words)
    assert trainer.step == 0


def test_batches_that_a_map_gave_another_number_of_rows_are_refused(tmp_path):
    trainer = distloop.Trainer(model_fn_of(), on(2, workdir=str(tmp_path), steps=3))
    fewer = data().map(lambda batch: {name: value[1:] for name, value in batch.items()})
    refused(
        lambda: trainer.fit(fewer, actions=[distloop.ExampleHistory()]),
        "rows have no numbers",
        "a worker's own shard",
        "another number of rows",
    )
    assert trainer.step == 0


def test_rows_without_numbers_are_refused_before_the_first_step(tmp_path):
    trainer = distloop.Trainer(model_fn_of(), on(2, workdir=str(tmp_path), steps=3))
    dataset = tf.data.Dataset.from_tensor_slices(rows_of()).batch(8)
    refused(
        lambda: trainer.fit(dataset, actions=[distloop.ExampleHistory()]),
        "data whose rows have no numbers",
        "distloop.make_dataset",
    )
    assert trainer.step == 0


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Returns a function that copies the files of a run of three steps into a directory."""
    workdir = tmp_path_factory.mktemp("begun")
    train(workdir, steps=3)
    return lambda path: shutil.copytree(workdir, path, dirs_exist_ok=True)


def test_a_file_of_other_values_is_refused(tmp_path, begun):
    begun(tmp_path)
    trainer = distloop.Trainer(model_fn_of(), on(1, workdir=str(tmp_path), steps=6))
    refused(
        lambda: trainer.fit(data(), actions=[distloop.ExampleHistory(("loss",))]),
        "61 rows and values=['loss']",
        "move the file away",
    )


LOGITS = np.array([[0.5, 2.0, 1.0], [0.0, 3.0, 1.0], [4.0, 4.0, -1.0]], "float32")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_margin_is_how_much_the_logit_of_the_label_exceeds_the_others(dtype):
    margin = distloop.margin(tf.constant([1, 0, 1]), tf.constant(LOGITS, dtype))
    assert margin.dtype == tf.float32 and margin.numpy().tolist() == [1.0, -3.0, 0.0]
    assert distloop.margin(np.array([[1], [0], [1]]), LOGITS).numpy().tolist() == [1.0, -3.0, 0.0]


SHAPES = {
    "one logit": ([0, 1], [2, 1], "logits of shape (2, 1)", "two classes or more", "tf.concat"),
    "no axis of classes": ([0, 1], [2], "logits of shape (2,)", "[B, C]"),
    "one-hot": ([[1, 0, 0], [0, 1, 0]], [2, 3], "labels of shape (2, 3)", "numbers of classes, [B]", "tf.argmax"),
    "other rows": ([0, 1, 1], [2, 3], "labels of shape (3,) for logits (2, 3)", "numbers of classes, [B]"),
    "one label": (1, [2, 3], "labels of shape ()", "numbers of classes, [B]"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_a_margin_of_other_shapes_is_refused_at_tracing(case):
    labels, shape, *words = SHAPES[case]
    refused(lambda: distloop.margin(np.array(labels), np.ones(shape)), *words)
    traced = tf.function(distloop.margin, autograph=False)
    refused(lambda: traced.get_concrete_function(tf.constant(labels), tf.TensorSpec(shape)), *words)


def test_a_margin_is_traced_where_the_size_of_the_batch_is_unknown():
    specs = tf.TensorSpec([None]), tf.TensorSpec([None, 3])
    margin = tf.function(distloop.margin).get_concrete_function(*specs)
    assert margin(tf.constant([1.0, 0.0, 1.0]), tf.constant(LOGITS)).numpy().tolist() == [1.0, -3.0, 0.0]
    of_unknown = tf.function(distloop.margin).get_concrete_function(tf.TensorSpec(None), tf.TensorSpec([None, 3]))
    assert of_unknown(tf.constant([[1.0], [0.0], [1.0]]), tf.constant(LOGITS)).numpy().tolist() == [1.0, -3.0, 0.0]


def test_the_margin_of_a_label_that_is_no_class_is_nan():
    for labels in ([-1, 3, 2**32 + 1], [0.5, 1.9, np.nan]):
        assert np.isnan(distloop.margin(np.array(labels), LOGITS).numpy()).all()


def write(path, **values):
    rows = np.zeros(np.shape(next(iter(values.values()))), [(name, np.float32) for name in values])
    for name, value in values.items():
        rows[name] = value
    np.save(path / "examples.npy", rows)


def test_examples_are_ranked_by_the_mean_of_their_margins(tmp_path):
    margin = [[3.0, -1.0, np.nan, np.nan], [1.0, -2.0, -5.0, np.nan], [-9.0, 9.0, np.nan, np.nan]]
    write(tmp_path, **{"loss": np.zeros([3, 4]), "critic/margin": margin})
    assert distloop.rank_mislabelled(str(tmp_path)).tolist() == [2, 0, 1]
    assert distloop.rank_mislabelled(str(tmp_path), epochs=2).tolist() == [2, 1, 0]
    assert distloop.rank_mislabelled(str(tmp_path), epochs=1).tolist() == [1, 0]


def test_without_margins_the_largest_loss_is_first(tmp_path):
    write(tmp_path, loss=[[0.1, 3.0, np.nan, 0.5]])
    assert distloop.rank_mislabelled(str(tmp_path)).tolist() == [1, 3, 0]


def test_what_cannot_be_ranked_is_refused(tmp_path):
    refused(lambda: distloop.rank_mislabelled(str(tmp_path)), "holds no examples.npy", "distloop.ExampleHistory")
    write(tmp_path, accuracy=[[1.0, 0.0]])
    refused(lambda: distloop.rank_mislabelled(str(tmp_path)), "has ['accuracy']: record 'margin'")
    refused(lambda: distloop.rank_mislabelled(str(tmp_path), epochs=0), "epochs=0", "1 or more")


@pytest.mark.parametrize("content", [b"garbage", b"", "cut", "plain"])
def test_a_damaged_file_is_neither_ranked_nor_gone_on_with(tmp_path, content, begun):
    begun(tmp_path)
    path = tmp_path / "examples.npy"
    if content == "plain":
        np.save(path, np.zeros([1, 61]))
    else:
        path.write_bytes(path.read_bytes()[:-7] if content == "cut" else content)
    found = refused(lambda: distloop.rank_mislabelled(str(tmp_path)), "examples.npy' is damaged")
    assert "pickle" not in found
    trainer = distloop.Trainer(model_fn_of(), on(1, workdir=str(tmp_path), steps=6))
    refused(
        lambda: trainer.fit(data(), actions=[distloop.ExampleHistory(("loss", "row"))]),
        "examples.npy' is damaged",
        "move the file away",
    )
