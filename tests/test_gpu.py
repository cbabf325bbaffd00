"""What only a GPU can show: its memory, what it says of itself, and its numbers beside those of a CPU; with `--gpu`."""

import collections
import glob

import keras
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import distloop
from tests.problems import assert_close, assert_equal, batches, classifier, everything, on, rows_of, weights

pytestmark = [pytest.mark.slow, pytest.mark.skipif("not config.getoption('gpu')")]
WIDTH = 2**18  # 1 MB for each row's activations


def wide_model():
    """A `model_fn` whose rows take a MB of a GPU for each activation that the backward pass needs."""
    hidden = keras.layers.Dense(WIDTH, "tanh", kernel_initializer="zeros", bias_initializer="normal", name="hidden")
    model = keras.Sequential([keras.Input((8,)), hidden], name="wide")

    def loss_fn(batch, training):
        return {"loss": tf.reduce_mean(model(batch["x"], training=training) ** 2, 1)}

    return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn)


def test_a_batch_without_memory_ends_the_run_in_one_sentence():
    trainer = distloop.Trainer(wide_model, on(1))
    sentence = r"^GPU:0 ran out of memory in step 1 or soon after \(.* in use, .* at most\).*try microbatches=2 or more"
    with pytest.raises(tf.errors.ResourceExhaustedError, match=sentence):
        trainer.fit(batches(1024, 1024), steps=1)


def test_the_search_for_a_batch_size_ends_where_the_memory_does():
    result = distloop.autotune_batch(distloop.Trainer(wide_model, on(1)), batches(64, 4096))
    assert result.reason.endswith("does not fit"), result.reason
    assert len(result.trials) > 1


def test_a_row_says_what_the_gpu_does_and_holds(tmp_path):
    trainer = distloop.Trainer(classifier(), on(2, workdir=str(tmp_path), log_every=50))
    trainer.fit(batches(rows=64), steps=2000)
    row = rows_of(tmp_path)[-1]
    assert 0 <= row["gpu_utilization"] <= 1
    assert row["gpu_memory_gb"] > 1  # what TensorFlow took at its start
    assert 0 < row["device_memory_gb"] < 1
    assert row["gpu_watts"] > 10 and 10 < row["gpu_temperature"] < 110 and 0 < row["energy_kwh"] < 0.1


def test_the_numbers_are_those_of_a_cpu():
    found = []
    for strategy in (None, tf.distribute.OneDeviceStrategy("/CPU:0")):
        model_fn = classifier(l2=0.1, batch_norm="local")
        trainer = distloop.Trainer(model_fn, on(1, clip_norm=0.5, average_decay=0.9), strategy=strategy)
        trainer.fit(batches(), steps=12)
        found.append(weights(trainer))
    assert_close(*found, 1e-5)


def test_a_checkpoint_of_gpus_goes_on_upon_a_cpu(tmp_path):
    first = distloop.Trainer(classifier(), on(4, workdir=str(tmp_path)))
    first.fit(batches(rows=64), steps=5)
    then = distloop.Trainer(classifier(), on(1), strategy=tf.distribute.OneDeviceStrategy("/CPU:0"))
    then.restore(str(tmp_path))
    assert then.step == 5
    assert_equal(weights(then), weights(first))


@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("jit_compile", [False, True], ids=["", "XLA"])
def test_half_precision_learns(precision, jit_compile):
    config = on(2, precision=precision, jit_compile=jit_compile)
    trainer = distloop.Trainer(classifier(optimizer=lambda: keras.optimizers.Adam(0.02)), config)
    first = trainer.fit(batches(rows=64), steps=4)["loss"]
    assert trainer.fit(batches(rows=64), steps=200)["loss"] < 0.7 * first


def test_several_strategies_live_in_a_process():
    found = []
    for replicas in (2, 4, 3, 2):
        trainer = distloop.Trainer(classifier(), on(replicas))
        trainer.fit(batches(rows=64), steps=6)
        found.append(everything(trainer))
    for other in found[1:]:
        assert_close({k: v for k, v in other.items() if k in found[0]}, found[0], 1e-5)


def test_a_loop_copies_no_row_back_to_the_host(tmp_path):
    """The profile of steps in a compiled loop: what the graph says of GPUs that are not there is so."""
    trainer = distloop.Trainer(classifier(), on(1))
    trainer.fit(batches(rows=64), steps=100)
    tf.profiler.experimental.start(str(tmp_path))
    trainer.fit(batches(rows=64), steps=300)
    tf.profiler.experimental.stop()
    space = xplane_pb2.XSpace()
    (path,) = glob.glob(f"{tmp_path}/plugins/profile/*/*.xplane.pb")
    with open(path, "rb") as file:
        space.ParseFromString(file.read())
    planes = [plane for plane in space.planes if plane.name.startswith("/device:GPU")]
    events = [(plane, event) for plane in planes for line in plane.lines for event in line.events]
    names = [plane.event_metadata[event.metadata_id].name for plane, event in events]
    counts = collections.Counter(names)
    assert counts.total() > 200 * 5, counts.most_common(5)  # a step has more kernels than that
    back = sum(count for name, count in counts.items() if "MemcpyD2H" in name)
    assert back < 20, f"{back} copies to the host in 200 steps"
