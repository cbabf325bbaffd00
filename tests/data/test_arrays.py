"""Datasets made from arrays."""

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data.arrays import are_arrays, as_arrays, as_dataset, with_labels
from distloop.data.feeds import make_feed
from distloop.data.make_dataset import make_dataset
from tests.problems import (
    assert_equal,
    classification,
    classifier,
    everything,
    mostly_wide,
    of_unknown_length,
    on,
    refused,
)


def flat(dataset):
    return [int(value) for batch in dataset.as_numpy_iterator() for value in batch]


def test_arrays_become_batches_in_order():
    dataset = make_dataset({"x": np.arange(10).reshape(5, 2), "y": {"z": np.arange(5)}}, 2)
    batches = list(dataset.as_numpy_iterator())
    assert [batch["x"].tolist() for batch in batches] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]]
    assert [batch["y"]["z"].tolist() for batch in batches] == [[0, 1], [2, 3], [4]]
    assert len(dataset) == 3
    whole = make_dataset(np.arange(5), 2, drop_remainder=True)
    assert whole.element_spec.shape == [2] and flat(whole) == [0, 1, 2, 3]


@pytest.mark.parametrize("examples", [np.arange(20), tf.data.Dataset.range(20)], ids=["arrays", "dataset"])
def test_shuffling_gives_each_epoch_each_row_once_in_an_order_of_the_seed(examples):
    dataset = make_dataset(examples, 4, shuffle=True)
    first, second = flat(dataset), flat(dataset)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != list(range(20)) and first != second
    repeated = flat(make_dataset(examples, 4, shuffle=True).repeat(2))
    assert sorted(repeated[:20]) == list(range(20)) and repeated[:20] != repeated[20:]
    orders = [flat(make_dataset(examples, 4, shuffle=True, seed=seed).repeat(2)) for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]


def test_rows_of_several_arrays_stay_together_when_shuffled():
    dataset = make_dataset({"x": np.arange(20), "y": 10 * np.arange(20)}, 3, shuffle=True)
    for batch in dataset.as_numpy_iterator():
        np.testing.assert_array_equal(10 * batch["x"], batch["y"])


def test_a_buffer_shuffles_near_examples_and_all_where_the_length_is_known():
    order = flat(make_dataset(tf.data.Dataset.range(20), 4, shuffle=3))
    assert sorted(order) == list(range(20)) and order != list(range(20))
    assert all(value <= place + 2 for place, value in enumerate(order))  # never earlier than the buffer allows
    with pytest.raises(ValueError, match="shuffle=True was given with a dataset of unknown length; give the number"):
        make_dataset(of_unknown_length(tf.data.Dataset.range(9)), 2, shuffle=True)


def test_a_cached_dataset_is_read_once():
    reads = []

    def examples():
        reads.append(True)
        yield from range(4)

    dataset = tf.data.Dataset.from_generator(examples, output_signature=tf.TensorSpec([], tf.int64))
    cached = make_dataset(dataset, 2, cache=True)
    assert flat(cached) == flat(cached) == [0, 1, 2, 3]
    assert len(reads) == 1


def test_arrays_become_a_dataset_in_order_and_a_dataset_stays_as_it_is():
    data = tf.data.Dataset.range(4).batch(2)
    assert as_dataset(data, 3, 0) is data
    assert [batch["x"].numpy().tolist() for batch in as_dataset({"x": np.arange(5)}, 2)] == [[0, 1], [2, 3], [4]]
    found, expected = as_dataset(np.arange(20), 4, 7), make_dataset(np.arange(20), 4, shuffle=True, seed=7)
    assert [flat(found), flat(found)] == [flat(expected), flat(expected)]  # of which each epoch has another order
    (batch,) = as_dataset([np.zeros([3, 2]), np.ones([3])], 4)
    assert isinstance(batch, tuple) and [part.shape for part in batch] == [(3, 2), (3,)]


def test_are_arrays_is_true_for_structures_of_arrays_alone():
    x = np.zeros(3)
    arrays = [x, (x, {"y": x}), [1, 2], (x, [1, 2, 3]), [x, [x, [1, 2, 3]]]]
    arrays += [{"x": tf.zeros([3]), "y": tf.Variable([1, 2, 3])}]
    assert [are_arrays(data) for data in arrays] == [True] * 6
    a_list_of_batches, dataset = [(x, x)], tf.data.Dataset.range(3)
    others = [a_list_of_batches, [{"x": x}], (1, 2), (x, None), dataset, lambda: x, {}, [], None]
    assert [are_arrays(data) for data in others] == [False] * 9


