"""What `make_dataset` takes, and what it refuses."""

import json
import random

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from distloop.data.make_dataset import make_dataset, trace
from distloop.data.numbered import NumberedDataset
from tests.data.python_batches import Rows, Tensor
from tests.problems import refused

SPEC = {"x": tf.TensorSpec([2], tf.float32)}


def images(count=10):
    """Rows of images whose heights differ, with labels."""
    return Rows(lambda row: {"image": np.full([2 + row % 3, 3], row, np.float32), "label": row}, count)


@pytest.mark.slow
def test_a_map_of_tensorflow_brings_rows_to_one_shape():
    def resized(example, seed):
        return {"image": tf.image.resize(example["image"][..., None], [2, 2]), "label": example["label"]}

    data = make_dataset(images(), 4, map_fn=resized)
    batch = next(iter(data))
    assert batch["image"].shape == [4, 2, 2, 1] and batch["label"].numpy().tolist() == [0, 1, 2, 3]
    assert data.element_spec["image"].shape.as_list() == [None, 2, 2, 1]
    whole = make_dataset(images(), 4, drop_remainder=True, map_fn=lambda e, seed: e["label"])
    assert isinstance(whole, NumberedDataset) and whole.element_spec.shape == [4] and len(whole) == 2
    assert [batch.shape.as_list() for batch in whole] == [[4], [4]]


@pytest.mark.slow
def test_a_map_of_python_runs_in_python_with_the_same_seeds(capsys):
    def in_python(example, seed):
        return {"label": int(example["label"]), "seed": np.asarray(seed)}

    data = make_dataset(images(), 4, shuffle=True, map_fn=in_python)
    reason = "NotImplementedError: Cannot convert a symbolic tf.Tensor"
    assert f"map_fn runs in Python, as TensorFlow cannot trace it ({reason}" in capsys.readouterr().err
    traced = make_dataset(images(), 4, shuffle=True, map_fn=lambda e, seed: {"label": e["label"], "seed": seed})
    for one, other in zip(data.starting_at(2).take(3), traced.starting_at(2).take(3), strict=True):
        np.testing.assert_array_equal(one["label"], other["label"])
        np.testing.assert_array_equal(one["seed"], other["seed"])


def test_lists_are_sources_and_lists_of_arrays_are_columns():
    assert next(iter(make_dataset([3, 1, 2], 2))).numpy().tolist() == [3, 1]
    columns = next(iter(make_dataset([np.arange(4), np.ones([4, 2])], 2)))
    assert [column.shape.as_list() for column in columns] == [[2], [2, 2]]
    data = make_dataset({"x": np.arange(6.0)}, 3, map_fn=lambda e, seed: float(np.asarray(e["x"]).item()) + 0.5)
    assert next(iter(data)).numpy().tolist() == [0.5, 1.5, 2.5]


@pytest.mark.parametrize(
    ("source", "settings", "words"),
    [
        (images(), {}, r"entry of float32 \(None, 3\), and the rows of a batch need one shape: give"),
        (images(0), {}, "has 0 rows"),
        (iter([1]), {}, "The source given is a list_iterator; make_dataset takes arrays, anything with __len__"),
        ("text", {}, "The source given is a str"),
        (np.arange(3), {"seed": 2**31}, "seed=2147483648 was given"),
        (np.arange(3), {"pad_to": [16]}, r"pad_to=\[16\] was given without lengths"),
        (np.arange(3), {"cache": True}, "cache=True is for a tf.data.Dataset"),
        (
            images(),
            {"map_fn": lambda e, _: e["image"]},
            r"map_fn returns an entry of float32 \(None, 3\), and the rows",
        ),
        (np.arange(3), {"drop_remainder": True}, "The 3 rows given are no whole batch of 4"),
        (tf.data.Dataset.range(3), {"map_fn": lambda e, _: e}, "whose examples have no number: use Dataset.map"),
        (np.arange(3), {"batch_size": 0}, "batch_size=0; give a whole number, 1 or more"),
    ],
)
def test_what_cannot_be_is_refused(source, settings, words):
    with pytest.raises(ValueError, match=words):
        make_dataset(source, **{"batch_size": 4, **settings})


def padded(example, seed):
    ids = tf.pad(example["ids"], [[0, 5 - tf.shape(example["ids"])[0]]])
    return {**example, "ids": tf.ensure_shape(ids, [5])}


