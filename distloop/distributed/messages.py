"""Messages: a worker's heartbeat as a signed datagram of one network frame, and back; no sockets, threads or clocks.

    messages = Messages(worker=0, secret="a random text that all workers share")
    facts = messages.describe_facts({"--steps": "5", "--token": "hf_1"}, secret_names={"--token"})
    data = messages.write(beat, table, now)                      # by the worker that it is for
    letter = messages.read(data[1], now)                         # on worker 1; raises NotCounted

A process has a random name, its *run*. Each datagram carries the runs of its writer and, once that is known, of its
reader, and a number that only grows. One that names this process is an *answer*: it was written since this process
began, and counts once. Any other one says only which run to answer. So a recorded datagram has no effect. Without a
secret nothing is signed, and the writer may be anyone.

Long parts (which runs a worker hears, digests of its settings) are spread over several datagrams. Texts of others are
escaped and cut here, before anything prints them. `liveness` decides what a heartbeat means.
"""

import hmac
import itertools
import json
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from distloop.distributed.liveness import Beat, Facts, Table
from distloop.log import printable

MAX_BYTES = 1_232  # of a datagram: IPv6 carries 1,280 over any link, less the headers of IPv6 and UDP
HIDDEN = "***"  # in place of a secret value

_STATES = ("alive", "failed", "ended", "left")
_MAX_RUNS = 10_000  # whose counters are kept
_SIGNATURE_BYTES = 64  # SHA-256 in hexadecimal digits


class NotCounted(ValueError):
    """The datagrams of a host do not count; the message says why."""


class Letter(NamedTuple):
    """A datagram as it was read."""

    worker: int  # that claims to have written it; signed if there is a secret
    run: str  # of the writer
    beat: Beat | None  # None if it is no answer to this process


