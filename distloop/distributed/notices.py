"""Notices: this process is asked to stop, by SIGTERM, when Google Compute Engine announces that its machine goes.

    with watched():
        ...

The metadata server of the machine is asked for what `TerminationConfig` of `tf.distribute` looks at, a maintenance that
ends the machine, and for a preemption. Elsewhere nothing is asked. Of a launcher and its workers the launcher asks. It
does not know what follows from the signal.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from distloop.distributed import output
from distloop.distributed.notes import find_membership

_POLL_SECS = 1.0
_TIMEOUT_SECS = 5.0
_PRODUCT = "/sys/class/dmi/id/product_name"
_ANNOUNCED = {"instance/preempted": "TRUE", "instance/maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Sends this process SIGTERM, once, when its machine is announced to go; does nothing in a launcher's worker."""
    is_over = threading.Event()
    if find_membership() is None and (server := _find_server()):
        threading.Thread(target=_watch, args=(server, is_over), name="distloop-notices", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _find_server() -> str:
    """Returns the metadata server, by the variable that Google's and TensorFlow's libraries read; "" elsewhere."""
    if address := os.environ.get("GCE_METADATA_IP"):
        return address
    try:
        with open(_PRODUCT, encoding="utf-8") as file:
            return "metadata.google.internal" if file.read().startswith("Google") else ""
    except OSError:
        return ""


def _watch(server: str, is_over: threading.Event) -> None:
    while not is_over.wait(_POLL_SECS):
        for name, value in _ANNOUNCED.items():
            if _read(server, name) == value and not is_over.is_set():
                output.say(f"distloop: {name} is {value}: this machine is about to go.", 0.1)
                os.kill(os.getpid(), signal.SIGTERM)
                return


def _read(server: str, name: str) -> str:
    """Returns a value of this machine's metadata; empty if the server does not answer."""
    import urllib.request  # takes a tenth of a second

    url = f"http://{server}/computeMetadata/v1/{name}"
    try:
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECS) as answer:
            return str(answer.read().decode(errors="replace"))
    except (OSError, ValueError):
        return ""
