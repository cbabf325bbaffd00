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
from collections.abc import Mapping, Sequence
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

Encoded = tuple[TensorProto, SummaryMetadata]

_BUCKETS = 30
_GAP = 2  # pixels between the images of a grid
_MIN_SIDE, _CAPTION_WIDTH = 64, 140  # pixels; what small images of a grid are enlarged to, without and with captions
_LINE = 24  # pixels
# Suffix of the file of a kind of media, and its index in the tensor.
_FILES = {images.PLUGIN_NAME: (".png", 2), audio.PLUGIN_NAME: (".wav", 0), text.PLUGIN_NAME: (".md", 0)}


class Media(abc.ABC):
    """A result to show that is not a number."""

    @abc.abstractmethod
    def encode(self) -> Encoded:
        """Returns the tensor and the metadata for TensorBoard's plugin of this kind."""

    def projector_files(self) -> Mapping[str, bytes]:
        """Returns files for TensorBoard's projector, by the end of their names: none, but of vectors."""
        return {}

    def as_file(self) -> MediaFile | None:
        """Returns the media as the content of a file; None if its kind has none, such as a precision-recall curve."""
        tensor, metadata = self.encode()
        kind = metadata.plugin_data.plugin_name
        if kind == histograms.PLUGIN_NAME:
            left, right, counts = np.frombuffer(tensor.tensor_content).reshape(-1, 3).T.tolist()
            return MediaFile(".json", json.dumps({"edges": [*left, right[-1]], "counts": counts}).encode())
        suffix, index = _FILES.get(kind, ("", 0))
        data = tensor.string_val[index] if suffix else b""
        return MediaFile(".gif" if data.startswith(b"GIF8") else suffix, data) if suffix else None


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
    files: Mapping[str, bytes]  # as `projector_files` returns them

    def encode(self) -> Encoded:
        """Returns the stored encoding."""
        return self.encoded

    def projector_files(self) -> Mapping[str, bytes]:
        """Returns the stored files."""
        return self.files


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
    """Images in one grid, row by row.

    Attributes:
        array: `[N, H, W, C]`, C in 1 (grey), 3 (RGB), 4 (RGBA): uint8, or floats, clipped to 0..1.
        max: the most images to show, from the first.
        captions: a line below each image; None: no lines.
    """

    array: Any
    max: int = 16
    captions: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not are_pictures(self.array, channels=(1, 3, 4)):
            raise ValueError(
                f"Images was given {np.asarray(self.array).dtype} of shape {list(np.shape(self.array))}; it takes "
                "uint8, or floats in 0..1, [N, H, W, C] with C in 1, 3, 4, none of them 0: convert it, or add an axis "
                "with array[..., None] or array[None]."
            )

    def encode(self) -> Encoded:
        """Returns width, height and one PNG for the image plugin."""
        return _encode_image(_grid(_pictures(self.array[: self.max]), list(self.captions or [])[: self.max]))


@dataclass(frozen=True, eq=False)
class Video(Media):
    """A video, which is shown as an animated GIF; of 256 colors each frame, and without sound.

    Attributes:
        array: `[T, H, W, C]`, C in 1 (grey), 3 (RGB): uint8, or floats, clipped to 0..1.
        fps: frames per second, at most 50, as GIFs have no more.
    """

    array: Any
    fps: float = 10.0

    def __post_init__(self) -> None:
        if not are_pictures(self.array, channels=(1, 3)) or not 0 < self.fps <= 50:
            raise ValueError(
                f"Video was given {np.asarray(self.array).dtype} of shape {list(np.shape(self.array))} and "
                f"fps={self.fps}; it takes uint8, or floats in 0..1, [T, H, W, C] with C in 1, 3, none of them 0, and "
                "up to 50 frames a second: give one video at a time."
            )

    def encode(self) -> Encoded:
        """Returns width, height and a GIF for the image plugin."""
        file, (first, *others) = io.BytesIO(), _pictures(self.array)
        first.save(file, "GIF", save_all=True, append_images=others, duration=1000 / self.fps, loop=0)
        return _encode_image(first, file.getvalue())


