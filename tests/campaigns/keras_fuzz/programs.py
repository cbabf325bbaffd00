"""Programs: held as parts that can be left out, and written as Python.

program = draw_program(7)                   # of drawing.py
namespace = program.run()                   # X, Y, WEIGHTS, DATA, make_model()
"""

import dataclasses
import re
from typing import Any

ROWS = 11
INPUTS = {
    "vector": ((6,), "rng.normal(size=({rows}, 6)).astype('{dtype}')"),
    "sequence": ((5, 4), "rng.normal(size=({rows}, 5, 4)).astype('{dtype}') * (np.arange(5) < LENGTHS)[..., None]"),
    "image": ((6, 6, 3), "rng.uniform(size=({rows}, 6, 6, 3)).astype('{dtype}')"),
    "volume": ((4, 4, 4, 2), "rng.normal(size=({rows}, 4, 4, 4, 2)).astype('{dtype}')"),
    "movie": ((2, 3, 3, 3, 2), "rng.normal(size=({rows}, 2, 3, 3, 3, 2)).astype('{dtype}')"),
    "tokens": ((5,), "(rng.integers(1, 12, size=({rows}, 5)) * (np.arange(5) < LENGTHS)).astype('{dtype}')"),
    "strings": ((2,), "rng.choice(['a', 'b', 'c', 'd'], size=({rows}, 2))"),
    "texts": ((1,), "rng.choice(['a b', 'b c a', 'd', ''], size=({rows}, 1))"),
    "signal": ((32,), "rng.normal(size=({rows}, 32)).astype('{dtype}')"),
}
RANDOM = re.compile(
    r"Dropout\(0\.[1-9]|GaussianNoise\(0\.[1-9]|dropout=0\.[1-9]|layers\.Random|RandAugment|AugMix|CutMix|MixUp|Solarization"
)
PREAMBLE = """import keras, numpy as np, tensorflow as tf
import distloop
from tests.campaigns.keras_fuzz.own_parts import *
rng = np.random.default_rng({number})
LENGTHS = rng.integers(1, 6, size=({rows}, 1))
"""


