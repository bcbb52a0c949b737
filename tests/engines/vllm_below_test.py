"""kvpool_vllm.below without vLLM: who is left out of a step, for how long, and what becomes of what comes."""

import types

import pytest

import kvpool
from kvpool_vllm import below

WAIT_MS = 1000


class Pending:
    """A match on its way."""

    def __init__(self, wait_ms):
        self.wait_ms, self.hit, self.patience = wait_ms, None, None

    def wait(self, timeout):
        self.patience = timeout
        if self.hit is None:
            raise kvpool.DeadlineExceededError("it has not come")
        return self.hit


class Session:
    def __init__(self):
        self.asked, self.full = [], False

    def match_groups(self, question, *, wait_ms):
        if self.full:
            raise kvpool.ResourceExhaustedError("too much is on its way")
        self.asked.append(Pending(wait_ms))
        return self.asked[-1]


class Scheduler:
    def __init__(self, connector=None, running=()):
        self.connector, self.running, self.waiting = connector, list(running), 1

    def get_request_counts(self):
        return len(self.running), self.waiting


def hit(tokens, below_tokens=0, miss="evicted", may_be_below=False):
    return types.SimpleNamespace(tokens=tokens, below_tokens=below_tokens, miss=miss, may_be_below=may_be_below)


def request(name):
    return types.SimpleNamespace(request_id=name, kvpool_asked=0)


def question(blocks=4):
    return [(0, [bytes(32)] * blocks)]


@pytest.fixture
def clock(monkeypatch):
    now = types.SimpleNamespace(at=100.0)
    monkeypatch.setattr(below, "time", types.SimpleNamespace(monotonic=lambda: now.at))
    return now


@pytest.fixture
def counters():
    return {}


@pytest.fixture
def waits(clock, counters):
    return below.Below(WAIT_MS, 100, counters)


def step(waits, session, *requests, scheduler=None, take=lambda hit, question: None):
    """Names of those that a scheduler leaves out."""
    scheduler = scheduler or Scheduler(running=["another"])
    out = []
    with waits.planning(scheduler):
        for each in requests:
            waits.is_coming(session, each, take)
            if scheduler.connector.get_num_new_matched_tokens(each, 0) == (None, False):
                out.append(each.request_id)
    return out


def test_left_out_until_all_has_come(waits, counters, clock):
    session, one, taken = Session(), request("one"), []
    assert waits.prefetches(one, question()) and not waits.prefetches(one, question())
    waits.pool_has(one, question(), hit(32, below_tokens=64))
    assert session.asked == []
    assert step(waits, session, one) == ["one"]
    (pending,) = session.asked
    assert pending.wait_ms == WAIT_MS and pending.patience == 0  # Others are there to go on with.
    clock.at += 0.5
    assert step(waits, session, one) == ["one"]
    pending.hit = hit(96, miss="none")
    assert step(waits, session, one, take=lambda *what: taken.append(what)) == []
    assert taken == [(pending.hit, question())]
    assert counters == {"waited_requests": 1, "promoted_tokens": 64, "late_waits": 0}
    # It asks once, however often it is looked at.
    waits.pool_has(one, question(), hit(32, below_tokens=64))
    assert step(waits, session, one) == [] and len(session.asked) == 1
    # Unless it is queued again.
    waits.let_go("one")
    waits.pool_has(one, question(), hit(32, below_tokens=64))
    assert step(waits, session, one) == ["one"] and len(session.asked) == 2


def test_late_at_the_end_of_the_time(waits, counters, clock):
    """That begins when a step is planned without the request."""
    session, one = Session(), request("one")
    waits.pool_has(one, question(), hit(0, below_tokens=64))
    clock.at += 5
    assert step(waits, session, one) == ["one"]
    clock.at += WAIT_MS / 1000 - 0.001
    assert step(waits, session, one) == ["one"] and one.kvpool_asked == 0
    clock.at += 0.001
    assert step(waits, session, one) == [] and one.kvpool_asked is None  # What has come of it is found.
    assert counters == {"waited_requests": 1, "promoted_tokens": 0, "late_waits": 1}


