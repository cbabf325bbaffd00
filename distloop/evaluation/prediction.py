"""Prediction: calls a function of `ModelSpec.predict_fn` over a dataset, with the rows in order.

    predictor = Predictor(state)
    logits = predictor.predict(source)                                      # NumPy arrays, [N, ...]

A `PredictLoop` calls one function: it yields the outputs of a pass. It changes no variable.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.data import shards
from distloop.data.numbered import RowIterator
from distloop.data.shards import Batch, BatchLayout
from distloop.data.source import Source
from distloop.distributed import collectives, gathering
from distloop.distributed.devices import HOST
from distloop.errors import raise_as_user_error, require
from distloop.graph_functions import TimeLimit, called_by_kind, compiled
from distloop.model.memory import explain_pass
from distloop.model.state import TrainState
from distloop.model.user_functions import as_tensor
from distloop.settings import durations
from distloop.settings.precision import HALF_DTYPES
from distloop.training.microbatches import join_rows, run_forward
from distloop.workers.preemption import StopRequests

DEFAULT_SIGNATURE = "serving_default"  # the signature that TensorFlow's tools call unless they are given a name
_MAX_JOINED_BATCHES = 64  # batches whose outputs are on the host at the same time
_MAX_JOINED_SECS = 1.0  # after which no other batch is joined to those before
IS_EMPTY = "The dataset to predict for is empty; distloop needs one batch at least."


class PredictLoop:
    """Predicts for datasets with one function; traced once for each kind of data."""

    def __init__(
        self, state: TrainState, predict_fn: Callable[[Any], Any], keep_dtypes: bool = False, *, eager: bool = False
    ):
        """Prepares; nothing is traced yet. `keep_dtypes` is as for `check_outputs`, and `eager` as for `TrainLoop`."""
        self._state, self._strategy = state, state.strategy
        self._is_alone = collectives.num_workers(state.strategy) == 1
        self._predict_fn, self._keep_dtypes, self._eager = predict_fn, keep_dtypes, eager
        self._row_specs: Any = None  # of each output, on several workers, once a step was traced
        self._step = compiled(self._predict_batch, eager, name="prediction")  # one trace for its several callers
        self._run = compiled(lambda iterator, layout: self._step(shards.next_batch(iterator, layout), layout), eager)
        self._run_joined = compiled(self._predict_batches, eager)
        self._call_joined = called_by_kind(self._run_joined, eager)

    def trace(self, source: Source) -> None:
        """Traces the outputs for a batch, which runs nothing; `predict` uses the trace."""
        if not self._eager:
            self._run.get_concrete_function(source.iterator_spec(), source.layout)

    def predict(
        self, source: Source, *, is_joined: bool = False, limit: int = 0, stop_requests: StopRequests | None = None
    ) -> Iterator[Any]:
        """Yields the outputs of one pass, in order, with the averaged weights if the state has any.

        Args:
            source: data.
            is_joined: whether the outputs of several batches may come in one piece, which takes less time; else a
                piece a batch.
            limit: the largest number of batches; 0: all.
            stop_requests: asked between two pieces whether to leave the pass; None: it is not left.

        Raises:
            ValueError: if outputs that are to be joined have different shapes.
            Interrupted: on every worker, if one is asked to stop before the end.
        """
        collectives.report_phase(self._strategy, "predicting", self._state.step)
        iterator = source.new_iterator()
        streams = self._state.random_streams.read()
        run: Any = self._run
        if not self._is_alone:  # workers meet in a step, so each batch is a call, which all of them make
            run.get_concrete_function(iterator, source.layout)
            collectives.require_same(self._strategy, "predict", {"the rows of outputs": self._row_specs})
            if source.info.num_batches is None:
                run = self._run_if_all_have_a_batch
        elif is_joined and not limit:
            run = self._call_joined
        with source.gate:
            for piece in range(limit) if limit else itertools.count():
                if isinstance(iterator, RowIterator) and not iterator.has_next():
                    return
                if piece and stop_requests is not None:
                    vote = collectives.Vote(step=int(self._state.step))
                    collectives.agree_to_go_on(self._strategy, stop_requests, vote)
                # Between two batches, weights and random streams are those of training: the caller may train meanwhile.
                with self._state.averaged(), self._state.random_streams.preserved():
                    self._state.random_streams.write(streams)
                    try:
                        outputs = run(iterator, source.layout)
                        streams = self._state.random_streams.read()
                    except tf.errors.OutOfRangeError:
                        return
                    except tf.errors.ResourceExhaustedError as error:
                        raise explain_pass(error, self._state, "predicting", source.info.batch_size) from error
                    except tf.errors.OpError as error:
                        self._state.end_steps(are_complete=not self._state.passes_write)
                        if "TensorListConcat" in (error.message or ""):
                            raise _cannot_join("their shapes differ") from error
                        raise_as_user_error(error)
                yield tf.nest.map_structure(lambda t: t.numpy(), outputs)

    def _predict_batch(self, batch: Batch, layout: BatchLayout) -> Any:
        """Returns the outputs for a batch, `[B, ...]`; outside `strategy.run`."""
        per_replica = self._strategy.run(functools.partial(self._forward, layout), args=(batch,))

        def joined(value: Any) -> tf.Tensor:
            pieces = self._strategy.experimental_local_results(value)
            if not self._is_alone:
                return pieces[0]  # each replica holds the rows of all
            rows = join_rows(pieces)
            return rows if batch.size is None else rows[: batch.size]

        return tf.nest.map_structure(joined, per_replica)

    def _forward(self, layout: BatchLayout, batch: Batch) -> Any:
        """Returns the outputs for a replica's rows; on several workers, for those of all replicas."""

        def predict(rows: Any, row_weights: tf.Tensor | None) -> Any:
            outputs = check_outputs(self._predict_fn(rows), shards.batch_size(rows), self._keep_dtypes)
            if self._is_alone:
                return outputs
            count = None if row_weights is None else tf.cast(tf.reduce_sum(row_weights), tf.int32)
            # Even if all rows count: TensorFlow gathers what an operation made on a device, not an entry of a batch.
            return tf.nest.map_structure(lambda output: output[:count], outputs)

        results = run_forward(self._state, layout, batch, predict)
        outputs = tf.nest.map_structure(lambda *pieces: join_rows(pieces), *results)
        if self._is_alone:
            return outputs
        self._row_specs = tf.nest.map_structure(lambda t: f"{t.dtype.name} {list(t.shape[1:])}", outputs)
        return tf.nest.map_structure(_join_outputs, outputs)

    def _run_if_all_have_a_batch(self, iterator: Any, layout: BatchLayout) -> Any:
        """Predicts for the next batch of data of unknown length, once all workers have one; as an iterator ends."""
        has_batch, get_batch = shards.next_batch_if_any(iterator, layout)
        collectives.require_same(self._strategy, "predict", {"whether a batch follows": bool(has_batch)})
        if not has_batch:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        return self._step(get_batch(), layout)

    def _predict_batches(self, iterator: Any, layout: BatchLayout) -> Any:
        """Predicts for up to `_MAX_JOINED_BATCHES` batches, and joins them; takes none after `_MAX_JOINED_SECS`."""
        with tf.device(HOST):
            time_limit = TimeLimit(tf.constant(_MAX_JOINED_SECS, tf.float64))
            batch = shards.next_batch(iterator, layout)
        first = self._step(batch, layout)
        leaves = tf.nest.flatten(first)
        if any(isinstance(leaf, tf.RaggedTensor) for leaf in leaves):
            return first  # a TensorArray holds no ragged tensors

        def new_array(leaf: tf.Tensor) -> tf.TensorArray:
            return tf.TensorArray(leaf.dtype, 1, True, infer_shape=False, clear_after_read=False).write(0, leaf)

        def body(count: tf.Tensor, _: tf.Tensor, arrays: list[tf.TensorArray]) -> Any:
            has_batch, get_batch = shards.next_batch_if_any(iterator, layout)

            def taken() -> list[tf.TensorArray]:
                outputs = tf.nest.flatten(self._step(get_batch(), layout))
                return [array.write(count, output) for array, output in zip(arrays, outputs, strict=True)]

            return count + 1, has_batch, tf.cond(has_batch, taken, lambda: arrays)

        with tf.device(HOST):
            _, _, arrays = tf.while_loop(
                lambda count, has_more, _: has_more & (count < _MAX_JOINED_BATCHES) & time_limit.is_ahead(),
                body,
                (tf.constant(1), tf.constant(True), list(map(new_array, leaves))),
                parallel_iterations=1,
            )
            return tf.nest.pack_sequence_as(first, [array.concat() for array in arrays])


