"""Law `tokens`: on any devices and after any stop, what is due by tokens is due at the same step."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.checkpoints.store import in_workdir
from distloop.training.window import Progress
from tests.problems import assert_close, assert_equal, classification, classifier, mostly_wide, on, refused, weights

SIZE, ROWS = 4, 22  # the last batch of a pass has 2 rows
LENGTHS = 1 + np.arange(ROWS) * 7 % 5  # tokens of each row, of 5 at most
UNTIL, WARM_UP = 300, 90


def rows():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 9, [ROWS, 5]).astype(np.int32)
    return {"words": words, "mask": np.float32(np.arange(5) < LENGTHS[:, None])}


def data():
    return distloop.make_dataset(rows(), SIZE)


def model_fn(length="100 %", **arguments):
    table, head = keras.layers.Embedding(9, 4, name="table"), keras.layers.Dense(9, name="head")
    table.build([None, 5])
    head.build([None, 5, 4])

    def loss_fn(batch, training):
        logits = head(table(batch["words"]))
        values = keras.losses.sparse_categorical_crossentropy(batch["words"], logits, from_logits=True)
        return {"loss": distloop.weighted(values, batch["mask"])}  # [B, T]

    rate = distloop.make_schedule(0.5, length, **{"warmup": f"{WARM_UP} tokens", "decay": "linear", **arguments})
    return distloop.ModelSpec([table, head], keras.optimizers.SGD(rate), loss_fn)


def counts(steps):
    """The tokens of the run after each step, by hand; from 0 steps on."""
    of_batches = [int(LENGTHS[i : i + SIZE].sum()) for i in range(0, ROWS, SIZE)]
    return np.cumsum([0, *(of_batches[step % len(of_batches)] for step in range(steps))])


COUNTS = counts(60)
LAST = int(np.argmax(COUNTS >= UNTIL))


def rate_after(tokens):
    if tokens < WARM_UP:
        return 0.5 * tokens / WARM_UP
    return 0.5 * max(0.0, 1 - (tokens - WARM_UP) / (UNTIL - WARM_UP))


def noting(every, fail_at=None):
    """An action that notes its steps and the learning rate of each, and fails at one until it is told not to."""

    def act(report):
        act.steps.append(report.step)
        if report.step == act.fail_at:
            raise RuntimeError("stop here")

    act.every, act.steps, act.fail_at = every, [], fail_at
    return act


def train(replicas=1, actions=(), **changes):
    trainer = distloop.Trainer(model_fn, on(replicas, log_every=1, **changes))
    found = trainer.fit(data(), until=f"{UNTIL} tokens", actions=actions)
    return trainer, found


@pytest.fixture(scope="module")
def straight():
    return weights(train()[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "replicas, settings",
    mostly_wide(
        [(1, {}), (2, {}), (3, {"microbatches": 2}), (2, {"virtual_replicas": 2}), (1, {"eager": True})], (2, {})
    ),
)
def test_a_run_ends_and_acts_at_the_steps_that_reach_so_many_tokens(straight, replicas, settings):
    act, quarter = noting("70 tokens"), noting("25 %")
    trainer, found = train(replicas, [act, quarter], **settings)
    due = [step for step in range(1, LAST) if COUNTS[step] // 70 > COUNTS[step - 1] // 70]
    assert trainer.step == LAST and act.steps == [*due, LAST]
    assert quarter.steps == [int(np.argmax(share * UNTIL <= COUNTS)) for share in (0.25, 0.5, 0.75, 1.0)]
    assert_close(weights(trainer), straight)
    rates = dict(zip(found.steps["learning_rate"], found.history["learning_rate"], strict=True))
    expected = {step: rate_after(COUNTS[step]) for step in rates}
    assert rates == pytest.approx(expected, abs=1e-6) and len(rates) == LAST


@pytest.mark.slow
@pytest.mark.parametrize("step", mostly_wide(range(1, LAST), LAST - 1))
def test_a_run_that_stopped_anywhere_goes_on_to_the_same_step_and_weights(straight, tmp_path, step):
    act = noting(1, fail_at=step)
    with pytest.raises(RuntimeError, match="stop here"):
        train(workdir=str(tmp_path), actions=[act], checkpoint_every="50 tokens")
    saved = [number for number in range(1, step) if COUNTS[number] // 50 > COUNTS[number - 1] // 50]
    assert set(in_workdir(str(tmp_path)).steps) <= {*saved, step}
    act.fail_at = None
    trainer, _ = train(workdir=str(tmp_path), actions=[act], checkpoint_every="50 tokens")
    assert trainer.step == LAST
    assert_equal(weights(trainer), straight)
    again = distloop.Trainer(model_fn, on(1, workdir=str(tmp_path)))
    again.fit(data(), until=f"{UNTIL} tokens")
    assert again.step == LAST


@pytest.mark.slow
def test_an_evaluation_due_by_tokens_comes_where_an_action_failed(tmp_path):
    step = int(np.argmax(COUNTS >= 100))
    act, evals = noting(1, fail_at=step), {"test": distloop.Evaluation(data(), every="100 tokens")}
    config = on(1, log_every=1, workdir=str(tmp_path))
    with pytest.raises(RuntimeError, match="stop here"):
        distloop.Trainer(model_fn, config).fit(data(), until=f"{UNTIL} tokens", evals=evals, actions=[act])
    act.fail_at = None
    found = distloop.Trainer(model_fn, config).fit(data(), until=f"{UNTIL} tokens", evals=evals, actions=[act])
    assert found.steps["test/loss"][0] == step


@pytest.mark.slow
def test_a_schedule_in_tokens_may_be_that_of_a_run_in_steps():
    trainer, dataset = distloop.Trainer(lambda: model_fn(f"{UNTIL} tokens"), on(2, log_every=5)), data()
    trainer.fit(dataset, steps=5)
    found = trainer.fit(dataset, steps=10)  # the count goes on
    assert found["learning_rate"] == pytest.approx(rate_after(COUNTS[10]), abs=1e-6)


@pytest.mark.slow
def test_a_step_of_a_run_in_tokens_is_replayed(tmp_path):
    def act(report):
        weights_then[report.step] = weights(report.state)

    act.every, weights_then = 1, {}
    train(workdir=str(tmp_path), checkpoint_every=5, actions=[act])
    trainer = distloop.Trainer(model_fn, on(1, workdir=str(tmp_path), until=f"{UNTIL} tokens"))
    result = trainer.replay(data(), step=8)
    assert result.learning_rate == pytest.approx(rate_after(COUNTS[7]), abs=1e-6)
    assert_close(result.weights_after, weights_then[8])


@pytest.mark.slow
def test_the_weights_of_examples_may_be_their_tokens():
    def of_examples():
        spec = model_fn()

        def loss_fn(batch, training):
            values, mask = spec.loss_fn(batch, training)["loss"]
            number = tf.reduce_sum(mask, -1)
            return {"loss": distloop.weighted(tf.reduce_sum(values * mask, -1) / number, number)}  # [B], [B]

        return distloop.ModelSpec(spec.model, spec.optimizer, loss_fn)

    trainer = distloop.Trainer(of_examples, on(1, log_every=1))
    found = trainer.fit(data(), until=f"{UNTIL} tokens")
    assert trainer.step == LAST
    assert found["tokens_per_sec"] == pytest.approx((COUNTS[LAST] - COUNTS[LAST - 1]) * found["steps_per_sec"])


@pytest.mark.parametrize(
    ("arguments", "until", "message"),
    [
        ({"warmup": 5}, "300 tokens", "one of which counts tokens: give all lengths in tokens"),
        ({"length": 100}, "300 tokens", "one of which counts tokens"),
        ({}, "20 steps", "one of which counts tokens"),
    ],
)
def test_lengths_in_tokens_and_in_steps_are_refused(arguments, until, message):
    trainer = distloop.Trainer(lambda: model_fn(**arguments), on(1))
    refused(lambda: trainer.fit(data(), until=until), message)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("length", [{"until": "10 tokens"}, {"steps": 2}])
def test_tokens_without_a_loss_are_refused(length, eager):
    def without_loss():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])

        rate = 0.1 if "until" in length else distloop.make_schedule(0.1, "10 tokens")

        def step_fn(step):
            step.report("rows", 1.0, 1.0)

        return distloop.ModelSpec(model, keras.optimizers.SGD(rate), step_fn=step_fn)

    trainer = distloop.Trainer(without_loss, on(1, eager=eager))
    refused(
        lambda: trainer.fit(distloop.make_dataset(classification(16), 8), **length),
        "A duration in tokens was given, and no `loss` whose weights count them is returned",
    )


@pytest.mark.slow
@pytest.mark.parametrize("length", [{"until": "100 tokens"}, {"steps": 6}])
def test_a_checkpoint_that_counted_no_tokens_is_refused(tmp_path, monkeypatch, length):
    rate = 0.1 if "until" in length else distloop.make_schedule(0.1, "100 tokens")
    make, dataset = (
        classifier(optimizer=lambda: keras.optimizers.SGD(rate)),
        distloop.make_dataset(classification(64), 8),
    )
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "save", lambda self, save=Progress.save: {**save(self), "tokens": math.nan})
        distloop.Trainer(make, on(1, workdir=str(tmp_path))).fit(dataset, steps=3)
    trainer = distloop.Trainer(make, on(1, workdir=str(tmp_path)))
    refused(lambda: trainer.fit(dataset, **length), "the checkpoint does not know how many there were")


def test_a_share_of_a_run_in_tokens_is_no_step_to_average_from():
    trainer = distloop.Trainer(model_fn, on(1, average_from="50 %"))
    refused(
        lambda: trainer.fit(data(), until="300 tokens"), "which is by time or tokens, so that its steps are not known"
    )
