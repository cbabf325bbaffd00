"""What users get wrong: each mistake is told in one sentence, what was given and what to do, before the first step."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.training.loop import Diverged
from tests.problems import assert_equal, classification, classifier, mostly_wide, on, refused, weights

RNG = np.random.default_rng(0)
ROWS = {"x": RNG.normal(size=(12, 3)).astype(np.float32), "y": RNG.normal(size=(12, 2)).astype(np.float32)}

REPLICAS = pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])


def dataset(rows=ROWS, batch_size=4):
    return distloop.make_dataset(rows, batch_size)


def net():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="out")], name="net")


def squares(model, batch, training=False):
    return tf.square(model(batch["x"], training=training) - batch["y"])  # [B, 2]


def loss_of(model, batch, training=False):
    return tf.reduce_mean(squares(model, batch, training), -1)  # [B]


def make_model_fn(returned=None, optimizer=None, **spec):
    """Makes a model_fn whose loss_fn returns `returned(model, batch)`; `spec` holds functions of the model."""

    def model_fn():
        model = net()

        def loss_fn(batch, training):
            return returned(model, batch) if returned else {"loss": loss_of(model, batch, training)}

        made = {"predict_fn": lambda m: lambda batch: m(batch["x"], training=False), **spec}
        made = {name: value(model) if value else None for name, value in made.items()}
        return distloop.ModelSpec(model, optimizer() if optimizer else keras.optimizers.SGD(0.1), loss_fn, **made)

    return model_fn


def make_trainer(returned=None, replicas=1, settings=None, **spec):
    return distloop.Trainer(make_model_fn(returned, **spec), on(replicas, **(settings or {})))


def fit_refused(*parts, trainer=None, data=None, replicas=1, in_step=0, **made):
    """Checks that `fit` refuses before the first step, or in step `in_step`, leaving the weights as they are."""
    trainer = trainer or make_trainer(replicas=replicas, **made)
    before = weights(trainer) if trainer.state.is_built else {}
    message = refused(lambda: trainer.fit(dataset() if data is None else data, steps=5), *parts)
    assert trainer.step <= in_step
    if before:
        assert_equal(weights(trainer), before)
    return message


# loss_fn ------------------------------------------------------------------------------------------------------------


PER_EXAMPLE = "one value per example"

# What loss_fn returns, and what the sentence says.
RESULTS = {
    "a loss that is reduced already": (
        lambda model, batch: {"loss": tf.reduce_mean(loss_of(model, batch))},
        ('loss_fn returned "loss" of shape []', f"{PER_EXAMPLE}, [B]", "drop the reduce_mean"),
    ),
    "a loss that a Keras object reduced": (
        lambda model, batch: {"loss": keras.losses.MeanSquaredError()(batch["y"], model(batch["x"]))},
        ('loss_fn returned "loss" of shape []', "drop the reduce_mean"),
    ),
    "labels that lack the axis of the predictions": (
        lambda model, batch: {"loss": tf.square(batch["y"][:, 0] - model(batch["x"])[:, :1])},
        ('loss_fn returned "loss" of shape [B, B]', "[B] and [B, 1] were broadcast", PER_EXAMPLE),
    ),
    "a value that is reduced over the batch": (
        lambda model, batch: {"loss": loss_of(model, batch), "error": tf.reduce_mean(squares(model, batch), 0)},
        ('loss_fn returned "error" of shape [2]', PER_EXAMPLE),
    ),
    "weights that are not per example": (
        lambda model, batch: {"loss": distloop.weighted(loss_of(model, batch), 2.0)},
        ('The value "loss" of shape', "with weights of shape", "one weight per example"),
    ),
    "no loss": (
        lambda model, batch: {"error": loss_of(model, batch)},
        ("loss_fn returned ['error'] without \"loss\"", "return {"),
    ),
    "a tensor": (loss_of, ("loss_fn returned a ", "; distloop needs a dict", "return {")),
    "a tuple": (lambda model, batch: (1, 2), ("loss_fn returned a ", "; distloop needs a dict", "return {")),
    "nothing": (lambda model, batch: None, ("loss_fn returned a ", "; distloop needs a dict", "return {")),
    "a loss that depends on no variable": (
        lambda model, batch: {"loss": tf.reduce_sum(batch["y"], -1)},
        ("The loss does not depend on any variable", "compute it from the model's outputs"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("returned", "parts"), RESULTS.values(), ids=RESULTS)
def test_a_loss_fn_that_returns(returned, parts):
    fit_refused(*parts, returned=returned)


@pytest.mark.slow
@pytest.mark.parametrize("result", ["a loss that is reduced already", "weights that are not per example"])
def test_a_loss_fn_that_returns_on_two_replicas(result):
    returned, parts = RESULTS[result]
    fit_refused(*parts, returned=returned, replicas=2)


@pytest.mark.slow
@pytest.mark.parametrize("is_static", [False, True])
def test_a_loss_that_is_reduced_with_its_axes_kept(is_static):
    fit_refused(
        'loss_fn returned "loss" of shape [1, 1]',
        "one value per example",
        "drop the reduce_mean",
        data=distloop.make_dataset(ROWS, 4, drop_remainder=is_static),
        returned=lambda model, batch: {"loss": tf.reduce_mean(squares(model, batch), keepdims=True)},
    )


@pytest.mark.slow
@REPLICAS
def test_a_value_per_part_of_an_example_that_was_flattened(replicas):
    fit_refused(
        'The value "error"',
        "one value per example",
        replicas=replicas,
        in_step=1,
        returned=lambda model, batch: {
            "loss": loss_of(model, batch),
            "error": tf.reshape(squares(model, batch), [-1]),  # [2 * B], known while running only
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["fit", "evaluate"])
def test_a_tuple_under_a_name_without_a_metric(verb):
    trainer = make_trainer(lambda model, batch: {"loss": loss_of(model, batch), "auc": (batch["y"], model(batch["x"]))})
    action = {"fit": lambda: trainer.fit(dataset(), steps=1), "evaluate": lambda: trainer.evaluate(dataset())}[verb]
    refused(action, 'loss_fn returned a tuple under "auc"', "ModelSpec(metrics=...)", "declare")
    assert trainer.step == 0


@pytest.mark.slow
def test_values_under_the_name_of_a_metric():
    fit_refused(
        '"auc", which is a Keras metric',
        "tuple of arguments for its update_state",
        returned=lambda model, batch: {"loss": loss_of(model, batch), "auc": loss_of(model, batch)},
        metrics=lambda model: {"auc": keras.metrics.AUC()},
    )


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["fit", "evaluate"])
def test_a_metric_that_loss_fn_never_feeds(verb):
    trainer = make_trainer(metrics=lambda model: {"auc": keras.metrics.AUC()})
    action = {"fit": lambda: trainer.fit(dataset(), steps=1), "evaluate": lambda: trainer.evaluate(dataset())}[verb]
    refused(action, "auc", "loss_fn")
    assert trainer.step == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["regularization", "learning_rate", "skipped_steps", "weight_norm", "step_secs_p50"])
def test_a_name_that_distloop_reports_itself(name):
    fit_refused(name, returned=lambda model, batch: {"loss": loss_of(model, batch), name: loss_of(model, batch)})


# Data ---------------------------------------------------------------------------------------------------------------


def verbs(trainer, data):
    return {
        "fit": lambda: trainer.fit(data, steps=5),
        "fit epochs": lambda: trainer.fit(data, epochs=1),
        "evals": lambda: trainer.fit(dataset(), steps=1, evals={"test": data}),
        "evaluate": lambda: trainer.evaluate(data),
        "predict": lambda: trainer.predict(data),
        "stream": lambda: trainer.stream_predictions(data),
    }


VERBS = pytest.mark.parametrize("verb", ["fit", "evals", "evaluate", "predict"])


@VERBS
def test_a_dataset_without_a_batch_axis(verb):
    trainer = make_trainer()
    single_examples = tf.data.Dataset.from_tensor_slices({**ROWS, "id": np.arange(12)})
    refused(verbs(trainer, single_examples)[verb], "single examples", "takes batches", "call .batch(batch_size)")
    assert trainer.step == 0


@VERBS
def test_examples_that_look_like_batches_of_different_sizes(verb):
    trainer = make_trainer()
    data = tf.data.Dataset.from_tensor_slices(ROWS)  # x [3], y [2]
    refused(verbs(trainer, data)[verb], "first axes of [2, 3]", "call .batch(batch_size)")
    assert trainer.step == 0


EMPTY = {"known": lambda: dataset().take(0), "unknown": lambda: dataset().filter(lambda batch: False)}


@pytest.mark.slow
@pytest.mark.parametrize("length", EMPTY)
@pytest.mark.parametrize("verb", ["fit", "fit epochs", "evals", "evaluate", "predict"])
def test_an_empty_dataset(verb, length):
    trainer = make_trainer()
    refused(verbs(trainer, EMPTY[length]())[verb], "dataset", "empty", "one batch")
    if (verb, length) != ("evals", "unknown"):  # that it is empty shows when it is read, after the first step
        assert trainer.step == 0


@pytest.mark.parametrize(
    "data",
    [[{"x": ROWS["x"]}], (ROWS["x"], None), {"x": ROWS["x"], "y": 3}],
    ids=["list", "tuple", "dict"],
)
@VERBS
def test_structures_that_are_not_of_arrays_alone(verb, data):
    trainer = make_trainer()
    refused(
        verbs(trainer, data)[verb],
        f"is a {type(data).__name__}",
        "tf.data.Dataset",
        "arrays or lists of numbers, [N, ...]",
        "distloop.make_dataset(examples, batch_size)",
    )
    assert trainer.step == 0


def generated(*batches):
    signature = {"x": tf.TensorSpec([None, 3]), "y": tf.TensorSpec([None, 2])}
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)


def batch_of(rows, **changes):
    return {**{name: array[:rows] for name, array in ROWS.items()}, **changes}


CHANGES = {
    "structure": {name: ROWS[name] for name in "x"},
    "dtype": batch_of(4, y=np.array([["a", "b"]] * 4)),
    "rank": batch_of(4, y=ROWS["y"][:4, 0]),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", mostly_wide(CHANGES))
@pytest.mark.parametrize(
    ("verb", "place", "replicas"),
    [("fit", 0, 1), ("fit", 0, 2), ("fit", 2, 1), ("evaluate", 2, 1), ("predict", 2, 2)],
)
def test_a_generator_that_changes_its_batches(verb, place, replicas, change):
    trainer = make_trainer(replicas=replicas)
    before = weights(trainer)
    batches = [batch_of(4)] * place + [CHANGES[change]]
    refused(
        verbs(trainer, generated(*batches))[verb],
        "A batch differs from those before it",
        "same structure, dtypes and number of axes",
        "correct the generator or its output_signature",
    )
    if verb != "fit" or place == 0:
        assert trainer.step == 0
        assert_equal(weights(trainer), before)


@pytest.mark.slow
@REPLICAS
@pytest.mark.parametrize("place", [0, 2])
def test_data_that_fails_on_the_way_leaves_counts_of_what_was_applied(place, replicas):
    expected = make_trainer(replicas=replicas)
    if place:
        expected.fit(dataset(batch_of(4)), steps=place)
    trainer = make_trainer(replicas=replicas)
    with pytest.raises(ValueError, match="A batch differs"):
        trainer.fit(generated(*[batch_of(4)] * place, CHANGES["rank"]), steps=5)
    assert_equal(weights(trainer), weights(expected))
    assert trainer.step == int(trainer.optimizer.iterations.numpy()) == place


@pytest.mark.slow
@REPLICAS
@pytest.mark.parametrize("verb", ["fit", "evaluate"])
def test_entries_with_different_numbers_of_rows(verb, replicas):
    trainer = make_trainer(replicas=replicas)
    data = generated(batch_of(4, y=ROWS["y"][:3]))
    refused(verbs(trainer, data)[verb], "A batch's entries differ in their number of rows", "batch them together")
    assert trainer.step == 0


@pytest.mark.slow
def test_entries_with_different_numbers_of_rows_that_broadcast():
    trainer = make_trainer()
    data = tf.data.Dataset.from_tensor_slices(ROWS).batch(4).map(lambda batch: {**batch, "y": batch["y"][:1]})
    refused(lambda: trainer.fit(data, steps=1), "A batch's entries differ in their number of rows")
    assert trainer.step == 0


def test_epochs_of_an_endless_dataset():
    trainer = make_trainer()
    refused(lambda: trainer.fit(dataset().repeat(), epochs=2), "epochs were given", "endless", "give steps instead")
    assert trainer.step == 0


@pytest.mark.parametrize("verb", ["evaluate", "predict", "evals"])
def test_measuring_on_an_endless_dataset(verb):
    trainer = make_trainer()
    data = dataset().apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))  # ends if it is read
    refused(verbs(trainer, data)[verb], "endless")
    assert trainer.step == 0


# How long -----------------------------------------------------------------------------------------------------------


def test_steps_and_epochs_both():
    trainer = make_trainer()
    refused(lambda: trainer.fit(dataset(), steps=5, epochs=2), "steps=5 and epochs=2", "exactly one", "give fit(")
    refused(lambda: on(1, steps=5, epochs=2), "steps=5 and epochs=2", "one length", "set either to 0")
    assert trainer.step == 0


def test_steps_and_epochs_neither():
    trainer = make_trainer()
    refused(lambda: trainer.fit(dataset()), "steps=0 and epochs=0", "exactly one", "or set one in the config")
    assert trainer.step == 0


@pytest.mark.parametrize("given", [{"steps": -5}, {"epochs": -1}, {"steps": 2.5}, {"steps": "5"}])
def test_a_length_that_is_no_whole_number(given):
    ((name, value),) = given.items()
    trainer = make_trainer()
    refused(lambda: trainer.fit(dataset(), **given), f"{name}={value!r}")
    assert trainer.step == 0


# Model and optimizer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "instead"),
    [
        ({"clipnorm": 1.0}, "Config(clip_variable_norm=...)"),
        ({"clipvalue": 1.0}, "Config(clip_value=...)"),
        ({"global_clipnorm": 1.0}, "Config(clip_norm=...)"),
        ({"use_ema": True}, "Config(average_decay=...)"),
        ({"gradient_accumulation_steps": 2}, "Config(microbatches=...)"),
        ({"loss_scale_factor": 8.0}, "the precision in Config"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_optimizer_with_a_setting_that_distloop_has(settings, instead):
    ((name, value),) = settings.items()
    refused(
        lambda: make_trainer(optimizer=lambda: keras.optimizers.Adam(**settings)),
        f"has {name}={value}",
        instead,
    )


def make_trainer_of_a_model_made_outside():
    model = net()
    distloop.Trainer(lambda: distloop.ModelSpec(model, keras.optimizers.SGD(), print), on(1))


MISTAKES = {
    "a plain callable as learning rate": (
        lambda: make_trainer(optimizer=lambda: keras.optimizers.SGD(lambda: 0.1)),
        ("a plain callable as learning rate", "give a keras.optimizers.schedules.LearningRateSchedule"),
    ),
    "a loss-scale optimizer": (
        lambda: make_trainer(optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())),
        ("A Keras LossScaleOptimizer was given", "give the optimizer inside it"),
    ),
    "a model made outside model_fn": (
        make_trainer_of_a_model_made_outside,
        ("model's variable 'net/out/kernel' was made outside model_fn", "make the model inside model_fn"),
    ),
    "a model_fn that returns the model": (
        lambda: distloop.Trainer(net, on(1)),
        ("model_fn returned a Sequential", "a ModelSpec", "return distloop.ModelSpec"),
    ),
    "a model in place of model_fn": (lambda: distloop.Trainer(net(), on(1)), ("model_fn",)),
    "nothing in place of model_fn": (lambda: distloop.Trainer(None, on(1)), ("model_fn",)),
    "more devices than there are": (
        lambda: distloop.Trainer(make_model_fn(), on(9)),
        ("num_devices=9", "call distloop.prepare(config) before the first tensor"),
    ),
    "a device that is not there": (
        lambda: distloop.Trainer(make_model_fn(), distloop.Config(device="gpu")),
        ("device=gpu", "use device=auto or cpu"),
    ),
    "a strategy that is a name": (
        lambda: distloop.Trainer(make_model_fn(), on(1), strategy="mirrored"),
        ("strategy='mirrored' is not a tf.distribute.Strategy object", "name one in Config(strategy=...)"),
    ),
    "an export without a predict_fn": (
        lambda: make_trainer(predict_fn=None).export("model"),
        ("ModelSpec has no predict_fn",),
    ),
}


@pytest.mark.parametrize(("call", "parts"), MISTAKES.values(), ids=MISTAKES)
def test_a_trainer_with(call, parts):
    refused(call, *parts)


@REPLICAS
@pytest.mark.parametrize("is_built", [False, True])
def test_an_optimizer_made_outside_model_fn(replicas, is_built):
    optimizer = keras.optimizers.Adam()
    if is_built:
        optimizer.build(net().trainable_variables)
    refused(
        lambda: make_trainer(replicas=replicas, optimizer=lambda: optimizer),
        "optimizer's variable",
        "was made outside model_fn",
        "make the optimizer inside model_fn",
    )


# Config and devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [("strategy", "mirorred", "mirrored"), ("device", "cuda", "gpu"), ("precision", "bfloat16", "mixed_bfloat16")],
)
def test_a_name_that_is_none_of_the_choices(setting, value, allowed):
    refused(lambda: distloop.Config(**{setting: value}), f"{setting}='{value}' is not allowed", "one of", allowed)


@pytest.mark.parametrize("inside", ["", "run"])
def test_a_workdir_that_cannot_be_written(tmp_path, inside):
    (tmp_path / "file").write_text("in the way")
    workdir = tmp_path / "file" / inside
    trainer = make_trainer(settings={"workdir": str(workdir)})  # a Trainer touches no disk
    refused(lambda: trainer.fit(dataset(), steps=1), "workdir=", str(workdir), "cannot be written", "give a directory")
    assert trainer.step == 0


@pytest.mark.parametrize("name", ["train", "metrics.jsonl"])
def test_a_place_in_the_workdir_that_cannot_be_written(tmp_path, name):
    if name == "train":
        (tmp_path / name).write_text("in the way")
    else:
        (tmp_path / name).mkdir()
    trainer = make_trainer(settings={"workdir": str(tmp_path)})
    refused(lambda: trainer.fit(dataset(), steps=1), str(tmp_path), "cannot be written")
    assert trainer.step == 0


@pytest.mark.parametrize("action", [lambda report: None, "print"], ids=["no every", "no function"])
def test_an_action_that_is_none(action):
    trainer = make_trainer()
    refused(lambda: trainer.fit(dataset(), steps=1, actions=[action]), "The action", "was given", "`every`", "set it")
    assert trainer.step == 0


def test_evaluations_that_are_no_dict():
    trainer = make_trainer()
    refused(lambda: trainer.fit(dataset(), steps=1, evals=dataset()), "evals", "dict")
    assert trainer.step == 0


# predict_fn ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["predict", "stream"])
def test_predict_without_a_predict_fn(verb):
    trainer = make_trainer(predict_fn=None)
    refused(verbs(trainer, dataset())[verb], "ModelSpec has no predict_fn", "give ModelSpec(..., predict_fn=")


REDUCTIONS = {
    "all": lambda output: tf.reduce_mean(output),
    "the batch": lambda output: tf.reduce_mean(output, 0),
    "the batch, kept": lambda output: tf.reduce_mean(output, 0, keepdims=True),
    "parts": lambda output: tf.reshape(output, [-1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("over", REDUCTIONS)
def test_a_predict_fn_that_reduces(over):
    trainer = make_trainer(predict_fn=lambda model: lambda batch: REDUCTIONS[over](model(batch["x"])))
    refused(lambda: trainer.predict(dataset()), "predict_fn returned", "one row of output per row of input", "return")


@pytest.mark.parametrize("returned", [None, tf.sparse.from_dense([[1.0]])])
def test_a_predict_fn_that_returns_no_dense_tensor(returned):
    trainer = make_trainer(predict_fn=lambda model: lambda batch: {"a": returned})
    kind = "None" if returned is None else "a SparseTensor"
    refused(lambda: trainer.predict(dataset()), f"predict_fn returned {kind}, which is no dense tensor: return one")


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        ({"batch_fn": lambda batch, training: None}, "batch_fn returned None; it returns the batch for loss_fn"),
        ({"gradient_fn": dict.fromkeys}, "gradient_fn returned None for net/out/kernel, which is no dense tensor"),
    ],
)
def test_hooks_that_return_nothing(function, parts):
    made = {name: lambda model, value=value: value for name, value in function.items()}
    fit_refused(parts, **made)


# Numbers that are not finite ----------------------------------------------------------------------------------------


def rows_with(bad, row=9):
    """Returns rows of which one, in the third batch of four, is not finite."""
    x = ROWS["x"].copy()
    x[row, 1] = bad
    return {**ROWS, "x": x}


@pytest.mark.slow
@REPLICAS
@pytest.mark.parametrize("bad", mostly_wide([np.nan, np.inf]))
def test_a_loss_that_is_not_finite(bad, replicas):
    expected = make_trainer(replicas=replicas)
    expected.fit(dataset(), steps=2)
    trainer = make_trainer(replicas=replicas)
    message = refused(lambda: trainer.fit(dataset(rows_with(bad)), steps=6), "3", "on_nonfinite=skip", kind=Diverged)
    assert re.search(r"\bStep 3\b", message) and "loss is " in message and "net/out/kernel" in message
    assert trainer.step == 3
    assert_equal(weights(trainer), weights(expected))


@pytest.mark.slow
@pytest.mark.parametrize("bad", mostly_wide([np.nan, np.inf]))
def test_a_loss_that_is_not_finite_is_skipped_if_asked_for(bad):
    trainer = make_trainer(settings={"on_nonfinite": "skip"})
    numbers = trainer.fit(dataset(rows_with(bad)), steps=5)
    assert trainer.step == 5
    assert int(trainer.state.skipped_steps) == numbers["skipped_steps"] == 1
    assert int(trainer.optimizer.iterations.numpy()) == 4
    assert np.isfinite(numbers["loss"]) and all(np.isfinite(value).all() for value in weights(trainer).values())


@pytest.mark.slow
def test_a_metric_that_is_not_finite_is_no_reason_to_stop():
    trainer = make_trainer(
        lambda model, batch: {"loss": loss_of(model, batch), "ratio": tf.math.log(batch["y"][:, 0] * 0.0 - 1.0)},
    )
    numbers = trainer.fit(dataset(), steps=3)
    assert trainer.step == 3 and np.isnan(numbers["ratio"]) and np.isfinite(numbers["loss"])


@pytest.mark.slow
@REPLICAS
def test_a_gradient_that_is_not_finite_though_the_loss_is(replicas):
    trainer = make_trainer(
        lambda model, batch: {"loss": tf.reduce_sum(tf.sqrt(0.0 * model(batch["x"])), -1)}, replicas=replicas
    )
    before = weights(trainer)
    message = refused(lambda: trainer.fit(dataset(), steps=3), "Step 1", kind=Diverged)
    assert "gradient of net/out/kernel" in message and "the loss is finite, so a derivative is not" in message
    assert_equal(weights(trainer), before)


# Several predict functions ------------------------------------------------------------------------------------------


def first_output(batch):
    return batch["x"][:, :1]


@pytest.mark.parametrize("given", [{}, 3, "classify"], ids=["empty dict", "number", "name"])
def test_a_predict_fn_that_is_no_function(given):
    refused(
        lambda: make_trainer(predict_fn=lambda model: given) if given else make_spec(given),
        f"predict_fn={given!r}",
        "a function from a batch to outputs, or a dict of them by name",
    )


def make_spec(predict_fn):
    return distloop.ModelSpec(net(), keras.optimizers.SGD(0.1), lambda batch, training: {}, predict_fn=predict_fn)


@pytest.mark.parametrize("value", [None, 3, "fn", {"a": first_output}])
def test_a_dict_of_predict_functions_that_holds_something_else(value):
    refused(
        lambda: make_spec({"classify": first_output, "embed": value}),
        "ModelSpec(predict_fn=...) holds a",
        type(value).__name__,
        "'embed'",
        "give a function",
    )


@pytest.mark.parametrize("name", [3, None, ("a", "b"), ""])
def test_a_predict_function_under_a_name_that_is_no_string(name):
    refused(
        lambda: make_spec({"classify": first_output, name: first_output}),
        f"holds a function under {name!r}",
        "names are strings",
    )


def signature_verbs(trainer, name):
    return {
        "predict": lambda: trainer.predict(dataset(), signature=name),
        "stream": lambda: trainer.stream_predictions(dataset(), signature=name),
    }


@pytest.mark.parametrize("name", ["clasify", 3, ["classify"], ""])
@pytest.mark.parametrize("verb", ["predict", "stream"])
def test_a_signature_that_there_is_not(verb, name):
    never = lambda batch: pytest.fail("it was called")  # noqa: E731
    trainer = make_trainer(predict_fn=lambda model: {"classify": never, "embed": never})
    refused(signature_verbs(trainer, name)[verb], f"signature={name!r} was given", "['classify', 'embed']", "one of")


@pytest.mark.parametrize("verb", ["predict", "stream"])
def test_a_signature_where_there_is_one_function(verb):
    refused(
        signature_verbs(make_trainer(), "embed")[verb],
        "signature='embed' was given",
        "one predict_fn",
        "leave signature out",
        "predict_fn={'embed': ",
    )


@pytest.mark.parametrize("verb", ["predict", "stream"])
def test_a_signature_without_a_predict_fn(verb):
    refused(signature_verbs(make_trainer(predict_fn=None), "embed")[verb], "ModelSpec has no predict_fn")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [dict(num_devices=2), dict(microbatches=2)])
def test_a_term_of_activations_beside_a_weighted_loss_is_refused_where_the_batch_is_cut(settings):
    def model_fn():
        hidden = keras.layers.Dense(2, activity_regularizer="l1", name="hidden")
        model = keras.Sequential([keras.Input((3,)), hidden])

        def loss_fn(batch, training):
            return {"loss": distloop.weighted(loss_of(model, batch, training), batch["y"][:, 0] ** 2)}

        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn)

    parts = ["'hidden'", "activity regularizer or an add_loss", "in 2 shards", "value per example"]
    trainer = distloop.Trainer(model_fn, distloop.Config(device="cpu", **{"num_devices": 1, **settings}))
    refused(lambda: trainer.fit(dataset(), steps=1), *parts)


@pytest.mark.slow
@pytest.mark.parametrize("label", [7, -1])
def test_labels_that_are_no_number_of_a_class_are_named(label):
    rows = classification(8)
    rows["label"] = np.where(np.arange(8) == 3, label, rows["label"])
    sentence = f"A batch holds the label {label}, and the cross entropy has 4 classes, 0 to 3: number labels from 0"
    trainer = distloop.Trainer(classifier(), on(1, batch_size=8))
    refused(lambda: trainer.fit(rows, steps=1), sentence)
    refused(lambda: trainer.evaluate(rows), sentence)


ZEROS = np.zeros((8, 2), "float32")
TAKE_A_NUMBER = {
    "make_schedule(steps)": lambda value: distloop.make_schedule(0.1, value),
    "make_schedule(peak)": lambda value: distloop.make_schedule(value, 10),
    "make_schedule(warmup)": lambda value: distloop.make_schedule(0.1, 10, warmup=value),
    "make_schedule(drop_at)": lambda value: distloop.make_schedule(0.1, 10, decay="step", drop_at=[value]),
    "scale_learning_rate": lambda value: distloop.scale_learning_rate(0.1, value),
    "Evaluation(every)": lambda value: distloop.Evaluation(ZEROS, every=value),
    "Evaluation(batches)": lambda value: distloop.Evaluation(ZEROS, batches=value),
    "SaveBest(keep)": lambda value: distloop.SaveBest("loss", keep=value),
    "StopEarly(patience)": lambda value: distloop.StopEarly("loss", patience=value),
    "StopEarly(min_delta)": lambda value: distloop.StopEarly("loss", min_delta=value),
    "Export(keep)": lambda value: distloop.Export(print, "exports", keep=value),
    "LossScaleOptimizer(growth_steps)": lambda value: distloop.LossScaleOptimizer(
        keras.optimizers.SGD(), growth_steps=value
    ),
    "LossScaleOptimizer(max_scale)": lambda value: distloop.LossScaleOptimizer(keras.optimizers.SGD(), max_scale=value),
    "Mixture(weights)": lambda value: distloop.Mixture({"a": ZEROS, "b": ZEROS}, {"a": value, "b": 1}),
    "make_dataset(batch_size)": lambda value: distloop.make_dataset(ZEROS, value),
    "make_dataset(seed)": lambda value: distloop.make_dataset(ZEROS, 2, seed=value),
    "pack(length)": lambda value: distloop.pack([ZEROS[0]] * 4, value, lengths=[2] * 4),
    "from_callback(every)": lambda value: distloop.from_callback(keras.callbacks.Callback(), value),
    "notebook_launch(workers)": lambda value: distloop.notebook_launch(print, workers=value),
}


@pytest.mark.parametrize(
    "value", [10**400, 10**5_000, float("inf"), float("nan"), "1e400", 1j, None, [1]], ids=range(8)
)
@pytest.mark.parametrize("call", TAKE_A_NUMBER)
def test_what_is_no_number_that_a_float_can_hold_is_refused_in_a_sentence(call, value):
    if not (call == "Evaluation(every)" and value is None):  # as Config(eval_every) says
        refused(lambda: TAKE_A_NUMBER[call](value), "give" if "notebook" in call else "given")


@pytest.mark.parametrize(
    "length", [dict(steps=10**400), dict(epochs=10**5_000), dict(steps=2**63), dict(until="1e400")]
)
def test_a_length_that_no_run_can_count_is_refused(length):
    refused(lambda: distloop.Trainer(classifier(), on(1)).fit(classification(8), **length), "fit was given")
