"""What users of Keras and Lightning type first: one short sentence each, whose advice works as it is typed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.problems import mostly_wide, refused

X, Y = np.random.default_rng(0).normal(size=(64, 4)).astype("float32"), np.arange(64) % 2
ROWS = {"x": X, "y": Y}
QUIET = distloop.Config(device="cpu", console="quiet", batch_size=32)


def model_fn():
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])

    def loss_fn(batch, training):
        logits = net(batch["x"], training=training)
        return {"loss": keras.losses.sparse_categorical_crossentropy(batch["y"], logits, from_logits=True)}

    return distloop.ModelSpec(net, keras.optimizers.SGD(0.1), loss_fn)


def with_a_number():
    """Returns batches with one number for all their rows."""
    return tf.data.Dataset.from_tensor_slices(ROWS).batch(32).map(lambda batch: {**batch, "t": tf.constant(0.5)})


def compiled(learning_rate=0.1):
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    net.compile(keras.optimizers.SGD(learning_rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return distloop.from_keras(net)


@pytest.fixture(scope="module")
def trainer():
    return distloop.Trainer(compiled(), QUIET)


# name -> what is typed, and what the sentence says to type.
CALLS = {
    "max_epochs": (
        lambda t: distloop.Trainer(model_fn, max_epochs=3, devices=1),
        "Trainer was given max_epochs=3, devices=1: give Trainer(model_fn, distloop.Config(epochs=3, num_devices=1)).",
        lambda t: distloop.Trainer(model_fn, distloop.Config(epochs=3, num_devices=1)),
    ),
    "steps": (
        lambda t: distloop.Trainer(model_fn, steps=3),
        "Trainer was given steps=3: give Trainer(model_fn, distloop.Config(steps=3)).",
        lambda t: distloop.Trainer(model_fn, distloop.Config(steps=3)),
    ),
    "a precision of Lightning's": (
        lambda t: distloop.Trainer(model_fn, precision="bf16-mixed"),
        "give Trainer(model_fn, distloop.Config(precision=...)).",
        None,
    ),
    "callbacks of a Trainer": (lambda t: distloop.Trainer(model_fn, callbacks=[]), "give fit(data, actions=[", None),
    "by position": (
        lambda t: t.fit(X, Y, 32, 3),
        "fit was given 4 arguments by position: call it as fit(x, y, batch_size=32, epochs=3).",
        lambda t: t.fit(X, Y, batch_size=32, epochs=3),
    ),
    "callbacks": (
        lambda t: t.fit(X, Y, epochs=1, callbacks=[keras.callbacks.Callback()]),
        "give actions=[distloop.from_callback(callback)].",
        lambda t: t.fit(X, Y, epochs=1, actions=[distloop.from_callback(keras.callbacks.Callback())]),
    ),
    "ckpt_path": (
        lambda t: t.fit(X, Y, epochs=1, ckpt_path="last"),
        "set Config(workdir=...), with which the same command resumes, or Config(init_from=...).",
        lambda t: [distloop.Config(workdir="runs/a"), distloop.Config(init_from="runs/a")],
    ),
    "train_dataloaders": (
        lambda t: t.fit(train_dataloaders=[(X, Y)], val_dataloaders=[(X, Y)]),
        "fit was given train_dataloaders=...: give the data first, as in fit(x, y, epochs=2) or fit(dataset, epochs=2)",
        lambda t: [t.fit(X, Y, epochs=2), t.fit(distloop.make_dataset((X, Y), 32), epochs=2)],
    ),
    "val_dataloaders": (
        lambda t: t.fit(X, Y, epochs=1, val_dataloaders=[(X, Y)]),
        "as in evals={'val': dataset}?",
        lambda t: t.fit(X, Y, epochs=1, evals={"val": distloop.make_dataset((X, Y), 32)}),
    ),
    "x by name": (lambda t: t.fit(x=X, y=Y, epochs=1), "give the data first, as in fit(x, y, epochs=2)", None),
    "no data": (lambda t: t.fit(epochs=1), "fit was called without data: give the data first", None),
    "a setting": (
        lambda t: t.fit(X, Y, epochs=1, log_every_n_steps=5),
        "set Config(log_every=5).",
        lambda t: distloop.Config(log_every=5),
    ),
    "evaluate by position": (lambda t: t.evaluate(X, Y, 32), "set Config(batch_size=...), by which arrays", None),
    "evaluate(verbose=0)": (lambda t: t.evaluate(X, Y, verbose=0), "leave it out, as nothing is printed", None),
    "predict(batch_size=8)": (lambda t: t.predict(X, batch_size=8), "set Config(batch_size=...), by which", None),
    "evals of arrays": (
        lambda t: distloop.Trainer(model_fn, QUIET).fit(ROWS, steps=1, evals=ROWS),
        "evals has one array each under 'x', 'y', and the data to train on several: name the datasets, as in evals={'v",
        lambda t: distloop.Trainer(model_fn, QUIET).fit(ROWS, steps=1, evals={"val": ROWS}),
    ),
    "a metric without its evaluation": (
        lambda t: distloop.Trainer(model_fn, QUIET).fit(ROWS, steps=1, actions=[distloop.StopEarly("val/loss")]),
        "nothing reports: give fit evals={'val': dataset}, which reports 'val/loss'.",
        lambda t: t.fit(X, Y, epochs=1, evals={"val": (X, Y)}, actions=[distloop.StopEarly("val/loss")]),
    ),
    "a number beside rows in batches": (
        lambda t: distloop.Trainer(model_fn, QUIET).fit(with_a_number(), steps=1),
        "entry 't' is a scalar beside rows; distloop takes batches, whose entries have a row for each example, [B, "
        "...]: repeat it with Dataset.map, as in tf.repeat(scalar, tf.shape(x)[0])",
        lambda t: distloop.Trainer(model_fn, QUIET).fit(
            with_a_number().map(lambda b: {**b, "t": tf.repeat(b["t"], tf.shape(b["x"])[0])}), steps=1
        ),
    ),
    "a number among arrays": (
        lambda t: distloop.Trainer(model_fn, QUIET).fit({**ROWS, "t": np.float32(0.5)}, steps=1),
        "The number 0.5 was given among arrays, which have a row for each example, [N, ...]: repeat it with np.full(",
        lambda t: distloop.Trainer(model_fn, QUIET).fit({**ROWS, "t": np.full(64, 0.5)}, steps=1),
    ),
    "a number of Python among arrays": (
        lambda t: distloop.Trainer(model_fn, QUIET).fit({**ROWS, "t": 0.5}, steps=1),
        "The data given is a dict that holds a float under 't'; distloop takes",
        None,
    ),
    "steps in epochs": (
        lambda t: distloop.Config(steps="2 epochs"),
        "give a whole number, 0 or more, or until='2 epochs'.",
        lambda t: distloop.Config(until="2 epochs"),
    ),
    "epochs and a half": (
        lambda t: t.fit(X, Y, epochs=1.5),
        "it takes a whole number, 1 or more: give until='1.5 epochs'.",
        lambda t: t.fit(X, Y, until="1.5 epochs"),
    ),
    "a setting of others": (
        lambda t: distloop.Config(max_epochs=3),
        "'max_epochs' is no setting of distloop: did you mean epochs?",
        lambda t: distloop.Config(epochs=3),
    ),
}

LONG = {"evals of arrays", "a number among arrays"}  # which train anew


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_wide(CALLS, *(CALLS.keys() - LONG)))
def test_one_short_sentence_says_what_works_as_it_is_typed(name, trainer):
    wrong, advice, right = CALLS[name]
    try:
        wrong(trainer)
    except ValueError as error:
        message = str(error)
    else:
        pytest.fail("it was taken")
    assert advice in message and "\n" not in message and (len(message) <= 330 or right is None), message
    if right is not None:
        right(trainer)


def test_a_name_that_was_not_reported_is_told_with_the_one_that_was():
    result = distloop.History()
    result.write(1, {"loss": 1.0, "val/loss": 2.0})
    result.update({"loss": 1.0, "val/loss": 2.0})
    for numbers in (result, result.history, result.steps):
        with pytest.raises(KeyError, match="no 'val_loss': did you mean 'val/loss'?"):
            numbers["val_loss"]
        assert numbers.get("val_loss") is None and "val_loss" not in numbers
    del result.history["val/loss"]
    with pytest.raises(KeyError, match=r"no 'val_loss': there are \['loss'\]."):
        result.history["val_loss"]


@pytest.mark.slow
def test_class_weights_that_no_loss_fn_reads_are_refused():
    def model_fn(reads_weights=False):
        net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])

        def loss_fn(batch, training):
            x, y, weight = batch
            loss = keras.losses.sparse_categorical_crossentropy(y, net(x, training=training), from_logits=True)
            return {"loss": distloop.weighted(loss, weight) if reads_weights else loss}

        return distloop.ModelSpec(net, keras.optimizers.SGD(0.1), loss_fn)

    trainer = distloop.Trainer(model_fn, QUIET)
    sentence = "fit was given class weights, the third entry of a batch, which no loss_fn reads"
    refused(lambda: trainer.fit(X, Y, epochs=1, class_weight={0: 2.0}), sentence, "distloop.weighted(values, weight)")
    assert trainer.step == 0
    distloop.Trainer(lambda: model_fn(True), QUIET).fit(X, Y, epochs=1, class_weight={0: 2.0})


@pytest.mark.slow
def test_a_plateau_of_an_optimizer_with_a_schedule_is_refused():
    def plateau():  # an action belongs to one run
        return distloop.from_callback(keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=100.0))

    trainer = distloop.Trainer(compiled(distloop.make_schedule(0.1, "100 %")), QUIET)
    refused(lambda: trainer.fit(X, Y, epochs=4, actions=[plateau()]), "ReduceLROnPlateau", "the optimizer's schedule")
    assert trainer.step == 0
    distloop.Trainer(compiled(), QUIET).fit(X, Y, epochs=2, actions=[plateau()])
