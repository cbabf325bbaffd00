"""The checker: which invariants the log of a round breaks; pure functions of events.

    violations = check(plan, events, outputs, reference)         # [Violation("I2", "..."), ...]

I1  The run ends, bit for bit as the one without faults, and in its history every batch was trained once.
I2  A step that was said to be saved is never lost.
I3  One process writes at a time.
I4  After a failure all processes end within a bound, with the right code and the right name; without one, none ends.
I5  Nothing is left over; but a process that a signal killed leaves its child where no launcher ends it.

The history of a run is what its last checkpoint contains: of each life the steps up to the one from which the next life
went on.
"""

import collections
import itertools
import json
import re
from typing import NamedTuple

from tests.campaigns.nemesis import faults
from tests.campaigns.nemesis.setting import BATCH_SIZE, ROWS, STEPS

_REFUSAL = r"workdir|is another run there\?|did not come within"  # what a second start may say


class Violation(NamedTuple):
    """An invariant that is broken."""

    invariant: str
    text: str


def check(plan, events, outputs, reference):
    """Returns the violations of a round.

    Args:
        plan: of the round.
        events: of the round, in order.
        outputs: what the commands printed, by life.
        reference: events of an undisturbed run with as many workers.
    """
    return [
        *check_history(events, reference),
        *check_rows(events, reference),
        *check_saved(events),
        *check_writers(events),
        *check_ends(plan, events, outputs),
        *check_leftovers(events),
    ]


def is_finished(events):
    """Returns whether all commands of the newest life have ended with code 0."""
    ends = [event for event in events if event["event"] == "end"]
    return bool(ends) and all(event["code"] == 0 for event in ends if event["life"] == ends[-1]["life"])


def check_history(events, reference):
    """Checks that the run ended, and that each step of it trained the batch and made the weights of the reference."""
    expected = {(e["share"], e["step"]): e for e in _named(reference, "step")}
    for event in _named(events, "step"):
        step = expected.get((event["share"], event["step"]))
        for name in ("ids", "digest"):
            if step is None or event[name] != step[name]:
                yield Violation("I1", f"{name} of {_place(event)} differs: {event[name]}")
    begins = {step: e["digest"] for (share, step), e in expected.items() if share == 0}
    for event in _of_chief(_named(events, "going on")):
        if event["digest"] != begins.get(event["step"], event["digest"]):
            yield Violation("I1", f"life {event['life']} went on from wrong weights of step {event['step']}")
    if not is_finished(events):
        yield Violation("I1", "the run was not finished")
        return
    history = surviving(events)
    if [event["step"] for event in history] != list(range(1, STEPS + 1)):
        yield Violation("I1", f"steps of the history: {[event['step'] for event in history]}")
    counts = collections.Counter(i for event in history for i in event["ids"])
    epochs = STEPS * BATCH_SIZE // ROWS
    if wrong := {i: counts[i] for i in range(ROWS) if counts[i] != epochs}:
        yield Violation("I1", f"rows that were not trained {epochs} times: {wrong}")


def surviving(events):
    """Returns the chief's steps in the history of the run, in order."""
    history = []
    for event in _of_chief(events):
        if event["event"] == "going on":
            history = [step for step in history if step["step"] <= event["step"]]
        elif event["event"] == "step":
            history.append(event)
    return history


def check_rows(events, reference):
    """Checks that `metrics.jsonl` holds each step once, with the reference's numbers."""
    lines = [line for event in _named(events, "rows") for line in event["rows"]]
    rows = [row for line in lines if (row := _parse(line)) is not None]
    expected = [json.loads(line) for event in _named(reference, "rows") for line in event["rows"]]
    steps = [row["step"] for row in rows]
    if steps != sorted(set(steps)):
        yield Violation("I1", f"steps of metrics.jsonl are not in order: {steps}")
    lacks = sorted(set(range(1, STEPS + 1)) - set(steps))
    if (lacks or len(rows) < len(lines)) and is_finished(events):
        yield Violation("I1", f"metrics.jsonl lacks the steps {lacks}, or holds what is no row")
    losses = {row["step"]: row["loss"] for row in expected}
    if wrong := [row["step"] for row in rows if row["loss"] != losses[row["step"]]]:
        yield Violation("I1", f"metrics.jsonl has other losses at the steps {wrong}")


