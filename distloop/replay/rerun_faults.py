"""Was it the hardware? Takes the steps before a fault again, twice, from a copy of the state, and compares bits.

    trainer.fit(train, actions=[distloop.RerunFaults(every="1000 steps")])

The error then ends in what is to blame: code and data compute the same again, memory and chips that fail do not. The
model is the rerun state machine of Megatron-LM, which takes one step again; a number that memory has changed may do
harm some steps later, so all steps since the copy are taken.
"""

import dataclasses
import hashlib
from typing import Any, NamedTuple

from distloop.checkpoints.resume import RunCheckpoints
from distloop.data.numbered import NumberedDataset
from distloop.distributed import collectives
from distloop.errors import first_line
from distloop.model.saved_state import ReplicaComparison, ReplicasDifferError, SavedState
from distloop.model.state import TrainState
from distloop.run.overview import ForwardPass
from distloop.training.action import Action, Report
from distloop.training.loop import Diverged, Host
from distloop.training.window import Progress

_CHANGED = "memory or a chip has changed a number"
_DID_NOT_FAIL = "did not fail, with the same bits both times"


class _KeptState(NamedTuple):
    """The state of a run after a step, on the host."""

    values: dict[str, Any]
    average: Any
    position: dict[str, Any]  # in the data
    progress: Progress


class _Outcome(NamedTuple):
    """What came of the steps: whether there was the fault, and the digest of all variables."""

    has_fault: bool
    digest: str


class RerunFaults(Action):
    """Says whether code and data or the hardware is to blame, where a step fails or replicas differ.

        trainer.fit(train, actions=[distloop.RerunFaults(every="1000 steps")])

    Where a loss or gradient is not finite, a loss jumps (`on_divergence`), or replicas differ (`check_replicas_every`),
    the steps since the last copy of the state are taken again, twice, on the same devices, and the error ends in one of
    these: the same fault again, so code or data; no fault, so memory or a chip; or two results that differ, so an
    operation that is not deterministic, or hardware that still fails. A chip that always computes the same wrong number
    looks like code: replay the step on another machine. What other actions change after a copy is not done again.
    Under `on_divergence="rollback"`, a run whose steps did not fail again leaves out no batch: it goes back to the
    newest checkpoint that is no later than the copy, and ends with the error if there is none.
    """

    phase = "keeping a copy"
    name = "RerunFaults"

    def __init__(self, *, every: int | str = "10 min"):
        """Stores how often the state is copied to the host's memory, a duration; there is one copy at a time."""
        self.every: int | str | None = every
        self._call: Any = None  # a `FitCall`
        self._loop: Any = None
        self._copy: _KeptState | None = None

    def set_fit(self, call: Any, loop: Any, checkpoints: RunCheckpoints) -> None:
        """Copies the state that the run begins with.

        Raises:
            ValueError: if the data cannot be read again as it was, or there is another RerunFaults.
        """
        if sum(isinstance(action, RerunFaults) for action in call.actions) > 1:
            raise ValueError("Two RerunFaults were given, and each would take the steps again: give one.")
        if not isinstance(call.source.feed, NumberedDataset) and call.config.on_divergence != "rollback":
            raise ValueError(
                "RerunFaults was given data without numbers, whose order may be another when it is read again: give "
                "fit arrays or distloop.make_dataset, or set on_divergence='rollback'."
            )
        self._call, self._loop = call, loop
        self._copy = self._take_copy(checkpoints.progress)

    def __call__(self, report: Report) -> None:
        """Copies the state; all workers call it."""
        self._copy = self._take_copy(self._loop.progress)

    def on_end(self, report: Report) -> None:
        """Forgets the copy."""
        self._copy = None

    def on_error(self, error: Exception) -> None:
        """Adds to an error about replicas that differ what is to blame."""
        if isinstance(error, ReplicasDifferError):
            error.args = (f"{str(error).removesuffix('.')}{self.explain_fault(error, self._call.step)}.",)

    def explain_fault(self, error: Exception, step: int) -> str:
        """Returns what is to blame for a fault, to be put behind its sentence; all workers call it.

        If the hardware is, the sentence of a step that failed loses guess and advice, and its batch the blame.
        """
        kept, state, loop = self._copy, self._call.state, self._loop
        if kept is None or kept.progress.step >= step:
            return ""
        copies = [copy for variable in state.all_variables().values() for copy in state.replica_variables(variable)]
        before, may_be_saved, progress = [copy.numpy() for copy in copies], state.may_be_saved, loop.progress
        original = _Outcome(True, _digest(state))
        try:
            words = self._compare(original, [self._run_again(kept, error, step) for _ in range(2)])
        except Exception as failure:  # the first error is the one to be seen
            words = f"failed otherwise ({first_line(failure).removesuffix('.')})"
        finally:
            for copy, value in zip(copies, before, strict=True):
                copy.assign(value)
            state.may_be_saved, loop.progress = may_be_saved, progress
        if words.startswith(_DID_NOT_FAIL):
            words += f" from a checkpoint of step {kept.progress.step} or before"
            if isinstance(error, Diverged):
                error.right_until = kept.position["batches"]
                error.args = (str(error).partition("; ")[0],)  # `diagnosis` guesses and advises behind it
        return f"; taken again twice from step {kept.progress.step} on, it {words}"

    def _take_copy(self, progress: Progress) -> _KeptState:
        state, source = self._call.state, self._call.source
        average = None if state.average is None else state.average.get_state()
        at_step = dataclasses.replace(progress, step=self._call.step)
        return _KeptState(SavedState(state).snapshot(), average, source.position(), at_step)

    def _run_again(self, kept: _KeptState, error: Exception, step: int) -> _Outcome:
        """Takes the steps from the copy to the fault."""
        state, source, has_fault = self._call.state, self._call.source, False
        SavedState(state).restore(kept.values)
        if state.average is not None:
            state.average.set_state(kept.average)
        source.go_to(kept.position)
        host = Host(executor=ForwardPass(state, self._call.config).choose_executor(source))
        try:
            self._loop.train(source, step, [], host, kept.progress)
            if isinstance(error, ReplicasDifferError):
                ReplicaComparison(state, [*state.seeds, *state.recurrent_states]).require_equal(step, "")
        except Diverged as again:
            has_fault = again.step == step
        except ReplicasDifferError:
            has_fault = True
        return _Outcome(has_fault, _digest(state))

    def _compare(self, original: _Outcome, reruns: list[_Outcome]) -> str:
        """Returns how the reruns ended, and what is to blame."""
        one, other = reruns
        facts = one.has_fault and other.has_fault, one.digest == other.digest, one.digest == original.digest
        of_workers = collectives.gather(self._call.state.strategy, list(facts))
        is_fault, are_equal, is_original = (all(of) for of in zip(*of_workers, strict=True))
        if is_fault and are_equal and is_original:
            return "failed with the same bits: look at code and data, not at the hardware"
        if is_fault:
            return f"failed again with other bits: look at code and data first, but {_CHANGED}, too, or an action has"
        if one.has_fault == other.has_fault and are_equal:
            return f"{_DID_NOT_FAIL}: {_CHANGED}, so test the machine and go on elsewhere"
        return f"had two results: an operation is not deterministic (see deterministic=True), or {_CHANGED}"


def _digest(state: TrainState) -> str:
    """Returns a digest of the bits of all variables, on every replica of this worker."""
    digest = hashlib.sha256()
    for variable in state.all_variables().values():
        for copy in state.replica_variables(variable):
            digest.update(copy.numpy().tobytes())
    return digest.hexdigest()
