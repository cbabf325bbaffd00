"""Copies of Keras models and optimizers: what their configs leave out, compared with Keras training the original."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from tests.keras_models.compiled_models import X, Y, assert_trains_on_as_keras_does, batches, compiled, net
from tests.problems import on

pytestmark = pytest.mark.slow


def trainer_of(model, replicas=1):
    return distloop.Trainer(distloop.from_keras(model), on(replicas))


WORDS = np.array(["a", "b c", "c d e", "f"] * 8, dtype=object)[:, None]


class Counted(keras.layers.Layer):
    """Adds a number that only `save_own_variables` keeps."""

    number = 0.0

    def call(self, x):
        return x + self.number

    def save_own_variables(self, store):
        store["number"] = self.number

    def load_own_variables(self, store):
        self.number = float(store["number"])


def adapted_model():
    """Returns a compiled model of numbers and words whose layers hold more than weights."""
    layers, counted = keras.layers, Counted()
    counted.number = 2.5
    normalization, bins = layers.Normalization(), layers.Discretization(num_bins=5, output_mode="multi_hot")
    lookup, text = layers.StringLookup(output_mode="one_hot"), layers.TextVectorization(output_mode="tf_idf")
    for layer, values in ((normalization, 5 * X + 3), (bins, X), (lookup, WORDS), (text, WORDS)):
        layer.adapt(values)
    hashing = layers.Hashing(4, output_mode="one_hot")
    numbers, words = keras.Input((6,), name="numbers"), keras.Input((1,), dtype="string", name="words")
    inner = keras.Sequential([keras.Input((6,)), normalization, counted])
    features = [inner(numbers), bins(numbers), lookup(words), layers.Flatten()(text(words)), hashing(words)]
    outputs = layers.Dense(2)(layers.Concatenate()(features))
    return compiled(keras.Model({"numbers": numbers, "words": words}, outputs), optimizer=keras.optimizers.SGD(0.01))


@pytest.mark.wide
def test_statistics_and_vocabularies_come_along_to_training_and_export(tmp_path):
    model = adapted_model()
    inputs = {"numbers": tf.constant(X), "words": tf.constant(WORDS)}
    data = batches(inputs, Y)
    trainer = trainer_of(model, 2)
    model.fit(data, epochs=1, verbose=0)
    expected = model(inputs).numpy()
    trainer.fit(data, epochs=1)
    np.testing.assert_allclose(trainer.predict(data), expected, rtol=1e-5, atol=1e-5)
    trainer.export(str(tmp_path))
    served = tf.saved_model.load(str(tmp_path)).signatures["serving_default"]
    outputs = served(numbers=inputs["numbers"], words=inputs["words"])
    np.testing.assert_allclose(outputs["output"], expected, rtol=1e-5, atol=1e-5)


def freeze_a_layer(model):
    model.layers[1].trainable = False


def change_variables(model):
    model.layers[0].bias.trainable = False
    model.layers[0].kernel.regularizer = keras.regularizers.L2(0.1)
    model.layers[1].kernel.constraint = keras.constraints.MaxNorm(0.5)
    model.layers[1].kernel_regularizer = keras.regularizers.L2(0.1)  # without effect: the variable has none


@pytest.mark.parametrize("change", [freeze_a_layer, change_variables])
def test_what_was_changed_after_some_training_is_taken_over(change):
    model = compiled(net())
    model.fit(batches(X, Y), epochs=1, verbose=0)
    change(model)
    assert_trains_on_as_keras_does(trainer_of(model), model, batches(X, Y))


def test_variables_without_weight_decay_are_taken_over():
    model = net()
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay([model.layers[0].kernel], var_names=["bias"])
    compiled(model, optimizer=optimizer).fit(batches(X, Y), epochs=1, verbose=0)
    assert_trains_on_as_keras_does(trainer_of(model), model, batches(X, Y))


def test_a_schedule_without_a_config_is_taken_over():
    class Falling(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.1 / (1.0 + tf.cast(step, tf.float32))

    schedule = Falling()
    model = compiled(net(), optimizer=keras.optimizers.Adam(schedule))
    assert_trains_on_as_keras_does(trainer_of(model), model, batches(X, Y))
    assert model.optimizer._learning_rate is schedule


def test_what_cannot_be_made_again_or_trained_is_refused():
    class Closed(keras.optimizers.SGD):
        def __init__(self, factor):
            super().__init__(factor * 0.1)

    with pytest.raises(ValueError, match=r"'closed\w*', a Closed, cannot be made again .*: let get_config return"):
        trainer_of(compiled(net(), optimizer=Closed(2.0)))

    class Doubled(keras.Sequential):
        def call(self, x, **settings):
            return 2 * super().call(x, **settings)

    with pytest.raises(ValueError, match="Keras makes a Sequential of it, without its call.: give from_keras a func"):
        trainer_of(compiled(Doubled([keras.Input((6,)), keras.layers.Dense(2)])))
    inner, inputs = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6)]), keras.Input((6,))
    shared = keras.Model(inputs, inner.layers[0](inner(inputs)))
    with pytest.raises(ValueError, match="its layers share a variable, and those of the copy would not.: give from_k"):
        trainer_of(compiled(shared))
    with pytest.raises(ValueError, match="There is no trainable variable"):
        trainer_of(compiled(keras.Sequential([keras.Input((2,)), keras.layers.UnitNormalization()])))


def test_a_subclass_that_only_builds_its_layers_is_taken():
    class Small(keras.Model):
        def __init__(self):
            inputs = keras.Input((6,))
            super().__init__(inputs, keras.layers.Dense(2)(inputs))

    model = compiled(Small())
    assert_trains_on_as_keras_does(trainer_of(model), model, batches(X, Y))


def test_layers_are_paired_by_name_where_a_subclass_reorders_them():
    class Encoder(keras.Model):
        def __init__(self):
            inputs = keras.Input((6,))
            layers = [keras.layers.Dense(6, name=f"dense_{i}") for i in "abc"]
            outputs = layers[0](layers[1](layers[2](inputs)))
            super().__init__(inputs, keras.layers.Dense(2)(outputs))
            self.kept = layers

    model = compiled(Encoder())
    for i, variable in enumerate(model.weights):
        variable.assign(tf.fill(variable.shape, 0.01 * i))
    trainer = trainer_of(model)
    for layer in model.kept:
        np.testing.assert_array_equal(trainer.model.get_layer(layer.name).kernel, layer.kernel)


@pytest.mark.wide
def test_layers_that_keras_numbers_anew_are_paired_in_order():
    @keras.saving.register_keras_serializable("tests")
    class Pair(keras.Model):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.first, self.second = keras.layers.Dense(6), keras.layers.Dense(6)

        def call(self, x):
            return self.second(self.first(x))[:, :2]

    keras.layers.Dense(1)  # so that the numbers of the copy, which begin anew, are also those of other layers
    model = compiled(Pair())
    model(X)
    keras.backend.clear_session()
    copy = trainer_of(model).model
    for found, expected in ((copy.first, model.first), (copy.second, model.second)):
        np.testing.assert_array_equal(found.kernel, expected.kernel)


def test_an_optimizer_whose_config_lacks_an_argument_is_refused():
    class Boosted(keras.optimizers.SGD):
        def __init__(self, learning_rate=0.1, boost=1.0, **settings):
            super().__init__(learning_rate, **settings)
            self.boost = boost

    with pytest.raises(ValueError, match=r"a Boosted, cannot be made again .*lacks boost\): let get_config return"):
        trainer_of(compiled(net(), optimizer=Boosted(boost=3.0)))
    trainer_of(compiled(net(), optimizer=Boosted()))


def test_an_optimizer_that_keeps_an_argument_as_one_of_keras_is_copied():
    class Boosting(keras.optimizers.SGD):
        def __init__(self, boost=1.0, **settings):
            settings.setdefault("learning_rate", 0.1 * boost)
            super().__init__(**settings)

    trainer = trainer_of(compiled(net(), optimizer=Boosting(3.0)))
    assert float(trainer.optimizer.learning_rate) == pytest.approx(0.3)


@pytest.mark.parametrize("make", [list, lambda layers: dict(zip("ab", layers, strict=True))])
def test_a_layer_that_makes_the_layers_of_an_argument_itself_is_copied(make):
    @keras.saving.register_keras_serializable("tests")
    class Blocks(keras.layers.Layer):
        def __init__(self, blocks=None, **settings):
            super().__init__(**settings)
            self.blocks = make(blocks or [keras.layers.Dense(6), keras.layers.Dense(6)])

        def call(self, x):
            for block in self.blocks.values() if isinstance(self.blocks, dict) else self.blocks:
                x = block(x)
            return x

        def get_config(self):
            return super(keras.layers.Layer, self).get_config()

    keras.layers.Dense(1)
    model = compiled(keras.Sequential([keras.Input((6,)), Blocks(), keras.layers.Dense(2)]))
    np.testing.assert_array_equal(trainer_of(model).model(X), model(X))


def test_a_layer_that_makes_the_function_of_an_argument_itself_is_copied():
    @keras.saving.register_keras_serializable("tests")
    class Acts(keras.layers.Layer):
        def __init__(self, act=None, twice=None, times=2.0, **settings):
            super().__init__(**settings)
            inner = keras.layers.Activation("tanh")
            self.act = act or (lambda x: times * inner(x))
            self.twice = twice or functools.partial(lambda x, times: times * x, times=times)

        def call(self, x):
            return self.twice(self.act(x))

        def get_config(self):
            return super(keras.layers.Layer, self).get_config()

    model = compiled(keras.Sequential([keras.Input((6,)), Acts(), keras.layers.Dense(2)]))
    np.testing.assert_array_equal(trainer_of(model).model(X), model(X))
    model = compiled(keras.Sequential([keras.Input((6,)), Acts(times=3.0), keras.layers.Dense(2)]))
    with pytest.raises(ValueError, match="has another act; let its get_config return it"):
        trainer_of(model)


class OfUnits(keras.Model):
    """Makes a graph alone, so that Keras's copy is a plain Functional."""

    def __init__(self, units=6):
        inputs = keras.Input((6,))
        super().__init__(inputs, keras.layers.Dense(units)(inputs))
        self.units = units