@pytest.mark.parametrize("format", [None, "numpy"])
def test_datasets_of_hugging_face_are_sources(format):
    datasets = pytest.importorskip("datasets")
    columns = {
        "ids": [list(range(row % 5)) for row in range(12)],
        "matrix": [[[row, 1], [2, 3]] for row in range(12)],
        "text": [f"row {row}" for row in range(12)],
        "image": [np.full([2, 3, 3], row, np.uint8) for row in range(12)],
    }
    of_lists = {"ids": datasets.List(datasets.Value("int64")), "matrix": datasets.Array2D([2, 2], "int32")}
    of_one = {"text": datasets.Value("string"), "image": datasets.Image()}  # PNG, decoded by row
    features = datasets.Features({**of_lists, **of_one})
    source = datasets.Dataset.from_dict(columns, features=features).with_format(format)
    numbers = []
    for batch in make_dataset(source, 5, shuffle=True, seed=2, map_fn=padded):
        rows = batch["image"].numpy()[:, 0, 0, 0].tolist()
        numbers += rows
        assert batch["image"].shape == [len(rows), 2, 3, 3]
        assert batch["ids"].numpy().tolist() == [columns["ids"][row] + [0] * (5 - row % 5) for row in rows]
        assert batch["matrix"].numpy().tolist() == [columns["matrix"][row] for row in rows]
        assert [text.decode() for text in batch["text"].numpy()] == [columns["text"][row] for row in rows]
    assert sorted(numbers) == list(range(12))
    column = datasets.Dataset.from_dict({"x": [3, 1, 2]})["x"]
    assert next(iter(make_dataset({"x": column}, 3)))["x"].numpy().tolist() == [3, 1, 2]
    words = r"An entry of type Dataset was given in a structure of arrays .* source\['train'\]"
    with pytest.raises(ValueError, match=words):
        make_dataset(datasets.DatasetDict(train=source), 5)


def test_a_map_dataset_of_grain_is_a_source():
    grain = pytest.importorskip("grain")
    source = grain.MapDataset.range(10).map(lambda number: {"x": np.full([2], number, np.float32)})
    batch = next(iter(make_dataset(source, 4, shuffle=True, seed=1)))
    expected = next(iter(make_dataset(np.arange(10), 4, shuffle=True, seed=1)))
    assert batch["x"].numpy()[:, 0].astype(int).tolist() == expected.numpy().tolist()
    with pytest.raises(ValueError, match="has no end; make_dataset starts each epoch itself"):
        make_dataset(source.repeat(), 4)


def test_a_dataset_of_pytorch_is_a_source():
    pairs = Rows(lambda row: (Tensor(np.full([2], row, np.float32)), row % 2))
    x, label = next(iter(make_dataset(pairs, 4)))
    assert x.numpy()[:, 0].tolist() == [0, 1, 2, 3] and label.numpy().tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("sizes", [np.int64(4), {0: np.int64(4), np.int64(3): np.int32(2)}], ids=["one", "two"])
def test_integers_of_numpy_can_be_saved(sizes):
    data = make_dataset(np.arange(10), sizes, shuffle=True, seed=np.int64(3))
    facts = data.facts_at({"batches": 2})
    assert json.loads(json.dumps(facts)) == facts and facts["seed"] == 3 and facts["batch_size"] == 4


@pytest.mark.parametrize("draw", [lambda: np.random.rand(), lambda: random.random(), lambda: tf.random.uniform([])])
def test_a_function_that_draws_without_its_seed_is_refused(draw):
    with pytest.raises(ValueError, match="map_fn draws from .* a resumed run cannot repeat: draw from the seed"):
        trace(lambda example, seed: example["x"] + draw(), SPEC)


@pytest.mark.parametrize("returned", [None, {"x": None}], ids=["nothing", "an entry of nothing"])
def test_a_function_that_returns_none_is_refused(returned):
    refused(lambda: trace(lambda example, seed: returned, SPEC), "map_fn returned", "let it return the exam")


@pytest.mark.parametrize("make", [np.arange, tf.data.Dataset.range], ids=["arrays", "tf.data"])
def test_an_order_is_that_of_its_seed_whatever_tensorflow_was_seeded_with(make):
    def order(seed, global_seed):
        tf.random.set_seed(global_seed)
        dataset = make_dataset(make(40), 8, shuffle=True, seed=seed).repeat()
        assert context.global_seed() == global_seed
        return np.concatenate(list(dataset.take(15).as_numpy_iterator())).tolist()

    assert order(4, 0) == order(4, 1) != order(5, 1)
    assert sorted(order(4, 0)[:40]) == list(range(40)) and order(4, 0)[:40] != order(4, 0)[40:80]
