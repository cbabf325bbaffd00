"""What is refused: a row for each call, and the words of the sentence that says what was given and what to do.

A row calls what makes the check. That each method of a Trainer checks before the first step is a test at the end.
"""

import functools
import itertools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data.source import Passes
from distloop.distributed.strategies import check_strategy
from distloop.evaluation.evaluation import EvalLoop
from distloop.evaluation.prediction import Predictor, check_outputs
from distloop.keras_models.fit_arguments import read_arguments
from distloop.log import shown
from distloop.model.broadcasts import refuse_pairs
from distloop.model.keras_metrics import KerasMetrics
from distloop.model.metrics import check_fed
from distloop.model.state import TrainState
from distloop.run import fit_call
from distloop.run.assembly import make_step
from distloop.training.action import check_actions
from distloop.training.differentiation import tally_outputs
from tests.problems import assert_equal, classification, every, mirrored, on, refused, weights

RNG = np.random.default_rng(0)
ROWS = {"x": RNG.normal(size=(12, 3)).astype(np.float32), "y": RNG.normal(size=(12, 2)).astype(np.float32)}
ZEROS, SGD, ONE = np.zeros((8, 2), "float32"), keras.optimizers.SGD(), tf.distribute.get_strategy()
PASSES = Passes(ONE, {"batch_size": 4})


def row(name, call, *parts):
    """A refusal: its name, the call, and the parts of the sentence in their order."""
    return pytest.param(call, parts, id=name)


def dataset():
    return distloop.make_dataset(ROWS, 4)


def net(**hidden):
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="out", **hidden)], name="net")


def squares(model, batch, training=False):
    return tf.square(model(batch["x"], training=training) - batch["y"])  # [B, 2]


def loss_of(model, batch, training=False):
    return tf.reduce_mean(squares(model, batch, training), -1)  # [B]


def spec(model=None, optimizer=None, *, returned=None, **settings):
    """Makes a spec whose loss_fn returns `returned(model, batch)`."""
    model = model or net()
    loss_fn = lambda batch, training: returned(model, batch) if returned else {"loss": loss_of(model, batch)}  # noqa: E731
    predict_fn = settings.pop("predict_fn", lambda batch: model(batch["x"], training=False))
    return distloop.ModelSpec(model, optimizer or keras.optimizers.SGD(0.1), loss_fn, predict_fn=predict_fn, **settings)


def state(*made, strategy=ONE, **settings):
    return TrainState(lambda: spec(*made, **settings), strategy)


# Config -------------------------------------------------------------------------------------------------------------


def setting(words, **values):
    return row(
        ", ".join(f"{name}={value!r}" for name, value in values.items()), lambda: distloop.Config(**values), words
    )


IN_PLACE = {"audit": True, "memory": True, "autotune_batch": True, "fast_dev_run": True}
IN_PLACE |= {"replay": 20, "evaluate": "best", "predict": "out"}

SETTINGS = [
    setting("steps=1.5 is not allowed: give a whole number, 0 or more", steps=1.5),
    setting("steps=True is not allowed: give a whole number", steps=True),
    setting("steps='5' is not allowed: give a whole number", steps="5"),
    setting("steps=None is not allowed", steps=None),
    setting("steps=-1 is not allowed", steps=-1),
    setting("steps=inf is not allowed", steps=float("inf")),
    setting("microbatches='some' is not allowed: give a whole number, 1 or more", microbatches="some"),
    setting("microbatches=0 is not allowed: give a whole number, 1 or more", microbatches=0),
    setting("batch has 1 example or more: give batch_size or replica_batch_size", batch_size=0),
    setting("clip_norm=nan is not allowed", clip_norm=float("nan")),
    setting("clip_norm=False is not allowed: give a number, 0 or more", clip_norm=False),
    setting("average_decay=1 is not allowed: give a number, 0 or more and below 1", average_decay=1),
    setting("below 4294967296", seed=2**32),
    setting("precision='float61' is not allowed: give one of float32, mixed_", precision="float61"),
    setting(
        "precision='bfloat16' is not allowed: give one of float32, mixed_float16, mixed_bfloat16", precision="bfloat16"
    ),
    setting("strategy='mirorred' is not allowed: give one of auto, none, mirrored", strategy="mirorred"),
    setting("give one of auto, none, mirrored", strategy=["none"]),
    setting("device='cuda' is not allowed: give one of auto, cpu, gpu", device="cuda"),
    setting("deterministic=1 is not allowed: give True or False", deterministic=1),
    setting("workdir=3 is not allowed: give a string", workdir=3),
    setting("steps=3 and epochs=4 were both given; a run has one length: set either to 0", steps=3, epochs=4),
    setting("clip_norm=1 and clip_value=2 were both given", clip_norm=1.0, clip_value=2),
    setting("overfit_batches=2 and limit_train_batches=3 were both given", overfit_batches=2, limit_train_batches=3),
    setting("eager=True and jit_compile=pass were both given", eager=True, jit_compile=True),
    setting("eager=True and locate_nonfinite=True were both given", eager=True, locate_nonfinite=True),
    setting("locate_nonfinite=True and on_nonfinite=skip were both", locate_nonfinite=True, on_nonfinite="skip"),
    setting("strategy=none and num_devices=2 contradict", strategy="none", num_devices=2),
    *[
        setting(
            f"strategy=mirrored, num_stages=2 and num_devices={count} were given, which is one replica: give a larger",
            **{"strategy": "mirrored", "num_stages": 2, "num_devices": count},
        )
        for count in (0, 2)
    ],
    setting("on_divergence=rollback was given without a workdir", on_divergence="rollback"),
    setting("keep_every=2 was given without a workdir, so no checkpoint would be kept: give a w", keep_every=2),
    setting("histograms_every=1 epoch was given without a workdir, so the his", histograms_every="1 epoch"),
    setting("evaluate=3 is not allowed: give 'newest', 'best' or the step of a checkpoint as a str", evaluate=3),
    setting("recompute='block_(' is no regular expression: give one that is found in", recompute="block_("),
    *[
        setting(f"device_shares={shown(value)} is not allowed: give whole numbers of 1 or more", device_shares=value)
        for value in ([3, 0], [3, -1], [3, 1.0], [True, 1], "3:1", "3,,1", 3, None, [10**9], [[3], [1]], {3: 1})
    ],
    setting(
        "device_shares=3,1 and virtual_replicas=4 were both given", device_shares=np.array([3, 1]), virtual_replicas=4
    ),
    setting("device_shares=3,1 and replica_batch_size=8 were both", device_shares="3,1", replica_batch_size=8),
    setting("batch_size=64 and replica_batch_size=32 were both given", batch_size=64, replica_batch_size=32),
    setting("batch_size=256 and replica_batch_size=32 were both given", batch_size=256, replica_batch_size=32),
    setting("max_rollbacks=5 was given without on_divergence=rollback, so a run never goes back", max_rollbacks=5),
    setting("loss_jump=2 was given without on_divergence=rollback, so a run never goes back: give on_", loss_jump=2),
    setting("graph=always was given without a workdir, so the graph would be lost: give a workdir", graph="always"),
    setting("eager=True and max_traces=3 were both given", eager=True, max_traces=3),
    setting("eager=True and executor=serial were both given", eager=True, executor="serial"),
    setting("executor=serial and jit_compile=loop were both given", executor="serial", jit_compile="loop"),
    *(
        setting("were both given; each takes the place of training: leave either out", workdir="run", **dict(pair))
        for pair in itertools.combinations(IN_PLACE.items(), 2)
        if dict(pair).keys() != {"evaluate", "predict"}
    ),
]