def _parse(line):
    try:
        return json.loads(line)
    except ValueError:
        return None


def damaged_steps(events):
    """Returns the steps whose checkpoint has a flipped byte and was not written again since."""
    damaged = set()
    for event in events:
        if event["event"] == "damaged":
            damaged.add(event["step"])
        elif event["event"] == "saved":
            damaged.discard(event["step"])
    return damaged


def check_saved(events):
    """Checks that each life went on from a step at least as late as the last that was said to be saved."""
    saved, source, damaged = 0, "nothing was saved", set()
    for event in events:
        kind = event["event"]
        if kind in ("saved", "left") and event["worker"] == 0:
            if event["step"] >= saved:
                saved, source = event["step"], f"life {event['life']} {kind} {event['step']}"
            damaged.discard(event["step"])
        elif kind == "damaged":
            damaged.add(event["step"])
            if saved in damaged:
                saved, source = event["whole"][-1], f"step {event['step']} was damaged, {event['whole']} were whole"
        elif kind == "going on" and event["worker"] == 0:
            if event["step"] < saved:
                yield Violation("I2", f"life {event['life']} went on from step {event['step']}, but {source}")
                saved = event["step"]


def check_writers(events):
    """Checks that no two processes that own the files trained at the same time."""
    spans = {}
    for event in _of_chief(events):
        if event["event"] in ("going on", "step", "saved", "left", "finished"):
            first, _ = spans.get(event["process"], (event, event))
            spans[event["process"]] = first, event
    for (a, end), (b, _) in itertools.combinations(spans.values(), 2):
        if b["time"] < end["time"]:
            wrote = f"life {a['life']} wrote until {end['time']:.2f}"
            yield Violation("I3", f"life {b['life']} went on at {b['time']:.2f}, when {wrote}")


def check_ends(plan, events, outputs):
    """Checks how each life ended, and what happened beside it."""
    for number in dict.fromkeys(event["life"] for event in _named(events, "end")):
        life = [event for event in events if event.get("life") == number]
        yield from _check_life(plan, int(number), life, outputs[int(number)])
    for event in _named(events, "child ended"):
        if not event["is_gone"]:
            yield Violation("I4", f"life {event['life']}: a child outlived SIGTERM")
    for event in _named(events, "second"):
        second = f"life {event['life']}: the second start"
        if event["code"] is None:
            yield Violation("I4", f"{second} did not end in {event['secs']:.0f} s")
        elif event["code"] != 0 and not re.search(_REFUSAL, event["output"]):
            yield Violation("I4", f"{second} was refused with {event['output'][-300:]!r}")


def _check_life(plan, number, life, output):
    ends = _named(life, "end")
    strikes = _named(life, "strike")
    deadly = next((event for event in strikes if event["is_deadly"]), None)
    if deadly is None:
        outcome = faults.Outcome({event["command"]: {0} for event in ends}, within_secs=float("inf"))
    else:
        outcome = plan.lives[number].deadly.outcome(plan.setting)
        if _is_early(plan.setting, life, deadly):
            outcome = _early(plan.setting, outcome)
        if _named(life, "finished"):  # the fault came to a worker that waited for the others to end
            outcome = outcome._replace(codes={i: {*codes, 0} for i, codes in outcome.codes.items()}, text="")
    names = [event["fault"] for event in strikes]
    cause = f"life {number} ({', '.join(names) or 'no fault'})"
    has_code_0 = all(event["code"] == 0 for event in ends) and bool(_named(life, "finished"))
    for event in ends:
        allowed = outcome.codes[event["command"]] | ({1} if "FillDisk" in names else set())
        command = f"{cause}: command {event['command']}"
        if event["code"] is None:
            yield Violation("I4", f"{command} did not end")
        elif event["code"] not in allowed and not has_code_0:
            yield Violation("I4", f"{command} ended with {event['code']}, not {sorted(allowed)}")
        is_orphan = plan.setting.placement == "alone" and plan.setting.child_of >= 0
        is_orphan &= event["code"] in (faults.KILLED, faults.TERMINATED) and len(event["leftovers"]) == 1
        if event["leftovers"] and not is_orphan:
            yield Violation("I5", f"{command} left {event['leftovers']}")
    has_end = all(event["code"] is not None for event in ends)
    if deadly is not None and has_end and not has_code_0:
        secs = max(event["gone_at"] for event in ends) - deadly["time"]
        if secs > outcome.within_secs:
            yield Violation("I4", f"{cause}: ended after {secs:.1f} s, not {outcome.within_secs:.0f}")
        if "ReadNothing" not in names and outcome.text and not re.search(outcome.text, output):
            yield Violation("I4", f"{cause}: the output does not match {outcome.text!r}")