def test_what_the_daemon_gives_up_is_late(waits, counters):
    session, one = Session(), request("one")
    waits.pool_has(one, question(), hit(0, below_tokens=64))
    assert step(waits, session, one) == ["one"]
    session.asked[0].hit = hit(32, below_tokens=32)
    assert step(waits, session, one) == []
    assert counters == {"waited_requests": 1, "promoted_tokens": 32, "late_waits": 1}


def test_nothing_is_asked_where_nothing_is_below(waits, counters):
    session, one = Session(), request("one")
    assert waits.prefetches(one, question())
    waits.pool_has(one, question(), hit(32, miss="never_seen"))
    assert step(waits, session, one) == [] and session.asked == []
    waits.pool_has(one, question(), hit(32, below_tokens=96))  # It has left the pool since, and was asked for again.
    assert step(waits, session, one) == ["one"]


def test_an_idle_engine_waits_for_answers_and_not_long(waits):
    session, one = Session(), request("one")
    waits.pool_has(one, question(), hit(0, below_tokens=64))
    assert step(waits, session, one, scheduler=Scheduler()) == ["one"]
    assert 0 < session.asked[0].patience <= 0.002


def test_a_store_that_has_not_said_is_waited_for(waits, counters):
    session, one, taken = Session(), request("one"), []
    waits.pool_has(one, question(), hit(0, miss="never_seen", may_be_below=True))
    assert step(waits, session, one) == ["one"]
    (pending,) = session.asked
    assert 0 < pending.patience <= 0.002  # If nothing is there the answer is here, or nearly so.
    pending.hit = hit(64, miss="never_seen")
    assert step(waits, session, one, take=lambda *what: taken.append(what)) == [] and len(taken) == 1
    assert counters == {"waited_requests": 1, "promoted_tokens": 64, "late_waits": 0}


def test_a_store_is_not_asked_with_all_in_the_pool(waits, counters):
    session, one = Session(), request("one")
    assert waits.prefetches(one, question())
    waits.pool_has(one, question(), hit(128, miss="none"))
    assert step(waits, session, one) == [] and session.asked == []
    assert waits.asking() == [] and counters["promoted_tokens"] == 0


def test_only_more_than_it_holds_is_taken(waits):
    """An answer that says the same again costs the daemon nothing but the holds that go back with it."""
    session, one, taken = Session(), request("one"), []
    waits.pool_has(one, question(), hit(32, miss="never_seen", may_be_below=True))
    assert step(waits, session, one) == ["one"]
    session.asked[0].hit = hit(32, miss="never_seen")
    assert step(waits, session, one, take=lambda *what: taken.append(what)) == [] and not taken
    # It does not hold what gave way.
    waits.let_go("one")
    waits.pool_has(one, question(), hit(32, below_tokens=32))
    waits.give_way("one")
    session.match_groups = lambda question, wait_ms: types.SimpleNamespace(wait=lambda timeout: hit(32, miss="evicted"))
    assert step(waits, session, one, take=lambda *what: taken.append(what)) == [] and len(taken) == 1


def test_what_is_below_takes_turns(waits, clock):
    """100 blocks come up at once, or one request's."""
    session, requests = Session(), [request(str(i)) for i in range(4)]
    sizes = (150, 60, 40, 10)
    assert [waits.prefetches(each, question(size)) for each, size in zip(requests, sizes)] == [True, False, False, False]
    for each, size in zip(requests, sizes):
        waits.pool_has(each, question(size), hit(0, below_tokens=32 * size))
    assert step(waits, session, *requests) == ["0", "1", "2", "3"] and len(session.asked) == 1
    session.asked[0].hit = hit(32 * 150, miss="none")
    clock.at += 0.25
    assert step(waits, session, *requests) == ["1", "2", "3"] and len(session.asked) == 3
    assert [pending.wait_ms for pending in session.asked] == [1000, 750, 750]  # What is left of their time.
    for pending in session.asked[1:]:
        pending.hit = hit(1, miss="none")
    assert step(waits, session, *requests) == ["3"] and len(session.asked) == 4


def test_as_many_wait_as_the_daemon_takes(clock):
    waits, session = below.Below(WAIT_MS, 1 << 30, {}), Session()
    requests = [request(str(i)) for i in range(80)]
    assert sum(waits.prefetches(each, question()) for each in requests) == 16  # Before it is their turn.
    for each in requests:
        waits.pool_has(each, question(), hit(0, below_tokens=128))
    assert len(step(waits, session, *requests)) == 64 and len(session.asked) == 48
    for pending in session.asked[:10]:
        pending.hit = hit(128, miss="none")
    assert len(step(waits, session, *requests)) == 54  # The others went on.
    assert len(waits.asking()) == 48
    clock.at += 2
    assert step(waits, session, *requests) == [] and waits.asking() == []


