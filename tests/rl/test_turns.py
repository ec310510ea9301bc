"""Turns: one at a time, for everyone, with waiting in between."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from specjax.rl.turns import Turns


def test_a_loop_lets_others_in():
    """A plain lock would nearly always go back to the loop."""
    turns, stop = Turns(), threading.Event()

    def loop():
        while not stop.is_set():
            with turns:
                time.sleep(0.002)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(loop)
        start = time.perf_counter()
        for _ in range(20):
            with turns:
                pass
        seconds = time.perf_counter() - start
        stop.set()
    assert seconds < 20 * 0.02  # each waits for one round of the loop, give or take


def test_one_at_a_time_and_nothing_is_missed():
    """Four threads pass a number on; each waits for its own to come up."""
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

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(take, range(4), timeout=30))
    assert seen == [0, 1, 2, 3] * 50


def test_whose_turn_it_is():
    turns = Turns()
    with turns, ThreadPoolExecutor(1) as pool:
        assert turns.is_mine and not pool.submit(lambda: turns.is_mine).result()
    assert not turns.is_mine
