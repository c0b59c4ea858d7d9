"""Counts of an engine, read while it generates."""

import asyncio


async def counted_tokens(engine, requests):
    """Return the numbers of tokens that the engine counts, read from another thread until the first sample arrives."""
    stream = engine.generate(requests)
    first, found = asyncio.ensure_future(anext(stream)), []
    while not first.done():
        found.append(await asyncio.to_thread(lambda: engine.num_tokens))
    await first
    await stream.aclose()
    return found
