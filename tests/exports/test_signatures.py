"""Signatures: which tensors serve a function of a batch, by which names; no trainer and no file."""

import numpy as np
import pytest
import tensorflow as tf

from distloop.exports.saved_model import entry_specs, make_signature, title

X = np.arange(12, dtype=np.float32).reshape(4, 3)
Z = np.ones((4, 2), np.float32)


def signature_of(predict_fn, batch, **settings):
    """Returns the signature for batches like the given one."""
    element_spec = tf.nest.map_structure(tf.type_spec_from_value, batch)
    return make_signature("serving_default", predict_fn, element_spec, **settings)[0]


def input_names(signature):
    return [spec.name for spec in signature.input_signature]


def tensors(structure):
    return tf.nest.map_structure(tf.constant, structure)


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        ({"x": X, "more": {"z": Z, "a": Z}}, ["more_a", "more_z", "x"]),
        ((X, {"z": Z}, [X, Z]), ["x0", "z", "x2_0", "x2_1"]),
        (({"num": X, "more": {"z": Z}}, Z), ["more_z", "num", "x1"]),
        (({"a": X, "b": Z}, {"a": Z}), ["x0_a", "b", "x1_a"]),
        (({"x1": X}, Z), ["x0_x1", "x1"]),
        (X, ["x"]),
    ],
    ids=["dict", "tuple", "a dict in a tuple", "two of a name", "a name of a tuple's", "one tensor"],
)
def test_entries_are_named_by_their_path_in_the_order_of_the_structure(batch, names):
    specs = entry_specs(tf.nest.map_structure(tf.type_spec_from_value, tensors(batch)))
    assert list(specs) == names
    assert [spec.name for spec in specs.values()] == names
    assert all(spec.shape[0] is None for spec in specs.values())  # though the batch had 4 rows


def test_only_entries_that_are_read_are_taken_of_any_number_of_rows():
    batch = tensors({"x": X, "more": {"z": Z}, "label": np.ones(4, np.int32)})
    signature = signature_of(lambda b: tf.concat([b["more"]["z"], b["x"]], -1), batch)
    assert input_names(signature) == ["more_z", "x"]
    for size in (1, 3, 4):
        z, x = Z[:size], X[:size]
        np.testing.assert_array_equal(signature(z, x)["output"], np.concatenate([z, x], -1))


def test_more_than_ten_entries_of_a_tuple_keep_their_places():
    columns = [np.full((4, 1), 10.0**i, np.float32) for i in range(-5, 7)]
    signature = signature_of(lambda batch: tf.concat(batch, -1), tuple(tensors(columns)))
    assert input_names(signature) == [f"x{i}" for i in range(12)]
    np.testing.assert_array_equal(signature(*columns)["output"], np.concatenate(columns, -1))


def test_a_ragged_entry_is_taken_apart():
    words = tf.ragged.constant([[1.0], [2.0, 2.0], [], [4.0]])
    signature = signature_of(lambda b: b["x"] + tf.reduce_sum(b["words"], -1)[:, None], {"x": X, "words": words})
    assert input_names(signature) == ["words", "words_1", "x"]
    sums = signature(words.values, words.row_splits, X)["output"] - X
    np.testing.assert_array_equal(sums[:, 0], [1, 4, 0, 4])


@pytest.mark.parametrize(
    ("outputs_of", "names"),
    [
        (lambda x: {"logits": x, "best": tf.argmax(x, -1)}, {"logits", "best"}),
        (lambda x: (x, tf.argmax(x, -1)), {"output_0", "output_1"}),
        (lambda x: {"deep": {"logits": x}}, {"output"}),
        (lambda x: x, {"output"}),
    ],
    ids=["dict", "tuple", "nested", "one tensor"],
)
def test_outputs_keep_their_names_or_are_numbered(outputs_of, names):
    outputs = signature_of(outputs_of, tf.constant(X))(X)
    assert set(outputs) == names
    assert any(np.array_equal(output, X) for output in outputs.values())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_outputs_become_float32_unless_kept(dtype):
    for keep_dtypes, expected in ((False, "float32"), (True, dtype)):
        signature = signature_of(lambda x: tf.cast(x, dtype), tf.constant(X), keep_dtypes=keep_dtypes)
        assert signature(X)["output"].dtype == expected


def test_entries_that_would_share_a_name_are_refused():
    with pytest.raises(ValueError, match="Two entries of a batch would both be named 'a_b' .*: rename one"):
        entry_specs({"a": {"b": tf.TensorSpec([4])}, "a_b": tf.TensorSpec([4])})
    batch = {"words": tf.ragged.constant([[1.0], [2.0]]), "words_1": tf.constant([1.0, 2.0])}
    with pytest.raises(ValueError, match="both be named 'words_1'"):
        signature_of(lambda b: tf.reduce_sum(b["words"], -1) + b["words_1"], batch)


@pytest.mark.parametrize("name", ["serving_default", "embed"])
def test_a_function_that_reads_nothing_is_refused_by_its_name(name):
    assert title("serving_default") == "predict_fn" and title("embed") == "predict_fn['embed']"
    with pytest.raises(ValueError) as caught:
        make_signature(name, lambda batch: tf.zeros([4, 1]), {"x": tf.TensorSpec([4, 3])})
    assert str(caught.value).startswith(f"{title(name)} reads nothing from its batch, so there is nothing to serve:")
