"""What `fit` returns, and curves as SVG, as lines of characters and as a picture."""

import json
import math
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from distloop.monitoring.curves import History, Recorder, draw_lines, draw_picture
from distloop.monitoring.run_files import Series, load_all
from tests.problems import write_run


def recorded():
    recorder = Recorder()
    for step in (10, 20, 30):
        recorder.write(step, {"loss": 100.0 / step**2, "steps_per_sec": 5.0})
    recorder.write(30, {"loss": 1 / 9, "test/loss": 0.25, "test/accuracy": float("nan")})
    return recorder.result({"loss": 1 / 9, "test/loss": 0.25, "steps_per_sec": 5.0})


def test_the_result_is_a_dict_of_the_last_numbers_with_a_history():
    result = recorded()
    assert isinstance(result, dict) and json.loads(json.dumps(result)) == dict(result) == result
    assert result.history["loss"] == [1.0, 0.25, 1 / 9] and result.steps["loss"] == [10, 20, 30]
    assert result.steps["test/loss"] == [30]


def test_its_representation_is_one_short_line():
    assert repr(recorded()) == "{'loss': 0.1111, 'test/loss': 0.25, and 1 more}"
    assert repr(History({})) == "{}"
    assert len(repr(History({f"name_{i}": 0.123456 for i in range(100)}))) < 200


def names_in(svg):
    """Returns the names of the curves in each chart."""
    return [[text.text for text in chart.findall("{*}text")][10:] for chart in svg.findall("{*}g")]  # after 10 numbers


def test_curves_of_training_and_evaluation_share_a_chart(tmp_path):
    picture = recorded().plot()
    picture.save(tmp_path / "curves.svg")
    svg = ElementTree.parse(tmp_path / "curves.svg").getroot()
    assert names_in(svg) == [["loss", "test/loss"], ["test/accuracy"]]
    first, second = svg.find("{*}g").findall("{*}polyline")
    assert len(first.get("points").split()) == 3 and len(second.get("points").split()) == 1
    with pytest.raises(ValueError, match="plot was given 'los'; there are .*: name one of them"):
        recorded().plot("los")


def test_curves_that_are_named_are_the_only_ones():
    for names, charts in (
        (["test/accuracy"], [["test/accuracy"]]),
        (["steps_per_sec", "loss"], [["steps_per_sec"], ["loss"]]),  # one about the run, too
        (["test/loss", "loss"], [["test/loss", "loss"]]),
    ):
        assert names_in(ElementTree.fromstring(recorded().plot(*names).svg)) == charts


def test_rows_after_a_step_that_is_trained_again_are_dropped():
    result = History({})
    for step in (1, 2, 3, 2):
        result.add(step, {"loss": float(step)})
    assert result.steps["loss"] == [1, 2]


def test_a_long_history_is_thinned_out(monkeypatch):
    monkeypatch.setattr("distloop.monitoring.curves._MAX_ROWS", 8)
    result = History({})
    for step in range(1, 21):
        result.add(step, {"loss": float(step)})
    assert len(result.steps["loss"]) <= 8 and result.steps["loss"][-1] == 20 and result.history["loss"][-1] == 20.0


NAN = math.nan


def draw(*groups, length=8, **settings):
    """Draws lists of values, measured at each step from 1, or of (step, value)."""
    pairs = [[v if isinstance(v, tuple) else (i + 1, v) for i, v in enumerate(values)] for values in groups]
    return draw_lines(
        [Series("loss", [s for s, _ in group], [v for _, v in group]) for group in pairs], length, **settings
    )


@pytest.mark.parametrize(
    ("groups", "settings", "lines"),
    [
        ([[0, 1, 2, 3, 4, 5, 6, 7]], {}, ["▁▂▃▄▅▆▇█"]),
        ([[7.0, 0.0, -7.0]], {}, ["█▅▁"]),
        ([[0, 1, 2, 3, 4, 5, 6, 7, NAN]], {"length": 9, "is_ascii": True}, ["_.-~=+*#!"]),
        ([[0, 1, 2, 3], [3, 3]], {}, ["▁▃▆█", "██"]),  # runs share one scale and one axis of steps
        ([[0, 4, 6, 10, 2, 2]], {"length": 3}, ["▂▇▂"]),  # the mean of a range of steps
        ([[0, 1, 2, 3], [(2, 3), (4, 0)]], {}, ["▁▃▆█", "██▁▁"]),  # a value counts for the steps before it
        ([[(0, 1), (4, 0)]], {}, ["█▁"]),
        ([[0, NAN, 0, 0, 8, 8, NAN, NAN]], {"length": 4}, ["!▁█!"]),
        ([[NAN, NAN], [NAN]], {}, ["!!", "!"]),
        ([[0.5, 0.5], [0.5]], {}, ["▁▁", "▁"]),
        ([[1, 10, 100, 1000]], {}, ["▁▃▆█"]),  # a wide range of positive values has a logarithmic scale
        ([[0, 10, 100, 1000]], {}, ["▁▁▁█"]),
    ],
)
def test_a_line_goes_from_the_lowest_bar_to_the_highest(groups, settings, lines):
    assert draw(*groups, **settings) == lines


@pytest.mark.parametrize("count", [1, 2, 7, 31, 32, 33, 100, 1001])
@pytest.mark.parametrize("every", [1, 7])
def test_a_complete_run_fills_its_line(count, every):
    (line,) = draw([(every * (i + 1), i) for i in range(count)], length=32)
    assert len(line) == min(count, 32) and line[0] == "▁" and (count == 1 or line[-1] == "█")


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="needs matplotlib, which is not installed: pip install matplotlib, or do"):
        draw_picture([], str(tmp_path / "runs.png"))


@pytest.fixture
def found(tmp_path):
    pytest.importorskip("matplotlib")
    write_run(tmp_path / "a$\\x$", [{"step": i, "loss": 2.0**-i, "f1 $\\x$": None} for i in range(1, 30)])
    write_run(tmp_path / "_b", [{"step": 1, "loss": 0.5, "reward": 1.0}])
    write_run(tmp_path / "c", [])
    return load_all([str(tmp_path)])


def test_a_picture_has_one_chart_per_metric_whatever_the_names(found, tmp_path):
    draw_picture(found, str(tmp_path / "runs.png"))
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_runs_without_numbers_is_empty(found, tmp_path):
    draw_picture(found[2:], str(tmp_path / "runs.png"))
    assert (tmp_path / "runs.png").exists()


def test_a_picture_that_cannot_be_written_is_an_error(found, tmp_path):
    with pytest.raises(ValueError, match=r"cannot be written \(No such file or directory\): give another path."):
        draw_picture(found, str(tmp_path / "nope" / "runs.png"))
