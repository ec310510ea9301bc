"""A queue whose workers die at random still has every place done once."""

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
def test_every_place_is_done_once_whoever_dies(seed):
    chance = random.Random(seed)
    count, num_workers = chance.randrange(30), chance.randrange(1, 6)
    work = work_of(count, chance.randrange(1, 8), max_deaths=1000)
    busy, answered = [], []
    while work.is_left:
        while len(busy) < num_workers and (group := work.take()):
            busy.append(group)
        group = busy.pop(chance.randrange(len(busy)))
        if chance.random() < 0.4:
            work.died(group, ERROR)
        else:
            work.done(group)
            answered += group.places
    assert not busy and sorted(answered) == list(range(count))
    assert work.deadly is None and work.take() is None


@pytest.mark.parametrize("seed", range(20))
def test_a_deadly_place_is_named_and_what_runs_is_waited_for(seed):
    chance = random.Random(seed)
    work = work_of(12, 4)
    deadly, num_deaths = chance.randrange(12), 0
    busy, answered = [], []
    while work.is_left:
        while len(busy) < 2 and (group := work.take()):
            assert work.deadly is None
            busy.append(group)
        group = busy.pop(chance.randrange(len(busy)))
        if deadly in group.places:
            num_deaths += 1
            work.died(group, ERROR)
        else:
            work.done(group)
            answered += group.places
    assert not busy and work.deadly == (deadly, ERROR) and num_deaths == 3
    assert deadly not in answered and len(set(answered)) == len(answered)


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


@pytest.mark.parametrize(
    "needs, nodes, expected",
    [
        ({"CPU": 1}, [{"CPU": 2}], 2),
        ({"CPU": 1, "GPU": 1}, [{"CPU": 8, "GPU": 4}, {"CPU": 3, "GPU": 4}], 7),
        ({"GPU": 0.1}, [{"GPU": 1}], 10),  # 0.3 / 0.1 and the like are just below
        ({"GPU": 0.1}, [{"GPU": 0.3}], 3),
        ({"GPU": 8}, [{"GPU": 4}, {"GPU": 4}], 0),  # as many, but of two nodes
        ({"CPU": 1, "rack": 1}, [{"CPU": 8}], 0),
        ({"CPU": 0}, [{}], float("inf")),
        ({"CPU": 1}, [], 0),
    ],
)
def test_workers_fit_where_a_node_has_all_they_need(needs, nodes, expected):
    assert num_fitting(needs, nodes) == expected
