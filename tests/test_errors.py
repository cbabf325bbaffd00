"""Errors of a failed operation, as one sentence for users."""

import os
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop import errors
from distloop.data.source import Source
from tests import forked
from tests.problems import batch_taker, classification, classifier, mirrored, on


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("Requested a `Lambda`. If you trust it, call `enable()`.", "Requested a `Lambda`"),
        ("Error for {'a': 1}.\n\nException encountered: L.__init__() lacks 'units'", "L.__init__() lacks 'units'"),
        ("Unknown arguments of Net: {'a': [" + "1, " * 99 + "]}", "Unknown arguments of Net ..."),
        ("word " * 50, "word " * 39 + "word ..."),
        ("", "ValueError"),
    ],
)  # fmt: skip
def test_the_cause_in_a_message_of_keras_is_a_complete_sentence(message, cause):
    assert errors.cause(ValueError(message)) == cause


def test_a_condition_that_does_not_hold_fails_with_the_sentence():
    assert bool(errors.require(tf.constant(True), "never seen"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="rows were given; keep the batch"):
        errors.require(tf.constant(False), "rows were given; keep the batch")


def explained(dataset, strategy=None, batches=9):
    """Returns what `explain` says of the error that reading the data raises."""
    source = Source(dataset, strategy or tf.distribute.get_strategy(), repeat=False)
    take = batch_taker(source, source.iterator())
    with pytest.raises(tf.errors.OpError) as caught:
        for _ in range(batches):
            take()
    return errors.as_user_error(caught.value)


def generated(batches, **specs):
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=specs)


X = tf.TensorSpec([None, 2])


@pytest.mark.parametrize(
    ("second", "mark"),
    [
        ({"y": np.zeros([3, 2])}, "structure"),
        ({"x": np.array([["a", "b"]])}, "expected type"),
        ({"x": np.zeros([3])}, "element of shape"),
        ({"x": np.zeros([3, 5])}, "element of shape"),
    ],
    ids=["structure", "dtype", "rank", "axis"],
)
def test_a_generator_that_changes_its_batches_is_explained(second, mark):
    error = explained(generated([{"x": np.zeros([3, 2])}, second], x=X))
    assert isinstance(error, ValueError) and mark in str(error)
    assert str(error).startswith("A batch differs from those before it: ")
    assert str(error).endswith("correct the generator or its output_signature.")


@pytest.mark.slow
def test_entries_that_differ_in_their_number_of_rows_are_explained():
    dataset = generated([{"x": np.zeros([3, 2]), "y": np.zeros([4, 2])}], x=X, y=X)
    error = str(explained(dataset, mirrored(2), batches=1))
    assert "A batch's entries differ in their number of rows" in error and "\n" not in error


def test_the_end_of_all_data_is_an_empty_dataset_and_other_errors_stay():
    assert str(explained(generated([], x=X))).startswith("The dataset given is empty")
    assert errors.as_user_error(tf.errors.InvalidArgumentError(None, None, "Matrix size-incompatible")) is None
    assert errors.as_user_error(tf.errors.InternalError(None, None, None)) is None


def class_with(method, file=errors.__file__):
    """Returns a class with short tracebacks; the code of its method `run` says that it is in the file."""
    namespace = {"tf": tf}
    exec(compile(method, file, "exec"), namespace)
    return errors.with_short_tracebacks(type("Program", (), {"run": namespace["run"]}))


def caught(call, kind=Exception):
    with pytest.raises(kind) as info:
        call()
    return info.value


def functions(error):
    """Returns the functions in the error's traceback, the outermost first, without those of the test."""
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return names[names.index("call" if "call" in names else "generate") :]


THROUGH_TENSORFLOW = "def run(self, fn): return tf.function(lambda: tf.nest.map_structure(fn, [1]), autograph=False)()"


def mistaken(_):
    return {}["lable"]


@pytest.fixture
def all_frames():
    """Shows all frames of errors, for one test."""
    distloop.prepare(distloop.Config(device="cpu", full_tracebacks=True))
    yield
    keras.config.enable_traceback_filtering()
    tf.debugging.enable_traceback_filtering()


def test_a_mistake_of_a_user_shows_the_users_frames_alone():
    error = caught(lambda: class_with(THROUGH_TENSORFLOW)().run(mistaken))
    assert functions(error) == ["call", "mistaken"] and repr(error) == "KeyError('lable')"