class ListOfUnits(keras.Sequential):
    """As `OfUnits`, of which Keras makes a plain Sequential."""

    def __init__(self, units=6):
        super().__init__([keras.Input((6,)), keras.layers.Dense(units)])
        self.units = units


@pytest.mark.parametrize("kind", [OfUnits, ListOfUnits])
def test_a_model_class_that_only_makes_a_graph_is_copied(kind):
    model = compiled(kind(3))
    np.testing.assert_allclose(trainer_of(model).model(X), model(X), rtol=1e-6)


class Scale(keras.layers.Layer):
    """Counts its calls; its config is that of a layer without arguments."""

    def __init__(self, factor=1.0, units=None, table=(), **settings):
        super().__init__(**settings)
        self.factor, self.units, self._table, self.calls = factor, units or 3, np.array(table), 0

    def call(self, x):
        self.calls += 1
        return self.factor * x

    def get_config(self):
        return super().get_config()


class Mapping(Scale):
    """Its config is that of a layer without arguments, too."""

    def __init__(self, fn=None, kept=frozenset(), **settings):
        super().__init__(**settings)
        self.fn, self.kept = fn or (lambda x: x), kept


class Renamed(keras.layers.Layer):
    """Its config lacks what Keras itself copies, or names anew; the factor is among its variables."""

    def __init__(self, factor=1.0, name=None, trainable=True):
        super().__init__(name=name, trainable=trainable)
        self.factor = factor

    def call(self, x):
        return self.factor * x

    def get_config(self):
        return {}

    def save_own_variables(self, store):
        store["factor"] = self.factor

    def load_own_variables(self, store):
        self.factor = float(store["factor"])