@dataclasses.dataclass(frozen=True)
class Step:
    """Some layers, and the line that calls them: `{h}` is the tensor so far, `{0}` the first layer."""

    layers: tuple[str, ...]
    call: str = "{h} = {0}({h})"


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of the model, and the layers that only it goes through."""

    name: str
    kind: str
    dtype: str
    steps: tuple[Step, ...] = ()


@dataclasses.dataclass(frozen=True)
class Head:
    """An output with its targets, loss and metrics."""

    name: str
    kind: str
    units: int
    activation: str
    labels: str  # how Y is made
    weights: str | None  # how the sample weights of this output are made
    loss: str
    metrics: tuple[str, ...] = ()
    weighted_metrics: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, its data, and how it is trained."""

    number: int
    style: str  # sequential, functional or subclassed
    inputs: tuple[Input, ...]
    trunk: tuple[Step, ...]
    heads: tuple[Head, ...]
    structure: str  # dict or list: of several inputs and outputs
    optimizer: str
    lines: tuple[str, ...] = ()  # between optimizer and compile
    loss_weights: tuple[float, ...] = ()
    has_common_weights: bool = False  # the first head's sample weights serve all
    batch_size: int = 4
    epochs: int = 2
    replicas: tuple[int, ...] = (1, 2)
    microbatches: int = 1
    route: str = "from_keras"  # or function, supervised

    @property
    def has_weights(self) -> bool:
        return self.heads[0].weights is not None

    def source(self) -> str:
        """Returns the program as Python: data, and a function that makes the compiled model."""
        lines = [PREAMBLE.format(number=self.number, rows=ROWS)]
        lines += [f"X = {self._pack([(i.name, _data_of(i)) for i in self.inputs])}"]
        lines += [f"Y = {self._pack([(head.name, head.labels) for head in self.heads])}"]
        if self.has_weights:
            heads = self.heads[:1] if self.has_common_weights else self.heads
            lines += [f"WEIGHTS = {self._pack([(head.name, head.weights) for head in heads])}"]
        arrays = "(X, Y, WEIGHTS)" if self.has_weights else "(X, Y)"
        lines += [f"DATA = tf.data.Dataset.from_tensor_slices({arrays}).batch({self.batch_size})", ""]
        model = {"sequential": self._sequential, "functional": self._functional, "subclassed": self._subclassed}
        lines += model[self.style]()
        return "\n".join(lines + self._compile()) + "\n"

    def run(self) -> dict[str, Any]:
        """Runs the source and returns its names."""
        namespace: dict[str, Any] = {}
        exec(compile(self.source(), f"<program {self.number}>", "exec"), namespace)
        return namespace

    def _pack(self, named: list[tuple[str, Any]]) -> str:
        if len(named) == 1:
            return named[0][1]
        if self.structure == "dict":
            return "{" + ", ".join(f'"{name}": {text}' for name, text in named) + "}"
        return "(" + ", ".join(text for _, text in named) + ")"

    def _input(self, i: Input) -> str:
        return f'keras.Input({INPUTS[i.kind][0]}, name="{i.name}", dtype="{i.dtype}")'

    def _sequential(self) -> list[str]:
        steps = [step.layers[0] for step in (*self.inputs[0].steps, *self.trunk)]
        layers = [self._input(self.inputs[0]), *steps, _layer_of(self.heads[0])]
        listed = [f"        {_with_data(layer, 'X')}," for layer in layers]
        return ["def make_model():", "    model = keras.Sequential([", *listed, "    ])"]

    def _functional(self) -> list[str]:
        lines, ends = ["def make_model():"], []
        for i in self.inputs:
            lines += [f"    {i.name} = {self._input(i)}", f"    h = {i.name}"]
            lines += self._lines(i.steps, self._x(i))
            ends.append(f"h_{i.name}" if len(self.inputs) > 1 else "h")
            lines += [f"    h_{i.name} = h"] if len(self.inputs) > 1 else []
        lines += [f"    h = keras.layers.Concatenate()([{', '.join(ends)}])"] if len(ends) > 1 else []
        lines += self._lines(self.trunk, "X")
        for head in self.heads:
            lines += [f"    {head.name} = {_layer_of(head)}(h)"]
        packed = self._pack([(i.name, i.name) for i in self.inputs])
        outputs = self._pack([(head.name, head.name) for head in self.heads])
        return [*lines, f"    model = keras.Model({packed}, {outputs})"]

    def _lines(self, steps: tuple[Step, ...], x: str) -> list[str]:
        """Returns the lines of a functional model that call the steps."""
        lines = []
        for step in steps:
            layers = [_with_data(layer, x) for layer in step.layers]
            if "{0}({h} * 0.5)" in step.call:
                lines.append(f"    shared = {layers[0]}")
                layers[0] = "shared"
            lines.append("    " + step.call.format(*layers, h="h"))
        return lines

    def _x(self, i: Input) -> str:
        if len(self.inputs) == 1:
            return "X"
        return f'X["{i.name}"]' if self.structure == "dict" else f"X[{self.inputs.index(i)}]"

    def _subclassed(self) -> list[str]:
        made, called, ends = [], [], []
        for i in self.inputs:
            called += [f"        h = {self._x(i).replace('X', 'inputs')}"]
            for step in i.steps:
                called.append(self._own(step, made, self._x(i)))
            called += [f"        h_{i.name} = h"] if len(self.inputs) > 1 else []
            ends.append(f"h_{i.name}")
        if len(ends) > 1:
            called.append(f"        h = keras.ops.concatenate([{', '.join(ends)}], axis=-1)")
        called += [self._own(step, made, "X") for step in self.trunk]
        for head in self.heads:
            called.append(self._own(Step((_layer_of(head),), f"{head.name} = {{0}}(h)"), made, "X"))
        outputs = self._pack([(head.name, head.name) for head in self.heads])
        lines = ["class Net(keras.Model):", "    def __init__(self):", "        super().__init__()", *made]
        lines += ["    def call(self, inputs):", *called, f"        return {outputs}", "", "def make_model():"]
        return [*lines, "    model = Net()", "    model(next(iter(DATA))[0])"]

    def _own(self, step: Step, made: list[str], x: str) -> str:
        """Adds the lines that make a step's layers, and returns the one that calls them."""
        names = []
        for layer in step.layers:
            names.append(f"self.layer_{len(made)}")
            made.append(f"        {names[-1]} = {_with_data(layer, x)}")
        return "        " + step.call.format(*names, h="h")

    def _compile(self) -> list[str]:
        heads = self.heads
        lines = [f"    optimizer = {self.optimizer}", *(f"    {line}" for line in self.lines)]
        settings = [f"loss={self._pack([(head.name, head.loss) for head in heads])}"]
        if self.loss_weights:
            weights = [(h.name, str(w)) for h, w in zip(heads, self.loss_weights, strict=True)]
            settings.append(f"loss_weights={self._pack(weights).replace('(', '[').replace(')', ']')}")
        for name in ("metrics", "weighted_metrics"):
            if any(getattr(head, name) for head in heads):
                lists = [(head.name, "[" + ", ".join(getattr(head, name)) + "]") for head in heads]
                settings.append(f"{name}={self._pack(lists)}")
        return [*lines, "    model.compile(optimizer, " + ", ".join(settings) + ")", "    return model"]


def _data_of(i: Input) -> str:
    return INPUTS[i.kind][1].format(rows=ROWS, dtype=i.dtype)


def _layer_of(head: Head) -> str:
    if head.kind == "embedding":
        return "keras.layers.UnitNormalization()"
    return f'keras.layers.Dense({head.units}, {head.activation}, name="{head.name}")'


def _with_data(layer: str, x: str) -> str:
    return layer.replace("ARRAY", x)
