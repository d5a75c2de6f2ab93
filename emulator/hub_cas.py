"""The CAS over HTTP, as the xet client speaks to it: upload xorbs and shards, ask how to rebuild a file, fetch ranges.

The URL of the CAS holds the id of this store, since the client keys its cache of known chunks by that URL: a store that
was wiped, or that dropped garbage, must not be taken for the one that still has them.
"""

import errno
import time
import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bucket_grpo.emulator.cas import CasRefusal, Term, cut_terms
from bucket_grpo.emulator.hub_content import read_range, send
from bucket_grpo.emulator.hub_errors import HubError
from bucket_grpo.emulator.hub_faults import fault_for
from bucket_grpo.emulator.objects import StoredFile
from bucket_grpo.emulator.tokens import Role

if TYPE_CHECKING:
    from bucket_grpo.emulator.hub import Hub

URL_LIFETIME_S = 3600


def store_id(hub: "Hub") -> str:
    return hub.database.setting("store_id", uuid.uuid4().hex[:12])


def base_url(request: Request) -> str:
    """The URL under which the caller reached this server."""
    return str(request.base_url).rstrip("/")


def cas_url(request: Request) -> str:
    return f"{base_url(request)}/cas/{store_id(hub_of(request))}"


def hub_of(request: Request) -> "Hub":
    hub: Hub = request.app.state.hub
    return hub


def signed_url(request: Request, path: str) -> str:
    """A URL on this server that is valid for an hour and needs no token."""
    query = {"expires": str(int(time.time()) + URL_LIFETIME_S)}
    query["signature"] = hub_of(request).tokens.sign(f"{path}?{query['expires']}")
    return f"{base_url(request)}{path}?{urlencode(query)}"


def check_signature(request: Request) -> None:
    expires = request.query_params.get("expires", "0")
    right = hub_of(request).tokens.sign(f"{request.url.path}?{expires}")
    if request.query_params.get("signature") != right or not expires.isdecimal() or int(expires) < time.time():
        raise HubError(403, "Signature of the URL is not valid or has expired")


def authorize(request: Request, needed: Role) -> None:
    hub_of(request).tokens.check_cas_token(request.headers.get("authorization"), needed)


async def upload_xorb(request: Request) -> Response:
    authorize(request, "write")
    data = await request.body()
    inserted = await run_in_threadpool(
        _store, request, lambda hub: hub.objects.put_xorb(request.path_params["name"], data)
    )
    return JSONResponse({"was_inserted": inserted})


def head_xorb(request: Request) -> Response:
    authorize(request, "read")
    return Response(status_code=200 if hub_of(request).objects.has_xorb(request.path_params["name"]) else 404)


async def upload_shard(request: Request) -> Response:
    authorize(request, "write")
    data = await request.body()
    new = await run_in_threadpool(_store, request, lambda hub: hub.objects.put_shard(data))
    if "/v2/" in request.url.path:
        return Response('{"type":"result"}\n', media_type="application/x-ndjson")
    return JSONResponse({"result": 1 if new else 0})


def _store(request: Request, put: Any) -> Any:
    if fault_for(request, "disk_full"):
        raise HubError(507, "No space left on device (fault on demand)")
    try:
        return put(hub_of(request))
    except CasRefusal as error:
        raise HubError(400, str(error)) from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise HubError(507, f"No space left for the emulated Hub: {error}") from error


def no_known_chunk(request: Request) -> Response:
    """Deduplication over all of the store is an offer that a CAS may decline: every chunk is unknown here."""
    authorize(request, "read")
    raise HubError(404, "This chunk is not tracked for global deduplication")