# The model, its optimizer and what is trained -------------------------------------------------------------------------


def optimizer(name, make, *parts):
    return row(f"optimizer: {name}", lambda: spec(optimizer=make()), *parts)


def owned(setting, value, instead):
    make = lambda: keras.optimizers.Adam(**{setting: value})  # noqa: E731
    return optimizer(setting, make, f"has {setting}={value}", instead)


def with_updates(**given):
    update = distloop.Update("a", lambda batch, training: {}, keras.optimizers.SGD())
    return lambda: distloop.ModelSpec(None, updates=[update], **given)


def without(**given):
    return lambda: distloop.ModelSpec(net(), **given)


def made_outside(strategy):
    model = net()
    return lambda: state(model, strategy=strategy)


def optimizer_made_outside(strategy, is_built):
    given = keras.optimizers.Adam()
    if is_built:
        given.build(net().trainable_variables)
    return lambda: state(None, given, strategy=strategy)


def no_loss(batch, training):
    return {}


OUTSIDE = ("optimizer's variable", "was made outside model_fn", "make the optimizer inside model_fn")
ONE_FUNCTION = "ModelSpec needs an optimizer and a loss_fn, or updates: give"

MODELS = [
    owned("clipnorm", 1.0, "Config(clip_variable_norm=...)"),
    owned("clipvalue", 1.0, "Config(clip_value=...)"),
    owned("global_clipnorm", 1.0, "Config(clip_norm=...)"),
    owned("use_ema", True, "Config(average_decay=...)"),
    owned("gradient_accumulation_steps", 2, "Config(microbatches=...)"),
    owned("loss_scale_factor", 8.0, "the precision in Config"),
    optimizer(
        "a plain callable as learning rate",
        lambda: keras.optimizers.SGD(lambda: 0.1),
        *("a plain callable as learning rate", "give a keras.optimizers.schedules.LearningRateSchedule"),
    ),
    optimizer(
        "a loss-scale optimizer",
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
        *("A Keras LossScaleOptimizer was given", "give the optimizer inside it"),
    ),
    optimizer("a name", lambda: "adam", "needs a keras.optimizers.Optimizer object"),
    optimizer("a class", lambda: keras.optimizers.SGD, "needs a keras.optimizers.Optimizer object"),
    row("loss_fn: a name", without(optimizer=SGD, loss_fn="mse"), "loss_fn='mse' was given", "(batch, training)"),
    row("neither an optimizer nor a loss_fn", without(), ONE_FUNCTION),
    row("no loss_fn", without(optimizer=SGD), ONE_FUNCTION),
    row("no optimizer", without(loss_fn=no_loss), ONE_FUNCTION),
    row(
        "updates and an optimizer",
        with_updates(optimizer=SGD),
        "given updates and also optimizer; ",
        "leave the others",
    ),
    row("updates and a loss_fn", with_updates(loss_fn=no_loss), "given updates and also loss_fn; ", "leave the others"),
    row(
        "updates and trainable",
        with_updates(trainable="head"),
        "given updates and also trainable; ",
        "leave the others",
    ),
    row(
        "updates and rules",
        with_updates(gradient_fn=dict, no_decay="bias"),
        "updates and also gradient_fn and no_decay",
    ),
    row(
        "a metric that is a function",
        lambda: spec(metrics={"f1": keras.metrics.binary_accuracy}),
        *('holds a function under "f1"; it takes ', ": return means"),
    ),
    row(
        "trainable: a pattern that is found in no path",
        lambda: state(trainable="decoder"),
        *("'decoder' for the model is found in no ", "out/kernel'", ": correct it"),
    ),
    row(
        "a model made outside model_fn",
        made_outside(ONE),
        "'net/out/kernel' was made outside model_fn",
        ": make the model inside model_fn",
        "from_keras",
    ),
    row("a model made outside model_fn, on two", made_outside(mirrored(2)), "'net/out/kernel' was made outside"),
    *(
        row(f"an optimizer made outside, {kind}, on {count}", optimizer_made_outside(strategy, is_built), *OUTSIDE)
        for kind, is_built in (("built", True), ("not built", False))
        for count, strategy in ((1, ONE), (2, mirrored(2)))
    ),
    row(
        "learning_rates: no path",
        lambda: state(learning_rates={"encoder": 0.1}),
        *("learning_rates", "'encoder'", "net/out/kernel", "correct it"),
    ),
    row("learning_rates: 0", lambda: state(learning_rates={"out": 0}), "learning_rates", "positive", "trainable"),
    row("no_decay: no decay", lambda: state(no_decay="bias"), "no_decay='bias'", "no weight_decay", "AdamW"),
    row("gradient_fn: a number", lambda: state(gradient_fn=3), "gradient_fn=3"),
    row("batch_fn: a name", lambda: state(batch_fn="flip"), "batch_fn='flip'"),
]

