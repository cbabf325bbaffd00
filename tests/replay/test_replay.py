"""Law replay: a step that is replayed has the batch, values, gradients and weights that it had; nothing is written."""

import itertools
import json
import pathlib
import re
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.checkpoints.checkpoint import load
from distloop.workdir.run_lock import RunLock
from tests import forked
from tests.problems import assert_close, assert_equal, classification, classifier, mostly_wide, on, refused, weights

STEPS, SIZE, ROWS = 12, 16, 61  # 4 batches an epoch, the last one odd


def data(size=SIZE, **changes):
    return distloop.make_dataset({**classification(ROWS), **changes}, size, shuffle=True, seed=3)


def settings(replicas, workdir, **changes):
    defaults = {"log_every": 2, "checkpoint_every": 5, "keep_checkpoints": 100, "steps": STEPS}
    return on(replicas, workdir=str(workdir), **{**defaults, **changes})


def trainer_of(model_fn, replicas, workdir, **changes):
    return distloop.Trainer(model_fn, settings(replicas, workdir, **changes))


def train(model_fn, config, dataset=None):
    """Returns the weights after each step of a run."""
    trainer, seen = distloop.Trainer(model_fn, config), {}

    def remember(report):
        seen[report.step] = weights(report.state)

    remember.every = 1
    seen[0] = weights(trainer)
    trainer.fit(data() if dataset is None else dataset, actions=[remember])
    return seen


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The workdir of a run on one device, to be read."""
    workdir = tmp_path_factory.mktemp("finished")
    train(classifier(), settings(1, workdir))
    return workdir


def files_of(workdir):
    """The bytes and the time of each file; of the run's lock, whose holder renews its time, the bytes."""
    paths = [path for path in sorted(pathlib.Path(workdir).rglob("*")) if path.is_file()]
    return {
        str(path): (path.read_bytes(), None if path.name == "run.lock" else path.stat().st_mtime_ns) for path in paths
    }


def batch_by_hand(step):
    """The batch of a step, by passes over the data."""
    dataset = data()
    passes = (batch for _ in range(step) for batch in dataset)
    return tf.nest.map_structure(lambda t: t.numpy(), next(itertools.islice(passes, step - 1, None)))


@pytest.mark.parametrize(
    ("trained_on", "replayed_on", "step"),
    mostly_wide([(1, 2, 8), (2, 1, 8), (4, 2, 12), (2, 4, 1), (1, 2, 5), (3, 3, 6)]),
)
def test_a_step_has_the_batch_values_gradients_and_weights_that_it_had(tmp_path, trained_on, replayed_on, step):
    model_fn = classifier(is_weighted=True, l2=0.01)
    seen = train(model_fn, settings(trained_on, tmp_path, clip_norm=0.3, average_decay=0.9))
    before = files_of(tmp_path)
    with RunLock(str(tmp_path)):  # of the run, which is training
        held = files_of(tmp_path)
        trainer = trainer_of(model_fn, replayed_on, tmp_path, clip_norm=0.3, average_decay=0.9)
        result = trainer.replay(data(), step=step)
        assert files_of(tmp_path) == held
    assert {path for path in before if before[path] != files_of(tmp_path)[path]} <= {str(tmp_path / "run.lock")}
    assert_close(result.weights_before, seen[step - 1])
    assert_close(result.weights_after, seen[step])
    batch = batch_by_hand(step)
    assert_equal(dict(result.batch), batch)
    assert np.array_equal(np.asarray(classification(ROWS)["x"])[result.rows], batch["x"])
    assert result.differences == [] and result.is_finite and result.failure == ""

    spec = classifier(is_weighted=True, l2=0.01)()
    for variable in spec.model.variables:
        variable.assign(result.weights_before[variable.path])
    with tf.GradientTape() as tape:
        outputs = spec.loss_fn({name: tf.constant(value) for name, value in batch.items()}, True)
        mean = tf.reduce_sum(outputs["loss"].values * outputs["loss"].weights) / tf.reduce_sum(outputs["loss"].weights)
        total = mean + sum(spec.model.losses)
    gradients = tape.gradient(total, spec.model.trainable_variables)
    by_path = {v.path: g.numpy() for v, g in zip(spec.model.trainable_variables, gradients, strict=True)}
    assert_close(result.gradients, by_path)
    expected = {"loss": outputs["loss"].values.numpy(), "loss/weight": batch["weight"]}
    assert_close({name: result.values[name] for name in expected}, expected)
    text = str(result)
    assert f"step {step}: applied" in text and str(result.rows[np.argmax(result.values["loss"])]) in text


