"""Programs drawn from a number: inputs, layers that Keras accepts one after the other, heads, an optimizer, settings.

program = draw_program(7)
"""

import dataclasses
import re
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.campaigns.keras_fuzz import grammar, objectives, own_parts
from tests.campaigns.keras_fuzz.grammar import Draw
from tests.campaigns.keras_fuzz.programs import INPUTS, ROWS, Head, Input, Program, Step

# Images of three channels, which Keras checks in training alone.
OF_COLOURS = re.compile("Random(ColorJitter|ColorDegeneration|Grayscale|Hue|Saturation)")
# Keras computes these for labels [B] and outputs [B, 1] over all pairs of rows, or refuses them.
NEEDS_LAST_AXIS = re.compile(
    r"crossentropy|metrics.BinaryCrossentropy|R2Score|F1Score|FBetaScore|IoU|[hH]inge|own_metric|LargestError|Pinball|"
    r"[pP]oisson"
)
# Statistics of a replica's own rows, and pairs of rows: the stated exceptions to equal numbers on replicas.
DEPENDS_ON_SHARDS = re.compile(r"BatchNormalization\((?!synchronized=True)|losses.Circle")
# Statistics of the rows of a microbatch; calls in a step.
DEPENDS_ON_MICROBATCHES = re.compile(r"BatchNormalization|Counter\(")
# What layers adapt to that come first after an input.
ARRAYS = {"raw vector": np.zeros((2, 6)), "tokens": np.arange(10).reshape(2, 5)}
ARRAYS |= {"strings": np.array([["a", "b"], ["c", "a"]]), "texts": np.array([["a"], ["c"]])}
DTYPES = {"tokens": ["int32", "int64"], "strings": ["string"], "texts": ["string"]}
NAMES = {"keras": keras, "np": np, "tf": tf, **vars(own_parts)}


def kind_of(tensor: Any) -> str | None:
    """Returns what a symbolic tensor is to the layers after it; None: nothing that any layer is drawn for."""
    if any(size is None for size in tensor.shape[1:]) or np.prod(tensor.shape[1:]) > 300:
        return None
    if "float" not in tensor.dtype:
        return "tokens" if len(tensor.shape) == 2 and "int" in tensor.dtype else None
    return {2: "vector", 3: "sequence", 4: "image", 5: "volume"}.get(len(tensor.shape))


def draw_program(number: int) -> Program:
    """Returns the program of a number."""
    draw = Draw(number)
    style = draw.choices(["functional", "sequential", "subclassed"], [5, 2, 2])[0]
    inputs, tensors = [], []
    for index in range(1 if style == "sequential" else draw.choices([1, 2, 3], [9, 2, 1])[0]):
        drawn, tensor = _draw_input(draw, f"x{index}", style)
        inputs.append(drawn)
        tensors.append(tensor)
    if len(inputs) > 1:
        for index, tensor in enumerate(tensors):
            if (kind := kind_of(tensor)) != "vector":
                squash = Step((draw.choice(grammar.SQUASHES[kind]),))
                inputs[index] = dataclasses.replace(inputs[index], steps=(*inputs[index].steps, squash))
                tensors[index] = _symbolic(squash, tensor, None)
    tensor = keras.ops.concatenate(tensors, axis=-1) if len(tensors) > 1 else tensors[0]
    trunk: list[Step] = []
    for _ in range(draw.choice([0, 0, 1, 2])):
        tensor = _add_step(draw, trunk, tensor, style)
    if kind_of(tensor) in ("image", "volume") and draw.has(0.8):
        trunk.append(Step((draw.choice(grammar.SQUASHES[kind_of(tensor)]),)))
        tensor = _symbolic(trunk[-1], tensor, None)
    return _finish(draw, number, style, inputs, trunk, tensor)


def _draw_input(draw: Draw, name: str, style: str) -> tuple[Input, Any]:
    kind = draw.choices(list(INPUTS), [4, 4, 5, 2, 0.3, 3, 1, 1, 0.7])[0]
    dtype = draw.choice(DTYPES.get(kind, ["float32", "float32", "float32", "float64"]))
    tensor = keras.Input(INPUTS[kind][0], dtype=dtype)
    steps: list[Step] = []
    first = "raw vector" if kind == "vector" and draw.has(0.3) else kind
    while True:
        given = {} if steps else {"kind": first, "array": ARRAYS.get(first)}
        tensor = _add_step(draw, steps, tensor, style, **given)
        is_done = kind_of(tensor) not in (None, "tokens")
        if (is_done and draw.has(0.6)) or len(steps) > 4:
            break
    return Input(name, kind, dtype, tuple(steps)), tensor


def _add_step(draw: Draw, steps: list[Step], tensor: Any, style: str, kind: str | None = None, array: Any = None):
    """Draws a step that Keras accepts after the tensor, and returns the tensor after it."""
    kind = kind or kind_of(tensor)
    for _ in range(20 if kind else 0):
        step = _draw_step(draw, kind, style)
        if OF_COLOURS.search(step.layers[0]) and tensor.shape[-1] != 3:
            continue
        try:
            after = _symbolic(step, tensor, array)
        except Exception:  # noqa: S112 - Keras refuses, for whatever reason
            continue
        if kind_of(after) is not None:
            steps.append(step)
            return after
    return tensor


