"""`Turns`, a fair lock: one thread at a time, every thread in turn, and waiting."""

import threading
import time

from specjax.rl.turns import Turns


def test_a_thread_that_waits_comes_before_the_last_owner():
    """With a plain lock, the owner would nearly always get the lock again."""
    turns, order = Turns(), []

    def wait():
        with turns:
            order.append("waiting")

    for _ in range(10):
        thread = threading.Thread(target=wait)
        with turns:
            thread.start()
            end = time.monotonic() + 30
            while not turns._gate.locked():  # a thread that waits holds the gate
                assert time.monotonic() < end
                time.sleep(0.001)
        with turns:
            order.append("owner")
        thread.join(30)
    assert order == ["waiting", "owner"] * 10


def test_one_at_a_time_and_nothing_is_missed():
    """Four threads count up in turn; each waits for its next number."""
    turns, number, seen, inside = Turns(), [0], [], [0]

    def take(mine):
        for round_number in range(50):
            with turns:
                turns.wait_for(lambda goal=4 * round_number + mine: number[0] == goal)
                inside[0] += 1
                assert inside[0] == 1
                seen.append(mine)
                number[0] += 1
                inside[0] -= 1

    threads = [threading.Thread(target=take, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [0, 1, 2, 3] * 50


def test_whose_turn_it_is():
    turns, found = Turns(), []
    with turns:
        assert turns.is_mine
        thread = threading.Thread(target=lambda: found.append(turns.is_mine))
        thread.start()
        thread.join()
    assert found == [False] and not turns.is_mine
