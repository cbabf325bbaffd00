"""Media: texts, histograms, images, sounds and curves, encoded for TensorBoard's plugins.

    media = Images(samples, max=8)        # an action returns it under a name, like a metric
    tensor, metadata = media.encode()     # for the plugin that shows it

It needs no TensorFlow, and does not know files.
"""

import abc
import io
import json
import math
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_DOUBLE, DT_STRING
from tensorboard.plugins.audio import metadata as audio
from tensorboard.plugins.graph import metadata as graphs
from tensorboard.plugins.histogram import metadata as histograms
from tensorboard.plugins.image import metadata as images
from tensorboard.plugins.pr_curve import summary as pr_curves
from tensorboard.plugins.text import metadata as text

from distloop.monitoring.writers import MediaFile
from distloop.settings.durations import require_integer

Encoded = tuple[TensorProto, SummaryMetadata]

_BUCKETS = 30
_GAP = 2  # pixels between the images of a grid
_MIN_SIDE = 64  # pixels; what small images of a grid without captions are enlarged to
# TensorBoard scales a picture by the nearest pixel: to this width on its page of images, to this height on Time Series.
_SHOWN_WIDTH, _SHOWN_HEIGHT = 350, 215
_LETTERS, _LINE = 11, 14  # pixels; the size of a caption's letters, and the height of its line
_MIN_CAPTIONED = 20  # pixels; the height of an image with a caption, if there is room
# Suffix of the file of a kind of media, and its index in the tensor.
_FILES = {images.PLUGIN_NAME: (".png", 2), audio.PLUGIN_NAME: (".wav", 0), text.PLUGIN_NAME: (".md", 0)}


class Media(abc.ABC):
    """A result to show that is not a number."""

    @abc.abstractmethod
    def encode(self) -> Encoded:
        """Returns the tensor and the metadata for TensorBoard's plugin of this kind."""

    def as_file(self) -> MediaFile | None:
        """Returns the media as the content of a file; None if its kind has none, such as a precision-recall curve."""
        tensor, metadata = self.encode()
        kind = metadata.plugin_data.plugin_name
        if kind == histograms.PLUGIN_NAME:
            left, right, counts = np.frombuffer(tensor.tensor_content).reshape(-1, 3).T.tolist()
            return MediaFile(".json", json.dumps({"edges": [*left, right[-1]], "counts": counts}).encode())
        suffix, index = _FILES.get(kind, ("", 0))
        data = tensor.string_val[index] if suffix else b""
        return MediaFile(suffix, data) if suffix else None


@dataclass(frozen=True, eq=False)
class Text(Media):
    """A text in Markdown."""

    text: str

    def encode(self) -> Encoded:
        """Returns a string for the text plugin."""
        return _tensor(DT_STRING, [], string_val=[self.text.encode()]), text.create_summary_metadata(None, None)


@dataclass(frozen=True, eq=False)
class EncodedMedia(Media):
    """Media that is already encoded, and so independent of arrays that may change."""

    encoded: Encoded

    def encode(self) -> Encoded:
        """Returns the stored encoding."""
        return self.encoded


@dataclass(frozen=True, eq=False)
class Histogram(Media):
    """The distribution of numbers in an array of any shape; values that are not finite are left out."""

    values: Any

    def encode(self) -> Encoded:
        """Returns rows of left edge, right edge and count, `[k, 3]`, for the histogram plugin."""
        values = np.asarray(self.values, np.float64).ravel()
        values = values[np.isfinite(values)]
        buckets = np.zeros([1, 3])
        if values.size:
            low, high = values.min(), values.max()
            if high - low <= 1e-12 * max(abs(low), abs(high)):  # nearly one value: floats allow no narrower buckets
                low, high = low - 0.5 * max(abs(low), 1.0), high + 0.5 * max(abs(high), 1.0)
            counts, edges = np.histogram(values, _BUCKETS, (low, high))
            buckets = np.stack([edges[:-1], edges[1:], counts], 1)
        tensor = _tensor(DT_DOUBLE, buckets.shape, tensor_content=buckets.astype(np.float64).tobytes())
        return tensor, histograms.create_summary_metadata(None, None)


