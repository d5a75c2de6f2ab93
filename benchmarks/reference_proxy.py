"""A minimal aiohttp proxy with prefix affinity, to compare with.

The prompt's 16-token blocks are hashed as a chain; the owner of the longest known prefix answers, else who has the
fewest requests in flight; an owner that is clearly busier than the idlest replica is passed over.

`python benchmarks/reference_proxy.py PORT URL [URL …]`
"""

import hashlib
import sys

import aiohttp
from aiohttp import web

BLOCK = 16
SPILL_MARGIN = 8


class PrefixRouter:
    """Owns blocks by chained hash; the policy alone, so that it can also be simulated."""

    def __init__(self, urls: list[str]) -> None:
        self.in_flight = dict.fromkeys(urls, 0)
        self.owner: dict[bytes, str] = {}
        self.counts = {"affinity": 0, "cold": 0, "spilled": 0}

    def place(self, model: str, prompt: list[int]) -> str:
        chain, link = [], model.encode()
        for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
            link = hashlib.blake2b(link + str(prompt[start : start + BLOCK]).encode(), digest_size=16).digest()
            chain.append(link)
        idlest = min(self.in_flight, key=self.in_flight.__getitem__)
        # A match within the template that all prompts share says nothing: at least half of the prompt must be known.
        known = next((index for index in range(len(chain) - 1, -1, -1) if chain[index] in self.owner), -1)
        if known >= 0 and 2 * (known + 1) >= len(chain):
            url = self.owner[chain[known]]
            if self.in_flight[url] > self.in_flight[idlest] * 1.5 + SPILL_MARGIN:
                url, kind = idlest, "spilled"
            else:
                kind = "affinity"
        else:
            url, kind = idlest, "cold"
        for link in chain:
            self.owner.setdefault(link, url)
        self.counts[kind] += 1
        self.in_flight[url] += 1
        return url

    def finish(self, url: str) -> None:
        self.in_flight[url] -= 1


def build(urls: list[str]) -> web.Application:
    router = PrefixRouter(urls)

    async def session_for_the_app(app: web.Application) -> None:
        app["session"] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        url = router.place(body.get("model", ""), body.get("prompt", []))
        try:
            async with request.app["session"].post(url + "/v1/completions", json=body) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
        finally:
            router.finish(url)

    app = web.Application(client_max_size=8 << 20)
    app.on_startup.append(session_for_the_app)
    app.router.add_post("/v1/completions", complete)
    return app


if __name__ == "__main__":
    web.run_app(build(sys.argv[2:]), host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)
