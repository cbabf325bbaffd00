"""Prediction by signature: the functions of `ModelSpec.predict_fn`, and a traced loop for each that was called."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from distloop.data.source import Source
from distloop.distributed.preemption import StopRequests
from distloop.training.missing_entries import explaining_mistakes
from distloop.training.prediction import PredictLoop, PredictStep, cannot_join
from distloop.training.state import TrainState

DEFAULT_SIGNATURE = "serving_default"  # the signature that TensorFlow's tools call unless they are given a name


class Predictor:
    """Predicts with any of the model's `predict_fn`s."""

    def __init__(self, state: TrainState, *, eager: bool = False, predict_fn: Callable[[Any], Any] | None = None):
        """Prepares; nothing is traced yet.

        Args:
            state: holds the weights.
            eager: as for `TrainLoop`.
            predict_fn: used in place of ModelSpec's; None: those.
        """
        self._state = state
        self._eager = eager
        self._predict_fn = predict_fn
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
        return (
            self
            if predict_fn is None
            else Predictor(self._state, eager=self._eager, predict_fn=explaining_mistakes(predict_fn))
        )

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
        batches = list(self.stream(source, signature, keep_dtypes, limit, is_joined=True, stop_requests=stop_requests))
        if not batches:
            raise ValueError("The dataset to predict for is empty; distloop needs one batch at least.")
        try:
            return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *batches)
        except ValueError as error:
            raise cannot_join(error) from None

    def stream(
        self,
        source: Source,
        signature: str | None,
        keep_dtypes: bool,
        limit: int = 0,
        *,
        is_joined: bool = False,
        stop_requests: StopRequests | None = None,
    ) -> Iterator[Any]:
        """Returns an iterator over outputs, as for `Trainer.stream_predictions`; the last two as for `PredictLoop`."""
        loop = self._loop(self._find(signature), keep_dtypes)
        return loop.predict(source, is_joined=is_joined, limit=limit, stop_requests=stop_requests)

    def trace(self, source: Source) -> None:
        """Traces the outputs of the first function for a batch, which runs nothing.

        Raises:
            ValueError: if there is no function, or it breaks a rule.
        """
        self._loop(self._find(None), keep_dtypes=False).trace(source)

    def _loop(self, name: str, keep_dtypes: bool) -> PredictLoop:
        if (name, keep_dtypes) not in self._loops:
            step = PredictStep(self._state, self.predict_fns[name], keep_dtypes)
            self._loops[name, keep_dtypes] = PredictLoop(self._state, step, eager=self._eager)
        return self._loops[name, keep_dtypes]

    def _find(self, signature: str | None) -> str:
        """Returns the name of the function to call; None and the default signature stand for the first one."""
        names = list(self.predict_fns)
        if signature in names:
            return str(signature)
        if signature in (None, DEFAULT_SIGNATURE):
            return names[0]
        if names == [DEFAULT_SIGNATURE]:
            raise ValueError(
                f"signature={signature!r} was given, but there is just one predict_fn: leave signature out, or give "
                f"ModelSpec(..., predict_fn={{{signature!r}: function, ...}})."
            )
        raise ValueError(f"signature={signature!r} was given; predict_fn has {names}: give one of them.")
