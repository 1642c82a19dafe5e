"""Events cross from the engine's thread to the event loop."""

import asyncio
import time
from typing import Any

from ster.server.feed import Feed
from ster.server.work import Finished, Token


def test_a_wake_up_for_events_that_were_taken_is_not_the_end_of_the_wait() -> None:
    async def main() -> None:
        async def receive() -> Any:
            await asyncio.sleep(60)

        feed = Feed(1, receive, eager=True)
        feed.listener(0, Token(1, "a", None, None, None))
        await asyncio.sleep(0)  # woken
        feed.listener(0, Token(2, "b", None, None, None))  # the wake-up is on its way when both are taken
        assert [event.id for _, event in await feed.next(5) if isinstance(event, Token)] == [1, 2]
        later = asyncio.get_running_loop().run_in_executor(None, lambda: (time.sleep(0.05), feed.listener(0, Finished(None, [1, 2]))))
        began = time.monotonic()
        events = await feed.next(5)
        assert len(events) == 1 and time.monotonic() - began > 0.03
        await later
        assert await feed.next(0.01) == []
        feed.close()

    asyncio.run(main())
