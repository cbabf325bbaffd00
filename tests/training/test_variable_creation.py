"""Variables that a step's functions create are refused, wherever the step runs."""

import keras
import pytest
import tensorflow as tf

import distloop
from distloop.training.user_functions import VariableCreatedError, recorded, refusing_new_variables
from tests.problems import classification, mirrored, on


def test_variables_are_recorded_by_identity():
    created = {}
    with recorded(created):
        variable = tf.Variable(0.0)
    assert created[id(variable)] is variable and len(created) == 1


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("is_eager", [False, True])
def test_a_layer_that_is_built_by_a_step_is_refused_by_name(replicas, is_eager):
    layer = keras.layers.Dense(2, name="head")
    fn = refusing_new_variables(lambda: layer(tf.ones([1, 3])))
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()

    def step():
        return strategy.run(fn)

    with pytest.raises(VariableCreatedError, match="^The variable 'head/kernel' was created by a step") as e:
        step() if is_eager else tf.function(step, autograph=False)()
    assert e.value.variable == "head/kernel"


def test_a_random_stream_of_its_own_gets_another_hint():
    fn = refusing_new_variables(lambda: keras.layers.Dropout(0.5))
    with pytest.raises(
        VariableCreatedError, match="variable .* was created by a step, .*: give keras.random functions"
    ):
        tf.function(fn, autograph=False)()


def test_other_errors_and_results_pass():
    assert refusing_new_variables(lambda x: x + 1)(1) == 2
    with pytest.raises(KeyError):
        refusing_new_variables(lambda: {}["x"])()


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_part_that_only_training_calls_is_refused_in_the_first_step(replicas):
    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            self.head, self.extra = keras.layers.Dense(4), keras.layers.Dense(4, name="extra")

        def call(self, x, training=False):
            return self.head(x) + (self.extra(x) if training else 0.0)

    def model_fn():
        model = Late()

        def loss_fn(batch, training):
            logits = model(batch["x"], training=training)
            return {"loss": keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)}

        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn)

    trainer = distloop.Trainer(model_fn, on(replicas))
    with pytest.raises(ValueError, match="The variable 'late.*/extra/kernel' was created by a step"):
        trainer.fit(distloop.make_dataset(classification(), 16), steps=2)