class Predictor:
    """Predicts with any of the model's `predict_fn`s."""

    def __init__(self, state: TrainState, *, eager: bool = False, predict_fn: Callable[[Any], Any] | None = None):
        """Prepares; nothing is traced yet. `predict_fn` is used in place of ModelSpec's; None: those are used."""
        self._state, self._eager, self._predict_fn = state, eager, predict_fn
        self._loops: dict[tuple[str, bool], PredictLoop] = {}  # by signature and keep_dtypes

    @property
    def predict_fns(self) -> Mapping[str, Callable[[Any], Any]]:
        """The functions by signature.

        Raises:
            ValueError: if the ModelSpec has none.
        """
        predict_fn = self._predict_fn or self._state.spec.predict_fn
        if predict_fn is None:
            raise ValueError(
                "ModelSpec has no predict_fn; give ModelSpec(..., predict_fn=lambda batch: model(batch['image'])), a "
                "function from a batch to outputs, [B, ...]."
            )
        return predict_fn if isinstance(predict_fn, Mapping) else {DEFAULT_SIGNATURE: predict_fn}

    def with_function(self, predict_fn: Callable[[Any], Any] | None) -> "Predictor":
        """Returns a predictor of the same model with another function; None: this one."""
        if predict_fn is None:
            return self
        return Predictor(self._state, eager=self._eager, predict_fn=self._state.prepared(predict_fn))

    def predict(
        self,
        source: Source,
        signature: str | None = None,
        keep_dtypes: bool = False,
        limit: int = 0,
        *,
        stop_requests: StopRequests | None = None,
    ) -> Any:
        """Returns the outputs for all rows, as for `Trainer.predict`; `stop_requests` as for `PredictLoop`."""
        loop = self._loop(signature, keep_dtypes, limit)
        pieces = list(loop.predict(source, is_joined=True, limit=limit, stop_requests=stop_requests))
        if not pieces:
            raise ValueError(IS_EMPTY)
        try:
            return tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *pieces)
        except ValueError as error:
            raise _cannot_join(error) from None

    def stream(
        self, source: Source, signature: str | None = None, keep_dtypes: bool = False, limit: int = 0
    ) -> Iterator[Any]:
        """Returns an iterator over outputs, as for `Trainer.stream_predictions`."""
        return self._loop(signature, keep_dtypes, limit).predict(source, limit=limit)

    def trace(self, source: Source) -> None:
        """Traces the outputs of the first function for a batch, which runs nothing."""
        self._loop().trace(source)

    def _loop(self, signature: str | None = None, keep_dtypes: bool = False, limit: int = 0) -> PredictLoop:
        durations.require_integer("predict", 0, batches=limit)
        key = name, _ = self._find(signature), keep_dtypes
        if key not in self._loops:
            self._loops[key] = PredictLoop(self._state, self.predict_fns[name], keep_dtypes, eager=self._eager)
        return self._loops[key]

    def _find(self, signature: str | None) -> str:
        """Returns the name of the function to call; None and the default signature stand for the first one."""
        names = list(self.predict_fns)
        if signature in (*names, None, DEFAULT_SIGNATURE):
            return str(signature) if signature in names else names[0]
        known = "is one predict_fn:" if names == [DEFAULT_SIGNATURE] else f"are functions {names}: give one of these,"
        raise ValueError(
            f"signature={signature!r} was given, but there {known} leave signature out, or give "
            f"ModelSpec(..., predict_fn={{{signature!r}: function, ...}})."
        )


