"""One call of a layer that is recomputed: the same gradients, masks, statistics and losses, less memory; refusals."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.audit.memory_estimate import peak_of
from distloop.graph_functions import RECOMPUTED_SCOPE, graph_function
from distloop.recompute.recomputation import recomputing
from distloop.variables import named_variables, tensorflow_variable
from tests.problems import assert_close, assert_equal
from tests.recompute.test_recomputation import make_chain

layers = keras.layers


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
    assert any(f"{RECOMPUTED_SCOPE}/" in op.name for op in graph.get_operations()), "nothing was recomputed"
    assert_equal(written_again, written)
    assert {path: type(value) for path, value in again.items()} == {path: type(v) for path, v in kept.items()}
    dense = [{p: tf.convert_to_tensor(v).numpy() for p, v in of.items() if v is not None} for of in (again, kept)]
    assert_close(*dense)
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


@pytest.mark.slow
def test_gradients_masks_and_statistics_are_those_of_kept_activations():
    model, ids = Reader(), tf.constant([[1, 2, 3, 0], [4, 5, 0, 0], [8, 7, 6, 5]])
    model(ids)

    def loss_fn(rows, training):
        loss = keras.ops.mean(model(rows, training=training) ** 2)
        return loss + sum(model.losses)

    gradients, _ = assert_same(model, loss_fn, ids, "attend|score|read|embed|inner")  # a score is within attend
    assert all(gradient is not None for gradient in gradients.values())
    assert isinstance(gradients["reader/embed/embeddings"], tf.IndexedSlices)  # as it is without recomputation


class Block(layers.Layer):
    """Sets the `training` of one of its layers, by which Keras sets that of all later ones."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.drop, self.norm = layers.Dropout(0.5), layers.BatchNormalization(momentum=0.5)
        self.norm.build((None, 4))

    def call(self, rows):
        return self.norm(self.drop(rows), training=False)


@pytest.mark.slow
def test_the_second_call_sees_the_state_that_the_first_one_saw():
    block, dense = Block(name="block"), layers.Dense(4)
    dense.build((None, 4))

    def loss_fn(rows, training):
        hidden = block(dense(rows), training=training)
        return tf.reduce_mean(block.norm(hidden + 1.0, training=True) ** 3)  # writes the statistics that were read

    assert_same([block, dense], loss_fn, tf.random.normal([6, 4], seed=1), "block")


@pytest.mark.wide
def test_activations_take_less_memory_and_xla_computes_the_same():
    model = make_chain(width=16, blocks=5)
    loss_fn, rows = squares_of(model), tf.ones([64, 16])
    graphs = [differentiated(model, loss_fn, rows, pattern)[2] for pattern in ("", "block")]
    kept, recomputed = (peak_of(graph).activations for graph in graphs)
    assert recomputed < 0.5 * kept  # nothing is taken from the first pass
    model = make_chain(blocks=1)
    _, graph = assert_same(model, squares_of(model), tf.random.normal([6, 8], seed=1), "block", jit_compile=True)
    assert any(op.type == "XlaOptimizationBarrier" for op in graph.get_operations())


def squares_of(model):
    return lambda rows, training: tf.reduce_mean(model(rows, training=training) ** 2)


def test_a_gradient_within_the_loss_is_differentiated_too():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, activation="tanh", name="hidden"), layers.Dense(1)])

    def loss_fn(rows, training):
        with tf.GradientTape() as tape:
            tape.watch(rows)
            outputs = model(rows, training=training)
        of_rows, of_kernel = tape.gradient(outputs, [rows, model.layers[0].kernel.value])
        return tf.reduce_sum(of_rows**2) + tf.reduce_sum(of_kernel**2)

    assert_same(model, loss_fn, tf.random.normal([5, 3], seed=1), "hidden")


def test_what_a_layer_reads_without_being_given_it_gets_its_gradient():
    table, shift, keep = layers.Embedding(3, 4, name="table"), layers.Dense(1, name="shift"), {}
    tied = layers.Lambda(lambda hidden: hidden @ tf.transpose(table.embeddings) + keep["shift"], name="tied")
    rows = tf.constant([0, 1, 1])
    shift(table(rows))

    def loss_fn(rows, training):
        hidden = table(rows)
        keep["shift"] = shift(hidden)
        return tf.reduce_sum(tied(hidden) ** 2)

    assert_same([table, shift, tied], loss_fn, rows, "tied")


class Faulty(layers.Layer):
    """A layer that cannot be called again, for what it does besides its computation."""

    def __init__(self, fault, **settings):
        super().__init__(**settings)
        self.fault, self.kept = fault, []
        self.count = self.add_weight(shape=(), trainable=False, name="count")
        self.kernel = self.add_weight(shape=(3, 3), name="kernel")

    def call(self, rows):
        hidden = rows @ self.kernel
        if more := self.fault(self, rows, hidden):
            hidden += more[0]
        return hidden * 1.0


def gathers(layer, rows, hidden):
    return [tf.reduce_sum(distloop.gather_rows(rows)[0])]


def writes_by_tensorflow(layer, rows, hidden):
    tensorflow_variable(layer.count).assign_add(1.0)


def writes_in_a_loop(layer, rows, hidden):
    tf.while_loop(lambda i: i < 2, lambda i: [i + 0 * tf.cast(layer.count.assign(i), tf.int32) + 1], [0])


def writes_what_is_trained(layer, rows, hidden):
    layer.kernel.assign(layer.kernel / tf.norm(layer.kernel))


def keeps_for_the_loss(layer, rows, hidden):
    layer.kept = [hidden]


def keeps_for_itself(layer, rows, hidden):
    if not layer.kept:
        layer.kept.append(tf.tanh(hidden))
    return layer.kept


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (gathers, "calls gather_rows; the backward pass cannot call it again"),
        (writes_by_tensorflow, "writes to a variable or a generator by TensorFlow's operation AssignAddVariableOp"),
        (writes_in_a_loop, "writes 'faulty/count' in a loop or a branch of TensorFlow"),
        (writes_what_is_trained, "writes 'faulty/kernel', which is trained"),
        (keeps_for_the_loss, r"keeps the tensor '.*' of its call for later, by other ways than its outputs"),
        (keeps_for_itself, r"keeps the tensor '.*' of its call for later, by other ways than its outputs"),
    ],
)
def test_layers_that_cannot_be_called_again_are_refused(fault, sentence):
    layer = Faulty(fault, name="faulty")

    def loss_fn(rows, training):
        return tf.add_n([tf.reduce_sum(tensor) for tensor in [layer(rows), *layer.kept]])

    with pytest.raises(ValueError, match=f"^recompute was given, and the layer 'faulty', which it matches, {sentence}"):
        differentiated([layer], loss_fn, tf.ones([2, 3]), "faulty")


def test_what_a_layer_keeps_may_be_used_where_no_gradient_flows():
    layer = Faulty(keeps_for_the_loss, name="faulty")

    def loss_fn(rows, training):
        return tf.reduce_sum(layer(rows)) + tf.reduce_sum(tf.stop_gradient(layer.kept[0]))

    assert_same([layer], loss_fn, tf.ones([2, 3]), "faulty")