def looking_around(step):
    """A step whose second pass is at other weights, which do not wait for the first pass."""
    gradients = step.gradients()
    with step.moved({path: tf.ones_like(gradient) for path, gradient in gradients.items()}):
        step.gradients()
    return gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "replicas", "changes"),
    mostly_wide(
        [
            ("gathers", 1, {"virtual_replicas": 2}),
            ("two passes", 1, {"virtual_replicas": 4, "microbatches": 2}),
            ("two passes", 2, {"microbatches": 3}),
            ("gathers", 2, {}),
        ]
    ),
)
def test_each_value_stands_at_the_row_of_its_example(kind, replicas, changes, tmp_path):
    def model_fn():
        net = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64, "tanh"), keras.layers.Dense(1)])

        def loss_fn(batch, training):
            outputs = net(batch["x"], training=training)
            longest = tf.tile(batch["label"][:, None], [1, tf.reduce_max(batch["label"]) + 1])  # of these rows
            mean = tf.reduce_mean(distloop.gather_rows(outputs)[0]) if kind == "gathers" else 0.0
            return {"loss": (outputs[:, 0] - mean) ** 2, "row": tf.cast(batch["row"], tf.float32), "long": longest}

        step_fn = None if kind == "gathers" else looking_around
        return distloop.ModelSpec(net, keras.optimizers.SGD(0.01), loss_fn, step_fn=step_fn)

    rows = data(row=np.arange(ROWS))
    trainer_of(model_fn, replicas, tmp_path, log_every=1, **changes).fit(rows)
    losses = {row["step"]: row["loss"] for row in distloop.read_metrics(str(tmp_path))}
    trainer = trainer_of(model_fn, replicas, tmp_path, log_every=1, **changes)
    for step in (6, 7):
        result = trainer.replay(rows, step=step)
        assert list(result.values["row"]) == list(result.rows)
        assert np.mean(result.values["loss"]) == pytest.approx(losses[step], rel=1e-5)
        assert list(result.values["long"].max(1)) == list(result.batch["label"])


BITS = [
    pytest.param(2, 1, {"virtual_replicas": 4}, {"batch_norm": "plain"}, id="virtual replicas"),
    pytest.param(2, 2, {"microbatches": 3}, {}, id="microbatches"),
    pytest.param(2, 2, {"precision": "mixed_float16"}, {}, id="float16"),
    pytest.param(1, 1, {}, {"batch_norm": "plain"}, id="statistics"),
    pytest.param(2, 2, {"shard_optimizer": True, "clip_norm": 0.3}, {}, id="sharded"),
]


@pytest.mark.parametrize(("trained_on", "replayed_on", "changes", "of_model"), mostly_wide(BITS))
def test_weights_have_their_bits(trained_on, replayed_on, changes, of_model, tmp_path):
    model_fn = classifier(dropout=0.3, **of_model)
    seen = train(model_fn, settings(trained_on, tmp_path, **changes))
    result = trainer_of(model_fn, replayed_on, tmp_path, **changes).replay(data(), step=8)
    same = [path for path in seen[7] if not path.startswith("seeds/")]  # of other replicas
    assert_equal({p: result.weights_before[p] for p in same}, {p: seen[7][p] for p in same})
    assert_equal({p: result.weights_after[p] for p in same}, {p: seen[8][p] for p in same})
    assert result.differences == [] and len(result.values["loss"]) == len(result.batch["x"])


def run_on_workers(workdir):
    config = distloop.Config(workdir=workdir, log_every=2, checkpoint_every=5, keep_checkpoints=100, steps=STEPS)
    distloop.Trainer(classifier(), config).fit(data())


@pytest.mark.slow
@pytest.mark.parametrize("precision", mostly_wide(["mixed_float16", "mixed_bfloat16"]))
def test_rounding_on_other_devices_is_no_difference_and_hides_none(precision, tmp_path):
    model_fn = classifier(optimizer=lambda: keras.optimizers.Adam(0.01))
    train(model_fn, settings(2, tmp_path, precision=precision, log_every=1))
    replayed = lambda: trainer_of(model_fn, 1, tmp_path, precision=precision).replay(data(), step=10)  # noqa: E731
    assert replayed().differences == []
    path = tmp_path / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[8]["loss"] *= 1.05
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (sentence,) = replayed().differences
    assert "in the row of step 9: loss was" in sentence
    assert f"1 replicas round {precision[6:]} otherwise than 2" in sentence


