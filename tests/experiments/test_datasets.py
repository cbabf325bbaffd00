"""The experiments' data: sizes, splits, order, and what is said when it cannot be had."""

import keras
import numpy as np
import pytest

from experiments import datasets


def read(dataset):
    """Returns one pass over a dataset as arrays: images [N, ...], labels [N]."""
    batches = list(dataset.as_numpy_iterator())
    return tuple(np.concatenate([batch[name] for batch in batches]) for name in ("image", "label"))


def rows(images):
    """Returns images as a list of bytes, to compare them as a set."""
    return [image.tobytes() for image in images]


def test_batches_are_float_images_in_0_to_1_and_int_labels():
    dataset = datasets.digits("train", 256)
    assert dataset.element_spec["image"].shape.as_list() == [None, 8, 8, 1]
    images, labels = read(dataset)
    assert images.dtype == np.float32 and labels.dtype == np.int32
    assert images.min() == 0.0 and images.max() == 1.0
    assert set(labels) == set(range(10))


@pytest.mark.parametrize(("split", "size"), [("train", 1437), ("test", 360)])
def test_no_row_is_dropped(split, size):
    sizes = [len(batch["label"]) for batch in datasets.digits(split, 100).as_numpy_iterator()]
    assert sizes == [100] * (size // 100) + [size % 100]


@pytest.mark.slow
def test_train_and_test_are_disjoint_and_together_the_whole_set():
    train, test = (rows(read(datasets.digits(split, 256))[0]) for split in ("train", "test"))
    assert len(set(train)) + len(set(test)) == 1797  # no two digits of the set are equal
    assert not set(train) & set(test)
    # Both hold the same share of every digit.
    train, test = (np.bincount(read(datasets.digits(split, 256))[1]) for split in ("train", "test"))
    np.testing.assert_allclose(train / (train + test), 0.8, atol=0.01)


@pytest.mark.slow
def test_an_image_keeps_its_label_when_shuffled():
    plain, shuffled = (datasets.digits("train", 256, shuffle=shuffle) for shuffle in (False, True))
    label_of = dict(zip(rows(read(plain)[0]), read(plain)[1], strict=True))
    images, labels = read(shuffled)
    assert [label_of[row] for row in rows(images)] == list(labels)


@pytest.mark.slow
def test_the_test_split_keeps_its_order_unless_it_is_shuffled():
    dataset = datasets.digits("test", 50)
    first, second = rows(read(dataset)[0]), rows(read(dataset)[0])
    assert first == second == rows(read(datasets.digits("test", 128))[0])
    shuffled = datasets.digits("test", 256, shuffle=True)
    assert rows(read(shuffled)[0]) != rows(read(shuffled)[0])


@pytest.mark.slow
def test_the_train_split_has_a_new_order_each_pass_fixed_by_the_seed():
    images = read(datasets.digits("train", 1437).repeat(2))[0]
    first, second = rows(images[:1437]), rows(images[1437:])
    assert first != second and sorted(first) == sorted(second)
    again = read(datasets.digits("train", 1437).repeat(2))[0]
    np.testing.assert_array_equal(images, again)
    assert rows(read(datasets.digits("train", 1437, seed=1))[0]) != first
    fixed = datasets.digits("train", 256, shuffle=False)
    assert rows(read(fixed)[0]) == rows(read(fixed)[0])


@pytest.mark.parametrize("make_dataset", [datasets.digits, datasets.mnist, datasets.cifar10])
def test_an_unknown_split_is_refused(make_dataset):
    with pytest.raises(ValueError, match='split is \'valid\'; use "train" or "test".'):
        make_dataset("valid", 32)


FETCHED = pytest.mark.parametrize(
    ("make_dataset", "module", "file", "shape", "shape_of_labels"),
    [
        (datasets.mnist, keras.datasets.mnist, "mnist.npz", (5, 28, 28, 1), (5,)),
        (datasets.cifar10, keras.datasets.cifar10, "cifar-10-batches-py-target_archive", (5, 32, 32, 3), (5, 1)),
    ],
)


@FETCHED
def test_keras_data_becomes_batches(monkeypatch, make_dataset, module, file, shape, shape_of_labels):
    of_images = shape if shape[-1] > 1 else shape[:-1]
    split = np.full(of_images, 255, np.uint8), np.arange(5, dtype=np.uint8).reshape(shape_of_labels)
    monkeypatch.setattr(module, "load_data", lambda: (split, split))
    images, labels = read(make_dataset("test", 2))
    assert images.shape == shape and images.max() == 1.0
    assert list(labels) == [0, 1, 2, 3, 4]


@FETCHED
def test_data_that_cannot_be_fetched_is_named_with_the_place_to_put_it(
    monkeypatch, make_dataset, module, file, shape, shape_of_labels
):
    def load_data():
        raise Exception("URL fetch failure")

    monkeypatch.setattr(module, "load_data", load_data)
    with pytest.raises(RuntimeError, match=f"could not be fetched .*URL fetch.*~/.keras/datasets: put .*{file}"):
        make_dataset("train", 32)


@pytest.mark.slow
def test_python_source_counts_each_byte_of_the_held_out_files_once():
    dataset = datasets.python_source("test", 512, 64)
    batches = list(dataset.as_numpy_iterator())
    bytes_, weight = (np.concatenate([batch[name] for batch in batches]) for name in ("bytes", "weight"))
    files = datasets.python_files("test")
    assert weight.sum() == sum(map(len, files))
    assert bytes(bytes_[:, 1:][weight == 1]) == b"".join(files)
    assert bytes(bytes_[0, :9]) == b"\0" + files[0][:8]


@pytest.mark.slow
def test_python_files_are_on_one_side_and_no_tests_are_among_them():
    train, test = (datasets.python_files(split) for split in ("train", "test"))
    assert 0.005 < sum(map(len, test)) / sum(map(len, train)) < 0.05
    assert not {file for file in train if len(file) > 1_000} & set(test)
    assert not [file for file in (*train, *test) if b"import unittest" in file and b"test.support" in file]