# Keras models, evaluations and steps --------------------------------------------------------------------------------


def supervised(loss, batch):
    """Calls the loss_fn of `distloop.supervised` with a batch of arrays."""
    tensors = tf.nest.map_structure(tf.constant, batch)
    return lambda: distloop.supervised(net(), loss, keras.optimizers.SGD()).loss_fn(tensors, True)


def of_unknown_rank():
    made = distloop.supervised(net(), "mse", keras.optimizers.SGD())
    call = tf.function(lambda x, y: made.loss_fn((x, y), True), autograph=False)
    call.get_concrete_function(tf.TensorSpec([None, 3]), tf.TensorSpec(None))


def without_a_loss():
    model = net()
    model.compile("sgd", None)
    return distloop.from_keras(model)().loss_fn((tf.constant(ROWS["x"]), tf.constant(ROWS["y"])), True)


class Secret(keras.metrics.Mean):
    """A metric that does not say how it is made."""

    def __init__(self, weight):
        super().__init__()


class OwnDistiller(keras.distillation.Distiller):
    """A Distiller with another loss."""

    def compute_loss(self, *arguments, **settings):
        return 2 * super().compute_loss(*arguments, **settings)


def distiller(kind=keras.distillation.Distiller):
    model = kind(net(), net(), keras.distillation.FeatureDistillation())
    model.build((None, 3))
    model.compile("sgd", "mse")
    return model


def of_several_optimizers(default=None):
    model = net()
    optimizers = keras.optimizers.OptimizerMap(default or keras.optimizers.SGD())
    model.compile(keras.optimizers.MultiOptimizer(optimizers), "mse")
    return model


def fit_with_plateau():
    trainer = distloop.Trainer(lambda: spec(optimizer=keras.optimizers.ScheduleFreeAdamW()), on(1))
    trainer.fit(ROWS, steps=1, actions=[distloop.from_callback(keras.callbacks.ReduceLROnPlateau("loss"))])


OF_NEW_KERAS = [
    row(
        "average_decay with ScheduleFreeAdamW",
        lambda: TrainState(lambda: spec(optimizer=keras.optimizers.ScheduleFreeAdamW()), ONE, average_decay=0.9),
        *("average_decay or average_from was given with ScheduleFreeAdamW", ": leave the setting out"),
    ),
    row(
        "ScheduleFreeAdamW: no average",
        lambda: state(None, keras.optimizers.ScheduleFreeAdamW(beta_1=0.0)),
        *("ScheduleFreeAdamW(beta_1=0.0) was given, ", ": give 0.9"),
    ),
    row(
        "ScheduleFreeAdamW: a schedule",
        lambda: state(None, keras.optimizers.ScheduleFreeAdamW(distloop.make_schedule(0.1, 100, warmup=10))),
        *("ScheduleFreeAdamW was given ", " as its learning rate, ", ": give a number and warmup_steps="),
    ),
    row(
        "ScheduleFreeAdamW: a callback that sets the rate",
        fit_with_plateau,
        *("ReduceLROnPlateau sets the learning rate, which has to stay in a schedule-free", ": leave the callback out"),
    ),
    row(
        "MultiOptimizer: Nadam",
        lambda: distloop.from_keras(of_several_optimizers(keras.optimizers.Nadam()))(),
        *("A MultiOptimizer was given with Nadam, which does more", ": give it another one"),
    ),
    row(
        "find_learning_rate: MultiOptimizer",
        lambda: distloop.find_learning_rate(
            distloop.Trainer(distloop.from_keras(of_several_optimizers()), on(1)), (ROWS["x"], ROWS["y"])
        ),
        *("find_learning_rate was given a model with a MultiOptimizer", ": compile the model with one"),
    ),
]

PAIRS = "take (x, y)"

