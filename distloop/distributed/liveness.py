"""Liveness: decides which worker failed by the last heartbeats and the time; no sockets, threads or clocks.

    table = table.receive(1, read_beat(message, now))
    judge(table, progress, Timeouts(hang_secs=600), now)     # None, or Verdict("worker 1 failed at step 7 ...")
    describe_facts(settings, secret).find_difference(digests)     # a setting that another worker has otherwise

The chief hears every worker. The others hear the chief, which tells them of the workers that are furthest behind, and
why it ends: so all end for the same reason.
"""

import hmac
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from distloop.log import printable

# The phases in which a worker needs all the others, and should not stand still.
JOINING, TRAINING, GATHERING = "joining", "training", "waiting for all"

SILENT_SECS = 3.0  # six heartbeats are missing: worth a mention if something is wrong
LEFT_SECS = 10.0  # the last operations of a worker that left may end this much later here

_STATES = ("alive", "failed", "ended", "left")
_MOST_SENT = 8  # workers
HIDDEN = "***"  # in place of a secret value


class Beat(NamedTuple):
    """One heartbeat of a worker."""

    state: str  # "alive"; "failed"; "ended", because another worker failed; "left", at the end of its program
    phase: str
    step: int
    error: str
    received_at: float  # seconds on this worker's monotonic clock
    is_hang: bool = False  # of one that ended: whether the reason is a hang


def read_beat(fields: Mapping[str, Any], received_at: float) -> Beat:
    """Returns the heartbeat in a message; its texts are escaped and cut, before anything prints them.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: if there is none.
    """
    state, step = fields["state"], fields["step"]
    if state not in _STATES or type(step) is not int or not 0 <= step < 2**63:
        raise ValueError(f"{state!r} and {step!r} are no state and step.")
    phase, error = shorten(fields["phase"], 60), shorten(fields["error"], 400)
    return Beat(state, phase, step, error, received_at, bool(fields.get("is_hang")))


class Liveness(NamedTuple):
    """The state of all workers as this worker knows it; immutable, so that every thread reads a consistent state."""

    addresses: tuple[str, ...]  # host:port of every worker, the chief first
    worker: int  # the index of this one
    beats: Mapping[int, Beat] = {}  # the last one of each worker that is known
    closed: frozenset[int] = frozenset()  # workers that have closed their connection
    has_met: bool = False  # every worker was connected
    awake_since: float = -1e9  # before, this process was suspended and could not hear

    @property
    def heard(self) -> Sequence[int]:
        """The workers that are connected to this one: to the chief all others, to another worker the chief."""
        return (0,) if self.worker else range(1, len(self.addresses))

    def receive(self, i: int, beat: Beat) -> "Liveness":
        """Returns the table after a heartbeat of worker `i`."""
        return self._replace(beats={**self.beats, i: beat})

    def learn(self, others: Mapping[str, Any], now: float) -> "Liveness":
        """Returns the table after the chief sent what it knows of other workers, as `tell` returns it."""
        beats = {int(i): read_beat(fields, now - float(fields["silent_secs"])) for i, fields in others.items()}
        known = {i: beat for i, beat in beats.items() if 0 < i < len(self.addresses) and i != self.worker}
        return self._replace(beats={i: beat for i, beat in self.beats.items() if i == 0} | known)

    def tell(self, now: float) -> dict[int, dict[str, Any]]:
        """Returns what the chief tells of the workers that are furthest behind."""
        return {i: self.beats[i]._asdict() | {"silent_secs": self.silent_secs(i, now)} for i in self.furthest_behind()}

    def furthest_behind(self) -> list[int]:
        """Returns up to 8 workers in their order: those that do not run, then those that others wait for."""

        def progress(i: int) -> tuple[bool, bool, int, int]:
            beat = self.beats[i]
            return beat.state == "alive", beat.phase == GATHERING, beat.step, i

        return sorted(sorted(self.beats, key=progress)[:_MOST_SENT])

    def lose(self, i: int) -> "Liveness":
        """Returns the table after worker `i` closed its connection; before all have met it may come back."""
        if self.has_met:
            return self._replace(closed=self.closed | {i})
        return self._replace(beats={j: beat for j, beat in self.beats.items() if j != i or beat.state != "alive"})

    def silent_secs(self, i: int, now: float) -> float:
        """Returns the seconds since the last heartbeat of worker `i`, during which this process was awake."""
        received_at = self.beats[i].received_at if i in self.beats else 0.0
        return now - max(received_at, self.awake_since)

    def is_silent(self, i: int, now: float) -> bool:
        """Returns True if heartbeats of worker `i` are missing."""
        return i not in self.beats or i in self.closed or self.silent_secs(i, now) > SILENT_SECS

    def describe(self, i: int, now: float) -> str:
        """Returns the last known position of worker `i`, as in `worker 1 (b:4000) is at step 7 (training)`."""
        beat, silent_secs = self.beats[i], self.silent_secs(i, now)
        verb = "is"
        if beat.state == "left":
            verb = "left"
        elif silent_secs > SILENT_SECS:
            verb = f"has been silent for {silent_secs:.0f} seconds, last heard"
        return f"worker {i} ({self.addresses[i]}) {verb} at step {beat.step} ({beat.phase})"

    def describe_others(self, now: float) -> str:
        """Returns the last known position of the workers that are furthest behind."""
        return "; ".join(self.describe(i, now) for i in self.furthest_behind())

    def find_missing(self, now: float) -> list[int]:
        """Returns the workers that are not connected to this one, or silent."""
        return [i for i in self.heard if self.is_silent(i, now)]

    def name(self, workers: Sequence[int]) -> str:
        """Returns workers with their addresses, as in `workers 1 (b:4000), 2 (c:4000)`."""
        names = ", ".join(f"{i} ({self.addresses[i]})" for i in workers)
        return f"worker{'s' if len(workers) > 1 else ''} {names}" if names else ""