@dataclass(frozen=True, eq=False)
class Images(Media):
    """Images in one grid, row by row; with captions in the size that TensorBoard shows it, which letters need.

    Attributes:
        array: `[N, H, W, C]`, C in 1 (grey), 3 (RGB), 4 (RGBA): uint8, or floats, clipped to 0..1.
        max: the most images to show, from the first.
        captions: a line below each image; None: no lines.
    """

    array: Any
    max: int = 16
    captions: Sequence[str] | None = None

    def __post_init__(self) -> None:
        require_integer("Images", 1, max=self.max)
        if not are_pictures(self.array):
            raise ValueError(
                f"Images was given {np.asarray(self.array).dtype} of shape {list(np.shape(self.array))}; it takes "
                "uint8, or floats in 0..1, [N, H, W, C] with C in 1, 3, 4, none of them 0: convert it, or add an axis "
                "with array[..., None] or array[None]."
            )

    def encode(self) -> Encoded:
        """Returns width, height and one PNG for the image plugin."""
        pictures, captions = _pictures(self.array[: self.max]), list(self.captions or [])[: self.max]
        return _encode_image(_captioned_grid(pictures, captions) if captions else _grid(pictures))


@dataclass(frozen=True, eq=False)
class Audio(Media):
    """A sound.

    Attributes:
        array: `[T]` or `[T, channels]`, floats, clipped to -1..1.
        rate: samples per second.
    """

    array: Any
    rate: int

    def __post_init__(self) -> None:
        require_integer("Audio", 1, rate=self.rate)
        if np.ndim(self.array) not in (1, 2) or np.asarray(self.array).dtype.kind != "f":
            raise ValueError(
                f"Audio was given {np.asarray(self.array).dtype} of shape {list(np.shape(self.array))}; it takes "
                "floats in -1..1, [T] or [T, channels]: give one sound at a time."
            )

    def encode(self) -> Encoded:
        """Returns a 16-bit WAV file and an empty label for the audio plugin."""
        array = np.clip(np.nan_to_num(np.asarray(self.array, np.float32)), -1, 1)
        file = io.BytesIO()
        with wave.open(file, "wb") as sound:
            sound.setparams((array.shape[1] if array.ndim == 2 else 1, 2, self.rate, 0, "NONE", ""))
            sound.writeframes(np.round(array * 32767).astype("<i2").tobytes())
        tensor = _tensor(DT_STRING, [1, 2], string_val=[file.getvalue(), b""])
        return tensor, audio.create_summary_metadata(None, None, audio.Encoding.Value("WAV"))


@dataclass(frozen=True, eq=False)
class PRCurve(Media):
    """The precision-recall curve of a binary classifier.

    Attributes:
        labels: `[N]`, True or 1 for positive examples.
        probabilities: `[N]`, predicted probability of the positive class.
    """

    labels: Any
    probabilities: Any

    def __post_init__(self) -> None:
        if np.shape(self.labels) != np.shape(self.probabilities):
            raise ValueError(
                f"PRCurve was given labels of shape {list(np.shape(self.labels))} and probabilities of shape "
                f"{list(np.shape(self.probabilities))}; it takes one of each per example: give both as [N]."
            )

    def encode(self) -> Encoded:
        """Returns TP, FP, TN, FN, precision and recall by threshold, `[6, thresholds]`, for the PR-curve plugin."""
        probabilities = np.clip(np.nan_to_num(np.ravel(self.probabilities)), 0, 1)
        curve = pr_curves.pb("", np.ravel(self.labels), probabilities)
        value = Summary.Value.FromString(curve.value[0].SerializeToString())
        return value.tensor, value.metadata


@dataclass(frozen=True, eq=False)
class LayerGraph(Media):
    """The layers of a Keras model, which the graph page shows as its conceptual graph."""

    json: str  # from `model.to_json()`

    def encode(self) -> Encoded:
        """Returns the JSON for the graph plugin."""
        data = SummaryMetadata.PluginData(plugin_name=graphs.PLUGIN_NAME_KERAS_MODEL, content=b"1")
        return _tensor(DT_STRING, [], string_val=[self.json.encode()]), SummaryMetadata(plugin_data=data)


