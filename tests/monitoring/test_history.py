"""What `fit` returns: the last numbers, their history, and its curves."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from distloop.monitoring.history import History, Recorder


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
    monkeypatch.setattr("distloop.monitoring.history._MAX_ROWS", 8)
    result = History({})
    for step in range(1, 21):
        result.add(step, {"loss": float(step)})
    assert len(result.steps["loss"]) <= 8 and result.steps["loss"][-1] == 20 and result.history["loss"][-1] == 20.0