def _cannot_join(reason: object) -> ValueError:
    """Returns the error for outputs of several batches whose shapes do not fit together."""
    return ValueError(
        f"Outputs of different batches cannot be joined ({reason}); take them a batch at a time from "
        "trainer.stream_predictions(dataset)."
    )


def check_outputs(outputs: Any, batch_size: tf.Tensor | int, keep_dtypes: bool = False) -> Any:
    """Checks what `predict_fn` returned, and casts half-precision tensors to float32.

    Args:
        outputs: any structure of tensors.
        batch_size: rows of the batch that `predict_fn` was given.
        keep_dtypes: whether half-precision tensors stay as they are.

    Raises:
        ValueError: if an output is no tensor, or has no leading axis of that size.
    """
    static_size = batch_size if isinstance(batch_size, int) else None

    def checked(output: Any) -> Any:
        output = output if isinstance(output, tf.RaggedTensor) else as_tensor(output, "predict_fn returned")
        rows = output.shape[0] if output.shape.rank else None
        message = (
            f"predict_fn returned a tensor of shape {list(output.shape)}; distloop needs one row of output per row of "
            f"input, [{static_size or 'B'}, ...]: return the model's outputs without reducing them."
        )
        if output.shape.rank == 0 or (rows is not None and rows != static_size):
            raise ValueError(message)
        if output.dtype.name in HALF_DTYPES and not keep_dtypes:
            output = tf.cast(output, tf.float32)
        if rows is None:
            require(tf.equal(shards.batch_size(output), batch_size), message)
        return output

    return tf.nest.map_structure(checked, outputs)


def _join_outputs(output: Any) -> tf.Tensor:
    """Returns the rows of all replicas on all workers, in their order; call in replica context."""
    if isinstance(output, tf.RaggedTensor) or not (output.dtype.is_numeric or output.dtype.is_bool):
        raise ValueError(
            f"predict_fn returned a {'ragged tensor' if isinstance(output, tf.RaggedTensor) else 'string tensor'}, "
            "which TensorFlow cannot collect from several workers: return dense numbers, or predict on one worker."
        )
    return gathering.all_gather(output)
