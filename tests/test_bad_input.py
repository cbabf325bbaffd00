"""What users get wrong: each mistake is told in one sentence, what was given and what to do, before the first step."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.training.loop import Diverged
from tests.problems import assert_equal, classification, classifier, mirrored, mostly_wide, on, refused, weights

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


def make_trainer(returned=None, replicas=1, settings=None, optimizer=None, **spec):
    """Makes a trainer whose loss_fn returns `returned(model, batch)`; `spec` holds functions of the model."""

    def model_fn():
        model = net()

        def loss_fn(batch, training):
            return returned(model, batch) if returned else {"loss": loss_of(model, batch, training)}

        made = {"predict_fn": lambda m: lambda batch: m(batch["x"], training=False), **spec}
        made = {name: value(model) if value else None for name, value in made.items()}
        return distloop.ModelSpec(model, optimizer() if optimizer else keras.optimizers.SGD(0.1), loss_fn, **made)

    return distloop.Trainer(model_fn, on(replicas, **(settings or {})))


def verbs(trainer, data, **of_prediction):
    return {
        "fit": lambda: trainer.fit(data, steps=5),
        "fit epochs": lambda: trainer.fit(data, epochs=1),
        "evals": lambda: trainer.fit(dataset(), steps=1, evals={"test": data}),
        "evaluate": lambda: trainer.evaluate(data),
        "predict": lambda: trainer.predict(data, **of_prediction),
        "stream": lambda: trainer.stream_predictions(data, **of_prediction),
    }


def assert_refused(*parts, verb="fit", data=None, steps=0, trains=False, **made):
    """Checks that a verb refuses after so many steps at most, leaving the weights of a trainer as they are."""
    trainer = make_trainer(**made)
    before = weights(trainer)
    refused(verbs(trainer, dataset() if data is None else data)[verb], *parts)
    assert trainer.step <= steps
    if not trains:
        assert_equal(weights(trainer), before)


def case(name, given, *parts, **made):
    """A mistake: its name, what is given, the parts of the sentence, and what the trainer is made with."""
    return pytest.param(given, parts, made, id=name)


# loss_fn ------------------------------------------------------------------------------------------------------------


def reduced(model, batch):
    return {"loss": tf.reduce_mean(loss_of(model, batch))}


def weighted_by_a_number(model, batch):
    return {"loss": distloop.weighted(loss_of(model, batch), 2.0)}


def auc(model):
    return {"auc": keras.metrics.AUC()}


PER_EXAMPLE = "one value per example"
OF_REDUCED = ('loss_fn returned "loss" of shape []', f"{PER_EXAMPLE}, [B]", "drop the reduce_mean")
OF_WEIGHTS = ('The value "loss" of shape', "with weights of shape", "one weight per example")
NO_DICT = ("loss_fn returned a ", "; distloop needs a dict", "return {")

RESULTS = [
    case("a loss that is reduced already", reduced, *OF_REDUCED),
    case("a loss that is reduced already, on two replicas", reduced, *OF_REDUCED, replicas=2),
    case(
        "a loss that a Keras object reduced",
        lambda model, batch: {"loss": keras.losses.MeanSquaredError()(batch["y"], model(batch["x"]))},
        *('loss_fn returned "loss" of shape []', "drop the reduce_mean"),
    ),
    case(
        "labels that lack the axis of the predictions",
        lambda model, batch: {"loss": tf.square(batch["y"][:, 0] - model(batch["x"])[:, :1])},
        *('loss_fn returned "loss" of shape [B, B]', "[B] and [B, 1] were broadcast", PER_EXAMPLE),
    ),
    case(
        "a value that is reduced over the batch",
        lambda model, batch: {"loss": loss_of(model, batch), "error": tf.reduce_mean(squares(model, batch), 0)},
        *('loss_fn returned "error" of shape [2]', PER_EXAMPLE),
    ),
    case("weights that are not per example", weighted_by_a_number, *OF_WEIGHTS),
    case("weights that are not per example, on two replicas", weighted_by_a_number, *OF_WEIGHTS, replicas=2),
    case(
        "no loss",
        lambda model, batch: {"error": loss_of(model, batch)},
        *("loss_fn returned ['error'] without \"loss\"", "return {"),
    ),
    case("a tensor", loss_of, *NO_DICT),
    case("a tuple", lambda model, batch: (1, 2), *NO_DICT),
    case("nothing", lambda model, batch: None, *NO_DICT),
    case(
        "a loss that depends on no variable",
        lambda model, batch: {"loss": tf.reduce_sum(batch["y"], -1)},
        *("The loss does not depend on any variable", "compute it from the model's outputs"),
    ),
    case(
        "values under the name of a metric",
        lambda model, batch: {"loss": loss_of(model, batch), "auc": loss_of(model, batch)},
        *('"auc", which is a Keras metric', "tuple of arguments for its update_state"),
        metrics=auc,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("returned", "parts", "made"), RESULTS)
def test_a_loss_fn_that_returns(returned, parts, made):
    assert_refused(*parts, returned=returned, **made)


@pytest.mark.slow
@pytest.mark.parametrize("is_static", [False, True])
def test_a_loss_that_is_reduced_with_its_axes_kept(is_static):
    assert_refused(
        *('loss_fn returned "loss" of shape [1, 1]', PER_EXAMPLE, "drop the reduce_mean"),
        data=distloop.make_dataset(ROWS, 4, drop_remainder=is_static),
        returned=lambda model, batch: {"loss": tf.reduce_mean(squares(model, batch), keepdims=True)},
    )


@pytest.mark.slow
@REPLICAS
def test_a_value_per_part_of_an_example_that_was_flattened(replicas):
    def returned(model, batch):  # [2 * B], known while running only
        return {"loss": loss_of(model, batch), "error": tf.reshape(squares(model, batch), [-1])}

    assert_refused('The value "error"', PER_EXAMPLE, replicas=replicas, steps=1, returned=returned)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["fit", "evaluate"])
@pytest.mark.parametrize(
    ("returned", "parts", "made"),
    [
        case(
            "a tuple under a name without a metric",
            lambda model, batch: {"loss": loss_of(model, batch), "auc": (batch["y"], model(batch["x"]))},
            *('loss_fn returned a tuple under "auc"', "ModelSpec(metrics=...)", "declare"),
        ),
        case("a metric that loss_fn never feeds", None, "auc", "loss_fn", metrics=auc),
    ],
)
def test_a_loss_fn_and_metrics_that_do_not_belong_together(verb, returned, parts, made):
    assert_refused(*parts, verb=verb, returned=returned, **made)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["regularization", "learning_rate", "skipped_steps", "weight_norm", "step_secs_p50"])
def test_a_name_that_distloop_reports_itself(name):
    assert_refused(name, returned=lambda model, batch: {"loss": loss_of(model, batch), name: loss_of(model, batch)})


# Data ---------------------------------------------------------------------------------------------------------------


NOT_OF_ARRAYS = [
    "tf.data.Dataset",
    "arrays or lists of numbers, [N, ...]",
    "distloop.make_dataset(examples, batch_size)",
]


@pytest.mark.parametrize(
    ("make", "parts", "made"),
    [
        case(
            "without a batch axis",
            lambda: tf.data.Dataset.from_tensor_slices({**ROWS, "id": np.arange(12)}),
            *("single examples", "takes batches", "call .batch(batch_size)"),
        ),
        case(
            "of examples that look like batches of different sizes",
            lambda: tf.data.Dataset.from_tensor_slices(ROWS),  # x [3], y [2]
            *("first axes of [2, 3]", "call .batch(batch_size)"),
        ),
        case(
            "that TensorFlow has distributed",
            lambda: mirrored(2).experimental_distribute_dataset(dataset()),
            *("a DistributedDataset", "give the dataset before it was distributed", "InputContext"),
        ),
        case("a list", lambda: [{"x": ROWS["x"]}], "is a list", *NOT_OF_ARRAYS),
        case("a tuple with None", lambda: (ROWS["x"], None), "is a tuple", *NOT_OF_ARRAYS),
        case("a dict with a number", lambda: {"x": ROWS["x"], "y": 3}, "is a dict", *NOT_OF_ARRAYS),
    ],
)
@pytest.mark.parametrize("verb", ["fit", "evals", "evaluate", "predict"])
def test_data_that_holds_no_batches(verb, make, parts, made):
    assert_refused(*parts, verb=verb, data=make())


EMPTY = {"known": lambda: dataset().take(0), "unknown": lambda: dataset().filter(lambda batch: False)}


@pytest.mark.slow
@pytest.mark.parametrize("length", EMPTY)
@pytest.mark.parametrize("verb", ["fit", "fit epochs", "evals", "evaluate", "predict"])
def test_an_empty_dataset(verb, length):
    is_late = (verb, length) == ("evals", "unknown")  # it shows when it is read, after the first step
    assert_refused("dataset", "empty", "one batch", verb=verb, data=EMPTY[length](), steps=is_late, trains=is_late)


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
    assert_refused(
        "A batch differs from those before it",
        "same structure, dtypes and number of axes",
        "correct the generator or its output_signature",
        verb=verb,
        data=generated(*[batch_of(4)] * place, CHANGES[change]),
        replicas=replicas,
        steps=place if verb == "fit" else 0,
        trains=verb == "fit" and place > 0,
    )


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


OTHER_ROWS = "A batch's entries differ in their number of rows"


@pytest.mark.slow
@REPLICAS
@pytest.mark.parametrize("verb", ["fit", "evaluate"])
def test_entries_with_different_numbers_of_rows(verb, replicas):
    data = generated(batch_of(4, y=ROWS["y"][:3]))
    assert_refused(OTHER_ROWS, "batch them together", verb=verb, data=data, replicas=replicas)


@pytest.mark.slow
def test_entries_with_different_numbers_of_rows_that_broadcast():
    data = tf.data.Dataset.from_tensor_slices(ROWS).batch(4).map(lambda batch: {**batch, "y": batch["y"][:1]})
    assert_refused(OTHER_ROWS, data=data)


@pytest.mark.parametrize("verb", ["evaluate", "predict", "evals"])
def test_measuring_on_an_endless_dataset(verb):
    data = dataset().apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))  # ends if it is read
    assert_refused("endless", verb=verb, data=data)


# How long -----------------------------------------------------------------------------------------------------------


def test_epochs_of_an_endless_dataset():
    trainer = make_trainer()
    refused(lambda: trainer.fit(dataset().repeat(), epochs=2), "epochs were given", "endless", "give steps instead")
    assert trainer.step == 0


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (dict(steps=5, epochs=2), ("steps=5 and epochs=2", "exactly one", "give fit or replay steps=")),
        ({}, ("steps=0 and epochs=0", "exactly one", "or set one in the config")),
        *((given, [f"{name}={value!r}" for name, value in given.items()])
          for given in (dict(steps=-5), dict(epochs=-1), dict(steps=2.5), dict(steps="5"))),
        *((given, ["fit was given"])
          for given in (dict(steps=10**400), dict(epochs=10**5_000), dict(steps=2**63), dict(until="1e400"))),
    ],
)  # fmt: skip
def test_a_length_that_no_run_can_have(given, parts):
    trainer = make_trainer()
    refused(lambda: trainer.fit(dataset(), **given), *parts)
    assert trainer.step == 0


def test_steps_and_epochs_both_in_the_config():
    refused(lambda: on(1, steps=5, epochs=2), "steps=5 and epochs=2", "one length", "set either to 0")


# Model and optimizer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("clipnorm", 1.0, "Config(clip_variable_norm=...)"),
        ("clipvalue", 1.0, "Config(clip_value=...)"),
        ("global_clipnorm", 1.0, "Config(clip_norm=...)"),
        ("use_ema", True, "Config(average_decay=...)"),
        ("gradient_accumulation_steps", 2, "Config(microbatches=...)"),
        ("loss_scale_factor", 8.0, "the precision in Config"),
    ],
)
def test_an_optimizer_with_a_setting_that_distloop_has(name, value, instead):
    made = lambda: keras.optimizers.Adam(**{name: value})  # noqa: E731
    refused(lambda: make_trainer(optimizer=made), f"has {name}={value}", instead)


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
        lambda: make_trainer(replicas=9),
        ("num_devices=9", "call distloop.prepare(config) before the first tensor"),
    ),
    "a device that is not there": (
        lambda: make_trainer(settings={"device": "gpu"}),
        ("device=gpu", "use device=auto or cpu"),
    ),
    "a strategy that is a name": (
        lambda: distloop.Trainer(net, on(1), strategy="mirrored"),
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
    parts = ["optimizer's variable", "was made outside model_fn", "make the optimizer inside model_fn"]
    refused(lambda: make_trainer(replicas=replicas, optimizer=lambda: optimizer), *parts)


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
    workdir = str(tmp_path / "file" / inside)  # a Trainer touches no disk
    assert_refused("workdir=", workdir, "cannot be written", "give a directory", settings={"workdir": workdir})


@pytest.mark.parametrize("name", ["train", "metrics.jsonl"])
def test_a_place_in_the_workdir_that_cannot_be_written(tmp_path, name):
    if name == "train":
        (tmp_path / name).write_text("in the way")
    else:
        (tmp_path / name).mkdir()
    assert_refused(str(tmp_path), "cannot be written", settings={"workdir": str(tmp_path)})


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (lambda: {"actions": [lambda report: None]}, ["The action", "was given", "`every`", "set it"]),
        (lambda: {"actions": ["print"]}, ["The action", "was given", "`every`", "set it"]),
        (lambda: {"actions": distloop.Summary("a", print)}, ["actions=<", "actions=[action]"]),
        (lambda: {"actions": [distloop.Export(print, "exports", every=[])]}, ["has every=[]", "give"]),
        (lambda: {"evals": dataset()}, ["evals", "dict"]),
        (lambda: {"evals": (np.eye(5), np.ones(5))}, ["evals=(array([[1., 0.", "dict"]),
    ],
    ids=["no every", "no function", "one action", "every=[]", "evaluations that are no dict", "arrays"],
)
def test_fit_with(given, parts):
    trainer = make_trainer()
    refused(lambda: trainer.fit(dataset(), steps=1, **given()), *parts)
    assert trainer.step == 0


# predict_fn ---------------------------------------------------------------------------------------------------------

PREDICTION = pytest.mark.parametrize("verb", ["predict", "stream"])


@PREDICTION
@pytest.mark.parametrize("signature", [None, "embed"])
def test_predict_without_a_predict_fn(verb, signature):
    call = verbs(make_trainer(predict_fn=None), dataset(), signature=signature)[verb]
    refused(call, "ModelSpec has no predict_fn", "give ModelSpec(..., predict_fn=")


ONE_ROW = ["predict_fn returned", "one row of output per row of input", "return"]
NOT_DENSE = "which is no dense tensor: return one"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("returned", "parts", "made"),
    [
        case("all is reduced", lambda output: tf.reduce_mean(output), *ONE_ROW),
        case("the batch is reduced", lambda output: tf.reduce_mean(output, 0), *ONE_ROW),
        case("the batch is reduced, kept", lambda output: tf.reduce_mean(output, 0, keepdims=True), *ONE_ROW),
        case("parts", lambda output: tf.reshape(output, [-1]), *ONE_ROW),
        case("nothing", lambda output: {"a": None}, f"predict_fn returned None, {NOT_DENSE}"),
        case(
            "a sparse tensor",
            lambda output: {"a": tf.sparse.from_dense([[1.0]])},
            f"predict_fn returned a SparseTensor, {NOT_DENSE}",
        ),
    ],
)
def test_a_predict_fn_that_returns(returned, parts, made):
    predict_fn = lambda model: lambda batch: returned(model(batch["x"]))  # noqa: E731
    assert_refused(*parts, verb="predict", predict_fn=predict_fn, **made)


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        ({"batch_fn": lambda batch, training: None}, "batch_fn returned None; it returns the batch for loss_fn"),
        ({"gradient_fn": dict.fromkeys}, "gradient_fn returned None for net/out/kernel, which is no dense tensor"),
    ],
)
def test_hooks_that_return_nothing(function, parts):
    assert_refused(parts, **{name: lambda model, value=value: value for name, value in function.items()})


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
    parts = ["3", "in x, first in row 1, row 9 of the data", "no setting of the training helps"]
    message = refused(lambda: trainer.fit(dataset(rows_with(bad)), steps=6), *parts, kind=Diverged)
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


OF_SPEC = "ModelSpec(predict_fn=...)"
A_FUNCTION = "a function from a batch to outputs, or a dict of them by name"


@pytest.mark.parametrize(
    ("predict_fn", "parts"),
    [
        *((given, [f"predict_fn={given!r}", A_FUNCTION]) for given in ({}, 3, "classify")),
        *(
            (
                {"classify": first_output, "embed": value},
                [f"{OF_SPEC} holds a", type(value).__name__, "'embed'", "give a function"],
            )
            for value in (None, 3, "fn", {"a": first_output})
        ),
        *(
            ({"classify": first_output, name: first_output}, [f"holds a function under {name!r}; names are strings"])
            for name in (3, None, ("a", "b"), "")
        ),
    ],
    ids=range(11),
)
def test_a_predict_fn_that_is_no_function_nor_a_dict_of_them_by_name(predict_fn, parts):
    model, optimizer = net(), keras.optimizers.SGD(0.1)
    refused(lambda: distloop.ModelSpec(model, optimizer, lambda batch, training: {}, predict_fn=predict_fn), *parts)


@pytest.mark.parametrize("name", ["clasify", 3, ["classify"], ""])
@PREDICTION
def test_a_signature_that_there_is_not(verb, name):
    never = lambda batch: pytest.fail("it was called")  # noqa: E731
    trainer = make_trainer(predict_fn=lambda model: {"classify": never, "embed": never})
    call = verbs(trainer, dataset(), signature=name)[verb]
    refused(call, f"signature={name!r} was given", "['classify', 'embed']", "one of")


@PREDICTION
def test_a_signature_where_there_is_one_function(verb):
    parts = ["signature='embed' was given", "one predict_fn", "leave signature out", "predict_fn={'embed': "]
    refused(verbs(make_trainer(), dataset(), signature="embed")[verb], *parts)


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
    trainer = distloop.Trainer(model_fn, on(1, **settings))
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


ZEROS, SGD = np.zeros((8, 2), "float32"), keras.optimizers.SGD()
ODD = {
    "make_dataset(shuffle)": lambda: distloop.make_dataset(ZEROS, 2, shuffle="no"),
    "make_dataset(drop_remainder)": lambda: distloop.make_dataset(ZEROS, 2, drop_remainder="no"),
    "make_dataset(cache)": lambda: distloop.make_dataset(tf.data.Dataset.range(3), 2, cache="no"),
    "SaveBest(restore)": lambda: distloop.SaveBest("loss", restore="no"),
    "StopEarly(restore_best)": lambda: distloop.StopEarly("loss", restore_best="no"),
    "when_better(metric)": lambda: distloop.when_better(3, print, mode="min"),
    "stages(recompute)": lambda: distloop.stages([net()], recompute="no"),
    "split(recompute)": lambda: distloop.split(net(), 1, recompute="no"),
    "Summary(name)": lambda: distloop.Summary(3, print),
    "Summary(fn)": lambda: distloop.Summary("a", 3),
    "Evaluation(predict_fn)": lambda: distloop.Evaluation(ZEROS, rows_fn=print, predict_fn=3),
    "Trainer(config)": lambda: distloop.Trainer(net, {"steps": 3}),
    "prepare": lambda: distloop.prepare(3),
}


@pytest.mark.parametrize("call", ODD)
def test_an_argument_that_would_be_taken_for_another_is_refused(call):
    refused(ODD[call], "given", "give" if "shuffle" not in call else "an integer")


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
    "LossScaleOptimizer(growth_steps)": lambda value: distloop.LossScaleOptimizer(SGD, growth_steps=value),
    "LossScaleOptimizer(max_scale)": lambda value: distloop.LossScaleOptimizer(SGD, max_scale=value),
    "Mixture(weights)": lambda value: distloop.Mixture({"a": ZEROS, "b": ZEROS}, {"a": value, "b": 1}),
    "make_dataset(batch_size)": lambda value: distloop.make_dataset(ZEROS, value),
    "make_dataset(seed)": lambda value: distloop.make_dataset(ZEROS, 2, seed=value),
    "pack(length)": lambda value: distloop.pack([ZEROS[0]] * 4, value, lengths=[2] * 4),
    "from_callback(every)": lambda value: distloop.from_callback(keras.callbacks.Callback(), value),
}


@pytest.mark.parametrize(
    "value", [10**400, 10**5_000, float("inf"), float("nan"), "1e400", 1j, None, [1]], ids=range(8)
)
@pytest.mark.parametrize("call", TAKE_A_NUMBER)
def test_what_is_no_number_that_a_float_can_hold_is_refused_in_a_sentence(call, value):
    if not (call == "Evaluation(every)" and value is None):  # as Config(eval_every) says
        refused(lambda: TAKE_A_NUMBER[call](value), "given")


OTHER_ARGUMENTS = {
    "model_fn": (lambda fn: distloop.Trainer(fn, on(1)), "()"),
    "The function given to from_keras": (distloop.from_keras, "()"),
    "map_fn": (lambda fn: distloop.make_dataset(ZEROS, 2, map_fn=fn), "(example, seed)"),
    "The function of Summary 'shown'": (lambda fn: distloop.Summary("shown", fn), "(state)"),
    "loss_fn of an Evaluation": (lambda fn: distloop.Evaluation(ZEROS, loss_fn=fn), "(batch, training)"),
    "rows_fn of an Evaluation": (lambda fn: distloop.Evaluation(ZEROS, rows_fn=fn), "(rows)"),
}


@pytest.mark.parametrize("name", OTHER_ARGUMENTS)
def test_a_function_with_other_arguments_is_refused_before_it_is_called(name):
    give, called_with = OTHER_ARGUMENTS[name]
    given = lambda one, two, three: None  # noqa: E731
    refused(lambda: give(given), f"{name} takes (one, two, three) and is called with {called_with} (missing")
