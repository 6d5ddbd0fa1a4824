"""Stands between the scheduler and a capacity policy of somebody's own: what cannot be carried out is refused in words.

A choice that names a request twice, or runs one that it pauses, would not stop the scheduler. It would compute wrong
tokens.
"""

from collections.abc import Iterable

from trtcb.errors import UsageError
from trtcb.executor.active_list import ActiveList
from trtcb.executor.policies import CapacityPolicy, Choice
from trtcb.executor.sequence import Sequence


class OwnPolicy:
    """Asks ``policy``, and checks what it answers.

    Blocks are not counted here: a policy that promises more than there are ends the engine when they are taken.
    """

    def __init__(self, policy: CapacityPolicy) -> None:
        self._policy = policy
        self._name = type(policy).__name__

    def select(self, active: ActiveList) -> Choice:
        """Return the policy's choice; raises ``UsageError`` for one that breaks its rules."""
        choice = self._choice(active)
        running = set(active.running)
        self._check_listed("fitting", choice.fitting)
        self._check_listed("paused", choice.paused)
        for seq in choice.paused:
            if seq not in running:
                raise self._error(f"pauses request {seq.request_id}, which is not running: pause others")
        paused = set(choice.paused)
        num_starts = 0
        for seq in choice.fitting:
            if seq in paused:
                raise self._error(f"runs request {seq.request_id} and pauses it in one step: do one of them")
            if seq not in running:
                if seq.ended or seq not in active.waiting:
                    raise self._error(f"runs request {seq.request_id}, which is not in the active list: leave it out")
                num_starts += 1
        num_places = active.max_requests - len(running) + len(paused)
        if num_starts > num_places:
            raise self._error(f"starts {num_starts} requests, but the batch has {num_places} places: start fewer")
        return choice

    def _choice(self, active: ActiveList) -> Choice:
        answer = self._policy.select(active)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise self._error("answers something else than a Choice(fitting, paused): return one")
        fitting, paused = answer
        if not (isinstance(fitting, Iterable) and isinstance(paused, Iterable)):
            raise self._error("answers something else than two lists: return Choice(fitting, paused)")
        return Choice(list(fitting), list(paused))  # copies: a policy may keep and change its own

    def _check_listed(self, what: str, listed: list[Sequence]) -> None:
        for seq in listed:
            if not isinstance(seq, Sequence):
                raise self._error(f"lists something as {what} that is no sequence: take them from the active list")
        if len(set(listed)) != len(listed):
            raise self._error(f"lists a request as {what} twice: list each once")

    def _error(self, fault: str) -> UsageError:
        return UsageError(f"scheduler_policy {self._name} {fault}.")