@pytest.mark.slow
def test_one_process_replays_a_run_of_two_workers(tmp_path):
    forked.run_in_workers(run_on_workers, 2, str(tmp_path))
    result = trainer_of(classifier(), 1, tmp_path).replay(data(), step=10)
    saved = load(str(tmp_path / "checkpoints" / "10")).values
    assert_close(result.weights_after, {path: saved[f"model/{path}"].numpy() for path in result.weights_after})
    assert result.differences == [] and len(result.rows) == SIZE


def with_a_bad_row(row):
    """The rows, of which one has a number that is not finite."""
    x = np.array(classification(ROWS)["x"])
    x[row, 0] = np.nan
    return {"x": x}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", mostly_wide([1, 2]))
def test_a_step_that_float16_skipped_is_seen_as_it_was(replicas, tmp_path):
    model_fn, changes = classifier(batch_norm="plain"), with_a_bad_row(7)
    seen = train(model_fn, settings(replicas, tmp_path, precision="mixed_float16", log_every=1), data(**changes))
    is_skipped = lambda step: all(np.array_equal(seen[step][p], seen[step - 1][p]) for p in seen[0])  # noqa: E731
    skipped = next(step for step in range(1, STEPS + 1) if is_skipped(step))
    trainer = trainer_of(model_fn, replicas, tmp_path, precision="mixed_float16", log_every=1)
    result = trainer.replay(data(**changes), step=skipped)
    assert not result.is_finite and 7 in result.rows and result.differences == []
    assert not np.isfinite(result.values["loss"][list(result.rows).index(7)])
    assert_equal(result.weights_after, result.weights_before)
    for step in (7, 10):  # the same trainer looks at other steps
        later = trainer.replay(data(**changes), step=step)
        assert_equal(later.weights_before, seen[step - 1])
        assert_equal(later.weights_after, seen[step])


@pytest.mark.slow
def test_a_rollback_is_replayed_before_at_and_after_the_batch_left_out(tmp_path, capsys):
    changes = with_a_bad_row(7)
    config = settings(1, tmp_path, on_divergence="rollback")
    seen = train(classifier(), config, data(**changes))
    incidents = [json.loads(line) for line in (tmp_path / "incidents.jsonl").read_text().splitlines()]
    failed = incidents[0]["step"]
    hint = f"--replay={failed} shows the step again"
    assert hint in incidents[0]["reason"] and hint in capsys.readouterr().out
    trainer = distloop.Trainer(classifier(), config)
    for step in sorted({failed + 2, STEPS} - {row["step"] for row in incidents}):
        result = trainer.replay(data(**changes), step=step)
        assert_equal(result.weights_after, seen[step])
        assert result.is_finite and 7 not in result.rows and result.differences == []
    result = trainer.replay(data(**changes), step=failed)
    assert not result.is_finite and 7 in result.rows
    assert f"Step {failed} is the first that was not finite" in result.failure


@pytest.mark.slow
def test_the_operation_is_named_by_a_replay_alone(tmp_path):
    changes, config = with_a_bad_row(7), settings(1, tmp_path, checkpoint_every=1)
    with pytest.raises(FloatingPointError, match=r"--replay=(\d+)") as error:
        train(classifier(), config, data(**changes))
    step = int(re.search(r"--replay=(\d+)", str(error.value))[1])
    trainer = trainer_of(classifier(), 1, tmp_path, checkpoint_every=1, locate_nonfinite=True)
    result = trainer.replay(data(**changes), step=step)
    assert "the batch itself holds such numbers, in x, first in row" in result.failure and 7 in result.rows


@pytest.mark.slow
def test_a_run_that_went_on_with_another_batch_size_is_replayed_after_that(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / "12")  # it goes on in the middle of an epoch
    seen = train(classifier(), settings(1, tmp_path, steps=16), data(12))
    trainer = trainer_of(classifier(), 1, tmp_path, steps=16)
    result = trainer.replay(data(12), step=13)
    assert_equal(result.weights_after, seen[13])
    assert len(result.rows) == 12
    refused(lambda: trainer.replay(data(12), step=4), "starts from step 0", "make another Trainer")
    trainer = trainer_of(classifier(), 1, tmp_path, steps=16)
    other = trainer.replay(data(12), step=4)  # of the smaller batches, which it did not have
    assert len(other.differences) == 1 and "differs from the run in the row of step 1: loss was" in other.differences[0]


