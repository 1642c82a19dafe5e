"""Events cross from the engine's thread to the event loop."""

import asyncio
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
        waiting = asyncio.create_task(feed.next(60))
        for _ in range(100):
            await asyncio.sleep(0)  # the wake-up has come, and found nothing
        assert not waiting.done()
        await asyncio.to_thread(feed.listener, 0, Finished(None, [1, 2]))
        assert len(await waiting) == 1
        assert await feed.next(0.01) == []
        feed.close()

    asyncio.run(main())
