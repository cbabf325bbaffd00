"""The schedule of a round: how its runs are started, and which faults come when, drawn from a seed.

    plan = draw_plan(seed=1, number=7)
    plan.lives[0].strikes           # the last of them deadly; the last life has no deadly one

A life lasts from a start of the command to the end of all its processes.
"""

import dataclasses
import random

from tests.campaigns.nemesis import faults, kernel
from tests.campaigns.nemesis.faults import Fault
from tests.campaigns.nemesis.setting import ELASTIC_REPLICAS, STEPS, Setting


@dataclasses.dataclass(frozen=True)
class Strike:
    """A fault, and when it comes: after steps of the chief in this life, or seconds after the start."""

    fault: Fault
    after_steps: int | None = None
    after_secs: float = 0.0

    def __str__(self):
        when = f"{self.after_secs:.1f} s" if self.after_steps is None else f"{self.after_steps} steps"
        return f"{self.fault} after {when}"


@dataclasses.dataclass(frozen=True)
class Life:
    """One start of the command."""

    strikes: tuple[Strike, ...]
    flips_byte: bool = False  # afterwards, in the newest checkpoint, if there is another one

    @property
    def deadly(self):
        """The fault that ends it; None if it is to finish the run."""
        return next((strike.fault for strike in self.strikes if strike.fault.is_deadly), None)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A round."""

    seed: int
    number: int
    setting: Setting
    lives: tuple[Life, ...]


def draw_plan(seed, number):
    """Returns the plan of a round; the rounds of a seed take turns in which fault each has for certain."""
    kinds = [*faults.DEADLY, *faults.HARMLESS]
    random.Random(seed).shuffle(kinds)
    featured = kinds[number % len(kinds)]
    generator = random.Random(f"{seed}/{number}")
    setting = _draw_setting(generator)
    for _ in range(1000):
        if featured.fits(setting):
            break
        setting = _draw_setting(generator)
    else:  # this machine does not allow it
        featured = faults.Terminate
    count = generator.choice([1, 1, 2])
    lives = [_draw_life(generator, setting, is_last=i == count) for i in range(count + 1)]
    strike = _draw_strike(generator, setting, featured)
    i = generator.randrange(count)
    kept = [old for old in lives[i].strikes if old.fault.is_deadly != featured.is_deadly]
    lives[i] = dataclasses.replace(lives[i], strikes=(*kept, strike))
    lives = [dataclasses.replace(life, strikes=_compatible(life.strikes)) for life in lives]
    return Plan(seed, number, setting, tuple(lives))


def draw_elastic_plan(seed, number, most=ELASTIC_REPLICAS):
    """Returns the plan of a round whose workers fall and come back while the launcher goes on."""
    generator = random.Random(f"{seed}/{number}/elastic")
    setting = Setting(
        placement="elastic",
        workers=most,
        checkpoint_every=generator.choice([1, 3, 5, 5]),
        keep=generator.choice([1, 2, 3]),
        least=generator.choice([1, 1, 2]),
        pause_secs=generator.choice([1.0, 4.0]),
    )
    deadly = generator.choice([None, None, None, faults.KillLauncher(0), faults.Terminate(0, True)])
    lives = [Life((*_draw_falls(generator, setting), Strike(deadly, after_steps=generator.randint(1, STEPS))))]
    return Plan(seed, number, setting, (*(lives if deadly else []), Life(_draw_falls(generator, setting))))


def _draw_falls(generator, setting):
    falls = [faults.Fall.draw(generator, setting) for _ in range(generator.choice([1, 2, 3]))]
    strikes = [Strike(fall, after_steps=generator.randint(1, STEPS)) for fall in falls]
    if not any(fall.hangs for fall in falls) and generator.random() < 0.3:
        suspend = dataclasses.replace(faults.Suspend.draw(generator, setting), is_command=False)
        strikes.append(Strike(suspend, after_steps=generator.randint(1, STEPS)))
    if generator.random() < 0.2:
        strikes.append(Strike(faults.StartTwice(), after_steps=generator.randint(1, STEPS)))
    return tuple(strikes)


def _draw_setting(generator):
    placements = ["alone", "launcher", *(["hosts"] if kernel.can_make_networks() else [])]
    placement = generator.choice(placements)
    workers = 1 if placement == "alone" else generator.choice([2, 2, 2, 2, 3, 4])
    return Setting(
        placement=placement,
        workers=workers,
        checkpoint_every=generator.choice([1, 3, 5, 5]),
        keep=generator.choice([1, 2, 3]),
        child_of=generator.choice([-1, -1, generator.randrange(workers)]),
        is_first_process=kernel.can_number_processes() and generator.random() < 0.25,
        noise=generator.choice([0, 0, 0, 20_000]),
    )


def _draw_life(generator, setting, *, is_last):
    kinds = [kind for kind in faults.HARMLESS if kind.fits(setting)]
    chosen = generator.sample(kinds, generator.choice([0, 0, 1, 1, 2]))
    if not is_last:
        chosen.append(generator.choice([kind for kind in faults.DEADLY if kind.fits(setting)]))
    strikes = tuple(_draw_strike(generator, setting, kind) for kind in chosen)
    return Life(strikes, flips_byte=not is_last and generator.random() < 0.3)


def _compatible(strikes):
    """Leaves out what would wake a worker that is stopped for ever, or let another one seem to hang."""
    if any(isinstance(strike.fault, faults.StopForEver) for strike in strikes):
        return tuple(s for s in strikes if isinstance(s.fault, faults.StopForEver | faults.TerminateChild))
    return strikes


def _draw_strike(generator, setting, kind):
    fault = kind.draw(generator, setting)
    if kind in faults.AT_START:
        return Strike(fault)
    may_come_early = kind in (*faults.DEADLY, faults.Suspend) and kind is not faults.StopForEver
    if may_come_early and not setting.is_first_process and generator.random() < 0.25:
        return Strike(fault, after_secs=generator.uniform(0, 4))
    return Strike(fault, after_steps=generator.randint(1, STEPS // 3))