def reconstruction(request: Request) -> Response:
    authorize(request, "read")
    hub = hub_of(request)
    file = hub.objects.file(request.path_params["name"])
    if file is None or not file.terms:
        raise HubError(404, f"no file {request.path_params['name']} in this store")
    start, end = read_range(request.headers.get("range"), file.size) or (0, file.size)
    skipped, terms = cut_terms(file.terms, start, end)
    answer = {
        "offset_into_first_range": skipped,
        "terms": [
            {"hash": t.xorb, "unpacked_length": t.size, "range": {"start": t.first, "end": t.last}} for t in terms
        ],
    }
    fetch = _fetch_v2 if "/v2/" in request.url.path else _fetch_v1
    return JSONResponse(answer | fetch(request, terms))


def _fetch_v2(request: Request, terms: list[Term]) -> dict[str, Any]:
    xorbs: dict[str, list[dict[str, Any]]] = {}
    for term in _merged(terms):
        xorbs.setdefault(term.xorb, []).append(
            {
                "url": _xorb_url(request, term.xorb),
                "ranges": [{"chunks": _chunks(term), "bytes": _bytes(request, term)}],
            }
        )
    return {"xorbs": xorbs}


def _fetch_v1(request: Request, terms: list[Term]) -> dict[str, Any]:
    info: dict[str, list[dict[str, Any]]] = {}
    for term in _merged(terms):
        info.setdefault(term.xorb, []).append(
            {"url": _xorb_url(request, term.xorb), "range": _chunks(term), "url_range": _bytes(request, term)}
        )
    return {"fetch_info": info}


def _merged(terms: list[Term]) -> list[Term]:
    """Overlapping terms of one xorb as one range: the client looks for the first range that its term begins in."""
    merged: list[Term] = []
    for term in sorted(set(terms)):
        if merged and merged[-1].xorb == term.xorb and term.first < merged[-1].last:
            merged[-1] = merged[-1]._replace(last=max(merged[-1].last, term.last))
        else:
            merged.append(term)
    return merged


def _chunks(term: Term) -> dict[str, int]:
    return {"start": term.first, "end": term.last}


def _bytes(request: Request, term: Term) -> dict[str, int]:
    start, end = hub_of(request).objects.span(term)
    return {"start": start, "end": end - 1}


def _xorb_url(request: Request, xorb: str) -> str:
    return signed_url(request, f"/cas/{request.path_params['store']}/xorbs/{xorb}")


def fetch_xorb(request: Request) -> Response:
    check_signature(request)
    objects = hub_of(request).objects
    name = request.path_params["name"]
    size = objects.xorb_size(name)
    if size is None:
        raise HubError(404, f"no xorb {name} in this store")
    return send(request, size, lambda start, end: iter([objects.xorb_bytes(name, start, end)]))


def fetch_file(request: Request) -> Response:
    """A whole file or a range of it, unpacked, for clients that don't speak xet: where `resolve` redirects to."""
    check_signature(request)
    objects = hub_of(request).objects
    file = objects.file(request.path_params["name"])
    if file is None:
        raise HubError(404, f"no file {request.path_params['name']} in this store")
    stored: StoredFile = file
    return send(request, stored.size, lambda start, end: objects.read(stored, start, end), {"ETag": f'"{stored.hash}"'})


def accept_telemetry(request: Request) -> Response:
    return JSONResponse({})


def routes() -> list[Route]:
    cas = "/cas/{store}"
    return [
        Route(f"{cas}/v1/xorbs/default/{{name}}", head_xorb, methods=["HEAD"]),
        Route(f"{cas}/v1/xorbs/default/{{name}}", upload_xorb, methods=["POST"]),
        Route(f"{cas}/v1/shards", upload_shard, methods=["POST"]),
        Route(f"{cas}/v2/shards", upload_shard, methods=["POST"]),
        Route(f"{cas}/v1/chunks/{{prefix}}/{{name}}", no_known_chunk),
        Route(f"{cas}/v1/reconstructions/{{name}}", reconstruction),
        Route(f"{cas}/v2/reconstructions/{{name}}", reconstruction),
        Route(f"{cas}/v1/telemetry", accept_telemetry, methods=["POST"]),
        Route(f"{cas}/xorbs/{{name}}", fetch_xorb),
        Route("/cas-bridge/{name}", fetch_file),
    ]