class Frame:
    """Has what is used of a frame of pandas."""

    iloc, shape = None, (3, 2)

    def to_numpy(self):
        return np.arange(6).reshape(3, 2)

    __array__ = to_numpy


class Foreign:
    """Has what is used of a tensor of PyTorch or JAX."""

    shape = (2,)

    def __array__(self, dtype=None, copy=None):
        return np.array([3.0, 4.0], dtype)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (tf.constant([[1.0], [2.0]]), np.array([[1.0], [2.0]], np.float32)),
        (tf.Variable([1, 2]), np.array([1, 2], np.int32)),
        ([[1.5, 2.0], [3.0, 4.0]], np.array([[1.5, 2.0], [3.0, 4.0]], np.float32)),
        ([1, 2], np.array([1, 2])),
        ([np.float64(1.5), np.float64(2)], np.array([1.5, 2.0], np.float32)),
        (["a", "bc"], np.array(["a", "bc"], object)),
        (Frame(), np.arange(6).reshape(3, 2)),
        (Foreign(), np.array([3.0, 4.0])),
    ],
)
def test_what_holds_rows_becomes_an_array(given, expected):
    array = as_arrays(given)
    assert type(array) is np.ndarray and array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)


def test_arrays_on_disk_stay_there(tmp_path):
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = np.arange(8.0)
        arrays = as_arrays((file["x"], np.memmap(tmp_path / "rows", np.int8, "w+", shape=(8,))))
        assert isinstance(arrays[0], h5py.Dataset) and isinstance(arrays[1], np.memmap)
        assert next(iter(as_dataset(arrays, 3)))[0].numpy().tolist() == [0, 1, 2]


def test_ragged_sparse_and_mixed_arrays_are_refused_with_what_to_do():
    for given in (tf.ragged.constant([[1], [2, 3]]), tf.sparse.from_dense(np.eye(3))):
        with pytest.raises(ValueError, match="distloop takes dense ones.*from_tensor_slices"):
            as_arrays((given, np.zeros(3)))
    with pytest.raises(ValueError, match="array of type object was given.*astype"):
        as_dataset(np.array([["a", 1], ["b", 2]], object), 2)


def test_labels_and_weights_join_their_features():
    x, y, w = np.zeros(3), [1, 2, 3], np.ones(3)
    assert with_labels(x) is x
    assert with_labels(x, y) == (x, y) and with_labels(x, y, w) == (x, y, w)
    for given, words in [
        ((tf.data.Dataset.range(3), y), "Labels were given beside a .*Dataset.*labels of their own"),
        ((x, None, w), "without y"),
        ((x, 0.5), "A float was given as the labels"),
        ((x, y, "balanced"), "A str was given as the sample weights"),
    ]:
        with pytest.raises(ValueError, match=words):
            with_labels(*given)


def supervised_classifier():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(4, name="logits")], name="net")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return distloop.supervised(model, loss, keras.optimizers.SGD(0.1))


def labelled(count):
    rows = classification(count)
    return rows["x"], rows["label"]


def ends(*data, model_fn=supervised_classifier, steps=2, **labels):
    """Returns a trainer and all that it changed."""
    trainer = distloop.Trainer(model_fn, on(1, batch_size=16))
    trainer.fit(*data, steps=steps, **labels)
    return trainer, everything(trainer)


@pytest.mark.slow
def test_x_and_y_apart_are_the_tuple_of_both():
    x, y = labelled(40)
    _, expected = ends((x, y), steps=4)
    scores = []
    for data in [(x, y), ((x, y),), (x, y.tolist()), ([x, tf.constant(y)],)]:
        trainer, _ = ends(*data)
        assert trainer.step == 2
        trainer.fit(*data, steps=4)  # goes on in the same arrays
        assert_equal(everything(trainer), expected)
        scores.append(trainer.evaluate(*data))
    assert scores == scores[:1] * 4
    trainer = distloop.Trainer(supervised_classifier, on(1, batch_size=16))
    trainer.build(x, y)
    assert trainer.audit(x, y).findings == ()