KERAS = [
    row(
        "supervised: a loss that is summed",
        supervised(keras.losses.MeanSquaredError(reduction="sum", name="total"), (ROWS["x"], ROWS["y"])),
        *("'total' has reduction='sum', ", ": leave reduction out"),
    ),
    row("supervised: a dict", supervised("mse", ROWS), "a dict of length 2 was given; ", PAIRS, "map the dataset"),
    row("supervised: no labels", supervised("mse", ROWS["x"]), "features without labels were given; ", PAIRS),
    row("supervised: one entry", supervised("mse", (ROWS["x"],)), "a tuple of length 1 was given; ", PAIRS),
    row(
        "supervised: labels of unknown rank",
        of_unknown_rank,
        *("the number of axes of y, ", ": set it, as in ", "tf.ensure_shape"),
    ),
    *(OF_NEW_KERAS if hasattr(keras.optimizers, "ScheduleFreeAdamW") else ()),
    row(
        "from_keras: a Distiller with sample weights",
        lambda: distloop.from_keras(distiller())().loss_fn(
            tf.nest.map_structure(tf.constant, (ROWS["x"], ROWS["y"], ROWS["y"][:, 0])), True
        ),
        *("'distiller' was given sample weights or class_weight, which Keras leaves out", ": give (x, y)"),
    ),
    row(
        "from_keras: a Distiller with a compute_loss of its own",
        lambda: distloop.from_keras(distiller(OwnDistiller))(),
        *("has a compute_loss of its own, which distloop would not call", ": write a model_fn"),
    ),
    row("from_keras: no loss", without_a_loss, "no loss for any of its outputs: compile it with one"),
    row(
        "supervised: a network in stages",
        lambda: distloop.supervised(distloop.split(net(), 1), "mse", keras.optimizers.SGD()),
        "supervised was given a Pipeline; it takes a keras.Model: return ModelSpec",
    ),
    row(
        "Evaluation: a metric that cannot be copied",
        lambda: EvalLoop(state(), loss_fn=no_loss, metrics={"secret": Secret(2)}),
        *('"secret" of an Evaluation, a Secret, cannot be made again ', ": let get_config return every argument"),
    ),
    *(
        row(
            f"gradient_noise_every of one part, {settings}",
            lambda settings=settings: make_step(state(), on(1, gradient_noise_every=1, **settings)),
            *("gradient_noise_every=1", "give microbatches, virtual replicas or more"),
        )
        for settings in ({}, {"virtual_replicas": 1})
    ),
]

# The trainer ----------------------------------------------------------------------------------------------------------

NO_STRATEGY = "is not a tf.distribute.Strategy object"

TRAINERS = [
    row(
        "model_fn: returns the model",
        lambda: distloop.Trainer(net, on(1)),
        *("model_fn returned a Sequential", "a ModelSpec", "return distloop.ModelSpec"),
    ),
    row("model_fn: a model", lambda: distloop.Trainer(net(), on(1)), "model_fn"),
    row("model_fn: nothing", lambda: distloop.Trainer(None, on(1)), "model_fn"),
    row(
        "more devices than there are",
        lambda: distloop.Trainer(spec, on(9)),
        *("num_devices=9", "call distloop.prepare(config) before the first tensor"),
    ),
    row(
        "shares of three devices for two",
        lambda: distloop.Trainer(spec, on(2, device_shares=[5, 2, 1])),
        "device_shares=[5, 2, 1] was given for 2 replicas (CPU:0, CPU:1), and each has one share: give as many numbers",
    ),
    row("no gpu", lambda: distloop.Trainer(spec, on(1, device="gpu")), "device=gpu", "use device=auto or cpu"),
    row(
        "strategy: a name",
        lambda: check_strategy("mirrored"),
        *("strategy='mirrored' " + NO_STRATEGY, "name one in Config(strategy=...)"),
    ),
    row("strategy: a class", lambda: check_strategy(tf.distribute.MirroredStrategy), NO_STRATEGY),
    row("strategy: a number", lambda: check_strategy(2), NO_STRATEGY),
    row(
        "strategy: asynchronous",
        lambda: check_strategy(object.__new__(tf.distribute.ParameterServerStrategy)),
        *("ParameterServerStrategy ", ": use a synchronous strategy"),
    ),
    row(
        "evaluate(color)",
        lambda: trainer().evaluate(1, color=0),
        *("Trainer.evaluate was called otherwise", "(dataset, y=None)"),
    ),
    row("predict()", lambda: trainer().predict(), "'dataset'", "call it as (dataset, *, signature=None"),
    row("predict(color)", lambda: trainer().predict(1, color=8), "'color'", "(dataset, *, signature=None"),
    row("export without a predict_fn", lambda: trainer(predict_fn=None).export("model"), "ModelSpec has no predict_fn"),
]


def trainer(settings=None, replicas=1, **given):
    return distloop.Trainer(lambda: spec(**given), on(replicas, **(settings or {})))


# What loss_fn returns -------------------------------------------------------------------------------------------------


def auc():
    return {"auc": keras.metrics.AUC()}


def values(name, returned, *parts, batch_size=None, make_metrics=dict):
    """A row of what a loss_fn returns for a traced batch, which is tallied as a step does."""

    def tally(batch):
        model, keras_metrics = net(), KerasMetrics(make_metrics(), ONE)
        outputs = returned(model, batch)
        tally_outputs(outputs, batch, None, keras_metrics)
        check_fed(keras_metrics, outputs)
        refuse_pairs(outputs, lambda rows, training: returned(model, rows), batch, True)

    specs = {"x": tf.TensorSpec([batch_size, 3]), "y": tf.TensorSpec([batch_size, 2])}
    return row(f"loss_fn: {name}", lambda: tf.function(tally, autograph=False).get_concrete_function(specs), *parts)


def also(name, value):
    """Returns a function that returns the loss, and another value."""
    return lambda model, batch: {"loss": loss_of(model, batch), name: value(model, batch)}


def kept_axes(model, batch):
    return {"loss": tf.reduce_mean(squares(model, batch), keepdims=True)}


