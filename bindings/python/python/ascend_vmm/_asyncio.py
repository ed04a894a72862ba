"""Waiting for a copy in asyncio."""

import asyncio


async def completed(copy):
    """Waits for a `PendingCopy` and raises what went wrong."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def tell():
        try:
            loop.call_soon_threadsafe(over.set)
        except RuntimeError:
            # The loop is closed: no one waits any more.
            pass

    copy.add_done_callback(tell)
    await over.wait()
    copy.wait()