def test_who_is_not_at_his_turn_keeps_nobody_waiting_who_is(waits):
    session, ahead, first = Session(), [request(str(i)) for i in range(20)], request("first")
    assert sum(waits.prefetches(each, question(50)) for each in ahead) == 1  # Half the room.
    waits.pool_has(first, question(100), hit(0, below_tokens=3200))
    assert step(waits, session, first) == ["first"] and len(session.asked) == 1


def test_who_gave_way_asks_again_in_the_time_that_is_left(waits, clock, counters):
    session, one = Session(), request("one")
    waits.pool_has(one, question(), hit(0, below_tokens=64))
    assert step(waits, session, one) == ["one"] and waits.asking() == ["one"]
    waits.give_way("one")
    assert waits.asking() == []
    clock.at += 0.9
    assert step(waits, session, one) == ["one"] and session.asked[1].wait_ms == pytest.approx(100, abs=1)
    waits.give_way("one")
    clock.at += 0.2
    assert step(waits, session, one) == [] and len(session.asked) == 2 and counters["late_waits"] == 1


def test_a_session_that_takes_no_more_questions(waits):
    session, one = Session(), request("one")
    session.full = True
    waits.pool_has(one, question(), hit(0, below_tokens=64))
    assert step(waits, session, one) == ["one"] and session.asked == []
    session.full = False
    assert step(waits, session, one) == ["one"] and len(session.asked) == 1


def test_a_session_that_is_over(waits):
    session, one = Session(), request("one")
    waits.pool_has(one, question(), hit(0, below_tokens=64))
    assert step(waits, session, one) == ["one"]

    def over(timeout):
        raise kvpool.UnavailableError("the daemon is gone")

    session.asked[0].wait = over
    with pytest.raises(kvpool.UnavailableError):
        step(waits, session, one)
    waits.clear()
    assert step(waits, session, one) == [] and not waits.requests()


def test_nobody_waits_outside_of_a_step(waits, counters):
    """A manager of KV caches may be asked by others than its scheduler, who can't leave out a request."""
    session, one = Session(), request("one")
    waits.pool_has(one, question(), hit(0, below_tokens=64))
    assert not waits.is_coming(session, one, lambda hit, question: None)
    assert counters == {"waited_requests": 0, "promoted_tokens": 0, "late_waits": 0} and waits.asking() == []


def test_nobody_waits_who_is_not_to(clock, counters):
    waits, session, one, scheduler = below.Below(0, 100, counters), Session(), request("one"), Scheduler()
    assert not waits.prefetches(one, question())
    waits.pool_has(one, question(), hit(0, below_tokens=64))
    with waits.planning(scheduler):
        assert scheduler.connector is None and not waits.is_coming(session, one, lambda hit, question: None)
    assert session.asked == [] and not waits.requests()


class Connector:
    def __init__(self):
        self.loads = 96

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self.loads, True

    def another_method(self):
        return "what it says"


def test_another_connector_is_asked_when_nothing_is_on_its_way(waits):
    session, one, other = Session(), request("one"), request("other")
    connector = Connector()
    scheduler = Scheduler(connector)
    waits.pool_has(one, question(), hit(0, below_tokens=64))
    with waits.planning(scheduler):
        assert scheduler.connector.another_method() == "what it says"
        for each in (one, other):
            waits.is_coming(session, each, lambda hit, question: None)
        assert scheduler.connector.get_num_new_matched_tokens(one, 0) == (None, False)
        assert scheduler.connector.get_num_new_matched_tokens(other, 0) == (96, True)
    assert scheduler.connector is connector


def test_a_step_without_waiting_requests_is_planned_as_ever(waits):
    scheduler = Scheduler()
    scheduler.waiting = 0
    with waits.planning(scheduler):
        assert scheduler.connector is None
    scheduler.waiting = 1
    with pytest.raises(RuntimeError), waits.planning(scheduler):
        raise RuntimeError("in a step")
    assert scheduler.connector is None
