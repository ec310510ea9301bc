"""A queue with randomly dying workers does each place of work exactly once."""

import random

import pytest

from specjax.rl.work import Group, WorkQueue, num_fitting

ERROR = RuntimeError("it is no more")


def work_of(count, size, max_deaths=3):
    groups = [range(start, min(start + size, count)) for start in range(0, count, size)]
    return WorkQueue(groups, max_deaths)


def take_all(work):
    return list(iter(work.take, None))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("has_deadly", [False, True])
def test_every_place_is_done_once_whoever_dies(seed, has_deadly):
    """Workers die at random, or at one place, which is reported after running work has ended."""
    chance = random.Random(seed)
    count, num_workers = chance.randrange(1, 30), chance.randrange(1, 6)
    work = work_of(count, chance.randrange(1, 8), max_deaths=3 if has_deadly else 1000)
    deadly, num_deaths = chance.randrange(count), 0
    busy, answered = [], []
    while work.is_left:
        while len(busy) < num_workers and (group := work.take()):
            assert work.deadly is None
            busy.append(group)
        group = busy.pop(chance.randrange(len(busy)))
        if deadly in group.places if has_deadly else chance.random() < 0.4:
            num_deaths += 1
            work.died(group, ERROR)
        else:
            work.done(group)
            answered += group.places
    assert not busy and work.take() is None and len(set(answered)) == len(answered)
    if has_deadly:
        assert work.deadly == (deadly, ERROR) and num_deaths == 3 and deadly not in answered
    else:
        assert work.deadly is None and sorted(answered) == list(range(count))


def test_what_a_dead_worker_had_is_next_in_order_and_one_by_one():
    work = work_of(6, 3)
    first = work.take()
    work.died(first, ERROR)
    assert take_all(work) == [Group((0,), 1), Group((1,), 1), Group((2,), 1), Group((3, 4, 5))]


def test_the_first_deadly_place_is_the_one_that_is_named():
    work = work_of(2, 1, max_deaths=1)
    first, second = take_all(work)
    assert work.is_left and work.take() is None
    other = RuntimeError("another")
    work.died(second, other)
    assert work.is_left  # the first is being done
    work.died(first, ERROR)
    assert work.deadly == (1, other) and not work.is_left


def test_a_group_is_ended_once():
    work = work_of(1, 1)
    group = work.take()
    work.done(group)
    assert not work.is_left
    with pytest.raises(KeyError):
        work.died(group, ERROR)


ROOM = [
    ({"CPU": 1}, [{"CPU": 2}], 2),
    ({"CPU": 1, "GPU": 1}, [{"CPU": 8, "GPU": 4}, {"CPU": 3, "GPU": 4}], 7),
    ({"GPU": 0.1}, [{"GPU": 0.3}], 3),  # 0.3 / 0.1 is just below
    ({"GPU": 8}, [{"GPU": 4}, {"GPU": 4}], 0),  # as many, but of two nodes
    ({"CPU": 1, "rack": 1}, [{"CPU": 8}], 0),
    ({"CPU": 0}, [{}], float("inf")),
    ({"CPU": 1}, [], 0),
]


@pytest.mark.parametrize("needs, nodes, expected", ROOM)
def test_workers_fit_where_a_node_has_all_they_need(needs, nodes, expected):
    assert num_fitting(needs, nodes) == expected