def _is_early(setting, life, deadly):
    """Returns whether a fault came before every worker trained: some did not catch signals yet, or know the others.

    Of an elastic run it may come during any later start.
    """
    if setting.placement == "elastic":
        return True
    began = [event["time"] for event in _named(life, "going on")]
    return len(began) < setting.workers or deadly["time"] < max(began)


def _early(setting, outcome):
    """Returns what an early fault allows besides: a plain SIGTERM, and hosts that wait for one that will not come."""
    codes = {}
    for command, allowed in outcome.codes.items():
        codes[command] = set(allowed)
        if faults.SAVED in allowed:
            codes[command] |= {faults.TERMINATED, faults.FOLLOWED}
        if setting.placement == "elastic":  # one may be killed while all leave
            codes[command] |= {faults.KILLED}
        if setting.placement == "hosts" and allowed != {faults.KILLED}:
            codes[command] |= {1, faults.FOLLOWED}
    waits = faults.START_SECS if setting.placement == "hosts" else 0.0
    text = f"{outcome.text}|did not come within" if outcome.text else ""
    return outcome._replace(codes=codes, text=text, within_secs=outcome.within_secs + waits)


def check_leftovers(events):
    """Checks that no temporary files are left."""
    if files := [name for event in _named(events, "remains") for name in event["files"]]:
        yield Violation("I5", f"files left over: {files}")


class Loss(NamedTuple):
    """What one deadly fault cost."""

    fault: str
    secs: float  # from the fault to the end of the last process
    steps: int | None  # that were trained again; None if a byte of the checkpoint was flipped


def losses(events):
    """Returns what each deadly fault cost, and each fall of workers that made a new membership, in order."""
    result = [loss for fall in _named(events, "fell") if (loss := _loss_of(fall, events)) is not None]
    for deadly in [event for event in _named(events, "strike") if event["is_deadly"]]:
        number = deadly["life"]
        life = [event for event in events if event.get("life") == number]
        later = [e for e in _of_chief(_named(events, "going on")) if e["time"] > deadly["time"] and e["life"] != number]
        steps = [event["step"] for event in _of_chief(_named(life, "step"))]
        last = max(steps, default=0)
        secs = max(event["gone_at"] for event in _named(life, "end")) - deadly["time"]
        has_flip = any(event["event"] == "damaged" for event in life)
        again = max(0, last - later[0]["step"]) if later and last else 0
        result.append(Loss(deadly["fault"], secs, None if has_flip else again))
    return result


def _loss_of(fall, events):
    """Returns what a fall cost: seconds to the next new step, and steps that were trained again; None: no restart."""
    of_life = [event for event in _of_chief(events) if event.get("life") == fall["life"]]
    begun = [event for event in _named(of_life, "going on") if event["time"] <= fall["time"]]
    later = [event for event in _named(of_life, "going on") if event["time"] > fall["time"]]
    if not begun or not later:
        return None
    steps = _named(of_life, "step")
    done = [event["step"] for event in steps if begun[-1]["time"] < event["time"] < later[0]["time"]]
    again = next((event for event in steps if event["time"] > later[0]["time"]), None)
    lost = max(done, default=begun[-1]["step"]) - later[0]["step"]
    return again and Loss(fall["fault"], again["time"] - fall["time"], max(0, lost))


def _named(events, name):
    return [event for event in events if event["event"] == name]


def _of_chief(events):
    return [event for event in events if event.get("worker") == 0]


def _place(event):
    return f"worker {event['worker']} at step {event['step']} of life {event['life']}"
