"""Out of memory: the sentence, and the settings to try."""

import re

import pytest
import tensorflow as tf

import distloop
from distloop.model import memory
from distloop.model.state import TrainState
from tests.problems import classification, classifier, mostly_wide, on

OOM = (
    "OOM when allocating tensor with shape[4096,1024] and type float on "
    "/job:localhost/replica:0/task:0/device:GPU:1 by allocator GPU_1_bfc [Op:MatMul]"
)


def exhausted(message=OOM):
    return tf.errors.ResourceExhaustedError(None, None, message)


def test_the_sentence_says_what_was_in_memory_and_what_to_try(monkeypatch):
    used = {"current": 70_120_000_000, "peak": 78_900_000_000}
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda device: {"GPU:1": used}[device])
    state = TrainState(classifier(), tf.distribute.get_strategy())
    text = str(memory.explain_step(exhausted(), state, 12, microbatches=2))
    assert text.startswith(
        "GPU:1 ran out of memory in step 12 or soon after (70.1 GB in use, 78.9 at most), for a tensor of shape "
        "[4096,1024] and type float; weights take "
    )
    parts = ["optimizer slots take", "microbatches=4 or more (it is 2", "precision=mixed_bfloat16", "a smaller batch"]
    assert all(part in text for part in parts)


CALLS = {"training": lambda trainer, data: trainer.fit(data, steps=2)}
CALLS |= {"evaluating": distloop.Trainer.evaluate, "predicting": distloop.Trainer.predict}
CALLS |= {"auditing": distloop.Trainer.audit}  # TensorFlow looks for memory for ten seconds, and an audit four times


@pytest.mark.slow
@pytest.mark.parametrize("doing", mostly_wide(CALLS))
def test_whatever_runs_out_of_memory_says_so_in_one_sentence(doing):
    def model_fn():
        spec = classifier()()

        def predict_fn(batch):
            outputs = spec.model(batch["x"], training=False)
            huge = tf.fill([tf.shape(outputs)[0], 10**7, 10**7], outputs[0, 0])  # more than any machine has
            return outputs + tf.reduce_sum(huge, [1, 2])[:, tf.newaxis]

        loss_fn = lambda batch, training: {"loss": predict_fn(batch)[:, 0]}  # noqa: E731
        return distloop.ModelSpec(spec.model, spec.updates[0].optimizer, loss_fn, predict_fn=predict_fn)

    trainer = distloop.Trainer(model_fn, on(1))
    data = distloop.make_dataset(classification(16), 8)
    try:
        text = str(CALLS[doing](trainer, data))
    except tf.errors.ResourceExhaustedError as error:
        text = str(error)
        assert error.__cause__ is None  # TensorFlow's own message, of many lines
    tries = ", for a tensor .*; weights take .*: try "
    what = {"auditing": "while auditing", "training": f"in step 1 or soon after{tries}microbatches=2 or more .it is 1"}
    expected = what.get(doing, f"while {doing} batches of 8 rows{tries}smaller batches")
    assert re.search(f"CPU:0 ran out of memory {expected}", text)
