"""Layers whose activations the backward pass computes again: the same gradients, masks and statistics, less memory."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.diagnostics.live_memory import peak_of
from distloop.graph_functions import graph_function
from distloop.training.recomputation import SCOPE, recomputing
from distloop.variables import named_variables, tensorflow_variable
from tests.problems import assert_close, assert_equal, classification, everything, on, optimize_graphs

layers = keras.layers


@pytest.fixture(autouse=True, scope="module")
def graphs_of_other_tests_are_optimized():
    """Virtual replicas turn TensorFlow's graph optimizers off in this process; turns them on again."""
    yield
    optimize_graphs()


def differentiated(model, loss_fn, rows, pattern="", **settings):
    """Returns the gradients of a loss, what the pass wrote, and its graph; restores the model's variables."""
    variables = named_variables(model)
    before = {path: variable.numpy() for path, variable in variables.items()}
    if pattern:
        loss_fn = recomputing(loss_fn, model=model, pattern=pattern)

    def compute(rows):
        trained = {path: tensorflow_variable(v) for path, v in variables.items() if v.trainable}
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(list(trained.values()))
            loss = loss_fn(rows, True)
        return loss, tape.gradient(loss, trained)

    traced = graph_function(compute, **settings).get_concrete_function(rows)
    loss, gradients = traced(rows)
    written = {path: v.numpy() for path, v in variables.items() if not np.array_equal(v.numpy(), before[path])}
    for path, variable in variables.items():
        variable.assign(before[path])
    return {"loss": loss.numpy(), **gradients}, written, traced.graph


def assert_same(model, loss_fn, rows, pattern, **settings):
    """Checks that recomputation changes no gradient and nothing that is written; returns gradients and the graph."""
    kept, written, _ = differentiated(model, loss_fn, rows, **settings)
    again, written_again, graph = differentiated(model, loss_fn, rows, pattern, **settings)
    assert any(f"{SCOPE}/" in op.name for op in graph.get_operations()), "nothing was recomputed"
    assert_equal(written_again, written)
    assert {path: type(value) for path, value in again.items()} == {path: type(v) for path, v in kept.items()}
    assert_close(
        {p: tf.convert_to_tensor(v).numpy() for p, v in again.items() if v is not None},
        {p: tf.convert_to_tensor(v).numpy() for p, v in kept.items() if v is not None},
    )
    return again, graph


