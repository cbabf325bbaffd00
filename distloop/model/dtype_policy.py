"""The dtype policy of Keras under which layers are created; no layer is changed afterwards.

config = with_policy_of_keras(config)
with policy(config.precision):
    spec = model_fn()                              # layers without a dtype of their own compute in the precision
check_precision(spec, config.precision)
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import keras

from distloop.log import log
from distloop.model.spec import ModelSpec
from distloop.settings.config import Config
from distloop.settings.precision import PRECISIONS
from distloop.variables import top_layers


@contextlib.contextmanager
def policy(name: str) -> Iterator[None]:
    """Enters a scope with another global dtype policy of Keras; layers take it when they are created."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def with_policy_of_keras(config: Config) -> Config:
    """Returns settings whose precision is the mixed policy that the user has set in Keras, if it was float32."""
    given = PRECISIONS.get(keras.config.dtype_policy().name)
    if given is None or PRECISIONS[config.precision].is_half:
        return config
    return dataclasses.replace(config, precision=given.name)


def check_precision(spec: ModelSpec, name: str) -> None:
    """Looks whether layers compute in the precision of a run, as no layer is changed once it is made.

    Raises:
        ValueError: if `from_keras` was given a model of which no layer does, or Keras's global policy or floatx is
            neither float32 nor mixed, and no layer has it.
    """
    layers = [each for top in top_layers(spec.model, in_modules=True) for each in top._flatten_layers()]
    computing = [layer for layer in layers if not isinstance(layer, keras.layers.InputLayer)]
    # Private: a model that only calls its layers computes nothing itself.
    used = {layer.compute_dtype for layer in computing if layer._trainable_variables or not layer._layers}
    policy, floatx = keras.config.dtype_policy(), keras.config.floatx()
    of_user = floatx if policy.name in PRECISIONS else policy.compute_dtype
    if of_user != "float32" and layers and of_user not in used:
        raise ValueError(
            f"Keras's global dtype policy or floatx is {of_user}, but layers are made under Config.precision, which is "
            f"{' or '.join(PRECISIONS)}: set both to float32 in Keras, or give layers a dtype of their own."
        )
    precision = PRECISIONS[name]
    if not precision.is_half or precision.compute_dtype in used:
        return
    if spec.original is not None:
        raise ValueError(
            f"precision={name} was given with the model {spec.original.name!r}, which is made already, and whose "
            f"layers compute in {' and '.join(sorted(used))}: give from_keras the function that builds and compiles "
            f"the model, or call keras.config.set_dtype_policy({name!r}) before the model is made."
        )
    log.warning(
        "precision=%s was given, but no layer of the model computes in %s: layers with a dtype of their own, and those "
        "of a file, keep it, and code without Keras's layers has to cast for itself.",
        name,
        precision.compute_dtype,
    )
