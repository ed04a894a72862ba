"""Waiting for a copy in asyncio."""

import asyncio


async def completed(copy):
    """Waits for a `PendingCopy` and raises its failure."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def wake():
        try:
            loop.call_soon_threadsafe(over.set)
        except RuntimeError:
            # The loop is closed: nobody waits.
            pass

    copy.add_done_callback(wake)
    await over.wait()
    copy.wait()