PER_EXAMPLE = "one value per example"
NO_DICT = ("loss_fn returned a ", "; distloop needs a dict", "return {")
KEPT = ('loss_fn returned "loss" of shape [1, 1]', PER_EXAMPLE, "drop the reduce_mean")

VALUES = [
    values(
        "a loss that is reduced already",
        lambda model, batch: {"loss": tf.reduce_mean(loss_of(model, batch))},
        *('loss_fn returned "loss" of shape []', f"{PER_EXAMPLE}, [B]", "drop the reduce_mean"),
    ),
    values(
        "a loss that a Keras object reduced",
        lambda model, batch: {"loss": keras.losses.MeanSquaredError()(batch["y"], model(batch["x"]))},
        *('loss_fn returned "loss" of shape []', "drop the reduce_mean"),
    ),
    values("a loss that is reduced with its axes kept", kept_axes, *KEPT),
    values("a loss that is reduced with its axes kept, of known rows", kept_axes, *KEPT, batch_size=4),
    values(
        "labels that lack the axis of the predictions",
        lambda model, batch: {"loss": tf.square(batch["y"][:, 0] - model(batch["x"])[:, :1])},
        *('loss_fn returned "loss" of shape [B, B]', "[B] and [B, 1] were broadcast", PER_EXAMPLE),
    ),
    values(
        "a value that is reduced over the batch",
        also("error", lambda model, batch: tf.reduce_mean(squares(model, batch), 0)),
        *('loss_fn returned "error" of shape [2]', PER_EXAMPLE),
    ),
    values(
        "weights that are not per example",
        lambda model, batch: {"loss": distloop.weighted(loss_of(model, batch), 2.0)},
        *('The value "loss" of shape', "with weights of shape", "one weight per example"),
    ),
    values(
        "no loss",
        lambda model, batch: {"error": loss_of(model, batch)},
        *("loss_fn returned ['error'] without \"loss\"", "return {"),
    ),
    values("a tensor", loss_of, *NO_DICT),
    values("a tuple", lambda model, batch: (1, 2), *NO_DICT),
    values("nothing", lambda model, batch: None, *NO_DICT),
    values(
        "values under the name of a metric",
        also("auc", loss_of),
        *('"auc", which is a Keras metric', "tuple of arguments for its update_state"),
        make_metrics=auc,
    ),
    values(
        "a tuple under a name without a metric",
        also("auc", lambda model, batch: (batch["y"], model(batch["x"]))),
        *('loss_fn returned a tuple under "auc"', "ModelSpec(metrics=...)", "declare"),
    ),
    values("no arguments of a metric", lambda *of: {"loss": loss_of(*of)}, "auc", "loss_fn", make_metrics=auc),
    *(
        values(name, also(name, loss_of), f"{name!r}, which distloop itself reports: rename it")
        for name in ["regularization", "learning_rate", "skipped_steps", "weight_norm", "step_secs_p50"]
    ),
]

# Data -----------------------------------------------------------------------------------------------------------------

NOT_OF_ARRAYS = [
    "tf.data.Dataset",
    "arrays or lists of numbers, [N, ...]",
    "distloop.make_dataset(examples, batch_size)",
]


def data(name, make, *parts):
    return row(f"data: {name}", lambda: PASSES.source(make()), *parts)


DATA = [
    data(
        "without a batch axis",
        lambda: tf.data.Dataset.from_tensor_slices({**ROWS, "id": np.arange(12)}),
        *("single examples", "takes batches", "call .batch(batch_size)"),
    ),
    data(
        "examples that look like batches of different sizes",
        lambda: tf.data.Dataset.from_tensor_slices(ROWS),  # x [3], y [2]
        *("first axes of [2, 3]", "call .batch(batch_size)"),
    ),
    data(
        "distributed by TensorFlow",
        lambda: mirrored(2).experimental_distribute_dataset(dataset()),
        *("a DistributedDataset", "give the dataset before it was distributed", "InputContext"),
    ),
    data("a list", lambda: [{"x": ROWS["x"]}], "is a list", *NOT_OF_ARRAYS),
    data("a tuple with None", lambda: (ROWS["x"], None), "is a tuple", *NOT_OF_ARRAYS),
    data("a dict with a number", lambda: {"x": ROWS["x"], "y": 3}, "is a dict", *NOT_OF_ARRAYS),
    data(
        "a list of batches",
        lambda: [classification(4), classification(4)],
        *("is a list; distloop takes ", "batches as lambda: iter(batches)"),
    ),
    data(
        "arrays of different lengths",
        lambda: {"x": np.zeros([4, 8], np.float32), "label": np.zeros([5], np.int64)},
        "Arrays of [4, 5] rows were given; they need the same number",
    ),
    data("endless, to measure on", lambda: endless(), "endless", "take(batches)"),
]


def endless():
    """Returns a dataset that says that it is endless, and ends if it is read."""
    return dataset().apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))


# What fit is given ----------------------------------------------------------------------------------------------------


def length(*parts, **given):
    arguments = {"steps": None, "epochs": None, "until": None, **given}
    name = ", ".join(f"{name}={shown(value)}" for name, value in given.items()) or "no length"
    return row(f"fit: {name}", lambda: fit_call.run_end(distloop.Config(), 3, **arguments), *parts)


def evals(name, given, *parts):
    return row(f"evals: {name}", lambda: read_arguments(dataset(), given, {}), *parts)


def actions(name, make, *parts):
    return row(f"actions: {name}", lambda: check_actions(make()), *parts)