def test_full_tracebacks_show_the_frames_of_tensorflow_and_distloop(all_frames):
    names = functions(caught(lambda: class_with(THROUGH_TENSORFLOW)().run(mistaken)))
    assert names[:2] == ["call", "run"] and names[-1] == "mistaken" and len(names) > 6


def test_a_generator_has_short_tracebacks():
    program = class_with("def run(self, fn):\n    yield tf.nest.map_structure(fn, [1])")()
    assert functions(caught(lambda: next(program.run(mistaken)))) == ["generate", "mistaken"]


def test_the_innermost_frame_of_an_error_in_a_library_stays():
    error = caught(lambda: class_with("def run(self): return tf.concat([], 0)")().run(), tf.errors.OpError)
    assert len(functions(error)) == 2 and "/tensorflow/" in traceback.extract_tb(error.__traceback__)[-1].filename


def test_a_sentence_for_users_has_no_frames_of_distloop():
    method = """def run(self):
        try:
            tf.debugging.Assert(False, ["never seen"])
        except tf.errors.OpError as error:
            raise ValueError("Give more rows.") from error
    """
    error = caught(lambda: class_with(method)().run())
    assert functions(error) == ["call"] and isinstance(error.__context__, tf.errors.OpError)
    assert "never seen" not in "".join(traceback.format_exception(error))


def test_a_mistake_in_distloop_keeps_all_frames():
    error = caught(lambda: class_with("def run(self): assert False")().run())
    assert functions(error) == ["call", "run"]


def dense_model_fn(loss_fn_of):
    def model_fn():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        return distloop.ModelSpec(model, keras.optimizers.SGD(), loss_fn_of(model))

    return model_fn


@pytest.mark.slow
def test_an_error_in_loss_fn_shows_the_line_of_loss_fn():
    def loss_fn(batch, training):
        return {"loss": batch["lable"]}

    trainer = distloop.Trainer(dense_model_fn(lambda model: loss_fn), on(2, steps=1))
    error = caught(lambda: trainer.fit({"x": np.zeros([4, 1], np.float32)}), ValueError)
    assert functions(error) == ["call", "loss_fn"]


def test_code_that_a_dataclass_generated_is_no_frame_of_the_user():
    def make():
        return distloop.ModelSpec(keras.Sequential([keras.layers.Dense(1)]), None, lambda batch, training: {})

    error = caught(lambda: distloop.Trainer(make), ValueError)
    assert "optimizer" in str(error)
    assert "__init__" not in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_tensors_of_other_shapes_on_another_worker_are_explained():
    message = (
        "Collective ops is aborted by: Shape mismatch in the collective instance 101. Op at device /job:worker/task:1"
    )
    message += " expected shape [8,5] but another member in the group expected shape [8,4]. This is likely due to ..."
    error = errors.as_user_error(tf.errors.InvalidArgumentError(None, None, message))
    assert str(error).startswith("The workers computed tensors of different shapes ([8,5] and [8,4]) where they share")


@pytest.mark.slow
def test_an_operation_that_fails_in_any_call_is_one_sentence():
    def model_fn():
        spec = classifier()()

        def loss_fn(batch, training):
            rows = tf.gather(batch["x"], tf.constant([10**6]))  # out of range
            return {"loss": tf.reduce_sum(rows) + tf.reduce_mean(spec.model(batch["x"]), 1)}

        return distloop.ModelSpec(spec.model, spec.optimizer, loss_fn, predict_fn=lambda b: loss_fn(b, False)["loss"])

    trainer = distloop.Trainer(model_fn, on(1))
    data = distloop.make_dataset(classification(8), 4)
    for call in (trainer.evaluate, trainer.predict, lambda data: trainer.fit(data, steps=1)):
        error = caught(lambda call=call: call(data), tf.errors.InvalidArgumentError)
        assert "= 1000000 is " in str(error) and "\n" not in str(error)
        assert len("".join(traceback.format_exception(error)).splitlines()) < 16


IN_GRAPH = """Graph execution error:

Detected at node while/while/sub_7 defined at (most recent call last):
  File "/home/a/program.py", line 30, in <module>

  File "{distloop}/training/differentiation.py", line 131, in __call__
{users}
Detected at node while/while/sub_7 defined at (most recent call last):
  File "/home/a/another.py", line 1, in f

{reasons} [Op:__inference_traced_1077]"""
ONE = "Incompatible shapes: [10] vs. [10,4]\n\t [[{{node while/while/replica_1/sub_7}}]]"
TWO = (
    f"2 root error(s) found.\n  (0) INVALID_ARGUMENT:  {ONE}\n  (1) INVALID_ARGUMENT:  {ONE}\n0 derived errors ignored."
)