def _tensor(dtype: Any, shape: Sequence[int], **values: Any) -> TensorProto:
    """Returns a tensor; importing TensorBoard's own function for this imports clients of buckets, too."""
    dims = [TensorShapeProto.Dim(size=size) for size in shape]
    return TensorProto(dtype=dtype, tensor_shape=TensorShapeProto(dim=dims), **values)


def are_pictures(array: Any) -> bool:
    """Returns whether an array holds images that can be shown: uint8 or floats, `[N, H, W, C]`."""
    shape, dtype = np.shape(array), np.asarray(array).dtype
    return len(shape) == 4 and shape[-1] in (1, 3, 4) and 0 not in shape and (dtype == np.uint8 or dtype.kind == "f")


def _pictures(array: Any) -> list[Image.Image]:
    """Returns images, `[N, H, W, C]`: uint8, or floats, clipped to 0..1."""
    array = np.asarray(array)
    if array.dtype != np.uint8:
        array = np.round(255 * np.clip(np.nan_to_num(array.astype(np.float32)), 0, 1)).astype(np.uint8)
    return [Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image) for image in array]


def _grid(pictures: Sequence[Image.Image]) -> Image.Image:
    """Returns pictures of one size and mode in a grid that is about as wide as high.

    Small ones are enlarged by a whole factor, so that the lines between them stay thin.
    """
    width, height = pictures[0].size
    factor = max(1, round(_MIN_SIDE / max(width, height))) if len(pictures) > 1 else 1
    columns = min(len(pictures), max(1, round(math.sqrt(len(pictures) * height / width))))
    cell = factor * width + _GAP, factor * height + _GAP
    size = columns * cell[0] - _GAP, -(-len(pictures) // columns) * cell[1] - _GAP
    grid = Image.new(pictures[0].mode, size, "white")
    for i, picture in enumerate(pictures):
        grid.paste(_scaled(picture, factor), (i % columns * cell[0], i // columns * cell[1]))
    return grid


def _captioned_grid(pictures: Sequence[Image.Image], captions: Sequence[str]) -> Image.Image:
    """Returns pictures of one size and mode in a grid as large as TensorBoard shows it, with a caption below each."""
    count, (width, height), font = len(pictures), pictures[0].size, ImageFont.load_default(_LETTERS)
    longest = max(font.getlength(caption) for caption in captions) + _GAP

    def layout(columns: int) -> tuple[int, int, float]:
        """Returns width and height of a cell, and the factor of a picture."""
        cell = _SHOWN_WIDTH // columns, _SHOWN_HEIGHT // -(-count // columns)
        factor = min((cell[0] - _GAP) / width, (cell[1] - _LINE - _GAP) / height)
        return *cell, math.floor(factor) if factor > 1 else max(factor, 1 / max(width, height))

    def quality(columns: int) -> tuple[bool, float, float]:  # images that can be seen, whole captions, large images
        cell_width, _, factor = layout(columns)
        return factor * height >= min(_MIN_CAPTIONED, height), min(cell_width, longest), factor

    columns = max(range(1, count + 1), key=quality)
    cell_width, cell_height, factor = layout(columns)
    grid = Image.new(pictures[0].mode, (_SHOWN_WIDTH, _SHOWN_HEIGHT), "white")
    draw = ImageDraw.Draw(grid)
    for i, picture in enumerate(pictures):
        left, top, scaled = i % columns * cell_width, i // columns * cell_height, _scaled(picture, factor)
        grid.paste(scaled, (left, top))
        if i < len(captions):
            draw.text((left + 1, top + scaled.height), captions[i], "black", font)
    return grid


def _scaled(picture: Image.Image, factor: float) -> Image.Image:
    """Returns a picture enlarged by a whole factor, or made smaller by a factor below 1."""
    size = max(1, round(factor * picture.width)), max(1, round(factor * picture.height))
    return picture.resize(size, Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.LANCZOS)


def _encode_image(picture: Image.Image) -> Encoded:
    """Returns a picture for the image plugin, as a PNG."""
    picture.save(file := io.BytesIO(), "PNG")
    strings = [*(str(side).encode() for side in picture.size), file.getvalue()]
    return _tensor(DT_STRING, [len(strings)], string_val=strings), images.create_summary_metadata(None, None)
