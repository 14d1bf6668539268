"""Where the time of each pool goes: an integral over a state that changes at events."""

from __future__ import annotations

from dataclasses import dataclass, field

IDLE = ("tail", "weights", "turn", "sync", "reward", "data", "routing")
"""Why a generation slot or the trainer is idle.

tail      rollouts of the batch that the trainer waits for still run, fewer than there are slots
weights   a step trains, and no more rollouts may start before its weights come
turn      the trainer uses the device that the slot is on
sync      weights are on their way
reward    only scoring is left to do
data      slots: nothing to start and nothing going on; trainer: it waits for rollouts
routing   rollouts queue at one engine while another has a free slot
"""


@dataclass(slots=True)
class Meter:
    """Integrates what ``num_slots`` generation slots and one trainer do, in slot- and seconds."""

    num_slots: int
    at_s: float = 0.0
    busy: int = 0  # slots that decode
    queued: int = 0  # rollouts that wait for a slot
    scoring: int = 0  # groups
    training: bool = False
    syncing: bool = False
    held: bool = False  # engines stand still for new weights
    taken: int = 0  # slots whose devices the trainer uses
    idle_engines: int = 0  # on which nothing runs
    busy_slot_s: float = 0.0
    low_s: float = 0.0  # with less than a quarter of the slots busy
    idle_engine_s: float = 0.0
    train_s: float = 0.0
    slot_idle_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(IDLE, 0.0))
    train_idle_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(IDLE, 0.0))

    def advance(self, now_s: float) -> None:
        """Account for the time up to now. Call it before each change of the fields."""
        spent = now_s - self.at_s
        if spent <= 0:
            return
        self.at_s = now_s
        slots, taken = self.num_slots, self.taken
        busy = 0 if self.held or taken >= slots else self.busy
        self.busy_slot_s += busy * spent
        self.idle_engine_s += self.idle_engines * spent
        if 4 * busy < slots:
            self.low_s += spent
        if taken:
            taken = min(taken, slots - busy)
            self.slot_idle_s["sync" if self.syncing else "turn"] += taken * spent
        if busy + taken < slots:
            self.slot_idle_s[self._slot_reason()] += (slots - busy - taken) * spent
        if self.training:
            self.train_s += spent
        else:
            self.train_idle_s[self._trainer_reason()] += spent

    def _slot_reason(self) -> str:
        if self.held:
            return "sync"
        if self.queued:
            return "routing"
        if self.training:
            return "weights"
        if self.syncing:
            return "sync"
        if self.busy:
            return "tail"
        return "reward" if self.scoring else "data"

    def _trainer_reason(self) -> str:
        if self.syncing:
            return "sync"
        if self.scoring and not (self.busy or self.queued):
            return "reward"
        return "data"
