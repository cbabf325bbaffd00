"""Where the time of a step on several workers goes: computing, waiting for the last worker, the all-reduce.

    python -m distloop.launch --workers=2 --cores_per_worker=1 -m experiments.benchmarks.timeline --workload=conv
    python -m distloop.launch --workers=2 --cores_per_worker=0 -m experiments.benchmarks.timeline --workload=conv

Each worker takes the time when a step begins, when its gradients are ready, and when their sum has arrived. A step has
no update and reads no data. All workers run on one machine, so they share its clock.
"""

import numpy as np
import tensorflow as tf
from absl import app, flags

from experiments.benchmarks.workloads import WORKLOADS

_WORKLOAD = flags.DEFINE_enum("workload", "conv", list(WORKLOADS), "Which model.")
_SECS = 3.0  # approximate length of the measurement


def make_run(strategy: tf.distribute.Strategy):
    """Returns a function from a number of steps to the three times of each step: `[steps, 3]`, seconds."""
    workload = WORKLOADS[_WORKLOAD.value]
    with strategy.scope():
        model = workload.make_model()
    features, labels = next(iter(workload.dataset(workload.global_batch_size(1))))

    def step(last: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([last]):
            begun = tf.timestamp()
        with tf.control_dependencies([begun]):
            batch = [tf.identity(features), tf.identity(labels)]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(workload.values(model, *batch, training=True)["loss"])
        gradients = tape.gradient(loss, model.trainable_variables)
        packed = tf.concat([tf.reshape(tf.convert_to_tensor(gradient), [-1]) for gradient in gradients], 0)
        with tf.control_dependencies([packed]):
            ready = tf.timestamp()
        with tf.control_dependencies([ready]):
            packed = tf.identity(packed)
        reduced = tf.distribute.get_replica_context().all_reduce("sum", packed)
        with tf.control_dependencies([reduced]):
            return tf.stack([begun, ready, tf.timestamp()])

    @tf.function(autograph=False)
    def run(steps: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor, last: tf.Tensor, times: tf.TensorArray):
            now = strategy.experimental_local_results(strategy.run(step, args=(last,)))[0]
            return i + 1, now, times.write(i, now)

        start = (tf.constant(0), tf.zeros([3], tf.float64), tf.TensorArray(tf.float64, steps))
        return tf.while_loop(lambda i, *_: i < steps, body, start)[2].stack()

    return run


def main(_):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    run = make_run(strategy)
    run(tf.constant(3))
    times = run(tf.constant(20))
    # The mean over the workers, so that all take the same number of steps.
    step_secs = float(strategy.reduce("MEAN", strategy.run(lambda: (times[-1, 2] - times[0, 0]) / 20), axis=None))
    times = run(tf.constant(max(20, int(_SECS / step_secs))))
    times = strategy.gather(strategy.run(lambda: times[tf.newaxis]), axis=0).numpy()  # [W, steps, 3]
    if strategy.cluster_resolver.task_id:
        return
    last = times[:, :, 1].max(0)  # when the last worker was ready
    spans = {
        "step": np.diff(times[0, :, 0]),
        "computing": (times[:, :, 1] - times[:, :, 0]).ravel(),
        "waiting for the last one": (last - times[:, :, 1]).ravel(),
        "sum, after all are ready": (times[:, :, 2] - last).ravel(),
    }
    print(f"{_WORKLOAD.value} on {len(times)} workers, {times.shape[1]} steps: milliseconds")
    for name, secs in spans.items():
        few, median, many = np.quantile(secs, [0.1, 0.5, 0.9]) * 1e3
        print(f"{name:26} mean {np.mean(secs) * 1e3:6.2f}, 10 % {few:6.2f}, median {median:6.2f}, 90 % {many:6.2f}")


if __name__ == "__main__":
    app.run(main)
