"""From sums of gradients to an update: packed, reduced once, divided, clipped, applied once."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from distloop.distributed import tensorflow_internals
from distloop.optimizers import gradients
from tests.problems import mirrored

REDUCTIONS = {"AddN", "CollectiveReduceV2", "CollectiveReduce", "NcclAllReduce"}
LARGE = gradients.LARGEST_PACKED_BYTES // 4 + 1  # float32 numbers that travel alone


SMALL = [tf.TensorSpec([2, 3]), tf.TensorSpec([]), tf.TensorSpec([4])]


def random_gradients(specs):
    rng = np.random.default_rng(0)
    return [tf.cast(rng.normal(size=spec.shape), spec.dtype) for spec in specs]


def reduced(strategy, specs):
    """Reduces the gradients `(replica + 1) * g`, and sums by name, which are what they should be.

    Returns:
        The gradients of the first replica before, each replica's ones after, and the types of the graph's operations
        that add, with the inputs' sizes.
    """
    packing = gradients.Packing(specs)
    values = random_gradients(specs)

    def replica_fn():
        factor = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group + 1, tf.float32)
        mine = [value * tf.cast(factor, value.dtype) for value in values]
        sums = {"pair": factor * tf.constant([1.0, 10.0]), "list": [factor, tf.fill([2, 1], 0.5 * factor)]}
        segments, sums = packing.all_reduce(packing.pack(mine), sums)
        return packing.unpack(segments), sums

    function = tf.function(lambda: strategy.run(replica_fn), autograph=False).get_concrete_function()
    result = function()
    found, total = [], sum(range(strategy.num_replicas_in_sync + 1))
    for r in range(strategy.num_replicas_in_sync):
        of_replica = tf.nest.map_structure(lambda t, r=r: strategy.experimental_local_results(t)[r].numpy(), result)
        found.append(of_replica[0])
        np.testing.assert_array_equal(of_replica[1]["pair"], [total, 10 * total])
        np.testing.assert_array_equal(of_replica[1]["list"][0], total)
        np.testing.assert_array_equal(of_replica[1]["list"][1], [[0.5 * total], [0.5 * total]])
    added = [(op.type, op.inputs[0].shape.num_elements()) for op in function.graph.get_operations() if op.inputs]
    return values, found, [(kind, size) for kind, size in added if kind in REDUCTIONS]


@functools.cache
def adding_by_collectives(count=2):
    """Returns a strategy over virtual CPUs, with the collectives that GPUs have."""
    with tensorflow_internals.own_collective_keys(tf.distribute.MirroredStrategy):
        return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(count)])


def test_without_other_sums_gradients_alone_are_reduced():
    packing, strategy = gradients.Packing(SMALL), mirrored(2)
    run = tf.function(lambda: strategy.run(lambda: packing.all_reduce([tf.ones([11])], {})), autograph=False)
    segments, sums = run()
    assert sums == {} and strategy.experimental_local_results(segments[0])[0].numpy().tolist() == [2.0] * 11


@pytest.mark.parametrize(
    "specs, sizes",
    [
        pytest.param(SMALL, [11], id="small ones travel in one vector"),
        pytest.param([tf.TensorSpec([n]) for n in (LARGE - 1, LARGE, 1)], [LARGE, LARGE], id="large ones travel alone"),
        pytest.param([keras.Variable(tf.zeros([2, 2])), tf.Variable(tf.zeros([3]))], [7], id="variables are specs"),
    ],
)
def test_gradients_are_packed_by_their_size(specs, sizes):
    packing = gradients.Packing(specs)
    assert [shape.as_list() for shape in packing.shapes] == [[size] for size in sizes]
    assert packing.dtypes == [tf.float32] * len(sizes)


def test_packing_and_unpacking_gives_back_every_gradient_in_its_dtype():
    sizes = [([2, 3], "float32"), ([5], "float64"), ([LARGE], "float32"), ([], "float32"), ([3, 1], "bfloat16")]
    specs = [tf.TensorSpec(shape, dtype) for shape, dtype in [*sizes, ([2], "float64")]]
    packing = gradients.Packing(specs)
    values = random_gradients(specs)
    segments = packing.pack(values)
    expected = [("bfloat16", 3), ("float32", 7), ("float32", LARGE), ("float64", 7)]
    assert sorted((s.dtype.name, s.shape[0]) for s in segments) == expected
    assert [s.dtype for s in segments] == packing.dtypes
    assert [s.shape.as_list() for s in segments] == [s.as_list() for s in packing.shapes]
    for given, found in zip(values, packing.unpack(segments), strict=True):
        assert given.dtype == found.dtype and given.shape == found.shape
        np.testing.assert_array_equal(given.numpy(), found.numpy())


@pytest.mark.slow
def test_a_sparse_gradient_has_a_size_that_tracing_knows():
    packing = gradients.Packing([tf.TensorSpec([4, 2]), tf.TensorSpec([3])])

    @tf.function
    def sizes(shape):
        gradient = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 3]), dense_shape=shape)
        (segment,) = packing.pack([gradient, tf.ones([3])])
        return segment.shape[0]

    assert sizes(tf.constant([4, 2])) == 11


SEVERAL = [tf.TensorSpec([LARGE]), tf.TensorSpec([3], tf.float64), tf.TensorSpec([2])]


@pytest.mark.parametrize(
    "specs, collectives",
    [
        pytest.param(SMALL, False, id="small"),
        pytest.param(SEVERAL, False, id="several dtypes"),
        pytest.param(SEVERAL, True, id="collectives"),
        pytest.param(SEVERAL[:2], False, id="no vector can carry the named values"),
    ],
)
def test_all_reduce_sums_gradients_and_named_values_over_the_replicas(specs, collectives):
    values, per_replica, added = reduced(adding_by_collectives() if collectives else mirrored(2), specs)
    for found in per_replica:
        for given, total in zip(values, found, strict=True):
            np.testing.assert_allclose(total, 3 * given.numpy(), rtol=1e-6)
    if collectives:  # as GPUs add: the large one is not copied into a vector with the others
        assert {size for kind, size in added if kind == "CollectiveReduceV2"} == {LARGE, 3, 2 + 5}
    elif specs == SMALL:  # a single reduction
        assert [kind for kind, _ in added] in (["AddN"], ["CollectiveReduceV2"] * 2)  # of each replica


def test_one_replica_reduces_nothing():
    for strategy in (mirrored(1), tf.distribute.get_strategy()):
        values, per_replica, added = reduced(strategy, SMALL)
        assert not added
        np.testing.assert_array_equal(per_replica[0][0], values[0].numpy())


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("places", [[], [0], [1], [2], [3], [1, 4], [0, 1, 2, 3, 4]])
def test_gradients_that_are_not_finite_are_found(bad, places):
    specs = [SMALL[0], SEVERAL[0], SMALL[1], tf.TensorSpec([3], tf.bfloat16), SMALL[2]]
    values = [np.ones(spec.shape, np.float32) for spec in specs]
    for place in places:
        values[place].flat[-1] = bad
    packing = gradients.Packing(specs)
    segments = packing.pack([tf.cast(value, spec.dtype) for value, spec in zip(values, specs, strict=True)])
    squares = gradients.squared_norms(segments)
    diagnosis = packing.diagnosis(segments, squares)
    assert diagnosis.shape == [packing.diagnosis_size] and diagnosis.dtype == tf.float32
    assert packing.find_nonfinite(diagnosis.numpy()) == places


def divide_and_clip(segments, weight, clip_norm):
    norm, scale = gradients.norm_and_scale(gradients.squared_norms(segments), tf.constant(weight))
    clipping, packing = gradients.Clipping(norm=clip_norm), gradients.Packing([])
    segments, scale, is_clipped = clipping.clip(packing, segments, norm, scale, tf.math.is_finite(norm))
    assert bool(is_clipped) == bool(clip_norm and norm > clip_norm)
    return gradients.scaled(segments, scale), norm


@pytest.mark.parametrize(
    "limit, clipped, is_clipped",
    [
        ({"value": 2.0}, ([[2.0, -2.0]], [1.0]), True),
        ({"variable_norm": 2.5}, ([[1.5, -2.0]], [1.0]), True),
        ({"value": 4.0}, ([[3.0, -4.0]], [1.0]), False),
        ({"variable_norm": 5.0}, ([[3.0, -4.0]], [1.0]), False),
    ],
)
def test_elements_or_variables_are_clipped_after_the_division(limit, clipped, is_clipped):
    packing = gradients.Packing([tf.Variable(tf.zeros([1, 2])), tf.Variable([0.0])])
    segments = packing.pack([tf.constant([[6.0, -8.0]]), tf.constant([2.0])])

    def clip(segments):
        norm, scale = gradients.norm_and_scale(gradients.squared_norms(segments), tf.constant(2.0))
        return gradients.Clipping(**limit).clip(packing, segments, norm, scale, tf.math.is_finite(norm))

    found, scale, was_clipped = clip(segments)
    assert [g.numpy().tolist() for g in packing.unpack(found, scale)] == list(clipped)
    assert bool(was_clipped) == is_clipped
    assert np.isinf(clip([segment + np.inf for segment in segments])[0][0]).all()  # so that they can be found


@pytest.mark.parametrize("clip_norm", [0.0, 0.1, 100.0])
def test_gradients_are_divided_and_clipped_as_numpy_does_it(clip_norm):
    segments = random_gradients([tf.TensorSpec([5]), tf.TensorSpec([7])])
    found, norm = divide_and_clip(segments, 4.0, clip_norm)
    divided = [segment.numpy().astype(np.float64) / 4.0 for segment in segments]
    expected_norm = np.sqrt(sum(np.sum(part**2) for part in divided))
    factor = min(1.0, clip_norm / expected_norm) if clip_norm else 1.0
    np.testing.assert_allclose(norm, expected_norm, rtol=1e-6)  # before clipping
    for part, expected in zip(found, divided, strict=True):
        np.testing.assert_allclose(part, expected * factor, rtol=1e-6)


@pytest.mark.parametrize(
    "segment, weight, clip_norm, norm, expected",
    [
        pytest.param([6.0, 8.0], 2.0, 5.0, 5.0, [3.0, 4.0], id="at the clip norm"),
        *[pytest.param([6.0, 8.0], 0.0, clip_norm, 0.0, [0.0, 0.0], id="of weight 0") for clip_norm in (0.0, 1.0)],
        *[pytest.param([0.0, 0.0], 2.0, clip_norm, 0.0, [0.0, 0.0], id="of 0") for clip_norm in (0.0, 1.0)],
    ],
)
def test_gradients_at_the_clip_norm_stay_and_those_of_weight_0_become_0(segment, weight, clip_norm, norm, expected):
    found, found_norm = divide_and_clip([tf.constant(segment)], weight, clip_norm)
    assert float(found_norm) == norm
    np.testing.assert_array_equal(found[0], expected)


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16, tf.float64])
def test_gradients_keep_their_dtype_and_the_norm_is_float32(dtype):
    found, norm = divide_and_clip([tf.cast([300.0, 400.0], dtype)], 1.0, 5.0)
    assert found[0].dtype == dtype and norm.dtype == tf.float32
    np.testing.assert_allclose(norm, 500.0, rtol=1e-2)
    np.testing.assert_allclose(tf.cast(found[0], tf.float32), [3.0, 4.0], rtol=1e-2)