EXACTLY_ONE, WHOLE = "exactly one of them: give fit or replay steps=..., epochs=", "it takes a whole number, 1 or more"
DURATION = "it takes a duration, such as '2 h', '3 epochs' or"
NO_PERIOD = ("The action", "was given", "`every`", "set it")
NOTE, RERUN = every(1, lambda report: None), distloop.RerunFaults()
OF_TWO = types.SimpleNamespace(actions=[RERUN, distloop.RerunFaults()])

FIT = [
    length("steps=0 and epochs=0", EXACTLY_ONE, "or set one in the config"),
    length("steps=5 and epochs=2", EXACTLY_ONE, steps=5, epochs=2),
    *(
        length(EXACTLY_ONE, **given)
        for given in (
            dict(steps=0, epochs=0),
            dict(steps=5, until="2 h"),
            dict(epochs=2, until=7),
            dict(until="0 s", steps=0),
        )
    ),
    *(length(f"steps={value!r}", WHOLE, steps=value) for value in (-5, -1, 2.5, 1.5, True, "5", "10")),
    length("epochs=-1", WHOLE, epochs=-1),
    *(length("fit was given", WHOLE, **given) for given in (dict(steps=10**400), dict(epochs=10**5_000))),
    *(length("fit was given until=", DURATION, until=value) for value in ("5 m", "25 %", -3, True, "1e400")),
    length("fit was given", steps=2**63),
    row(
        "fit: epochs of an endless dataset",
        lambda: fit_call.make_units(PASSES.source(dataset().repeat(), may_be_endless=True), "2 epochs"),
        *("epochs were given", "endless", "give steps instead"),
    ),
    evals("a dataset", dataset(), "evals", "dict"),
    evals("arrays", (np.eye(5), np.ones(5)), "evals=(array([[1., 0.", "dict"),
    actions("no every", lambda: [lambda report: None], *NO_PERIOD, "or give a Keras callback"),
    actions("no function", lambda: ["print"], *NO_PERIOD),
    actions("one twice", lambda: [NOTE, NOTE], "was given twice", "give it once"),
    row("two RerunFaults", lambda: RERUN.set_fit(OF_TWO, None, None), "Two RerunFaults were given", ": give one"),
    actions("one action", lambda: distloop.Summary("a", print), "actions=<", "actions=[action]"),
    actions("every=[]", lambda: [distloop.Export(print, "exports", every=[])], "has every=[]", "give"),
    *(
        actions(f"every={every!r}", lambda every=every: [distloop.Summary("a", print, every=every)], f"every={every!r}")
        for every in ("5 m", -1, True, 2.5)
    ),
    *(
        row(
            f"class_weight: {value!r}",
            lambda value=value: read_arguments((ZEROS, ZEROS[:, 0]), None, {"class_weight": {0: value}}),
            f"fit was given a class_weight of {value!r}; give finite numbers, 0 or more",
        )
        for value in ("a", None, float("nan"), -1.0)
    ),
]

# Predictions ----------------------------------------------------------------------------------------------------------

ONE_ROW = ["predict_fn returned", "one row of output per row of input", "return"]
NOT_DENSE = "which is no dense tensor: return one"
A_FUNCTION = "a function from a batch to outputs, or a dict of them by name"
OUTPUT = tf.zeros([4, 2])


def outputs(name, returned, *parts):
    return row(f"predict_fn returned: {name}", lambda: check_outputs(returned(), 4), *parts)


def predict_fn(given, *parts):
    name = (
        {key: getattr(value, "__name__", value) for key, value in given.items()} if isinstance(given, dict) else given
    )
    return row(f"predict_fn={name}", lambda: spec(predict_fn=given), *parts)


def first_output(batch):
    return batch["x"][:, :1]


def never(batch):
    pytest.fail("it was called")


def signature(given, *parts, functions=None):
    """Rows of a function that is asked for by name, of each method."""
    made = {} if functions == {} else {"predict_fn": functions}
    for method in ("predict", "stream_predictions"):
        call = lambda method=method: getattr(trainer(**made), method)(dataset(), signature=given)  # noqa: E731
        yield row(f"{method}({given!r}), {'one' if made == {} else functions and len(functions)}", call, *parts)


NONE_GIVEN = ("ModelSpec has no predict_fn", "give ModelSpec(..., predict_fn=")

PREDICTIONS = [
    outputs("all reduced", lambda: tf.reduce_mean(OUTPUT), *ONE_ROW),
    outputs("the batch reduced", lambda: tf.reduce_mean(OUTPUT, 0), *ONE_ROW),
    outputs("the batch reduced, kept", lambda: tf.reduce_mean(OUTPUT, 0, keepdims=True), *ONE_ROW),
    outputs("parts", lambda: tf.reshape(OUTPUT, [-1]), *ONE_ROW),
    outputs("nothing", lambda: {"a": None}, f"predict_fn returned None, {NOT_DENSE}"),
    outputs(
        "a sparse tensor",
        lambda: {"a": tf.sparse.from_dense([[1.0]])},
        f"predict_fn returned a SparseTensor, {NOT_DENSE}",
    ),
    *(predict_fn(given, f"predict_fn={given!r}", A_FUNCTION) for given in ({}, 3, "classify")),
    *(
        predict_fn({"a": first_output, "b": value}, "holds a", type(value).__name__, "'b'", "give a function")
        for value in (None, 3, "fn", {"a": None})
    ),
    *(
        predict_fn({"a": first_output, name: first_output}, f"holds a function under {name!r}; names are strings")
        for name in (3, None, ("a", "b"), "")
    ),
    *(
        of_method
        for name in ["clasify", 3, ["classify"], ""]
        for of_method in signature(
            name,
            *(f"signature={name!r} was given", "['classify', 'embed']", "one of"),
            functions={"classify": never, "embed": never},
        )
    ),
    *signature(
        "embed",
        *("signature='embed' was given", "one predict_fn", "leave signature out", "predict_fn={'embed': "),
        functions={},
    ),
    *signature(None, *NONE_GIVEN),
    *signature("embed", *NONE_GIVEN),
]