def _draw_step(draw: Draw, kind: str, style: str) -> Step:
    if style != "sequential" and kind in grammar.FLOATS and draw.has(0.2):
        merges = {**grammar.MERGES, **(grammar.ATTENTIONS if kind == "sequence" else {})}
        layer, call = merges[draw.choice(list(merges))]
        after = "keras.layers.Dense(4, activation={activation})"
        layers = [draw.text(after), draw.text(draw.choice([after, "keras.layers.Identity()", after]))]
        return Step((*layers, draw.text(layer)) if layer else tuple(layers), call)
    if style != "sequential" and kind in grammar.FLOATS and draw.has(0.07):
        return Step((draw.text("keras.layers.Dense(4, {activation})"),), "{h} = {0}({h}) + {0}({h} * 0.5)")
    if kind in grammar.FLOATS and draw.has(0.06):
        inner = ", ".join(_draw_layer(draw, kind) for _ in range(2))
        return Step((f"keras.Sequential([{inner}])",))
    if kind in grammar.FLOATS and draw.has(0.04):
        return Step((draw.choice(["Scale()", "Counter()"]),))
    return Step((_draw_layer(draw, kind),))


def _draw_layer(draw: Draw, kind: str) -> str:
    names = [name for name, (kinds, _) in grammar.LAYERS.items() if kind in kinds]
    name = draw.choice(names)
    arguments = grammar.LAYERS[name][1]
    layer = f"keras.layers.{name}({draw.text(draw.choice(arguments) if isinstance(arguments, list) else arguments)})"
    return f"adapted({layer}, ARRAY)" if grammar.ADAPTED.search(layer) else layer


def _symbolic(step: Step, tensor: Any, array: Any) -> Any:
    """Returns the symbolic tensor after a step."""
    layers = [eval(layer, {**NAMES, "ARRAY": array}) for layer in step.layers]
    names = {f"layer_{index}": layer for index, layer in enumerate(layers)}
    call = step.call.format(*names, h="h").removeprefix("h = ")
    return eval(call, {**NAMES, **names, "h": tensor})


def _finish(draw: Draw, number: int, style: str, inputs: list, trunk: list, tensor: Any) -> Program:
    """Draws heads, optimizer and settings."""
    num_heads = 1 if style == "sequential" else draw.choices([1, 2, 3], [8, 3, 1])[0]
    is_weighted = draw.has(0.4)
    heads = tuple(_draw_head(draw, f"y{index}", tensor.shape[1:-1], is_weighted) for index in range(num_heads))
    if heads[0].kind == "embedding":
        heads = heads[:1]
    name = draw.choice(list(grammar.OPTIMIZERS))
    optimizer = f"keras.optimizers.{name}({draw.text(grammar.OPTIMIZERS[name])})"
    lines = []
    if "weight_decay" in optimizer and draw.has(0.5):
        lines.append('optimizer.exclude_from_weight_decay(var_names=["bias", "gamma"])')
    if draw.has(0.05):
        lines.append("model.trainable_variables[0].trainable = False")
    program = Program(
        number, style, tuple(inputs), tuple(trunk), heads, draw.choice(["dict", "list"]), optimizer, tuple(lines)
    )
    has_loss_weights = len(heads) > 1 and draw.has(0.4)
    route = (
        "function" if style == "subclassed" else draw.choices(["from_keras", "function", "supervised"], [6, 1, 1])[0]
    )
    program = dataclasses.replace(
        program,
        loss_weights=tuple(draw.choice([0.5, 1.0, 2.0]) for _ in heads) if has_loss_weights else (),
        has_common_weights=draw.has(0.7),
        batch_size=draw.choice([3, 4, 5, 6]),
        replicas=draw.choices([(1,), (2,), (3,)], [6, 3, 1])[0],
        microbatches=draw.choices([1, 2], [4, 1])[0],
        route=route,
    )
    text = program.source()
    if "Lambda(" in text and number % 10:  # from_keras refuses a Lambda layer, which Keras does not rebuild
        program = dataclasses.replace(program, route="function" if program.route == "from_keras" else program.route)
    if DEPENDS_ON_SHARDS.search(text):
        program = dataclasses.replace(program, replicas=(1,), microbatches=1)
    return dataclasses.replace(program, microbatches=1) if DEPENDS_ON_MICROBATCHES.search(text) else program


def _draw_head(draw: Draw, name: str, axes: tuple[int, ...], is_weighted: bool) -> Head:
    kinds = [kind for kind in objectives.KINDS if kind not in ("embedding", "alignment")] * 4
    if len(axes) == 0:
        kinds.append("embedding")
    if len(axes) == 1 and axes[0] >= 5:
        kinds.append("alignment")
    kind = draw.choice(kinds)
    choice = objectives.KINDS[kind]
    units = draw.choice(choice.units)
    has_no_last_axis = draw.has(0.5)
    loss, metrics = objectives.draw_loss(draw, kind), objectives.draw_metrics(draw, kind, 3, not axes)
    weighted_metrics = objectives.draw_metrics(draw, kind, 2, not axes) if draw.has(0.5) else ()
    is_flat = units == 1 and has_no_last_axis and not axes and not NEEDS_LAST_AXIS.search(f"{loss} {metrics}")
    labels = objectives.LABELS[draw.choice(choice.labels)].format(
        rows=ROWS,
        shape=(ROWS,) if is_flat and not NEEDS_LAST_AXIS.search(f"{weighted_metrics}") else (ROWS, *axes, units),
        shape_without_last=(ROWS, *axes),
        shape_of_classes=(ROWS, *axes) if has_no_last_axis else (ROWS, *axes, 1),
    )
    shape = draw.choice([(ROWS, *axes), (ROWS,) + (1,) * len(axes)]) if axes else draw.choice([(ROWS,), (ROWS, 1)])
    weights = f"rng.choice([0.0, 0.5, 1.0, 3.0], size={shape}).astype('float32')" if is_weighted else None
    return Head(name, kind, units, draw.choice(choice.activations), labels, weights, loss, metrics, weighted_metrics)