@pytest.mark.parametrize("reasons", [ONE, TWO])
@pytest.mark.parametrize(
    ("users", "place"),
    [('\n  File "/home/a/model.py", line 5, in loss_fn\n', "at model.py:5"), ("", "at its operation sub_7")],
)
def test_an_error_of_a_compiled_function_is_a_sentence_with_the_users_line(reasons, users, place):
    message = IN_GRAPH.format(distloop=os.path.dirname(errors.__file__), users=users, reasons=reasons)
    error = errors.as_operation_error(tf.errors.InvalidArgumentError(None, None, message))
    assert type(error) is tf.errors.InvalidArgumentError
    assert str(error).startswith(f"A compiled function failed {place}: Incompatible shapes: [10] vs. [10,4]; Config")


def test_an_operation_that_another_device_cancelled_is_no_cause():
    reason = "RecvAsync is cancelled.\n\t [[{{node while/body/_1/while/cond/cond/output/_228/_22}}]]"
    message = IN_GRAPH.format(distloop=os.path.dirname(errors.__file__), users="", reasons=reason)
    error = errors.as_operation_error(tf.errors.CancelledError(None, None, message))
    assert type(error) is tf.errors.CancelledError
    assert str(error) == errors.CANCELLED


@pytest.mark.slow
def test_a_label_out_of_range_on_virtual_replicas_of_two_devices():
    trainer = distloop.Trainer(classifier(), on(2, virtual_replicas=4))
    bad = classification(16) | {"label": np.full(16, 8)}
    for call in (lambda: trainer.evaluate(bad), lambda: trainer.fit(bad, steps=1)):
        message = str(caught(call, (ValueError, tf.errors.CancelledError)))
        assert message == errors.CANCELLED or message.startswith("A batch holds the label 8"), message


def test_an_error_of_a_python_function_in_the_data_names_its_line():
    def fail(x):
        raise RuntimeError("boom")

    model_fn = dense_model_fn(lambda model: lambda batch, training: {"loss": model(batch)[:, 0]})
    data = tf.data.Dataset.from_tensors(tf.ones([1])).repeat(8)
    data = data.map(lambda x: tf.ensure_shape(tf.py_function(fail, [x], tf.float32), [1])).batch(4)
    error = caught(lambda: distloop.Trainer(model_fn, on(1)).fit(data, steps=1), tf.errors.UnknownError)
    line = fail.__code__.co_firstlineno + 1
    assert str(error) == f"A compiled function failed at test_errors.py:{line}: RuntimeError: boom."


def test_errors_of_devices_and_workers_and_outside_compiled_functions_stay():
    for kind, message in (
        (tf.errors.UnavailableError, "Graph execution error:\nSocket closed"),
        (tf.errors.InternalError, "Graph execution error:\nno CUDA"),
        (tf.errors.InvalidArgumentError, "Matrix size-incompatible"),
    ):
        assert errors.as_operation_error(kind(None, None, message)) is None


def test_a_type_error_of_a_users_function_stays():
    def model_fn():
        len(5)

    with pytest.raises(TypeError, match="has no len"):
        distloop.Trainer(model_fn, on(1))


def test_a_reduced_loss_under_absl_takes_few_lines(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        """
import distloop, keras, numpy as np
from absl import app

def model_fn():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    loss_fn = lambda batch, training: {"loss": keras.ops.mean(model(batch["x"]))}
    return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn)

def main(_):
    config = distloop.Config(device="cpu", num_devices=1, console="quiet")
    distloop.Trainer(model_fn, config).fit({"x": np.zeros((8, 2), "float32")}, steps=1)

app.run(main)
"""
    )
    result = forked.run([program], env=os.environ)
    _, _, shown = result.stderr.partition("in main\n")  # the frames above are those of the program and of absl
    lines = shown.splitlines()
    assert lines[-1].startswith('ValueError: loss_fn returned "loss" of shape []') and len(lines) <= 4
    assert shown.count("/distloop/") == 1 and "/tensorflow/" not in shown
