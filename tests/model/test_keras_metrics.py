"""Keras metrics on replicas: states that are sums and states that are not, built late, saved, and left alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.model.keras_metrics import KerasMetrics, check_arguments
from distloop.model.metrics import flatten_results
from tests.problems import mirrored, mostly_wide, on, refused

ONE = tf.distribute.get_strategy()


class Best(keras.metrics.Metric):
    """The largest score, a state that is no sum; cannot be made again from its `get_config()`."""

    def __init__(self, offset, name="best"):
        super().__init__(name=name)
        self.offset = offset
        self.best = self.add_variable((), lambda shape, dtype=None: tf.fill(shape, -np.inf), aggregation="sum")

    def update_state(self, labels, scores):
        self.best.assign(tf.maximum(self.best, tf.reduce_max(scores) + self.offset))

    def reset_state(self):
        self.best.assign(-np.inf)

    def result(self):
        return self.best

    def get_config(self):
        raise NotImplementedError


class Product(keras.metrics.Metric):
    """The product of all scores, which starts at 1, and the last one, in variables created by the first update."""

    def __init__(self):
        super().__init__()
        self.product = None

    def update_state(self, labels, scores):
        if self.product is None:
            self.product = self.add_variable(scores.shape[1:], "ones", aggregation="mean")
            self.last = self.add_variable(scores.shape[1:], "zeros", aggregation="none")
        self.product.assign(self.product * tf.reduce_prod(1 + scores, 0))
        self.last.assign(scores[-1])

    def reset_state(self):
        if self.product is not None:
            self.product.assign(tf.ones_like(self.product))

    def result(self):
        return {"product": self.product, "last": tf.identity(self.last)}


def largest(labels, scores):
    """A function of a batch that is no value per example."""
    return tf.reduce_max(scores)


MAKERS = {
    "best": lambda: Best(2.0),
    "product": Product,
    "largest": lambda: keras.metrics.MeanMetricWrapper(largest),
    "along_rows": lambda: keras.metrics.CosineSimilarity(axis=0),
    "f1": lambda: keras.metrics.F1Score(average="macro"),
    "r2": lambda: keras.metrics.R2Score(class_aggregation=None),
    "mean": keras.metrics.MeanSquaredError,
}
GENERATOR = np.random.default_rng(0)
ROWS = {
    "label": np.eye(3, dtype=np.float32)[GENERATOR.integers(0, 3, 17)],
    "score": GENERATOR.random((17, 3), np.float32),
}


def model_fn(makers):
    """Returns a spec whose metrics see the rows as they are, whatever is trained."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    metrics = {name: make() for name, make in makers.items()}

    def loss_fn(batch, training):
        loss = model(batch["score"], training=training)[:, 0]
        return {"loss": loss, **dict.fromkeys(metrics, (batch["label"], batch["score"]))}

    return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn, metrics=metrics)


def of_one_device(batch_size, makers):
    """Returns the results of Keras itself, which is given the batches one by one."""
    metrics = {name: make() for name, make in makers.items()}
    for start in range(0, 17, batch_size):
        for metric in metrics.values():
            metric.update_state(ROWS["label"][start : start + batch_size], ROWS["score"][start : start + batch_size])
    return flatten_results({name: metric.result() for name, metric in metrics.items()})


UNKNOWN_SIZES = pytest.mark.not_by_collectives("which need to know the size of a batch")
TWO = {name: MAKERS[name] for name in ("best", "mean")}


def arguments_of(names, rows=slice(None)):
    return {name: (tf.constant(ROWS["label"][rows]), tf.constant(ROWS["score"][rows])) for name in names}


def fed(metrics, strategy, rows=slice(None)):
    """Builds metrics and updates each replica with the same rows."""
    arguments = arguments_of(metrics, rows)
    if not metrics.is_built:
        metrics.build({"": arguments})
    metrics.reset()

    def update():
        metrics.update_gathered(*metrics.add(arguments, None))

    tf.function(lambda: strategy.run(update), autograph=False)()
    return metrics