# Arguments of other functions -----------------------------------------------------------------------------------------

ODD = {
    "make_dataset(shuffle)": lambda: distloop.make_dataset(ZEROS, 2, shuffle="no"),
    "make_dataset(drop_remainder)": lambda: distloop.make_dataset(ZEROS, 2, drop_remainder="no"),
    "make_dataset(cache)": lambda: distloop.make_dataset(tf.data.Dataset.range(3), 2, cache="no"),
    "SaveBest(restore)": lambda: distloop.SaveBest("loss", restore="no"),
    "ExampleHistory(values)": lambda: distloop.ExampleHistory("loss"),
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


@functools.cache
def predictor_of_one():
    return Predictor(state())


TAKE_A_NUMBER = {
    "make_schedule(steps)": lambda value: distloop.make_schedule(0.1, value),
    "make_schedule(peak)": lambda value: distloop.make_schedule(value, 10),
    "make_schedule(warmup)": lambda value: distloop.make_schedule(0.1, 10, warmup=value),
    "make_schedule(drop_at)": lambda value: distloop.make_schedule(0.1, 10, decay="step", drop_at=[value]),
    "scale_learning_rate": lambda value: distloop.scale_learning_rate(0.1, value),
    "Evaluation(every)": lambda value: distloop.Evaluation(ZEROS, every=value),
    "Evaluation(batches)": lambda value: distloop.Evaluation(ZEROS, batches=value),
    "predict(batches)": lambda value: predictor_of_one().predict(None, limit=value),
    "stream_predictions(batches)": lambda value: predictor_of_one().stream(None, limit=value),
    "SaveBest(keep)": lambda value: distloop.SaveBest("loss", keep=value),
    "StopEarly(patience)": lambda value: distloop.StopEarly("loss", patience=value),
    "StopEarly(min_delta)": lambda value: distloop.StopEarly("loss", min_delta=value),
    "Export(keep)": lambda value: distloop.Export(print, "exports", keep=value),
    "LossScaleOptimizer(growth_steps)": lambda value: distloop.LossScaleOptimizer(SGD, growth_steps=value),
    "LossScaleOptimizer(max_scale)": lambda value: distloop.LossScaleOptimizer(SGD, max_scale=value),
    "Mixture(weights)": lambda value: distloop.Mixture({"a": ZEROS, "b": ZEROS}, {"a": value, "b": 1}),
    "make_dataset(batch_size)": lambda value: distloop.make_dataset(ZEROS, value),
    "make_dataset(seed)": lambda value: distloop.make_dataset(ZEROS, 2, seed=value),
    "make_dataset(shuffle)": lambda value: distloop.make_dataset(tf.data.Dataset.range(3), 2, shuffle=value),
    "make_dataset(processes)": lambda value: distloop.make_dataset(ZEROS, 2, processes=value),
    "WorstExamples(most)": lambda value: distloop.WorstExamples("test", ZEROS, most=value),
    "WorstExamples(batch_size)": lambda value: distloop.WorstExamples("test", ZEROS, batch_size=value),
    "ActivationHistograms(rows)": lambda value: distloop.ActivationHistograms(ZEROS, rows=value),
    "Images(max)": lambda value: distloop.Images(np.zeros((1, 4, 4, 1), "float32"), max=value),
    "Audio(rate)": lambda value: distloop.Audio(ZEROS, value),
    "find_learning_rate(steps)": lambda value: distloop.find_learning_rate(None, ZEROS, steps=value),
    "find_learning_rate(lowest)": lambda value: distloop.find_learning_rate(None, ZEROS, lowest=value),
    "find_learning_rate(highest)": lambda value: distloop.find_learning_rate(None, ZEROS, highest=value),
    "autotune_batch(memory_share)": lambda value: distloop.autotune_batch(OF_NOTHING, ZEROS, memory_share=value),
    "pack(length)": lambda value: distloop.pack([ZEROS[0]] * 4, value, lengths=[2] * 4),
    "from_callback(every)": lambda value: distloop.from_callback(keras.callbacks.Callback(), value),
}
OF_NOTHING = types.SimpleNamespace(state=None, config=None)  # a trainer
WHOLE_NUMBERS = {
    *("Evaluation(batches)", "predict(batches)", "stream_predictions(batches)", "SaveBest(keep)", "Export(keep)"),
    *("make_dataset(batch_size)", "make_dataset(seed)", "make_dataset(processes)", "find_learning_rate(steps)"),
    *("WorstExamples(most)", "WorstExamples(batch_size)", "ActivationHistograms(rows)", "Images(max)", "Audio(rate)"),
}
NO_NUMBERS = [10**400, 10**5_000, float("inf"), float("nan"), "1e400", 1j, None, [1]]


def give_to_spec(name, fn):
    return distloop.ModelSpec(net(), SGD, **{"loss_fn": no_loss, name: fn})


def other_arguments(name, give, called_with):
    given = lambda one, two, three: None  # noqa: E731
    sentence = f"{name} takes (one, two, three) and is called with {called_with} (missing"
    return row(f"arguments of {name}", lambda: give(given), sentence)


ARGUMENTS = [
    *(row(name, call, "given", "give") for name, call in ODD.items()),
    *(
        row(f"{name}, no number {i}", functools.partial(call, value), "given")
        for name, call in TAKE_A_NUMBER.items()
        for i, value in enumerate(NO_NUMBERS)
        if not (name == "Evaluation(every)" and value is None)  # as Config(eval_every) says
    ),
    *(
        row(f"{name}={value!r}", functools.partial(TAKE_A_NUMBER[name], value), f"={value!r}; give a whole number, ")
        for name in sorted(WHOLE_NUMBERS)
        for value in (-1, 1.5, 2.0, True, np.float32(2), np.True_)
    ),
    *(
        row(name, call, "given", "; give ", "a whole number, 0 or more")
        for value in (-1, 1.5, "2")
        for name, call in {
            f"make_dataset(shuffle={value!r})": functools.partial(TAKE_A_NUMBER["make_dataset(shuffle)"], value),
            f"a batch size from {value!r} on": lambda value=value: distloop.make_dataset(ZEROS, {0: 4, value: 2}),
        }.items()
    ),
    other_arguments("model_fn", lambda fn: distloop.Trainer(fn, on(1)), "()"),
    other_arguments("The function given to from_keras", distloop.from_keras, "()"),
    other_arguments("map_fn", lambda fn: distloop.make_dataset(ZEROS, 2, map_fn=fn), "(example, seed)"),
    other_arguments("The function of Summary 'shown'", lambda fn: distloop.Summary("shown", fn), "(state)"),
    other_arguments("loss_fn of an Evaluation", lambda fn: distloop.Evaluation(ZEROS, loss_fn=fn), "(batch, training)"),
    other_arguments("rows_fn of an Evaluation", lambda fn: distloop.Evaluation(ZEROS, rows_fn=fn), "(rows)"),
    *(
        other_arguments(name, functools.partial(give_to_spec, name), called_with)
        for name, called_with in {
            "loss_fn": "(batch, training)",
            "predict_fn": "(batch)",
            "batch_fn": "(batch, training)",
            "gradient_fn": "(gradients)",
            "step_fn": "(step)",
        }.items()
    ),
]


@pytest.mark.parametrize(
    ("call", "parts"),
    [*SETTINGS, *MODELS, *KERAS, *TRAINERS, *VALUES, *DATA, *FIT, *PREDICTIONS, *ARGUMENTS],
)
def test_a_call_is_refused_in_a_sentence(call, parts):
    refused(call, *parts)


# Each method ----------------------------------------------------------------------------------------------------------


def methods(trainer, given):
    return {
        "fit": lambda: trainer.fit(given, steps=5),
        "fit epochs": lambda: trainer.fit(given, epochs=1),
        "evals": lambda: trainer.fit(dataset(), steps=1, evals={"test": given}),
        "evaluate": lambda: trainer.evaluate(given),
        "predict": lambda: trainer.predict(given),
    }


EMPTY = {"known": lambda: dataset().take(0), "unknown": lambda: dataset().filter(lambda batch: False)}
REDUCED = {"returned": lambda model, batch: {"loss": tf.reduce_mean(loss_of(model, batch))}}


def method(name, kind, make, *parts, **made):
    return pytest.param(name, make, parts, made, id=f"{name}, {kind}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make", "parts", "made"),
    [
        *(
            method(name, f"reduced, on {replicas}", dataset, "shape []", "reduce_mean", replicas=replicas, **REDUCED)
            for name in ("fit", "evaluate")
            for replicas in (1, 2)
        ),
        method(
            *("fit", "no variable", dataset, "The loss does not depend on any variable", "from the model's outputs"),
            returned=lambda model, batch: {"loss": tf.reduce_sum(batch["y"], -1)},
        ),
        method(
            *("fit", "batch_fn", dataset, "batch_fn returned None; it returns the batch for loss_fn"),
            batch_fn=lambda batch, training: None,
        ),
        method(
            *("fit", "gradient_fn", dataset, "gradient_fn returned None for net/out/kernel, which is no dense tensor"),
            gradient_fn=dict.fromkeys,
        ),
        *(
            method(name, "a list", lambda: [ROWS], "is a list", *NOT_OF_ARRAYS)
            for name in ("fit", "evals", "evaluate", "predict")
        ),
        *(
            method(name, f"empty, of {length} length", EMPTY[length], "dataset", "empty", "one batch")
            for name in ("fit", "fit epochs", "evals", "evaluate", "predict")
            for length in EMPTY
            if (name, length) != ("evals", "unknown")  # it shows when it is read, after the first step
        ),
        *(method(name, "endless", endless, "endless") for name in ("evals", "evaluate", "predict")),
    ],
)
def test_each_method_refuses_before_the_first_step(name, make, parts, made):
    asked = trainer(**made)
    before = weights(asked)
    refused(methods(asked, make())[name], *parts)
    assert asked.step == 0
    assert_equal(weights(asked), before)


@pytest.mark.parametrize("inside", ["", "run"])
def test_a_workdir_that_cannot_be_written(tmp_path, inside):
    (tmp_path / "file").write_text("in the way")
    workdir = str(tmp_path / "file" / inside)  # a Trainer touches no disk
    asked = trainer({"workdir": workdir})
    refused(lambda: asked.fit(dataset(), steps=1), "workdir=", workdir, "cannot be written", "give a directory")


@pytest.mark.parametrize("name", ["train", "metrics.jsonl"])
def test_a_place_in_the_workdir_that_cannot_be_written(tmp_path, name):
    if name == "train":
        (tmp_path / name).write_text("in the way")
    else:
        (tmp_path / name).mkdir()
    asked = trainer({"workdir": str(tmp_path)})
    refused(lambda: asked.fit(dataset(), steps=1), str(tmp_path), "cannot be written")
