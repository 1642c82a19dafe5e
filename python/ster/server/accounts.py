"""What requests cost: a Hold before one runs, settled before its answer ends; see `ster.state.budget`.

What is refused or fails costs nothing, nor does what its client leaves before anything was sent. A stream that breaks costs its prompt and
the tokens that were sent.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from ster.server.errors import invalid_api_key, key_paused, over_budget, state_unavailable
from ster.server.known_keys import KnownKeys
from ster.server.state_threads import log_trouble
from ster.state.amounts import NOTHING, Amount, Hold, KeyInactiveError, OverBudget
from ster.state.budget import free_dead, new_hold_id, settle, take_hold

if TYPE_CHECKING:
    from ster.server.callers import Caller
    from ster.server.metrics import Metrics
    from ster.server.plan import Plan
    from ster.state.state import State

log = logging.getLogger("ster.server")
T = TypeVar("T")
THREADS = 4
"""Databases write one thing at a time, or nearly; and one that does not answer must not take the threads that others need."""
SETTLE_SECONDS = 5.0
"""How long an answer waits for its Hold to be settled, which goes on if that takes longer."""
KEEP_SECONDS = 5.0
"""Between two looks for servers that are dead, and for what could not be settled."""


class Accounts:
    """The Holds of the requests that run on this server; from `start` to `close`."""

    def __init__(self, state: State, metrics: Metrics) -> None:
        self.state = state
        self.metrics = metrics
        self._executor = ThreadPoolExecutor(THREADS, "ster-accounts")
        self.keys = KnownKeys(state.database, self._executor)
        self._unsettled: deque[tuple[str, Amount]] = deque()
        self._ended = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="ster-accounts-keeper", daemon=True)

    def start(self) -> None:
        self._keeper.start()

    def close(self) -> None:
        """Settle what is to be settled. Nothing is held afterwards."""
        self._ended.set()
        if self._keeper.is_alive():
            self._keeper.join()
        self._executor.shutdown()
        self._settle_late()

    async def run(self, work: Callable[[], T]) -> T:
        """`work`, which asks the database, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def hold(self, key_id: str, plan: Plan) -> tuple[Plan, Bill]:
        """Take the Hold of a request. Where `max_tokens` was left out, it is what the budgets have left.

        Returns: the plan, with fewer `max_tokens` perhaps.

        Raises:
            ApiError: 429, a limit leaves no room. 401, 403: the key was revoked or paused. 503: the database does not answer.
        """
        asked = Amount(plan.prompt_tokens, plan.max_output, int(plan.layers is not None))
        least = plan.least_output if plan.open_ended else None
        id = new_hold_id()
        taking = self._executor.submit(self._take, key_id, id, asked, least)
        try:
            hold = await asyncio.shield(asyncio.wrap_future(taking))
        except OverBudget as refused:
            self.metrics.refused(refused.dimension)
            raise over_budget(refused) from None
        except KeyInactiveError as inactive:
            error = key_paused() if inactive.state == "paused" else invalid_api_key()
            self.metrics.refused(error.code)
            raise error from None
        except asyncio.CancelledError:
            taking.add_done_callback(lambda _: self.settle_later(id, NOTHING))
            raise
        except Exception as failure:
            log_trouble(f"taking {id}", failure)
            self.settle_later(id, NOTHING)  # it may be there: nobody knows what became of the transaction
            raise state_unavailable() from None
        bill = Bill(self, hold)
        if hold.amount.output_tokens < asked.output_tokens:
            plan = plan.shortened(hold.amount.output_tokens)
            bill.headers["X-Acs-Max-Tokens-Clamped"] = f"requested={asked.output_tokens},applied={hold.amount.output_tokens},reason=budget"
        return plan, bill

    def settle(self, hold: Hold, used: Amount) -> Future[None]:
        """Returns: when it is settled, or has been put off because the database does not answer."""
        try:
            return self._executor.submit(self._settle, hold.id, used)
        except RuntimeError:  # after `close`: the Hold is freed with the server
            log.warning("%s is not settled: the server has ended", hold.id)
            done: Future[None] = Future()
            done.set_result(None)
            return done

    def settle_later(self, hold_id: str, used: Amount) -> None:
        """When the keeper comes by; the Hold stays until then. Settling twice does no harm."""
        self._unsettled.append((hold_id, used))

    def _take(self, key_id: str, hold_id: str, asked: Amount, least: int | None) -> Hold:
        with self.state.database.write() as connection:
            return take_hold(connection, key_id, asked, self.state.presence.id, least_output=least, hold_id=hold_id)

    def _settle(self, hold_id: str, used: Amount, *, late: bool = False) -> None:
        """late: it has failed before, which was said."""
        try:
            with self.state.database.write() as connection:
                settle(connection, hold_id, used)
        except Exception as error:
            if not late:
                log_trouble(f"settling {hold_id}, which stays until the database answers,", error)
            self.settle_later(hold_id, used)
        else:
            if late:
                log.warning("%s is settled at last", hold_id)

    def _keep(self) -> None:
        while True:
            try:
                with self.state.database.write() as connection:
                    freed = free_dead(connection, own=self.state.presence.id)
                if freed:
                    log.warning("freed %d Holds of servers that are dead", freed)
            except Exception as error:
                log_trouble("freeing what dead servers held", error)
            self._settle_late()
            if self._ended.wait(KEEP_SECONDS):
                return

    def _settle_late(self) -> None:
        for _ in range(len(self._unsettled)):
            self._settle(*self._unsettled.popleft(), late=True)


class Bill:
    """What one request owes, and its Hold. headers: of its answer."""

    def __init__(self, accounts: Accounts | None, hold: Hold | None) -> None:
        self.headers: dict[str, str] = {}
        self._accounts = accounts
        self._hold = hold
        self._owed = NOTHING
        self._settled: Future[None] | None = None

    def owe(self, amount: Amount) -> None:
        """What would have to be paid if it ended now."""
        self._owed = amount

    def close(self) -> None:
        """Pay what is owed, without waiting for it. The first call counts."""
        if self._accounts is not None and self._hold is not None and self._settled is None:
            self._settled = self._accounts.settle(self._hold, self._owed)

    async def settled(self) -> None:
        """Wait until it is paid, after `close`: whoever asks for their usage then sees it."""
        if self._settled is not None:
            await asyncio.wait({asyncio.wrap_future(self._settled)}, timeout=SETTLE_SECONDS)


async def take_bill(accounts: Accounts | None, caller: Caller, plan: Plan) -> tuple[Plan, Bill]:
    """See `Accounts.hold`; a caller without a key of the state holds nothing."""
    if accounts is None or caller.key is None:
        return plan, Bill(None, None)
    return await accounts.hold(caller.key, plan)