@pytest.mark.slow
def test_a_row_that_is_not_that_of_the_run_is_named_with_what_explains_it(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[6]["accuracy"] += 0.125  # of an action, between two logs
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = trainer_of(classifier(), 1, tmp_path, on_nonfinite="skip")
    (sentence,) = trainer.replay(data(), step=9).differences
    assert "in the row of step 7: accuracy was" in sentence
    assert "the run had on_nonfinite='raise', and this is 'skip'" in sentence


@pytest.mark.parametrize("replicas", mostly_wide([1, 2]))
def test_several_updates_and_a_step_of_several_looks_are_replayed(replicas, tmp_path):
    def model_fn():
        layers = lambda: [keras.Input((8,)), keras.layers.Dense(4, name="d")]  # noqa: E731
        nets = {name: keras.Sequential(layers(), name=name) for name in "ab"}

        def loss_of(name):
            def loss_fn(batch, training):
                logits = nets[name](batch["x"], training=training)
                return {"loss": keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)}

            return loss_fn

        def twice(step):
            first = step.gradients()
            with step.moved(first):
                return step.gradients()

        updates = [
            distloop.Update("one", loss_of("a"), keras.optimizers.SGD(0.1), "^a/"),
            distloop.Update("two", loss_of("b"), keras.optimizers.SGD(0.2), "^b/", step_fn=twice),
        ]
        return distloop.ModelSpec(nets, updates=updates)

    seen = train(model_fn, settings(replicas, tmp_path))
    result = trainer_of(model_fn, replicas, tmp_path).replay(data(), step=6)
    assert_equal(result.weights_after, seen[6])
    assert {"one/loss", "two/loss"} == set(result.values) and len(result.values["two/loss"]) == SIZE
    moved = {path: seen[5][path] - seen[6][path] for path in seen[6]}
    for path, gradient in result.gradients.items():
        name, _, variable = path.partition("/")
        np.testing.assert_allclose(moved[variable], {"one": 0.1, "two": 0.2}[name] * gradient, rtol=2e-3, atol=1e-6)
    assert result.learning_rate == pytest.approx({"one": 0.1, "two": 0.2})


def test_the_command_of_the_run_prints_the_step_and_ends(finished, capsys):
    trainer = trainer_of(classifier(), 1, finished, replay=7)
    with pytest.raises(SystemExit) as end:
        trainer.fit(data())
    out = capsys.readouterr().out
    assert end.value.code == 0 and "replay: from checkpoint 5, 2 steps, about" in out and "step 7: applied" in out
    refused(lambda: trainer.fit(data()), "fit was called after replay", "make another Trainer")


def test_a_quiet_replay_prints_nothing_and_takes_a_step_of_numpys(finished, capfd):
    trainer = trainer_of(classifier(), 1, finished, console="quiet")
    results = [trainer.replay(data(), step=step) for step in (np.int64(7), 7.0)]
    assert [(result.step, type(result.step)) for result in results] == [(7, int)] * 2
    printed = capfd.readouterr()
    assert printed.out == "" and "step" not in printed.err


class Drawn(keras.utils.PyDataset):
    """The rows in an order that each epoch draws when it begins."""

    def __init__(self):
        super().__init__()
        self.random, self.order = np.random.default_rng(5), np.arange(ROWS)

    def __len__(self):
        return 4

    def on_epoch_begin(self):
        self.order = self.random.permutation(ROWS)

    def __getitem__(self, index):
        return {name: v[self.order[index * SIZE : (index + 1) * SIZE]] for name, v in classification(ROWS).items()}


@pytest.mark.slow
def test_a_pydataset_that_draws_its_order_is_replayed_once(tmp_path):
    seen = train(classifier(), settings(1, tmp_path), Drawn())
    trainer, again = trainer_of(classifier(), 1, tmp_path), Drawn()
    result = trainer.replay(again, step=7)
    assert_equal(result.weights_after, seen[7])
    assert result.differences == []
    refused(lambda: trainer.replay(again, step=8), "trained on before in this process", "make it anew")


@pytest.mark.slow
def test_data_that_cannot_be_read_again_is_explained_in_a_replay(tmp_path):
    def batches():
        for _ in range(9):
            yield from data(SIZE).as_numpy_iterator()

    train(classifier(), settings(1, tmp_path), batches)
    trainer, once = trainer_of(classifier(), 1, tmp_path), batches()
    trainer.replay(once, step=7)
    refused(lambda: trainer.replay(once, step=7), "was read before and cannot start again: give the function")


