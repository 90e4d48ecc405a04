"""A model of the job's state machine beside the store's real functions: whatever is called in whatever order, both say
the same, and the invariants hold after every call.

Workers come and go, messages are late, doubled and out of order, leases lapse, clients cancel and erase, the
reconciler sweeps and settles, and dies between its two steps. A failing run is printed as a script of calls, and
replayed by the seed that is printed with it.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
import redis
from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from brokers import calls, connect, entries, names
from brokers.job import Content, Control, FinishReason, Job, Kind, Lane, State, new_job_id
from brokers.settings import Region, Settings
from tests.faults.conftest import Tell
from tests.faults.rig import REGION, Servers
from tests.faults.sizes import sizes

_LEASE_MS = 600_000  # a lease lapses when a rule says so, never by itself
_PROMPT_TOKENS = 3
_STRIKES, _CRASHES = 3, 20
_STEPS = 60
_OWNER = "whoever owns it"
_tokens = st.sampled_from([_OWNER, _OWNER, _OWNER, "ann", "bob", "cid"])
_rarely = st.sampled_from([False] * 11 + [True])  # what ends a job, so that most live long enough to see something
_OVER = frozenset({"succeeded", "failed", "cancelled", "expired", "withdrawn", "erased"})


class JobMachine(RuleBasedStateMachine):
    """One job, three workers, its messages, and a reconciler."""

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        super().__init__()
        self.client, self.settings = client, settings
        now_ms = int(time.time() * 1000)
        job_id = new_job_id(REGION)
        self.job = Job(
            id=job_id,
            tenant="m" + job_id[-20:],
            kind=Kind.TEXT,
            model="scripted",
            lane=Lane.STANDARD,
            home=REGION,
            place=REGION,
            state=State.ACCEPTED,
            created_ms=now_ms,
            deadline_ms=now_ms + 3_600_000,
            prompt_tokens=_PROMPT_TOKENS,
        )
        self.keys = calls.keys(self.job, settings.partitions)
        # What the store must say.
        self.state = ""  # no record
        self.gen = 1
        self.pos = 0
        self.attempt = 0
        self.owner: str | None = None
        self.lease = False
        self.cancel_asked = False
        self.overdue = False
        self.began = False
        self.struck_at, self.strikes, self.crashes = -1, 0, 0
        self.used = self.settled = False
        self.text = ""
        self.digest = entries.Digest()
        # What went before.
        self.published = [1]  # generations of the messages that are under way, old ones included
        self.owed: list[calls.Settle] = []
        self.counted = False

    # --- the API ----------------------------------------------------------------------------------------------

    @initialize(before_its_record=_rarely)
    def arrive(self, before_its_record: bool) -> None:
        if not before_its_record:
            self.create()
            self.confirm()

    @rule()
    def create(self) -> None:
        made = self._call(calls.create(self.job, b"sealed", self.keys, self.settings))
        assert made == (self.state == "")
        self.state = self.state or "accepted"

    @precondition(lambda self: self.state)
    @rule()
    def confirm(self) -> None:
        if self.state == "accepted":
            self.state = "queued"
        assert self._call(calls.queued(self.job, self.keys, self.settings)) == self.state

    @precondition(lambda self: self.state)
    @rule()
    def withdraw(self) -> None:
        never_ran = self.state == "accepted" and not self.attempt
        assert self._call(calls.withdraw(self.job, self.keys)) == never_ran
        if never_ran:
            self.state = "withdrawn"

    @rule(really=_rarely)
    def cancel(self, really: bool) -> None:
        if not really:
            return
        answer = self._call(calls.cancel(self.job, self.keys))
        if self.state and self.state not in _OVER:
            self.cancel_asked = True
            if not (self.owner and self.lease):
                self._end("cancelled")
        assert answer == (self.state or None)

    @precondition(lambda self: self.state)
    @rule(really=_rarely)
    def erase(self, really: bool) -> None:
        if not really:
            return
        if self.state not in _OVER:
            self._end("cancelled")
        self.state = "erased"
        assert self._call(calls.erase(self.job, self.keys, self.settings)) == "erased"

    # --- the workers ------------------------------------------------------------------------------------------

    @rule(token=_tokens, data=st.data())
    def claim(self, token: str, data: st.DataObject) -> None:
        token = self._who(token)
        gen = data.draw(st.sampled_from(self.published), label="gen")
        message = msgspec.structs.replace(self.job, gen=gen)
        answer = self._call(calls.claim(message, self.keys, worker=token, token=token, lease_ms=_LEASE_MS))
        match answer:
            case calls.Claimed():
                assert self._may_claim(gen) == "claimed"
                self.attempt += 1
                suspect = self.strikes == _STRIKES - 1 and self.struck_at == self.pos
                assert answer == calls.Claimed(self.pos, self.attempt, b"sealed", suspect)
                self.state, self.owner, self.lease, self.began = "running", token, True, False
            case calls.Ended(state):
                wanted = self._may_claim(gen)
                if self.state not in _OVER:
                    self._end(wanted)
                assert state == self.state == wanted
            case calls.Poison():
                assert self._may_claim(gen) == "poison"
                if self.state not in _OVER:
                    self._end("failed")
            case _:
                assert type(answer).__name__.lower() == self._may_claim(gen)

    def _may_claim(self, gen: int) -> str:
        """What a claim must be told. Counts a strike when it is one."""
        if not self.state:
            return "gone"
        if self.state in _OVER:  # a failed one was poison: nothing else fails here
            return "poison" if self.state == "failed" else self.state
        if gen < self.gen:
            return "stale"
        if self.owner and self.lease:
            return "busy"
        return self._ends_unowned("poison") or "claimed"

    def _ends_unowned(self, poisoned: str) -> str | None:
        """How a job that nobody is at ends now, if it does. Counts a strike when it is one."""
        if self.cancel_asked:
            return "cancelled"
        if self.overdue:
            return "expired"
        struck = self.state == "running" and self.began and self._strike()
        return poisoned if struck else None

    @rule(token=_tokens)
    def begin(self, token: str) -> None:
        token = self._who(token)
        mine = self._owns(token)
        self._expect_write(token, self._call(calls.begin(self.keys, token)))
        self.began = self.began or mine

    @rule(token=_tokens)
    def renew(self, token: str) -> None:
        token = self._who(token)
        mine = self._owns(token)
        self._expect_write(token, self._call(calls.renew(self.keys, token, _LEASE_MS)))
        self.lease = self.lease or mine

    @rule(token=_tokens, count=st.integers(1, 5), off=st.sampled_from([0, 0, 0, -1, 1]))
    def append(self, token: str, count: int, off: int) -> None:
        token = self._who(token)
        start = max(0, self.pos + off)
        mine, fits = self._owns(token), start == self.pos
        pieces = [chr(0x61 + (self.pos + n) % 26) for n in range(count)]
        if mine and fits:
            self.digest.update("".join(pieces))
        fields = entries.fields([*map(ord, pieces)], pieces, self.digest.hex())
        answer = self._call(calls.append(self.keys, token, _LEASE_MS, start, start + count, fields))
        if mine and not fits:
            assert answer == calls.Rewind(self.pos)
            return
        self._expect_write(token, answer)
        if mine:
            self.pos, self.text, self.lease = self.pos + count, self.text + "".join(pieces), True

    @rule(token=_tokens, off=st.sampled_from([0] + [1] * 5))
    def finish(self, token: str, off: int) -> None:
        token = self._who(token)
        mine = self._owns(token)
        call = calls.finish(self.keys, token, self.pos + off, State.SUCCEEDED, FinishReason.STOP, _PROMPT_TOKENS, None)
        answer = self._call(call)
        if mine and off:
            assert answer == calls.Rewind(self.pos)
        elif mine:
            assert answer == calls.Accepted()
            self._end("succeeded")
        else:
            self._expect_write(token, answer)

    @rule(token=_tokens)
    def release(self, token: str) -> None:
        token = self._who(token)
        mine = self._owns(token)
        answer = self._call(calls.release(self.job, self.keys, token, self.settings))
        if mine:
            assert answer == calls.Accepted()
            self.state, self.owner, self.lease, self.began = "queued", None, False, False
        else:
            self._expect_write(token, answer)

    @rule()
    def look_again(self) -> None:
        """A worker believes that it ended the job."""
        answer = self._call(calls.look(self.job, self.keys))
        assert isinstance(answer, calls.Accepted if self.state else calls.Gone)
        if self.state == "queued":
            self.state = "accepted"

    @rule(token=_tokens)
    def engine_dies_over_it_alone(self, token: str) -> None:
        token = self._who(token)
        mine = self._owns(token)
        answer = self._call(calls.struck(self.keys, token))
        if not mine:
            self._expect_write(token, answer)
        elif self._strike():
            assert answer == calls.Poison()
            self._end("failed")
        else:
            assert answer == calls.Accepted()

    # --- time -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.owner and self.lease)
    @rule()
    def worker_crashes(self) -> None:
        """Or is cut off, or stopped: nobody renews its lease. What it sends later must still be judged rightly."""
        self.client.hset(self.keys.record, "lease", 0)
        self.lease = False

    @precondition(lambda self: self.state and self.state not in _OVER)
    @rule(really=_rarely)
    def deadline_passes(self, really: bool) -> None:
        if really:
            self.client.hset(self.keys.record, "deadline", 1)
            self.overdue = True

    # --- the reconciler ---------------------------------------------------------------------------------------

    @rule(assume_lost=st.booleans())
    def reconcile(self, assume_lost: bool) -> None:
        call = calls.reconcile(self.job.id, self.keys, self.settings, assume_lost=assume_lost)
        verdict = self._call(call)
        wanted = self._may_reconcile(assume_lost)
        match verdict:
            case calls.Publish(gen, sealed):
                assert wanted == "publish"
                assert (gen, sealed) == (self.gen + 1, b"sealed")
                self.state, self.owner, self.lease, self.began = "accepted", None, False, False
                self.gen = gen
                self.published.append(gen)
            case calls.Ended(state):
                assert state == wanted
                self._end(wanted)
            case calls.Settle():
                assert wanted == "settle"
                assert verdict.completion_tokens == self.pos
                self.owed.append(verdict)
            case _:
                assert wanted == "nothing"

    def _may_reconcile(self, assume_lost: bool) -> str:
        if not self.state or self.state in _OVER:
            return "settle" if self.used and not self.settled else "nothing"
        if self.owner and self.lease:
            return "nothing"
        unasked = "nothing" if self.state == "queued" and not assume_lost else "publish"
        return self._ends_unowned("failed") or unasked

    @precondition(lambda self: self.owed)
    @rule()
    def account(self) -> None:
        """Again and again, by a leader that died before the second step and by the one that followed it."""
        call = calls.account(self.job.id, REGION, self.owed[-1], 86_400_000)
        assert self._call(call) == (not self.counted)
        self.counted = True

    @precondition(lambda self: self.counted)
    @rule()
    def settle(self) -> None:
        self._call(calls.settled(self.job.id, self.keys))
        self.settled = True

    # --- what always holds ------------------------------------------------------------------------------------

    @invariant()
    def the_record_says_what_the_model_says(self) -> None:
        record = self._call(calls.fetch(self.keys.record))
        if record is None:
            assert self.state == ""
            return
        seen = (record.state.value, record.gen, record.pos, record.attempt)
        assert seen == (self.state, self.gen, self.pos, self.attempt)
        owner, began, strikes, crashes = self.client.hmget(self.keys.record, ["owner", "began", "strikes", "crashes"])
        assert owner == (self.owner.encode() if self.owner else None)
        assert (int(strikes or 0), int(crashes or 0)) == (self.strikes, self.crashes)
        if self.state == "running":
            assert bool(began) == self.began

    @invariant()
    def the_stream_is_whole(self) -> None:
        found = [entries.parse(entry_id, raw) for entry_id, raw in self._call(calls.entries_of(self.keys))]
        if self.state in {"", "withdrawn", "erased"}:
            assert found == []
            return
        content = [entry for entry in found if isinstance(entry, Content)]
        assert [entry.start for entry in content] == [0, *(entry.pos for entry in content)][: len(content)]
        assert "".join(entry.text for entry in content) == self.text
        ends = [entry for entry in found if isinstance(entry, Control) and entry.kind == "end"]
        assert len(ends) == (self.state in _OVER)
        if ends:
            assert found[-1] is ends[0]
            assert ends[0].data["status"] == self.state
            assert ends[0].data["usage"]["completion_tokens"] == self.pos
            assert ends[0].data["digest"] == (self.digest.hex() if self.pos else "")

    @invariant()
    def usage_is_counted_once(self) -> None:
        if not self.counted:
            return
        day = time.strftime("%Y-%m-%d", time.gmtime(self.owed[-1].ended_ms / 1000))
        usage = self.client.hgetall(names.usage(REGION, self.job.tenant, day))
        assert usage[b"jobs"] == b"1"
        assert int(usage[b"completion_tokens"]) == self.pos

    # --- helpers ----------------------------------------------------------------------------------------------

    def _call(self, call: calls.Call) -> Any:
        return connect.send(self.client, call)

    def _who(self, token: str) -> str:
        return (self.owner or "ann") if token == _OWNER else token

    def _owns(self, token: str) -> bool:
        return self.state == "running" and self.owner == token

    def _expect_write(self, token: str, answer: calls.Written) -> None:
        """The answer to a write at the right position."""
        if not self.state:
            assert answer == calls.Gone()
            assert isinstance(answer, calls.Gone)
        elif self._owns(token):
            assert answer == calls.Accepted(cancel=self.cancel_asked)
        else:
            assert isinstance(answer, calls.Unowned if self.state in {"accepted", "queued"} else calls.Fenced)

    def _strike(self) -> bool:
        progressed = self.pos > self.struck_at
        self.strikes = 1 if progressed else self.strikes + 1
        self.crashes += 1
        self.struck_at = self.pos
        return self.strikes >= _STRIKES or self.crashes >= _CRASHES

    def _end(self, state: str) -> None:
        assert self.state not in _OVER, "a terminal state changed"
        self.state, self.owner, self.lease, self.used = state, None, False, True

    def teardown(self) -> None:
        self.client.delete(*self.keys[:2])
        self.client.delete(names.settled(REGION, self.job.tenant))


@sizes(short=150, long=3000)
def test_any_order_of_calls(shared: Servers, tell: Tell, times: int) -> None:
    region = Region.model_validate({"amqp": "amqp://nowhere", "redis": shared.valkey.url})
    settings = Settings(region=REGION, regions={REGION: region}, models_dir=shared.models_dir)
    with redis.Redis.from_url(shared.valkey.url, socket_timeout=5, protocol=3) as client:
        connect.prepare(client, settings)
        explored = hypothesis_settings(
            max_examples=times,
            stateful_step_count=_STEPS,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        )
        machine = partial(JobMachine, client, settings)
        run_state_machine_as_test(machine, settings=explored)  # type: ignore[arg-type]  # a factory will do
    tell(
        f"any order of the store's functions, against a model, {times} runs of up to {_STEPS} calls",
        "the store and the model agree after every call",
    )