def made(strategy, makers=MAKERS):
    with strategy.scope():
        return KerasMetrics({name: make() for name, make in makers.items()}, strategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "replicas, microbatches, names",
    mostly_wide([(3, 1, ["best", "product", "largest", "f1", "r2"]), (2, 3, ["product", "r2"])]),
)
def test_every_state_is_that_of_one_device(replicas, microbatches, names):
    makers = {name: MAKERS[name] for name in names}
    config = on(replicas, microbatches=microbatches, log_every=3)
    trainer = distloop.Trainer(lambda: model_fn(makers), config)
    data = distloop.make_dataset(ROWS, 7)  # 7, 7 and 3 rows
    reported = trainer.fit(data, steps=3, evals={"test": distloop.make_dataset(ROWS, 2)})  # fewer rows than replicas
    for prefix, batch_size in (("", 7), ("test/", 2)):
        for name, value in of_one_device(batch_size, makers).items():
            assert reported[prefix + name] == pytest.approx(value, rel=1e-6), name


def test_keras_metrics_add_up_on_each_replica_and_others_take_all_rows():
    assert made(ONE).gathered == ["best", "product", "largest", "along_rows"]


@UNKNOWN_SIZES
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [(3, 2), (1, 3)])
def test_a_state_is_restored_on_another_number_of_replicas(replicas):
    before, after = (mirrored(count) for count in replicas)
    makers = {name: MAKERS[name] for name in ("best", "product", "mean")}
    saved = fed(made(before, makers), before)
    values, expected = saved.snapshot(), saved.results()
    for is_late in (False, True):  # the second is restored before its variables exist
        metrics = made(after, makers) if is_late else fed(made(after, makers), after, slice(3))
        metrics.restore(values)
        if is_late:
            metrics.build({"": arguments_of(makers)})
        tf.nest.map_structure(np.testing.assert_allclose, metrics.results(), expected)


@UNKNOWN_SIZES
def test_a_scope_of_its_own_leaves_the_state_and_new_state_starts_anew():
    strategy = mirrored(2)
    metrics = fed(made(strategy, TWO), strategy, slice(3))
    before = metrics.results()
    with metrics.preserved():
        assert metrics.results()["best"] == -np.inf
        fed(metrics, strategy)
        assert metrics.results()["best"] > before["best"]
    assert metrics.results() == before
    metrics.restore({})
    assert metrics.results() == {"best": -np.inf, "mean": 0.0}


def test_a_metric_whose_variables_have_other_shapes_starts_anew():
    strategy = mirrored(1)

    def auc(thresholds):
        with strategy.scope():
            metrics = KerasMetrics({"auc": keras.metrics.AUC(thresholds), "mean": keras.metrics.Mean()}, strategy)
        metrics.build({"": {"auc": (tf.ones([2]), tf.ones([2])), "mean": (tf.ones([2]),)}})
        return metrics

    before, after = auc(10), auc(20)
    with strategy.scope():
        before.by_name["auc"].update_state([0.0, 1.0], [0.2, 0.7])
        before.by_name["mean"].update_state([3.0])
    after.restore(before.snapshot())
    assert after.results() == {"auc": 0.0, "mean": 3.0} and before.results()["auc"] == 1.0


@pytest.mark.slow
def test_a_step_that_is_skipped_counts_in_no_metric():
    rows = {name: value[:8].copy() for name, value in ROWS.items()}
    rows["score"][5, 0] = np.inf  # in the second batch
    trainer = distloop.Trainer(lambda: model_fn({"best": MAKERS["best"]}), on(2, on_nonfinite="skip", log_every=2))
    reported = trainer.fit(distloop.make_dataset(rows, 4), steps=2)
    assert reported["skipped_steps"] == 1 and reported["best"] == pytest.approx(rows["score"][:4].max() + 2)


def noting(metric):
    """Keeps the arguments of a metric's updates, in place of its state."""
    batches = []
    metric.update_state = lambda *arguments: batches.append(arguments)
    return batches


