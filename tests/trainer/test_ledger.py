"""A group is trained once it went through a training step, not when it was put in a batch."""

import queue
from types import SimpleNamespace

from bucket_grpo.trainer.ledger import STALE, Ledger, ObservedQueue


def test_a_collated_group_is_not_trained_until_its_step_is_done() -> None:
    ledger = Ledger()
    ledger.update(group for group in (0, 1))
    ledger.update({2})
    assert (len(ledger), 0 in ledger) == (0, False)
    ledger.commit()
    assert set(ledger) == {0, 1}
    ledger.commit()
    assert set(ledger) == {0, 1, 2}


def test_each_group_is_trained_or_dropped_never_both() -> None:
    ledger = Ledger()
    ledger.drop(0, STALE)  # one stale sample; the rest of the group is trained
    ledger.drop(1, STALE)
    ledger.update({0})
    ledger.commit()
    ledger.drop(0, STALE)
    assert (set(ledger), ledger.dropped) == ({0}, {1: STALE})


def test_the_observer_sees_every_sample_before_the_trainer() -> None:
    seen: list[object] = []
    inner: queue.Queue[object] = queue.Queue()
    observed = ObservedQueue(inner, seen.append)
    sample = SimpleNamespace(group_id=3)
    observed.put_nowait(sample)
    assert observed.qsize() == 1
    assert observed.get(timeout=1) is sample
    assert seen == [sample]