class Messages:
    """Writes this worker's messages and reads those of the others.

    Attributes:
        run: the random name of this process.
        is_signed: whether there is a secret.
    """

    def __init__(self, worker: int, secret: str = ""):
        """Takes the index of this worker, and the secret that signs datagrams; "": none."""
        self.run = os.urandom(8).hex()
        self.is_signed = bool(secret)
        self._worker, self._key = worker, secret.encode()
        self._numbers = itertools.count(1)
        self._last_numbers: dict[tuple[int, str], int] = {}  # of the answers of each run
        self._cursor = 0  # of the long parts: where the next datagram begins

    def describe_facts(self, facts: Mapping[str, str], secret_names: Collection[str] = ()) -> Facts:
        """Returns settings as they are sent: digests, and values cut to fit; a secret value appears nowhere.

        Without a secret of the workers a digest has no key, and who reads it can try all short values: a secret value
        is then not compared.

        Args:
            facts: settings that must be the same on all workers, by name.
            secret_names: the settings that are compared and never shown.
        """
        digests, values = {}, {}
        for name, value in facts.items():
            digest = self._digest(name, value if self.is_signed or name not in secret_names else HIDDEN)
            cut = shorten(value, 160)
            shown = cut if cut == value else f"{cut} ({digest})"
            digests[shorten(name, 100)] = digest
            values[shorten(name, 100)] = HIDDEN if name in secret_names else shown
        return Facts(self._digest(*sorted(digests.items())), digests, values)

    def write(self, beat: Beat, table: Table, now: float) -> dict[int, bytes]:
        """Returns a datagram for each neighbor.

        Args:
            beat: of this worker; its `heard` and `facts` are not read.
            table: what this worker knows; until all have met, a part of it is sent.
            now: the time on the clock of the table.
        """
        body: dict[str, Any] = {"state": beat.state, "phase": shorten(beat.phase, 60), "step": beat.step}
        body |= {"error": shorten(beat.error, 400), "has_met": beat.has_met}
        if beat.state != "alive":
            body |= {"level": beat.level, "is_hang": beat.is_hang}
        if not table.have_all_met():
            body |= {"level": beat.level, "missing": shorten(beat.missing, 200), "facts": table.facts.digest}
            room = MAX_BYTES - _SIGNATURE_BYTES - len(self._encode(body, "0" * len(self.run)))
            for kind, name, text in self._next_items(table, room):
                body.setdefault(kind, {})[name] = text
        return {i: self._sign(self._encode(body, table.run_of(i, now))) for i in table.neighbors}

    def read(self, data: bytes, now: float) -> Letter:
        """Returns the contents of a datagram.

        Args:
            data: the datagram.
            now: the time on the clock of `Beat.received_at`.

        Raises:
            NotCounted: if the signature is missing or another one.
            Exception: of any kind, if another program wrote it.
        """
        m: dict[str, Any] = json.loads(self._verify(data))
        worker, run, number, step, level = m["worker"], m["run"], m["number"], m["step"], m.get("level", 0)
        is_whole = all(type(value) is int and 0 <= value < 2**63 for value in (worker, number, step, level))
        texts = [run, m["state"], m["phase"], m["error"], m["to"], m.get("missing", "")]
        if not is_whole or not all(isinstance(text, str) for text in texts) or m["state"] not in _STATES:
            raise ValueError
        run = shorten(run, 40)
        if m["to"] != self.run:
            return Letter(worker, run, None)
        if number <= self._last_numbers.get((worker, run), 0):
            raise ValueError("This datagram was counted before, or a later one was.")
        if len(self._last_numbers) >= _MAX_RUNS:  # without a secret, anyone can make up runs
            self._last_numbers.clear()
        self._last_numbers[worker, run] = number
        heard, digests, values = (
            {shorten(str(k), 100): shorten(str(v), 200) for k, v in m.get(name, {}).items()}
            for name in ("heard", "digests", "values")
        )
        facts = Facts(shorten(str(m.get("facts", "")), 40), digests, values)
        phase, error, missing = shorten(m["phase"], 60), shorten(m["error"], 400), shorten(m.get("missing", ""), 200)
        has_met, is_hang = bool(m["has_met"]), bool(m.get("is_hang", True))
        beat = Beat(run, m["state"], phase, step, error, has_met, heard, facts, now, level, missing, is_hang)
        return Letter(worker, run, beat)

    def _next_items(self, table: Table, room_bytes: int) -> Iterator[tuple[str, str, str]]:
        """Yields the next items of the long parts that fit, as name of the part, key and text; values come first."""
        others = [beat.facts for beat in table.beats.values()]
        differing = sorted({name for facts in others for name in table.facts.differing(facts)})
        urgent = [("values", name, table.facts.values.get(name, str(None))) for name in differing]
        items = [("heard", str(i), beat.run) for i, beat in table.beats.items()]
        if any(facts.digest != table.facts.digest for facts in others):
            digests = {**dict.fromkeys(differing, ""), **table.facts.digests}
            items += [("digests", name, digest) for name, digest in digests.items()]
        begin = self._cursor % max(1, len(items))
        room_bytes -= len(b'"heard":{},"digests":{},"values":{},')
        for count, item in enumerate([*urgent, *items[begin:], *items[:begin]]):
            room_bytes -= len(json.dumps(item[1:], ensure_ascii=False).encode())
            if room_bytes < 0:
                return
            self._cursor = begin + max(0, count + 1 - len(urgent))
            yield item

    def _encode(self, body: Mapping[str, Any], receiver: str) -> bytes:
        envelope = {"worker": self._worker, "run": self.run, "to": receiver, "number": next(self._numbers)}
        return json.dumps({**envelope, **body}, ensure_ascii=False, separators=(",", ":")).encode()

    def _digest(self, *parts: Any) -> str:
        """Returns a digest that can be compared by those who know the secret."""
        return hmac.digest(b"distloop" + self._key, repr(parts).encode(errors="backslashreplace"), "sha256").hex()[:16]

    def _sign(self, text: bytes) -> bytes:
        return self._signature(text) + text

    def _signature(self, text: bytes) -> bytes:
        return hmac.digest(self._key, text, "sha256").hex().encode() if self.is_signed else b""

    def _verify(self, data: bytes) -> bytes:
        """Returns the text of a datagram, without its signature."""
        if not self.is_signed:
            if data[:1] != b"{" and data[_SIGNATURE_BYTES : _SIGNATURE_BYTES + 1] == b"{":
                raise NotCounted("they are signed, and this worker has no DISTLOOP_SECRET")
            return data
        signature, text = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
        if data[:1] == b"{":
            raise NotCounted("they are not signed, and this worker has a DISTLOOP_SECRET")
        if not hmac.compare_digest(signature, self._signature(text)):
            raise NotCounted("they are not signed with the DISTLOOP_SECRET of this worker")
        return text


def shorten(text: str, max_bytes: int) -> str:
    """Returns a text in one line without control characters, cut to a length in UTF-8."""
    text = printable(text[: max_bytes + 1], keep="")
    data = text.encode()
    return text if len(data) <= max_bytes else f"{data[: max_bytes - 3].decode(errors='ignore')}..."
