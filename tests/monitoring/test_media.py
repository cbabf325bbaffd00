"""Media as TensorBoard's own code reads them."""

import io
import wave

import numpy as np
import pytest
from PIL import Image, ImageFont
from sklearn.metrics import precision_score, recall_score
from tensorboard.plugins.audio import metadata as audio
from tensorboard.plugins.pr_curve import summary as pr_curve
from tensorboard.util.tensor_util import make_ndarray

import distloop


def encoded(display, plugin):
    tensor, metadata = display.encode()
    assert metadata.plugin_data.plugin_name == plugin
    return make_ndarray(tensor)


def pictures(display):
    width, height, *files = encoded(display, "images")
    images = [np.asarray(Image.open(io.BytesIO(file))) for file in files]
    assert all(image.shape[:2] == (int(height), int(width)) for image in images)
    return images


def test_a_text_is_one_string():
    assert encoded(distloop.Text("# Größe"), "text").item().decode() == "# Größe"


def test_a_histogram_counts_every_number_in_buckets_side_by_side():
    values = np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32)
    rows = encoded(distloop.Histogram(values), "histograms")
    assert rows.shape == (30, 3) and rows[:, 2].sum() == 2000
    assert rows[0, 0] == values.min() and rows[-1, 1] == values.max()
    assert np.array_equal(rows[1:, 0], rows[:-1, 1])
    inside = (values >= rows[7, 0]) & (values < rows[7, 1])
    assert inside.sum() == rows[7, 2]


@pytest.mark.parametrize("value", [0.0, 3.0, -1e-30, 1e30])
def test_a_histogram_of_one_value_has_it_in_one_bucket(value):
    rows = encoded(distloop.Histogram([value] * 5), "histograms")
    ((least, most, count),) = rows[rows[:, 2] > 0]
    assert least <= value <= most and count == 5


def test_a_histogram_leaves_out_what_is_not_finite():
    assert encoded(distloop.Histogram([1.0, np.nan, np.inf, 2.0]), "histograms")[:, 2].sum() == 2
    for nothing in ([np.nan], np.zeros([0])):
        assert encoded(distloop.Histogram(nothing), "histograms").tolist() == [[0, 0, 0]]


@pytest.mark.parametrize(("channels", "shape"), [(1, (5, 7)), (3, (5, 7, 3)), (4, (5, 7, 4))])
def test_an_image_survives_its_encoding(channels, shape):
    array = np.random.default_rng(0).integers(256, size=(3, 5, 7, channels)).astype(np.uint8)
    (picture,) = pictures(distloop.Images(array, max=1))
    assert np.array_equal(picture, array[0].reshape(shape))


def test_images_are_one_grid():
    array = np.arange(5, dtype=np.uint8).reshape(5, 1, 1, 1) * np.ones([1, 70, 60, 1], np.uint8)
    (grid,) = pictures(distloop.Images(array))
    assert grid.shape == (3 * 72 - 2, 2 * 62 - 2)
    assert [grid[y, x] for y in (0, 72, 144) for x in (0, 62)] == [0, 1, 2, 3, 4, 255]


@pytest.mark.parametrize("count, side", [(1, 28), (4, 300), (16, 8), (16, 28), (9, 64)])
def test_a_grid_with_captions_is_drawn_as_large_as_tensorboard_shows_it(count, side):
    captions = [f"loss {i}.5" for i in range(count)]
    array = np.full([count, side, side, 1], 100, np.uint8)
    (grid,) = pictures(distloop.Images(array, captions=captions))
    assert grid.shape == (215, 350)  # the height on Time Series, the width on the page of images
    (without,) = pictures(distloop.Images(array, captions=[""] * count))
    images, letters = without == 100, grid != without
    assert without.max() == 255 and {*np.unique(without)} == {100, 255}
    rows = np.flatnonzero(images.any(1))
    assert images.sum() / count > 20 * 20 and rows[0] < 10  # each at least so large
    drawn = [ImageFont.load_default(11).getmask(text) for text in captions]  # each letter as the font draws it, whole
    assert letters.sum() >= 0.9 * sum(np.count_nonzero(np.asarray(mask)) for mask in drawn)
    assert not letters[:, -1].any() and not letters[-1].any()


def test_float_images_are_clipped_and_nan_is_black():
    array = np.array([0.0, 0.5, 1.0, 2.0, -1.0, np.nan], np.float32).reshape(1, 1, 6, 1)
    assert pictures(distloop.Images(array))[0].tolist() == [[0, 128, 255, 255, 0, 0]]


def test_audio_is_a_wav_file():
    tone = np.stack([np.sin(np.arange(800) / 10), np.full(800, 2.0)], 1)
    display = distloop.Audio(tone, 8000)
    ((content, label),) = encoded(display, "audio")
    with wave.open(io.BytesIO(content)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getnframes()) == (8000, 2, 800)
        samples = np.frombuffer(file.readframes(800), "<i2").reshape(800, 2) / 32767
    assert label == b"" and np.allclose(samples, np.clip(tone, -1, 1), atol=1e-4)
    parsed = audio.parse_plugin_metadata(display.encode()[1].plugin_data.content)
    assert parsed.encoding == audio.Encoding.Value("WAV")


def test_a_pr_curve_equals_tensorboards_and_scikit_learns():
    rng = np.random.default_rng(0)
    labels = rng.random(500) < 0.3
    probabilities = np.clip(0.4 * labels + 0.6 * rng.random(500), 0, 1).astype(np.float32)
    rows = encoded(distloop.PRCurve(labels, probabilities), "pr_curves")
    expected = make_ndarray(pr_curve.pb("p", labels, probabilities, num_thresholds=201).value[0].tensor)
    assert np.allclose(rows, expected)
    assert rows[4, 100] == pytest.approx(precision_score(labels, probabilities >= 0.5))
    assert rows[5, 100] == pytest.approx(recall_score(labels, probabilities >= 0.5))
    rows = encoded(distloop.PRCurve([0, 0], [0.2, 0.7]), "pr_curves")  # without a positive example
    assert np.isfinite(rows).all() and not rows[4:].any()


IMAGES = r"float64 of shape \[8, 8\]; it takes .*\[N, H, W, C\] .*, or add an axis"
INTEGERS = "int64 of shape .*; it takes uint8, or floats in 0..1, .*: convert"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: distloop.Images(np.zeros([8, 8])), IMAGES),
        (lambda: distloop.Images(np.zeros([1, 8, 8, 1], np.int64)), INTEGERS),
        (lambda: distloop.Audio(np.zeros(3, np.int64), 8000), r"int64 of shape \[3\]; it takes floats"),
        (lambda: distloop.PRCurve([1], [0.5, 0.5]), "labels of shape .* and probabilities"),
    ],
)
def test_what_is_no_such_media_is_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