@dataclass(frozen=True, eq=False)
class Embeddings(Media):
    """Vectors with labels, for TensorBoard's projector.

    Attributes:
        array: `[N, D]`, floats.
        labels: N texts, or anything that is written as one; None: the numbers of the rows.
    """

    array: Any
    labels: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        shape, count = np.shape(self.array), None if self.labels is None else len(self.labels)
        if len(shape) != 2 or 0 in shape or count not in (None, shape[0]):
            raise ValueError(
                f"Embeddings was given an array of shape {list(shape)} and {'no' if count is None else count} labels; "
                "it takes [N, D], neither of them 0, and a label for each row, or none."
            )

    def encode(self) -> Encoded:
        """Returns the shape as a text: the vectors are in files."""
        return Text(f"{' x '.join(map(str, np.shape(self.array)))}, in the projector").encode()

    def as_file(self) -> MediaFile:
        """Returns the vectors as lines of numbers between tabs."""
        rows = np.asarray(self.array, np.float32).tolist()
        return MediaFile(".tsv", "".join("\t".join(map(repr, row)) + "\n" for row in rows).encode())

    def projector_files(self) -> dict[str, bytes]:
        """Returns the vectors, and a line for each label."""
        labels = range(len(self.array)) if self.labels is None else self.labels
        lines = "".join(" ".join(str(label).split()) + "\n" for label in labels)
        return {".tsv": self.as_file().data, ".labels.tsv": lines.encode()}


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
class ConfusionMatrix(Media):
    """A picture of how often each label was predicted as each class.

    Attributes:
        labels: `[N]`, class indices from 0.
        predictions: `[N]`, class indices from 0.
        names: names of the classes; None: their indices.
    """

    labels: Any
    predictions: Any
    names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        arrays = [np.asarray(self.labels), np.asarray(self.predictions)]
        if any(a.ndim != 1 or not a.size or a.dtype.kind not in "iub" for a in arrays) or len({*map(len, arrays)}) > 1:
            shapes = " and ".join(f"{a.dtype}{list(a.shape)}" for a in arrays)
            raise ValueError(
                f"ConfusionMatrix was given {shapes}; it takes labels and predictions as whole numbers, [N] each: "
                "take the argmax of logits first."
            )
        low, high = min(int(a.min()) for a in arrays), max(int(a.max()) for a in arrays)
        if low < 0 or (self.names is not None and high >= len(self.names)):
            raise ValueError(
                f"ConfusionMatrix was given classes {low} to {high} and {len(self.names or [])} names; classes count "
                "from 0 and each has a name: correct either."
            )

    def counts(self) -> np.ndarray:
        """Returns the number of examples by label and prediction, `[classes, classes]`."""
        labels, predictions = (np.asarray(a).astype(np.int64) for a in (self.labels, self.predictions))
        size = len(self.names) if self.names is not None else int(max(labels.max(), predictions.max())) + 1
        return np.bincount(labels * size + predictions, minlength=size * size).reshape(size, size)

    def encode(self) -> Encoded:
        """Returns a PNG for the image plugin: a row per label, a column per prediction; darker: more of the row.

        Up to 30 classes, a cell shows its percentage of the row, and below it the count. TensorBoard shows the picture
        smaller than it is, so the letters are large.
        """
        counts = self.counts()
        names = list(self.names) if self.names is not None else [str(i) for i in range(len(counts))]
        shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        side = 80 if len(names) <= 30 else 24  # pixels per cell; numbers fit into large cells only
        font, small = ImageFont.load_default(32 if side == 80 else 20), ImageFont.load_default(20)
        upright = ImageFont.TransposedFont(font, Image.Transpose.ROTATE_90)
        title = "predicted, in % of a label"
        margin = 3 * _LINE + max(round(font.getlength(name)) for name in names)
        end = margin + side * len(names) + 8
        picture = Image.new("RGB", (max(end, margin + round(font.getlength(title)) + 4), end), "white")
        draw = ImageDraw.Draw(picture)
        for i, name in enumerate(names):
            middle = margin + side * i + side // 2
            draw.text((margin - 8, middle), name, "black", font, anchor="rm")
            _, _, width, height = upright.getbbox(name)
            draw.text((middle - width // 2, margin - 8 - height), name, "black", upright)
            for j, share in enumerate(shares[i]):
                left, top = margin + side * j, margin + side * i
                shade = (round(255 - 225 * share), round(255 - 150 * share), round(255 - 75 * share))
                draw.rectangle((left, top, left + side - 2, top + side - 2), shade, "#dddddd")
                if side == 80 and counts[i, j]:
                    ink, x = "white" if share > 0.5 else "black", left + side // 2 - 1
                    draw.text((x, top + 30), f"{100 * share:.0f}", ink, font, anchor="mm")
                    draw.text((x, top + 61), str(counts[i, j]), ink, small, anchor="mm")
        draw.text((margin, 4), title, "black", font)
        draw.text((4, margin - 8), "label", "black", font, anchor="ls")
        return _encode_image(picture)


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


def are_pictures(array: Any, channels: Sequence[int]) -> bool:
    """Returns whether an array holds images that can be shown: uint8 or floats, `[N, H, W, C]`."""
    shape, dtype = np.shape(array), np.asarray(array).dtype
    return len(shape) == 4 and shape[-1] in channels and 0 not in shape and (dtype == np.uint8 or dtype.kind == "f")


def _pictures(array: Any) -> list[Image.Image]:
    """Returns images, `[N, H, W, C]`: uint8, or floats, clipped to 0..1."""
    array = np.asarray(array)
    if array.dtype != np.uint8:
        array = np.round(255 * np.clip(np.nan_to_num(array.astype(np.float32)), 0, 1)).astype(np.uint8)
    return [Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image) for image in array]


def _grid(pictures: Sequence[Image.Image], captions: Sequence[str]) -> Image.Image:
    """Returns pictures of one size and mode in a grid that is about as wide as high, with a caption below each.

    Small ones are enlarged by a whole factor, so that the lines between them stay thin and captions have room.
    """
    width, height = pictures[0].size
    factor = max(1, round((_CAPTION_WIDTH if captions else _MIN_SIDE) / max(width, height))) if len(pictures) > 1 else 1
    if captions:
        factor = max(factor, -(-_CAPTION_WIDTH // width))
    columns = min(len(pictures), max(1, round(math.sqrt(len(pictures) * height / width))))
    cell = factor * width, factor * height + (_LINE if captions else 0)
    size = columns * (cell[0] + _GAP) - _GAP, -(-len(pictures) // columns) * (cell[1] + _GAP) - _GAP
    grid = Image.new(pictures[0].mode, size, "white")
    draw, font = ImageDraw.Draw(grid), ImageFont.load_default(15)
    for i, picture in enumerate(pictures):
        left, top = (i % columns) * (cell[0] + _GAP), (i // columns) * (cell[1] + _GAP)
        grid.paste(picture.resize((factor * width, factor * height), Image.Resampling.NEAREST), (left, top))
        if i < len(captions):
            draw.text((left + 2, top + factor * height + 4), captions[i], "black", font)
    return grid


def _encode_image(picture: Image.Image, content: bytes = b"") -> Encoded:
    """Returns a picture for the image plugin, as a PNG unless the content of another file is given."""
    if not content:
        picture.save(file := io.BytesIO(), "PNG")
        content = file.getvalue()
    parts = [str(side).encode() for side in picture.size] + [content]
    return _tensor(DT_STRING, [len(parts)], string_val=parts), images.create_summary_metadata(None, None)