class Timeouts(NamedTuple):
    """How long a run may stand still, in seconds; 0: without limit."""

    hang_secs: float = 0.0  # Config.hang_timeout
    join_secs: float = 0.0  # Config.start_timeout


class Progress(NamedTuple):
    """Where this worker is, and since when it has made no progress."""

    step: int
    phase: str
    since: float

    def advance(self, step: int, phase: str, now: float) -> "Progress":
        """Returns the progress at `now`; phases in which a worker needs no other one count as progress."""
        stands_still = (step, phase) == (self.step, self.phase) and phase in (JOINING, TRAINING, GATHERING)
        return self if stands_still else Progress(step, phase, now)


class Verdict(NamedTuple):
    """Why this worker has to end."""

    reason: str
    is_hang: bool = False  # if so, the stacks of its threads are of interest


def judge(table: Liveness, progress: Progress, timeouts: Timeouts, now: float) -> Verdict | None:
    """Returns why this worker has to end; None if the run goes on.

    Args:
        table: the last heartbeat of each worker.
        progress: of this worker.
        timeouts: limits for silence and for standing still.
        now: the time on the clock of `Beat.received_at`.
    """
    if verdict := find_failure(table):
        return verdict
    if reason := find_silence(table, timeouts.hang_secs, now):
        return Verdict(reason, is_hang=True)
    still_secs = now - progress.since
    left = [i for i, beat in sorted(table.beats.items()) if beat.state == "left"]
    if left and still_secs > LEFT_SECS:
        return Verdict(f"{table.describe(left[0], now)}, before the run was over")
    if progress.phase == JOINING and 0 < timeouts.join_secs < still_secs:
        return Verdict(
            f"TensorFlow has not joined the workers for start_timeout={timeouts.join_secs:g} seconds, though they hear "
            f"each other ({table.describe_others(now)}): are the TCP ports of all open?",
            is_hang=True,
        )
    if progress.phase != JOINING and 0 < timeouts.hang_secs < still_secs:
        return Verdict(
            f"no step has ended for hang_timeout={timeouts.hang_secs:g} seconds; worker {table.worker} is at step "
            f"{progress.step} ({progress.phase}), {table.describe_others(now)}",
            is_hang=True,
        )
    return None


def find_failure(table: Liveness) -> Verdict | None:
    """Returns the reason why another worker failed, ended or died; None if none did."""
    beats = sorted(table.beats.items())
    for i, beat in beats:
        if beat.state == "failed":
            return Verdict(f"worker {i} failed at step {beat.step} ({beat.phase}): {beat.error}")
    for _, beat in beats:
        if beat.state == "ended":
            return Verdict(beat.error, beat.is_hang)
    for i, beat in beats:
        if beat.state == "alive" and i in table.closed:
            return Verdict(
                f"the process of worker {i} ({table.addresses[i]}) is gone without a word, last heard at step "
                f"{beat.step} ({beat.phase}): was it killed, or out of memory? Its own output may tell"
            )
    return None


def find_silence(table: Liveness, limit_secs: float, now: float) -> str:
    """Returns which worker has been silent for longer than a limit; "" if none. 0 is no limit."""
    for i, beat in sorted(table.beats.items()):
        if beat.state == "alive" and 0 < limit_secs < table.silent_secs(i, now):
            return table.describe(i, now)
    return ""


class Facts(NamedTuple):
    """Settings that must be the same on all workers, by name."""

    digests: dict[str, str]  # can be compared by those who know the secret
    values: dict[str, str]  # as they may be shown

    def find_difference(self, digests: Mapping[str, str]) -> tuple[str, str] | None:
        """Returns name and value of the first setting that the chief has otherwise, or one of the two has alone."""
        names = sorted({*self.digests, *digests})
        name = next((name for name in names if self.digests.get(name) != digests.get(name)), None)
        return None if name is None else (name, self.values.get(name, str(None)))

    def explain_difference(self, i: int, name: str, value: str) -> str:
        """Returns the sentence about a setting that worker `i` has otherwise than the chief."""
        here, value = self.values.get(name, str(None)), shorten(value, 200)
        return (
            f"Workers were started differently: {shorten(name, 100)} is {here} on worker 0 and "
            f"{f'another {value}' if here == value else value} on worker {i}; start all with the same command."
        )


def describe_facts(facts: Mapping[str, str], secret: str, secret_names: Collection[str] = ()) -> Facts:
    """Returns settings as they are sent: digests, and values cut to fit; a secret value appears nowhere.

    Without a secret of the workers a digest has no key, and who reads it can try all short values: a secret value is
    then not compared.

    Args:
        facts: settings that must be the same on all workers, by name.
        secret: of the workers; "": none.
        secret_names: the settings that are compared and never shown.
    """
    described = Facts({}, {})
    for name, value in facts.items():
        compared = value if secret or name not in secret_names else HIDDEN
        text = repr((name, compared)).encode(errors="backslashreplace")
        digest = hmac.digest(b"distloop" + secret.encode(), text, "sha256").hex()[:16]
        cut = shorten(value, 160)
        described.digests[name] = digest
        described.values[name] = HIDDEN if name in secret_names else cut if cut == value else f"{cut} ({digest})"
    return described


def shorten(text: str, max_bytes: int) -> str:
    """Returns a text in one line without control characters, cut to a length in UTF-8."""
    text = printable(text[: max_bytes + 1], keep="")
    data = text.encode(errors="backslashreplace")
    return text if len(data) <= max_bytes else f"{data[: max_bytes - 3].decode(errors='ignore')}..."