def test_sample_weights_are_an_argument_too():
    x, y = labelled(32)
    assert_equal(ends(x, y, sample_weight=np.arange(32.0))[1], ends((x, y, np.arange(32.0)))[1])


@pytest.mark.wide
def test_lists_of_numbers_train_as_their_arrays():
    rows = classification(32)
    lists = {"x": rows["x"].tolist(), "label": rows["label"].tolist()}
    assert_equal(*(ends(data, model_fn=classifier(), steps=3)[1] for data in (rows, lists)))


def run(data, workdir="", steps=9, replicas=2, **settings):
    """Trains in batches of 16 and returns the trainer."""
    settings = {"seed": 5, "batch_size": 16, "workdir": str(workdir), "console": "quiet", **settings}
    trainer = distloop.Trainer(classifier(dropout=0.2), on(replicas, **settings))
    trainer.fit(data, steps=steps)
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("replicas", mostly_wide([1, 2]))
def test_runs_on_arrays_that_resume_equal_one_on_a_shuffled_dataset(replicas, tmp_path):
    rows = classification(67)  # the last batch has 3 rows
    expected = everything(run(make_dataset(rows, 16, shuffle=True, seed=5), steps=12, replicas=replicas))
    run(rows, tmp_path, steps=7, replicas=replicas)
    assert_equal(everything(run(rows, tmp_path, steps=12, replicas=replicas)), expected)
    trainer = run(rows, steps=7, replicas=replicas)
    trainer.fit(rows, steps=12)
    assert_equal(everything(trainer), expected)


@pytest.mark.wide
def test_arrays_are_evaluated_and_predicted_in_their_order():
    rows, dataset = classification(67), make_dataset(classification(67), 16)
    trainer = run(rows, steps=1, eval_every=1)
    assert trainer.evaluate(rows) == trainer.evaluate(dataset)
    np.testing.assert_array_equal(trainer.predict(rows), trainer.predict(dataset))
    assert [len(part) for part in trainer.stream_predictions(rows)] == [16, 16, 16, 16, 3]
    assert trainer.fit(rows, steps=2, evals={"test": rows})["test/loss"] == trainer.evaluate(rows)["loss"]


@pytest.mark.slow
def test_epochs_of_arrays_include_the_odd_last_batch_and_changes_in_place():
    trainer, rows = distloop.Trainer(classifier(), on(2, replica_batch_size=8)), classification(40)
    assert [len(part) for part in trainer.stream_predictions(rows)] == [16, 16, 8]
    first = trainer.predict(rows)
    rows["x"] += 1
    assert not np.array_equal(trainer.predict(rows), first)
    trainer.fit(classification(67), epochs=2)
    assert trainer.step == 10


@pytest.mark.wide
def test_arrays_build_a_model_are_audited_and_have_a_learning_rate_found():
    rows = classification(67)
    trainer = distloop.Trainer(classifier(), on(1, batch_size=16))
    trainer.build(rows)
    assert trainer.audit(rows).findings == trainer.audit(make_dataset(rows, 16, shuffle=True)).findings
    on_arrays = distloop.find_learning_rate(trainer, rows, steps=6)
    on_dataset = distloop.find_learning_rate(trainer, make_dataset(rows, 16, shuffle=True), steps=6)
    np.testing.assert_array_equal(on_arrays.losses, on_dataset.losses)


MASKED = np.ma.masked_less(np.arange(8.0, dtype=np.float32).reshape(4, 2), 3.0)
WAYS = {
    "arrays": lambda x: as_dataset((np.zeros(4), x), 2),
    "make_dataset": lambda x: make_dataset({"x": x}, 2),
    "examples": lambda x: make_dataset([{"x": row} for row in x], 2),
    "batches": lambda x: make_feed(iter([{"x": x[:2]}, {"x": x[2:]}])).dataset(),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_array_with_masked_values_is_refused_and_one_without_is_taken(way):
    refused(lambda: WAYS[way](MASKED), "masked", "would be dropped", "filled(")
    spec = tf.nest.flatten(WAYS[way](np.ma.array(MASKED.data)).element_spec)[-1]
    assert spec.dtype == tf.float32 and spec.shape[1:] == [2]
