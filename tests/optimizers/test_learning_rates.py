"""Tests learning rates over steps, and for another batch size."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.optimizers.learning_rates import WarmUp, make_schedule, resolve, scale_learning_rate
from distloop.settings.durations import Period, Units
from tests.problems import refused

schedules = keras.optimizers.schedules


def rates(schedule, steps):
    return [float(schedule(tf.constant(step, tf.int64))) for step in steps]


# Another batch size.


def test_scaling_follows_the_batch_size_or_its_root():
    assert scale_learning_rate(0.1, 1024) == pytest.approx(0.4)
    assert scale_learning_rate(0.1, 64, base_batch_size=128) == pytest.approx(0.05)
    assert scale_learning_rate(0.1, 1024, rule="sqrt") == pytest.approx(0.2)
    assert scale_learning_rate(0.1, 256) == scale_learning_rate(0.1, 256, rule="sqrt") == 0.1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: scale_learning_rate(0.1, 0), "batch_size=0"),
        (lambda: scale_learning_rate(0.1, 8, base_batch_size=-1), "base_batch_size=-1"),
        (lambda: scale_learning_rate(float("nan"), 8), "base_learning_rate=nan"),
        (lambda: scale_learning_rate(0.1, 8, rule="cubic"), "rule='cubic' was given to .*; give 'linear' or 'sqrt'"),
        (lambda: WarmUp(0.1, 5), "schedule=0.1"),
        (lambda: WarmUp(schedules.CosineDecay(1.0, 5), 0), "warmup_steps=0"),
        (lambda: WarmUp(schedules.CosineDecay(1.0, 5), 5, -1.0), "start=-1.0"),
    ],
)
def test_what_makes_no_sense_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# Over steps.


@pytest.mark.parametrize(
    ("decay", "arguments", "expected"),
    [
        ("cosine", {"final": 0.1}, [0, 0.9, 1.0, 0.55, 0.1, 0.1]),
        ("cosine", {}, [0, 0.9, 1.0, 0.5, 0.0, 0.0]),
        ("linear", {"final": 0.2}, [0, 0.9, 1.0, 0.6, 0.2, 0.2]),
        ("step", {"drop_at": [60], "drop_factor": 0.5}, [0, 0.9, 1.0, 0.5, 0.5, 0.5]),
        ("constant", {}, [0, 0.9, 1.0, 1.0, 1.0, 1.0]),
        ("inverse_sqrt", {}, [0, 0.9, 1.0, 6**-0.5, 11**-0.5, 1e-5**0.5]),
        ("linear", {"hold_until": 60}, [0, 0.9, 1.0, 1.0, 0.0, 0.0]),
        ("cosine", {"hold_until": 10, "start": 0.5, "final": 0.1}, [0.5, 0.95, 1.0, 0.55, 0.1, 0.1]),
    ],
)
def test_warm_up_then_decay_has_the_documented_values(decay, arguments, expected):
    arguments = {name: 2 * value if name in ("final", "start") else value for name, value in arguments.items()}
    schedule = make_schedule(2.0, 110, warmup=10, decay=decay, **arguments)
    assert rates(schedule, [0, 9, 10, 60, 110, 1_000_000]) == pytest.approx([2 * value for value in expected], abs=1e-7)


def test_a_stable_phase_ends_where_it_says_and_decays_like_the_rest_alone():
    schedule = make_schedule(0.3, 100, warmup=10, hold_until=80, final=0.1)
    assert rates(schedule, [5, *range(10, 81, 7), 80]) == pytest.approx([0.15] + [0.3] * 12)
    assert rates(schedule, range(80, 101)) == pytest.approx(rates(make_schedule(0.3, 20, final=0.1), range(21)))


def test_step_decay_drops_at_exactly_the_steps_named_however_late():
    schedule = make_schedule(1.0, 100, warmup=5, decay="step", drop_at=(30, 60))
    assert rates(schedule, [29, 30, 59, 60, 99]) == pytest.approx([1, 0.1, 0.1, 0.01, 0.01])
    drop = 2**24 + 1
    schedule = make_schedule(1.0, 2**25, warmup=2, decay="step", drop_at=[drop])
    assert rates(schedule, [drop - 1, drop]) == pytest.approx([1.0, 0.1])


def test_warm_up_meets_a_users_schedule_also_one_that_returns_a_number():
    class Constant(schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.1

    own = schedules.ExponentialDecay(0.8, decay_steps=10, decay_rate=0.5)
    assert rates(WarmUp(own, 4, start=0.4), [0, 1, 3, 4, 14]) == pytest.approx([0.4, 0.5, 0.7, 0.8, 0.4])
    assert rates(WarmUp(Constant(), 4), [0, 2, 4]) == pytest.approx([0, 0.05, 0.1])


def test_warm_up_agrees_with_keras():
    keras_own = schedules.CosineDecay(0.0, 90, warmup_target=0.5, warmup_steps=10)
    steps = range(0, 120, 7)
    assert rates(make_schedule(0.5, 100, warmup=10), steps) == pytest.approx(rates(keras_own, steps), abs=1e-7)


@pytest.mark.parametrize("decay", ["cosine", "linear", "step", "constant", "inverse_sqrt"])
def test_a_schedule_is_float32_over_int64_steps_and_survives_its_config(decay):
    drop_at = [50] if decay == "step" else ()
    if decay != "inverse_sqrt":  # which needs a warm-up
        assert rates(make_schedule(0.7, 100, decay=decay, drop_at=drop_at), [0]) == pytest.approx([0.7])
    schedule = make_schedule(0.7, 100, warmup=10, decay=decay, drop_at=drop_at)
    rate = tf.function(lambda step: schedule(step))(tf.constant(10, tf.int64))
    assert rate.dtype == tf.float32 and rate.shape == [] and float(rate) == np.float32(0.7)
    optimizer = keras.optimizers.SGD.from_config(keras.optimizers.SGD(schedule).get_config())
    again = schedules.deserialize(schedules.serialize(schedule))
    steps = [0, 5, 10, 49, 50, 99, 100]
    assert rates(again, steps) == rates(schedule, steps) == rates(optimizer._learning_rate, steps)


def test_a_share_of_a_short_run_leaves_a_step_after_the_warm_up():
    assert float(make_schedule(1.0, 1, warmup="10 %")(0)) == 1.0
    assert float(make_schedule(1.0, 2, warmup="90 %")(1)) == 1.0
    with pytest.raises(ValueError, match="warmup=2 was given .* below steps=2"):
        make_schedule(1.0, 2, warmup="100 %")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"peak": 0.0}, "peak=0.0 was given to make_schedule; give a learning rate above 0"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 10.5}, "steps=10.5"),
        ({"warmup": 100}, "warmup=100 was given .* below steps=100"),
        ({"warmup": -1}, "warmup=-1"),
        ({"decay": "cosin"}, "decay='cosin' was given to make_schedule; give 'cosine', 'linear'"),
        ({"final": 2.0}, "final=2.0 was given .* from 0 to peak=1.0"),
        ({"decay": "constant", "final": 0.5}, "final=0.5 was given .* decay='constant' does not read it"),
        ({"start": 0.1}, "start=0.1 was given .* warmup=0 does not read it"),
        ({"start": 2.0, "warmup": 5}, "start=2.0 was given .* from 0 to peak=1.0"),
        ({"hold_until": 100}, "hold_until=100 was given .* from warmup=0 to below steps=100"),
        ({"hold_until": 5, "warmup": 10}, "from warmup=10"),
        ({"decay": "inverse_sqrt"}, "decay='inverse_sqrt' was given .* give a warmup too"),
        ({"decay": "step"}, "decay='step' and drop_at=()"),
        ({"drop_at": [5]}, "decay='cosine' and drop_at="),
        ({"decay": "step", "drop_at": [60, 30]}, "give rising whole numbers"),
        ({"decay": "step", "drop_at": [100]}, "below steps=100"),
        ({"decay": "step", "drop_at": [5], "warmup": 5}, "above warmup=5"),
        ({"decay": "step", "drop_at": [5], "drop_factor": 1.0}, "drop_factor=1.0"),
    ],
)
def test_a_wrong_argument_fails_in_one_sentence(arguments, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(").replace(")", r"\)")) as error:
        make_schedule(**{"peak": 1.0, "steps": 100} | arguments)
    assert "\n" not in str(error.value)


# Schedules of a run.


def units_of(steps):
    return Units(run=Period(steps=steps))


@pytest.mark.parametrize(
    ("steps", "warmup", "hold_until"),
    [
        (400, 40, 200),
        ("400 steps", "10 %", "50 %"),
        ("100 %", "10 %", "50 %"),
        ("10 epochs", "1 epoch", "5 epochs"),
        ("4000 examples", "400 examples", "2000 examples"),
        ("100 %", "400 examples", "5 epochs"),
    ],
)
def test_the_rate_at_a_step_is_the_same_for_each_unit(steps, warmup, hold_until):
    optimizer = keras.optimizers.SGD(make_schedule(2.0, steps, warmup=warmup, hold_until=hold_until, decay="linear"))
    units = Units(lambda: 40, lambda: 10, run=Period(steps=400))
    resolve([optimizer], units, lambda: None)
    expected = {0: 0.0, 20: 1.0, 40: 2.0, 200: 2.0, 300: 1.0, 399: 0.01, 400: 0.0}
    assert rates(optimizer._learning_rate, expected) == pytest.approx(list(expected.values()), abs=1e-6)


def test_a_run_trains_by_the_rates_of_its_epochs():
    def model_fn():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        schedule = make_schedule(1.0, "100 %", warmup="1 epoch", hold_until="50 %", decay="linear")
        optimizer = keras.optimizers.SGD(schedule)
        return distloop.ModelSpec(model, optimizer, lambda batch, training: {"loss": model(batch["x"])[:, 0]})

    data = tf.data.Dataset.from_tensor_slices({"x": np.ones((20, 1), np.float32)}).batch(5)
    trainer = distloop.Trainer(model_fn, distloop.Config(console="quiet", log_every=1))
    trainer.build(data)
    weight = float(trainer.model.weights[0].numpy()[0, 0])
    numbers = trainer.fit(data, epochs=4)
    rates_of_steps = [0, 0.25, 0.5, 0.75, *[1.0] * 5, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    after = [*rates_of_steps[1:], 0.0]  # a row has the rate of the step after it
    assert numbers.history["learning_rate"] == pytest.approx(after, abs=1e-6)
    assert float(trainer.model.weights[0].numpy()[0, 0]) == pytest.approx(weight - sum(rates_of_steps), abs=1e-5)


class Least(schedules.LearningRateSchedule):
    """The least of what its parts return."""

    def __init__(self, parts):
        self.parts, self.settings = parts, {"unsorted": 1, 2: None}

    def __call__(self, step):
        parts = self.parts.values() if isinstance(self.parts, dict) else self.parts
        return keras.ops.min(keras.ops.stack([part(step) for part in parts]))


class Calls(schedules.LearningRateSchedule):
    """What a function returns."""

    def __init__(self, fn):
        self.fn = fn

    def __call__(self, step):
        return self.fn(step)


Pair = collections.namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    "make",
    [
        Calls,
        lambda rate: Least([rate]),
        lambda rate: Least((rate, schedules.ExponentialDecay(2.0, 100, 0.99))),
        lambda rate: Least(Pair(rate, second=rate)),
        lambda rate: Least({1: rate, "one": rate}),
        lambda rate: Least([Least({"inner": Calls(rate)}), WarmUp(Calls(lambda step: 1.0), 1, start=1.0)]),
    ],
)
def test_a_schedule_of_a_run_is_found_in_attributes_lists_tuples_and_dicts(make):
    given, called = make_schedule(1.0, "100 %", decay="linear"), []
    optimizer = keras.optimizers.SGD(make(given))
    for steps in (4, 4, 8):
        resolve([optimizer], units_of(steps), lambda steps=steps: called.append(steps))
        assert sum(rates(optimizer._learning_rate, range(steps))) == pytest.approx((steps + 1) / 2)
    assert called == [4, 8]
    other = keras.optimizers.SGD(optimizer._learning_rate)  # has copies of its own
    resolve([other], units_of(2), lambda: None)
    assert sum(rates(optimizer._learning_rate, range(8))) == pytest.approx(4.5)


@pytest.mark.parametrize("eager", [False, True])
def test_a_schedule_of_a_run_that_is_not_found_is_refused(eager):
    def model_fn():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        rate = make_schedule(1.0, "100 %", decay="linear")
        optimizer = keras.optimizers.SGD(Calls(lambda step: rate(step)), name="hidden")
        return distloop.ModelSpec(model, optimizer, lambda batch, training: {"loss": model(batch)[:, 0]})

    trainer = distloop.Trainer(model_fn, distloop.Config(console="quiet", batch_size=4, eager=eager))
    parts = "learning rate of 'hidden' calls a schedule whose lengths depend on the run", "or in a list, tuple or dict"
    refused(lambda: trainer.fit(np.ones((8, 1), np.float32), steps=4), *parts)
    assert trainer.step == 0


def test_one_schedule_in_two_optimizers_has_the_length_of_each_ones_run():
    schedule, called = make_schedule(0.1, "100 %", decay="linear"), []
    first, second = keras.optimizers.SGD(schedule), keras.optimizers.SGD(WarmUp(schedule, 10))
    for optimizer, steps in ((first, 10), (second, 20), (first, 40)):
        resolve([optimizer], units_of(steps), lambda optimizer=optimizer: called.append(optimizer))
    assert rates(first._learning_rate, [0, 20, 40]) == pytest.approx([0.1, 0.05, 0])
    assert rates(second._learning_rate, [0, 10, 20, 30]) == pytest.approx([0, 0.1, 0.05, 0])
    assert called == [first, second, first]
    resolve([first, second], units_of(40), lambda: called.append("again"))
    resolve([first, second], units_of(40), lambda: called.append("nothing new"))
    assert called[3:] == ["again"]  # of the second's other length
    assert rates(schedule, [0, 20]) == pytest.approx([0.1, 0.05])  # a user may look at it


def test_what_is_set_on_an_optimizer_between_two_fits_is_traced_again():
    optimizer, called = keras.optimizers.AdamW(make_schedule(0.1, 100)), []
    optimizer.build([keras.Variable(1.0)])
    for change in (lambda: None, lambda: setattr(optimizer, "learning_rate", make_schedule(0.2, 100))):
        change()
        resolve([optimizer], units_of(100), lambda: called.append("rate"))
    optimizer.weight_decay = 0.5
    resolve([optimizer], units_of(100), lambda: called.append("decay"))
    assert called == ["rate", "decay"]