@pytest.mark.parametrize("name", ["mean", "largest"])
def test_padding_counts_in_no_metric_and_masks_are_kept(name):
    metrics = made(ONE, {name: MAKERS[name]})
    batches = noting(metrics[name])
    labels, scores = tf.zeros([3, 2]), tf.constant([[1.0, 5.0], [2.0, 6.0], [9.0, 9.0]])
    scores._keras_mask = tf.constant([[True, False], [True, True], [True, True]])
    metrics.update_gathered(*metrics.add({name: (labels, scores, None)}, tf.constant([1.0, 1.0, 0.0])))
    ((_, kept, none),) = batches
    assert kept.numpy().tolist() == [[1.0, 5.0], [2.0, 6.0]] and none is None
    assert kept._keras_mask.numpy().tolist() == [[True, False], [True, True]]


def test_ragged_rows_are_for_metrics_that_add_up():
    metrics = made(ONE, {"mean": keras.metrics.Mean, "best": MAKERS["best"]})
    ragged, batches = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0]]), noting(metrics["mean"])
    metrics.add({"mean": (ragged,)}, tf.constant([1.0, 1.0, 0.0]))
    ((kept,),) = batches
    assert kept.to_list() == [[1.0], [2.0, 3.0]]
    refused(lambda: metrics.add({"best": (ragged,)}, None), "ragged tensor", '"best"', "to_tensor()")


@pytest.mark.wide
@pytest.mark.slow
def test_xla_counts_no_padding():
    makers = {"auc": lambda: keras.metrics.AUC(num_thresholds=20), "best": MAKERS["best"]}
    settings = {"log_every": 4, "microbatches": 2, "jit_compile": True}
    data = distloop.make_dataset(ROWS, 5)  # the last batch has 2 rows for 4 parts
    reported = distloop.Trainer(lambda: model_fn(makers), on(2, **settings)).fit(data, steps=4)
    for name, value in of_one_device(5, makers).items():
        assert reported[name] == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize("value", [tf.ones([2]), distloop.weighted(tf.ones([2]), tf.ones([2]))])
def test_values_for_arguments_or_a_number_for_a_batch_are_refused(value):
    refused(lambda: check_arguments("auc", value), 'under "auc", which is a Keras metric', "tuple of arguments")
    refused(lambda: check_arguments("best", (tf.constant(1.0),)), 'shape [] for the Keras metric under "best"')


class Hidden(Best):
    """Counts its updates in a variable that Keras does not know."""

    def __init__(self):
        super().__init__(0.0)
        self.count = tf.Variable(0.0)

    def update_state(self, labels, scores):
        self.count.assign_add(1.0)
        super().update_state(labels, scores)


class InPython(keras.metrics.Metric):
    """Keeps its state in Python."""

    def update_state(self, labels, scores):
        self.total = tf.reduce_sum(scores)


@pytest.mark.parametrize("make", [Hidden, InPython])
def test_state_elsewhere_than_in_the_metrics_variables_is_refused(make):
    metrics = made(ONE, {"mine": make})
    refused(lambda: metrics.build({"": arguments_of(metrics)}), f'under "mine", a {make.__name__}', "self.add_variable")


def test_a_metric_made_outside_model_fn_is_refused_on_replicas():
    metric = keras.metrics.Mean()
    KerasMetrics({"mean": metric}, ONE)
    refused(lambda: KerasMetrics({"mean": metric}, mirrored(2)), 'under "mean" was made outside model_fn')


def test_a_reset_makes_its_zeros_on_the_host():
    strategy, places = mirrored(2), []
    with strategy.scope():
        metric = keras.metrics.Mean()
    reset = metric.reset_state
    metric.reset_state = lambda: (places.append(tf.zeros([2]).device[-5:]), reset())
    with tf.device("CPU:1"):  # as on a GPU, to which the shape of zeros would be sent
        KerasMetrics({"mean": metric}, strategy).reset()
    assert places == ["CPU:0"]