class Kept(keras.layers.Layer):
    """Its config says what its arguments mean; its attributes have them in another form."""

    def __init__(self, axis=None, padding="SAME", **settings):
        super().__init__(**settings)
        self.axis, self.padding, self.calls = axis, padding, 0

    def build(self, shape):
        self.axis = len(shape) - 1
        self.built = True

    def call(self, x):
        self.calls += 1
        return x

    def get_config(self):
        return super().get_config() | {"axis": None, "padding": self.padding.lower()}


class Automatic(keras.layers.Layer):
    """Keras makes its config, of its arguments."""

    def __init__(self, rate=0.5, units=None, **settings):
        super().__init__(**settings)
        self.rate, self.units = rate, units or 6
        self.inside = [keras.layers.RandomFlip(), keras.layers.Dropout(rate), keras.layers.Dense(self.units, "relu")]

    def build(self, shape):
        self.inside[2].build(shape)
        self.built = True

    def call(self, x):
        return self.inside[2](x)


def around(layer):
    model = keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(2)])
    model(X), model(X)
    return compiled(model)


@pytest.mark.parametrize(
    ("make_layer", "lost"),
    [
        (lambda: Scale(3.0), "factor"),
        (lambda: Scale(units=8), "units"),
        (lambda: Scale(table=(1.0, 2.0)), "table"),
        (lambda: keras.Sequential([Kept(), Scale(3.0)]), "factor"),
        (lambda: Mapping(tf.square), "fn"),
        (lambda: Mapping(kept={1}), "kept"),
        (lambda: Mapping(kept=b"a"), "kept"),
    ],
)
def test_a_config_that_lacks_an_argument_with_a_default_is_refused(make_layer, lost):
    sentence = rf"rebuilt from its config \(the copy of its layer '\w+' has another {lost}; let its get_config return"
    with pytest.raises(ValueError, match=sentence):
        trainer_of(around(make_layer()))


def frozen(layer):
    layer.trainable = False
    return layer


TAKEN = {
    "defaults": Scale,
    "default functions": Mapping,
    "another name": lambda: frozen(Renamed(2.0, name="two")),
    "other forms": lambda: Kept(padding="VALID"),
    "automatic": lambda: Automatic(0.25, dtype="float32", trainable=False),
    "layers of Keras": lambda: keras.Sequential(
        [
            *(keras.layers.GaussianNoise(0.1), keras.layers.BatchNormalization(momentum=0.5)),
            *(keras.layers.Reshape((2, 3)), keras.layers.Bidirectional(keras.layers.GRU(3, recurrent_dropout=0.1))),
            *(keras.layers.SpectralNormalization(keras.layers.Dense(6)), keras.layers.Rescaling(0.5, offset=[1.0] * 6)),
            keras.layers.Dense(6, keras.layers.LeakyReLU(0.3), kernel_initializer=keras.initializers.RandomNormal()),
        ]
    ),
}


@pytest.mark.parametrize("case", TAKEN)
def test_a_layer_with_a_whole_config_and_a_state_is_taken(case):
    model = around(TAKEN[case]())
    np.testing.assert_allclose(trainer_of(model).model(X), model(X), rtol=1e-6)