@pytest.mark.slow
def test_a_shuffled_dataset_that_was_read_before_gives_the_same_rows(tmp_path):
    dataset = tf.data.Dataset.from_tensor_slices(classification(64)).shuffle(64, seed=3).batch(SIZE)
    seen = train(classifier(), settings(1, tmp_path), dataset)
    trainer = trainer_of(classifier(), 1, tmp_path)
    for step in (7, 7, 12):
        result = trainer.replay(dataset, step=step)
        assert_equal(result.weights_after, seen[step])
        assert result.differences == []


@pytest.mark.slow
def test_with_eager_the_step_alone_is_plain_python(finished):
    eager = []
    model_fn = classifier(on_trace=lambda training: eager.append(tf.executing_eagerly()))
    result = trainer_of(model_fn, 1, finished, eager=True).replay(data(), step=7)
    assert eager.count(True) == 1 and result.values["loss"].shape == (SIZE,)


def test_plain_datasets_and_batches_of_unknown_size_have_no_row_numbers(tmp_path):
    plain = tf.data.Dataset.from_tensor_slices(classification(ROWS)).batch(SIZE)
    seen = train(classifier(), settings(2, tmp_path), plain)
    result = trainer_of(classifier(), 2, tmp_path).replay(plain, step=8)  # an odd batch
    assert result.rows is None and len(result.values["loss"]) == ROWS - 3 * SIZE
    assert_equal(result.weights_after, seen[8])


@pytest.mark.slow
def test_a_run_at_a_url_and_one_from_other_weights_are_replayed(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    seen = train(classifier(), settings(1, "memory://replayed/run"))
    result = trainer_of(classifier(), 1, "memory://replayed/run").replay(data(), step=8)
    assert_equal(result.weights_after, seen[8])
    config = settings(1, tmp_path / "run", init_from=str(finished / "checkpoints" / "10"))
    seen = train(classifier(), config)
    result = distloop.Trainer(classifier(), config).replay(data(), step=3)
    assert_equal(result.weights_after, seen[3])
    assert result.differences == []


@pytest.mark.parametrize(
    ("changes", "step", "parts"),
    [
        ({}, 13, ["step 13", "has reached step 12", "a step from 1 to 12"]),
        ({}, 0, ["step 0", "a step from 1 to 12"]),
        ({}, 2.5, ["step 2.5"]),
        ({"model_fn": classifier(batch_norm="plain")}, 8, ["is of another model"]),
        ({"virtual_replicas": 2}, 8, ["virtual_replicas=0, and 2 were given"]),
        ({"workdir": ""}, 8, ["without a workdir"]),
        ({"steps": 7}, 8, ["step 8", "fit with this data ends at step 7", "a step from 1 to 7"]),
        ({"workdir": "none"}, 8, ["none", "holds no run that has come to a step"]),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_a_sentence(finished, changes, step, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = trainer_of(**{"model_fn": classifier(), "replicas": 1, "workdir": finished, **changes})
    refused(lambda: trainer.replay(data(), step=step), *parts)


def test_a_trained_trainer_and_a_run_without_a_beginning_are_refused(finished, tmp_path):
    trainer = trainer_of(classifier(), 1, tmp_path)
    trainer.restore(str(finished / "checkpoints" / "5"))
    refused(lambda: trainer.replay(data(), step=3), "on a Trainer at step 5", "make another one")
    trainer.fit(data())
    again = trainer_of(classifier(), 1, tmp_path)
    refused(lambda: again.replay(data(), step=3), "nothing to start from", "began at step 5", "keep_checkpoints")


def test_a_damaged_checkpoint_is_passed_over(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    (file,) = (tmp_path / "run" / "checkpoints" / "5").glob("variables.data-*")
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    result = trainer_of(classifier(), 1, tmp_path / "run").replay(data(), step=7)
    expected = trainer_of(classifier(), 1, finished).replay(data(), step=7)
    assert_equal(result.weights_after, expected.weights_after)


def test_settings_that_need_a_workdir_do_not_hinder_a_replay(tmp_path):
    model_fn, given = classifier(), {"max_secs": 1e6, "keep_every": 4, "profile": "2:3", "histograms_every": 2}
    train(model_fn, settings(1, tmp_path, **given))
    assert trainer_of(model_fn, 1, tmp_path, **given).replay(data(), step=5).differences == []
