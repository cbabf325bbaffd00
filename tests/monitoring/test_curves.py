"""What `fit` returns, and curves as a picture."""

import importlib.util
import json
import math
import sys

import pytest

from distloop.monitoring.curves import History, Picture
from distloop.workdir.run_files import Series


def recorded():
    result = History()
    for step in (10, 20, 30):
        result.write(step, {"loss": 100.0 / step**2, "steps_per_sec": 5.0})
    result.write(30, {"loss": 1 / 9, "test/loss": 0.25, "test/accuracy": float("nan")})
    result.update({"loss": 1 / 9, "test/loss": 0.25, "steps_per_sec": 5.0})
    return result


def test_the_result_is_a_dict_of_the_last_numbers_with_a_history():
    result = recorded()
    assert isinstance(result, dict) and json.loads(json.dumps(result)) == dict(result) == result
    assert result.history["loss"] == [1.0, 0.25, 1 / 9] and result.steps["loss"] == [10, 20, 30]
    assert result.steps["test/loss"] == [30]


def test_its_representation_is_one_short_line():
    assert repr(recorded()) == "{'loss': 0.1111, 'test/loss': 0.25, and 1 more}" and repr(History()) == "{}"
    long = History()
    long.update({f"name_{i}": 0.123456 for i in range(100)})
    assert len(repr(long)) < 200


def charts_in(picture):
    """Returns the curves of each chart: their steps and values, in order."""
    charts = [(axes.get_title(), axes.get_lines()) for axes in picture.figure.axes]
    return {title: [tuple(map(list, line.get_data())) for line in lines] for title, lines in charts}


def names_in(picture):
    return [text.get_text() for text in picture.figure.legends[0].get_texts()]


needs_matplotlib = pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib")


@needs_matplotlib
def test_curves_of_training_and_evaluation_share_a_chart():
    picture = recorded().plot()
    charts = charts_in(picture)
    assert charts["loss"] == [([10, 20, 30], [1.0, 0.25, 1 / 9]), ([30], [0.25])]
    assert list(charts) == ["loss", "accuracy"] and names_in(picture) == ["training", "test"]
    colors = [line.get_color() for axes in picture.figure.axes for line in axes.get_lines()]
    assert colors[0] != colors[1] == colors[2]


@needs_matplotlib
def test_a_picture_is_saved_as_its_name_says_and_shows_itself(tmp_path):
    picture = recorded().plot()
    for name, start in (("a.svg", b"<?xml"), ("a.pdf", b"%PDF"), ("a.png", b"\x89PNG"), ("a", b"\x89PNG")):
        picture.save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    assert "<svg" in picture._repr_svg_() and repr(picture) == "Picture of 2 charts; save(path) writes it"
    with pytest.raises(OSError):
        picture.save(tmp_path / "nope" / "a.svg")
    with pytest.raises(ValueError, match=f"{tmp_path}' is no picture: let it end in "):
        picture.save(tmp_path)
    with pytest.raises(ValueError, match=r"a.xyz' is no picture: let it end in .*, .png, .*, .svg, "):
        picture.save(tmp_path / "a.xyz")


@needs_matplotlib
def test_curves_that_are_named_are_the_only_ones():
    for names, charts in (
        (["test/accuracy"], {"accuracy": 1}),
        (["steps_per_sec", "loss"], {"steps_per_sec": 1, "loss": 1}),  # one about the run, too
        (["test/loss", "loss"], {"loss": 2}),
    ):
        shown = charts_in(recorded().plot(*names))
        assert {title: len(curves) for title, curves in shown.items()} == charts
    with pytest.raises(ValueError, match="plot was given 'los'; there are .*: name one of them"):
        recorded().plot("los")


def test_rows_of_a_repeated_step_are_dropped_and_long_histories_thinned(monkeypatch):
    again, long = History(), History()
    for step in (1, 2, 3, 2):
        again.write(step, {"loss": float(step)})
    assert again.steps["loss"] == [1, 2]
    monkeypatch.setattr("distloop.monitoring.curves._MAX_ROWS", 8)
    for step in range(1, 21):
        long.write(step, {"loss": float(step)})
    assert len(long.steps["loss"]) <= 8 and long.steps["loss"][-1] == 20 and long.history["loss"][-1] == 20.0


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"need matplotlib, which is not installed: pip install matplotlib"):
        recorded().plot()


@needs_matplotlib
def test_a_picture_may_have_any_names_a_logarithmic_scale_and_no_curves(tmp_path):
    curves = {"a$\\x$": Series("", list(range(1, 30)), [2.0**-i for i in range(1, 30)]), "_b": Series("", [1], [0.5])}
    odd = {"": Series("", [1, 2], [math.nan, math.inf]), "none": Series("", [], [])}
    picture = Picture({"loss": curves, "f1 $\\x$": odd})
    assert "<svg" in picture._repr_svg_()
    assert names_in(picture) == [r"a\$\x\$", "_b", "", "none"]
    assert [axes.get_yscale() for axes in picture.figure.axes] == ["log", "linear"]
    Picture({}).save(tmp_path / "runs.png")
    assert (tmp_path / "runs.png").exists()


def test_a_number_in_place_of_a_name_is_a_key_error():
    with pytest.raises(KeyError, match="The run reported no 0: there are "):
        recorded()[0]
