"""The benchmark: its smallest part, and the page that it writes of made-up numbers."""

import os
import re

import pytest

from distloop.workers import environment
from experiments.benchmarks import (
    cell,
    curves,
    goals,
    growth,
    input_speed,
    kept,
    page,
    pictures,
    processes,
    scaling,
    turns,
    workloads,
)
from tests import forked


def text_of(page):
    return page.read_text(encoding="utf-8")


def rows_of(text):
    """Reads the first table of a page: a dict a row, by the header."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert all(len(line) == len(lines[0]) for line in lines)
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def a_cell(part="training", **times):
    about = {"date": "2026-11-27", "commit": "abc", "machine": "2 CPU cores", "rounds": 2, "turn_secs": 0.4}
    return {"part": part, "workload": "tiny", "place": "1 replica", "times": times, **about}


def rendered(*cells):
    return page.render(cells, kept.NOISY)


@pytest.mark.slow
def test_the_smallest_part_gives_a_row_with_every_ratio(tmp_path):
    systems = ["bare", "handloop", "distloop"]
    spec = {"workload": "tiny", "place": "1 replica", "replicas": 1, "rounds": 2, "turn_secs": 0.01}
    found = cell.measure_training(cell.Systems(spec, str(tmp_path)), {**spec, "systems": systems})
    assert {name: len(secs) for name, secs in found["times"].items()} == dict.fromkeys(systems, 2)
    assert all(0 < sec < 1 for secs in found["times"].values() for sec in secs)
    (row,) = rows_of(rendered({**a_cell(), **spec, **found}))
    assert row["workload"] == "tiny" and row["goal"] == "1.40 / 1.10"
    assert float(row["**distloop**"].split(" / ")[1]) > 0


@pytest.mark.wide
def test_a_cell_of_distloop_takes_settings_from_before_tensorflow_starts():
    spec = {"part": "training", "workload": "tiny", "replicas": 2, "rounds": 1, "turn_secs": 0.01}
    found = processes.run_cell({**spec, "systems": ["distloop"], "settings": {"intra_op_threads": 3}})
    assert found.get("failed") is None and len(found["times"]["distloop"]) == 1


@pytest.mark.slow
@pytest.mark.skipif(environment.count_cores() < 2, reason="needs two cores")
def test_a_timeline_tells_what_steps_on_two_workers_are_made_of():
    program = ["-m", "experiments.benchmarks.timeline", "--workload=tiny"]
    found = forked.launch(["--workers=2", *program], env=os.environ)
    assert found.returncode == 0, found.stderr[-3000:]
    head, *lines = found.stdout.splitlines()
    assert head.startswith("[worker 0] tiny on 2 workers, ")
    means = [float(line.split(" mean ")[1].split(",")[0]) for line in lines]
    step, *parts = means
    assert len(parts) == 3 and all(part >= 0 for part in parts) and 0.5 * step < sum(parts) < 1.5 * step


def test_a_ratio_is_the_median_of_the_rounds_own_ratios():
    times = {"distloop": [1.0, 4.0, 9.0], "bare": [1.0, 8.0, 3.0]}  # the ratio of the medians would be 1.33
    assert turns.median_ratio(times, "distloop", "bare") == 1.0
    assert turns.median_ratio(times, "distloop", "handloop") is None


@pytest.mark.parametrize(
    "own, reached",
    [(1.0, "stretch / goal"), (1.2, "stretch / missed"), (1.3, "goal / missed"), (1.5, "missed / missed")],
)
def test_the_page_says_how_far_each_ratio_came(own, reached):
    (row,) = rows_of(rendered(a_cell(bare=[1.0], handloop=[1.0], distloop=[own])))
    assert row["reached"] == reached


def test_the_page_says_why_a_system_is_missing_and_what_has_no_measure():
    cell = {**a_cell(bare=[1.0], distloop=[1.0]), "missing": {"orbit": "no network"}}
    assert "- Orbit: no network\n" in rendered(cell)
    assert "Not measured: calls, tiny, 1 replica (code 1)." in rendered({**a_cell("calls"), "failed": "code 1"})


def test_other_frameworks_are_compared_with_distloop():
    cell = a_cell("peers", bare=[1.0, 2.0], scan=[0.5, 0.5], lightning=[8.0, 8.0], distloop=[2.0, 2.0])
    (row,) = rows_of(rendered(cell))
    assert row["Lightning"] == "4.00" and row["JAX, a scan of 50 steps"] == "0.25" and row["bare"] == "0.75"
    assert row["**distloop**, us"] == "2,000,000"


def test_the_page_says_what_was_measured_when_and_which_cells_were_noisy():
    times = {"bare": [1.0, 1.1, 1.2, 1.3, 1.4], "distloop": [1.0] * 5}
    noise = kept.noise(a_cell(**times))
    assert noise == pytest.approx(0.2 / 1.2, abs=1e-3)  # half of the times are within 1.1 to 1.3, around 1.2
    text = rendered({**a_cell(**times), "noise": noise}, {**a_cell(**times), "noise": 0.01, "workload": "conv"})
    assert "2026-11-27, commit abc, 2 CPU cores; 2 rounds or more" in text
    assert "are compared with): tiny on 1 replica 17%.\n" in text


def test_a_page_is_not_made_of_two_commits():
    with pytest.raises(ValueError):
        rendered(a_cell(bare=[1.0]), {**a_cell(bare=[1.0]), "commit": "def"})


def test_a_part_is_measured_again_alone_and_its_newest_cell_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "PATH", tmp_path / "runs" / "benchmarks.jsonl")
    spec = {"part": "training", "workload": "tiny", "place": "1 replica", "systems": ["bare", "distloop"]}
    others = [{**spec, "workload": "conv"}, {**spec, "systems": ["bare"]}]
    for secs in (1.0, 2.0):
        kept.keep({**spec, "times": {"bare": [secs] * 3}})
    kept.keep({**spec, "failed": "exit code 1"})
    found, *missing = kept.find([spec, *others])
    assert found["times"] == {"bare": [2.0] * 3} and found["noise"] == 0 and missing == [None, None]
    monkeypatch.setattr(kept, "origin", lambda: {"commit": "def", "machine": "another"})
    assert kept.find([spec]) == [None]


def test_speeds_are_those_of_the_median_call():
    times = {"keras": [1.0, 2.0, 4.0], "distloop": [0.04, 0.02, 0.01]}
    (row,) = rows_of(page.speeds_table([{**a_cell(), "evaluate": times}], "evaluate", goals.EVALUATE))
    assert row["**distloop**"] == "100,000" and row["times Keras"] == "100.00" and row["reached"] == "goal"


def test_each_kind_of_call_is_held_against_the_limit_of_its_place():
    fit, evaluate = {"keras": [0.5], "distloop": [0.02]}, {"keras": [0.2], "distloop": [0.04]}
    (row,) = rows_of(page.beyond_table([{**a_cell(), "beyond fit": fit, "beyond evaluate": evaluate}]))
    assert row["fit, Keras"] == "500" and row["goal"] == "30" and row["reached"] == "goal / missed"


def test_a_save_is_compared_with_that_of_the_same_round():
    times = {"save": {"manager": [1.0, 2.0, 4.0], "distloop": [0.5, 1.0, 1.0]}}
    (row,) = rows_of(page.against_table([{**a_cell(), **times}], "manager", page.KEPT))
    assert row["what"] == "save, s" and row["distloop / `CheckpointManager`"] == "0.50" and row["reached"] == "stretch"


def test_two_workers_keep_the_speed_of_one_where_their_steps_last_as_long():
    cells = [
        {"workload": "conv", "place": place, "times": {"handloop": [1.0], "distloop": [secs]}}
        for place, secs in (("1 worker", 0.9), ("2 workers", 1.0))
    ]
    (row,) = rows_of(page.two_workers_table(cells))
    assert row["handloop"] == "1.00" and row["**distloop**"] == "0.90" and row["reached"] == "missed"


def test_speed_ups_are_examples_a_second_of_all_devices_against_one(tmp_path):
    one = {"workload": "lm", "replicas": 1, "rows": 8, "weights": 100, "times": {"distloop": [1.0, 2.0, 4.0]}}
    two = {**one, "replicas": 2, "times": {"distloop": [2.5] * 3, "reduction": [0.25, 0.5, 1.0]}}
    alone = {**two, "workload": "conv", "weights": 7}  # without a figure on one device there is no speed-up
    text = scaling.render([two, alone, one], "today", "cpu")
    of_one, of_two = rows_of(text)
    assert (of_one["examples/s"], of_one["speed-up"], of_one["reduction, share of a step"]) == ("4", "1.00", "-")
    assert (of_two["examples/s"], of_two["speed-up"], of_two["reduction, share of a step"]) == ("6", "1.60", "0.20")
    assert "Virtual CPUs share" in text and "Virtual CPUs" not in scaling.render([one], "today", "gpu")
    scaling.draw(scaling.speed_ups([one, two]), tmp_path / "scaling.svg")
    assert (tmp_path / "scaling.svg").read_text().count("<svg") == 1


@pytest.mark.wide
def test_a_reduction_is_timed_beside_the_steps_that_need_it():
    spec = {"part": "scaling", "workload": "tiny", "replicas": 2, "rows": 8, "settings": {"device": "cpu"}}
    found = processes.run_cell({**spec, "rounds": 2, "turn_secs": 0.01})
    assert found["weights"] == 16 * 32 + 32 + 32 * 10 + 10
    assert {name: len(secs) for name, secs in found["times"].items()} == {"distloop": 2, "reduction": 2}


def test_watching_is_compared_with_watching_less():
    times = {"off": [1.0, 1.0, 2.0], "on": [1.02, 1.02, 2.5], "histograms": [1.2, 1.2, 2.6]}
    rows = rows_of(rendered(a_cell("monitoring", **times)))
    assert [row["ratio"] for row in rows] == ["1.02", "1.18"] and [row["reached"] for row in rows] == ["goal", "missed"]


def test_every_workload_has_goals():
    assert {name for name, _ in goals.STEPS} == set(workloads.WORKLOADS)


def test_a_turn_is_a_multiple_of_what_a_system_trains_at_once():
    asked = []

    class Fifty(turns.System):
        least = 50

        def steps_secs(self, steps):
            asked.append(steps)
            return 0.001 * steps

    turns.take_turns({"fifty": Fifty(lambda steps: None)}, 2, 0.26, float)
    assert asked[-2:] == [250, 250] and all(steps % 50 == 0 for steps in asked)


def test_inputs_are_compared_with_the_pipeline_of_tf_data():
    best = {"distloop": [300.0, 9.0, 0.5, 0.5], "tf.data, read again": [200.0, 10.0, 0.5, 8.0]}
    best["kept"] = [0.0, 0.0, 1.0, 1.0]
    workload = input_speed.Workload(64, 1_000, None, None, None)
    assert input_speed.page("arrays", workload, best).splitlines()[2:] == [
        "| distloop | 300 | 1.50 | 9.00 | 0.50 s | 0.50 s |",
        "| tf.data, read again | 200 | 1.00 | 10.00 | 0.50 s | 8.00 s |",
        "| kept | | | | 1.00 s | 1.00 s |",
    ]


def test_the_pictures_are_those_of_their_page():
    drawn = pictures.draw_all(text_of(pictures.PAGE))
    assert len(drawn) == 3
    for name, svg in drawn.items():
        assert text_of(pictures.PAGE.with_name(name)) == svg, "python -m experiments.benchmarks.pictures"
    text = text_of(curves.PAGE)
    kept_one = text_of(curves.PAGE.with_name(curves.PICTURE))
    assert kept_one == curves.draw(curves.read_panels(text)), "python -m experiments.benchmarks.curves"
    assert re.findall("^## (.*)$", text, re.M) == [name.capitalize() for name in growth.CURVES]


def test_a_cost_that_grows_with_its_size_lies_on_the_dotted_line():
    rows = ["| rows | flat, s | linear, MB |", "| --- | --- | --- |", "| 10 | 2 | 3 |", "| 1,000 | 2 | 300 |"]
    (panel,) = curves.read_panels("\n".join(["\n## Rows", "", *rows, "| 100 times | 1.0 times | 100.0 times |"]))
    assert panel.costs == {"flat, s": [1, 1], "linear, MB": [1, 100]} and panel.sizes == [10, 1000]
    svg = curves.draw([panel])
    (dotted,) = re.findall(r'1 4" x1="([\d.]+)" y1="([\d.]+)" x2="([\d.]+)" y2="([\d.]+)"', svg)
    lines = {name: points for points, name in re.findall(r'points="(.+?)"><title>(.+?):', svg)}
    x1, y1, x2, y2 = dotted
    assert lines == {"flat, s": f"{x1},{y1} {x2},{y1}", "linear, MB": f"{x1},{y1} {x2},{y2}"}


def test_the_readme_quotes_the_figures_of_the_page():
    section = text_of(pictures.PAGE).partition("\n## Training step\n")[2].partition("\n## ")[0]
    figures = {True: [], False: []}  # of steps over those of a handloop: on one replica, and on more
    for row in rows_of(section):
        figures[row["place"] == "1 replica"].append(row["**distloop**"].split(" / ")[1])
    several, one = (f"{min(figures[is_one])} to {max(figures[is_one])}" for is_one in (False, True))
    readme = " ".join(text_of(pictures.PAGE.parents[2] / "README.md").split())
    times = f"{one} times as long as in a compiled loop written by hand on one CPU, and {several} times on 2 and 4"
    assert f"A step takes {times} virtual CPUs" in readme


def test_a_picture_has_a_mark_where_each_figure_of_its_table_is():
    cell = a_cell(bare=[2.0], handloop=[2.0], keras=[8.0], orbit=[4.0], distloop=[1.0])
    (svg,) = pictures.draw_all(rendered(cell)).values()
    places = {name: float(x) for x, name in re.findall(r"translate\(([\d.]+),\d+\)\"><title>(.+?)</title>", svg)}
    assert sorted(places, key=places.get) == ["distloop: 0.5", "Orbit: 2", "Keras: 4"]
    octave = places["Keras: 4"] - places["Orbit: 2"]  # the axis is logarithmic
    assert places["Orbit: 2"] - places["distloop: 0.5"] == pytest.approx(2 * octave, abs=0.2)
    one = float(re.search(r'class="one" x1="([\d.]+)"', svg)[1])
    assert places["Orbit: 2"] - one == pytest.approx(octave, abs=0.2)


def test_a_curve_says_by_how_much_each_cost_grows():
    curve = growth.Curve(lambda size: {}, (10, 100), "rows", "they are read")
    table = growth.table_of(curve, [{"read, s": 0.5, "added, MB": 0}, {"read, s": 6, "added, MB": 2}])
    first, last, times = rows_of(table)
    assert first == {"rows": "10", "read, s": "0.5", "added, MB": "0"} and last["read, s"] == "6"
    assert times == {"rows": "10 times", "read, s": "12.0 times", "added, MB": "-"}