class Attend(layers.Layer):
    """Takes several arguments, by position and by name, and returns a dict of numbers and integers."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.score, self.drop = layers.Dense(1), layers.Dropout(0.5)
        self.norm = layers.BatchNormalization()

    def build(self, shape):
        self.score.build(shape)
        self.norm.build(shape)

    def call(self, inputs, mask=None, *, scale=1.0, others):
        weights = self.drop(keras.ops.sigmoid(self.score(inputs))) * scale  # `training` is that of the outer call
        self.add_loss(keras.ops.mean(weights**2))
        if mask is not None:
            weights = weights * keras.ops.cast(mask, weights.dtype)[..., None]
        return {"sum": self.norm(inputs * weights + others["shift"]), "count": keras.ops.sum(others["ids"], axis=1)}


class Reader(keras.Model):
    """A subclassed model whose parts are called several times, with masks that layers attach to tensors."""

    def __init__(self):
        super().__init__(name="reader")
        self.embed = layers.Embedding(9, 4, mask_zero=True, name="embed")
        self.read = layers.SimpleRNN(4, return_sequences=True, recurrent_dropout=0.2, name="read")
        self.attend = Attend(activity_regularizer=keras.regularizers.L2(0.01), name="attend")
        self.inner = keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dropout(0.5)], name="inner")
        self.head = layers.Dense(1, name="head")

    def call(self, ids):
        hidden = self.read(self.embed(ids))
        for scale in (1.0, 2.0):
            outputs = self.attend(hidden, scale=scale, others={"shift": self.inner(hidden), "ids": ids})
            hidden = outputs["sum"] * keras.ops.cast(outputs["count"], "float32")[:, None, None]
        return self.head(hidden)


def reader():
    model = Reader()
    ids = np.array([[1, 2, 3, 0], [4, 5, 0, 0], [8, 7, 6, 5]], np.int32)
    model(ids)

    def loss_fn(rows, training):
        loss = keras.ops.mean(model(rows, training=training) ** 2)
        return loss + sum(model.losses)

    return model, loss_fn, tf.constant(ids)


@pytest.mark.parametrize("pattern", ["attend|read|embed|inner", "reader"])
def test_gradients_masks_statistics_and_losses_of_layers_are_those_of_kept_activations(pattern):
    model, loss_fn, rows = reader()
    gradients, _ = assert_same(model, loss_fn, rows, pattern)
    assert all(gradient is not None for gradient in gradients.values())
    assert isinstance(gradients["reader/embed/embeddings"], tf.IndexedSlices)  # as it is without recomputation


def chain(width=8, blocks=3, **norm):
    """A model of blocks, one after the other."""

    def make_block(i):
        inputs = keras.Input((width,))
        hidden = layers.Dense(4 * width, activation="gelu", name=f"up_{i}")(inputs)
        hidden = layers.BatchNormalization(name=f"norm_{i}", **norm)(layers.Dropout(0.3)(hidden))
        return keras.Model(inputs, inputs + layers.Dense(width, name=f"down_{i}")(hidden), name=f"block_{i}")

    modules = [make_block(i) for i in range(blocks)]
    return keras.Sequential([keras.Input((width,)), *modules, layers.Dense(4, name="logits")], name="net")


def test_activations_take_less_memory_and_nothing_is_taken_from_the_first_pass():
    model = chain(width=16, blocks=5)
    loss_fn = lambda rows, training: tf.reduce_sum(model(rows, training=training) ** 2)  # noqa: E731
    rows = tf.ones([64, 16])
    kept, recomputed = (
        peak_of(differentiated(model, loss_fn, rows, pattern)[2]).activations for pattern in ("", "block")
    )
    assert recomputed < 0.5 * kept


def test_xla_computes_the_same():
    model = chain(blocks=1)
    loss_fn = lambda rows, training: tf.reduce_mean(model(rows, training=training) ** 2)  # noqa: E731
    _, graph = assert_same(model, loss_fn, tf.random.normal([6, 8], seed=1), "block", jit_compile=True)
    assert any(op.type == "XlaOptimizationBarrier" for op in graph.get_operations())


def test_a_gradient_within_the_loss_is_differentiated_too():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, activation="tanh", name="hidden"), layers.Dense(1)])

    def loss_fn(rows, training):
        with tf.GradientTape() as tape:
            tape.watch(rows)
            outputs = model(rows, training=training)
        return tf.reduce_sum(tape.gradient(outputs, rows) ** 2)

    assert_same(model, loss_fn, tf.random.normal([5, 3], seed=1), "hidden")


def test_what_a_layer_reads_without_being_given_it_gets_its_gradient():
    table = layers.Embedding(3, 4, name="table")
    tied = layers.Lambda(lambda hidden: hidden @ tf.transpose(table.embeddings) + keep["shift"], name="tied")
    shift = layers.Dense(1, name="shift")
    model = [table, shift, tied]
    keep = {}
    rows = tf.constant([0, 1, 1])
    shift(table(rows))

    def loss_fn(rows, training):
        hidden = table(rows)
        keep["shift"] = shift(hidden)
        return tf.reduce_sum(tied(hidden) ** 2)

    assert_same(model, loss_fn, rows, "tied")


def model_fn_of(**norm):
    def model_fn():
        model = chain(blocks=2, **norm)

        def loss_fn(batch, training):
            logits = model(batch["x"], training=training)
            return {"loss": keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)}

        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1, momentum=0.9), loss_fn)

    return model_fn


def trained(replicas, steps, *, norm=None, **settings):
    """Returns all that training changes, after some steps."""
    trainer = distloop.Trainer(model_fn_of(**norm or {}), on(replicas, steps=steps, batch_size=16, **settings))
    trainer.fit(classification())
    return everything(trainer)


def test_a_run_has_the_same_bits_and_its_checkpoints_go_on_without_recomputation(tmp_path, capsys):
    settings = {"virtual_replicas": 2, "microbatches": 2}
    expected = trained(1, 3, **settings)
    trained(1, 2, recompute="block", workdir=str(tmp_path), **settings)
    capsys.readouterr()
    assert_equal(trained(1, 3, workdir=str(tmp_path), **settings), expected)
    assert "recompute" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("replicas", "settings"),
    [(1, {"microbatches": 2}), (2, {"norm": {"synchronized": True}, "precision": "mixed_float16"})],
)
def test_weights_and_statistics_are_the_same(replicas, settings):
    found, expected = (trained(replicas, 1, recompute=pattern, **settings) for pattern in ("block", ""))
    assert_close(found, expected, 1e-6)


class Faulty(layers.Layer):
    """A layer that cannot be called again."""

    def __init__(self, fault, **settings):
        super().__init__(**settings)
        self.fault = fault
        self.count = self.add_weight(shape=(), trainable=False, name="count")
        self.kernel = self.add_weight(shape=(3, 3), name="kernel")

    def call(self, rows):
        self.hidden = rows @ self.kernel
        if self.fault == "gathers":
            self.hidden += tf.reduce_sum(distloop.gather_rows(rows)[0])
        if self.fault == "writes":
            tensorflow_variable(self.count).assign_add(1.0)
        if self.fault == "writes in a loop":
            tf.while_loop(lambda i: i < 2, lambda i: [i + 0 * tf.cast(self.count.assign(i), tf.int32) + 1], [0])
        return self.hidden * 1.0


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("gathers", "'faulty', which it matches, calls gather_rows; the backward pass cannot call it again"),
        ("writes", "writes to a variable or a generator by TensorFlow's operation AssignAddVariableOp"),
        ("writes in a loop", "writes 'faulty/count' in a loop or a branch of TensorFlow"),
        ("keeps", r"keeps the tensor '.*' of its call for later, by other ways than its outputs"),
    ],
)
def test_layers_that_cannot_be_called_again_are_refused(fault, sentence):
    layer = Faulty(fault, name="faulty")
    kept = lambda: tf.reduce_sum(layer.hidden) if fault == "keeps" else 0.0  # noqa: E731
    with pytest.raises(ValueError, match=sentence):
        differentiated([layer], lambda rows, training: tf.reduce_sum(layer(rows)) + kept(), tf.ones([2, 3]), "faulty")


def test_a_pattern_that_matches_nothing_names_some_layers():
    message = r"recompute='bloc_' was given, which is found in no path of a layer of the model \(net, .*block_0"
    with pytest.raises(ValueError, match=message):
        distloop.Trainer(model_fn_of(), on(1, recompute="bloc_"))


def test_stages_are_recomputed_as_a_whole():
    def model_fn():
        network = distloop.stages([layers.Dense(4), layers.Dense(4)], devices=["CPU:0", "CPU:0"])
        network(tf.ones([1, 4]))
        return distloop.ModelSpec(network, keras.optimizers.SGD(), lambda batch, training: {"loss": batch["x"]})

    with pytest.raises(ValueError, match="recompute='dense' was given with a network of 2 stages, which are recom"):
        distloop.Trainer(model_fn, on(1, strategy="none", recompute="dense"))
