"""The Hub's REST calls for buckets and accounts, in the shapes that `huggingface_hub` 1.33 to 2.4 sends and reads."""

import json
import time
from collections.abc import Iterable
from email.utils import formatdate
from typing import Any
from urllib.parse import quote, urlencode

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from bucket_grpo.emulator.events import iso, read_resume_point
from bucket_grpo.emulator.hub_buckets import AddFile, Bucket, CopyFile, DeleteFile, File, Folder, Refused, parse_batch
from bucket_grpo.emulator.hub_cas import base_url, cas_url, hub_of, signed_url
from bucket_grpo.emulator.hub_errors import HubError, bucket_not_found, invalid_token
from bucket_grpo.emulator.hub_faults import fault_for
from bucket_grpo.emulator.tokens import Identity

BUCKET = "/api/buckets/{namespace}/{name}"
PAGE = 1000
MAX_PAGE = 10_000
NAME_CHARACTERS = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


def caller(request: Request) -> Identity | None:
    return hub_of(request).tokens.identify(request.headers.get("authorization"))


def known_caller(request: Request) -> Identity:
    identity = caller(request)
    if identity is None:
        raise invalid_token()
    return identity


def namespace_of(request: Request) -> str:
    namespace: str = request.path_params["namespace"]
    return known_caller(request).user.name if namespace == "me" else namespace


def visible_bucket(request: Request, bucket_id: str, identity: Identity | None) -> Bucket:
    """The bucket, where this caller may read it; else what the Hub says of one that does not exist."""
    namespace, _, name = bucket_id.partition("/")
    try:
        bucket = hub_of(request).buckets.get(namespace, name)
    except KeyError as error:
        raise bucket_not_found(identity is not None) from error
    if bucket.private and not (identity and identity.owns(namespace)):
        raise bucket_not_found(identity is not None)
    return bucket


def readable(request: Request) -> Bucket:
    bucket_id = f"{request.path_params['namespace']}/{request.path_params['name']}"
    return visible_bucket(request, bucket_id, caller(request))


def writable(request: Request) -> Bucket:
    bucket = readable(request)
    known_caller(request).require_write(bucket.namespace)
    return bucket


def whoami(request: Request) -> Response:
    identity = known_caller(request)
    user = identity.user
    orgs = [
        {"type": "org", "id": f"org-{org}", "name": org, "fullname": org, "roleInOrg": "admin"} for org in user.orgs
    ]
    auth = {"type": "access_token", "accessToken": {"displayName": identity.role, "role": identity.role}}
    who = {"type": "user", "id": f"user-{user.name}", "name": user.name, "fullname": user.name, "isPro": False}
    return JSONResponse(who | {"orgs": orgs, "auth": auth})


async def create_bucket(request: Request) -> Response:
    namespace, name = namespace_of(request), request.path_params["name"]
    known_caller(request).require_write(namespace)
    if not set(name) <= NAME_CHARACTERS or len(name) > 96:
        raise HubError(400, f"{name!r} is not a valid name for a bucket")
    wishes = json.loads(await request.body() or b"{}")
    private = wishes.get("visibility") == "private" or bool(wishes.get("private"))
    where = {"url": f"{base_url(request)}/buckets/{namespace}/{name}", "id": f"{namespace}/{name}"}
    try:
        hub_of(request).buckets.create(namespace, name, private)
    except KeyError as error:
        raise HubError(409, f"You already created this bucket: {namespace}/{name}", details=where) from error
    return JSONResponse(where)


def bucket_info(request: Request) -> Response:
    return JSONResponse(_info(request, readable(request)))


def _info(request: Request, bucket: Bucket) -> dict[str, Any]:
    size, files = hub_of(request).buckets.usage(bucket)
    return {
        "id": bucket.id,
        "private": bucket.private,
        "visibility": "private" if bucket.private else "public",
        "createdAt": iso(bucket.created_at),
        "updatedAt": iso(bucket.updated_at),
        "size": size,
        "totalFiles": files,
    }


def list_buckets(request: Request) -> Response:
    namespace, identity = namespace_of(request), caller(request)
    if namespace not in hub_of(request).tokens.namespaces():
        raise bucket_not_found(authenticated=True)
    wanted = request.query_params.get("search", "")
    shown = [
        _info(request, bucket)
        for bucket in hub_of(request).buckets.in_namespace(namespace)
        if wanted in bucket.name and (not bucket.private or (identity and identity.owns(namespace)))
    ]
    return JSONResponse(shown)


def delete_bucket(request: Request) -> Response:
    hub_of(request).buckets.delete(writable(request))
    return Response(status_code=204)


async def change_settings(request: Request) -> Response:
    bucket, wishes = writable(request), json.loads(await request.body())
    private = wishes["private"] if "private" in wishes else wishes.get("visibility") == "private"
    hub_of(request).buckets.set_private(bucket, bool(private))
    return JSONResponse({"private": bool(private)})


async def move_repository(request: Request) -> Response:
    wishes, identity = json.loads(await request.body()), known_caller(request)
    if wishes.get("type") != "bucket":
        raise HubError(501, f"the emulated Hub holds buckets only, not {wishes.get('type')!r}")
    bucket = visible_bucket(request, wishes["fromRepo"], identity)
    namespace, _, name = wishes["toRepo"].partition("/")
    identity.require_write(bucket.namespace)
    identity.require_write(namespace)
    try:
        hub_of(request).buckets.move(bucket, namespace, name)
    except KeyError as error:
        raise HubError(409, f"{wishes['toRepo']} already exists") from error
    return JSONResponse({})


def tree(request: Request) -> Response:
    """Recursive unless told otherwise, and then without folders, as the Hub lists buckets."""
    bucket, prefix = readable(request), request.path_params.get("prefix", "")
    after = request.query_params.get("cursor", "")
    limit = max(1, min(int(request.query_params.get("limit", PAGE)), MAX_PAGE))
    buckets = hub_of(request).buckets
    entries: Iterable[File | Folder]
    if request.query_params.get("recursive", "true").lower() == "false":
        entries = [entry for entry in buckets.children(bucket, prefix) if entry.path > after]
    else:
        entries = buckets.files(bucket, prefix, after, limit + 1)
    page = list(entries)
    headers = {}
    if len(page) > limit:
        query = {**request.query_params, "cursor": page[limit - 1].path}
        # The path is quoted anew, since a prefix may hold characters that a URL must not.
        url = f"{base_url(request)}{quote(request.url.path)}?{urlencode(query)}"
        headers["Link"] = f'<{url}>; rel="next"'
    return JSONResponse([_entry(entry) for entry in page[:limit]], headers=headers)


def _entry(entry: File | Folder) -> dict[str, Any]:
    shown = {"path": entry.path, "uploadedAt": iso(entry.uploaded_at)}
    if isinstance(entry, Folder):
        return {"type": "directory", **shown}
    return {"type": "file", **shown, "size": entry.size, "xetHash": entry.xet_hash, "mtime": iso(entry.mtime)}


async def paths_info(request: Request) -> Response:
    bucket, wanted = readable(request), json.loads(await request.body()).get("paths", [])
    found = []
    for path in wanted:
        try:
            found.append(_entry(hub_of(request).buckets.file(bucket, path)))
        except HubError:
            continue  # a path that is not there is left out of the answer
    return JSONResponse(found)


async def batch(request: Request) -> Response:
    bucket, identity = writable(request), known_caller(request)
    operations = list(parse_batch(await request.body()))
    if not operations:
        raise HubError(400, "the batch has no operations")
    failed = await run_in_threadpool(_run_batch, request, bucket, identity, operations)
    report = {
        "success": not failed,
        "processed": len(operations),
        "succeeded": len(operations) - len(failed),
        "failed": failed,
    }
    return JSONResponse(report, 422 if len(failed) == len(operations) else 200)


def _run_batch(
    request: Request, bucket: Bucket, identity: Identity, operations: list[AddFile | CopyFile | DeleteFile]
) -> list[dict[str, str]]:
    if fault_for(request, "drop_commit"):
        return []
    to_fail, to_hide = fault_for(request, "fail_operations"), fault_for(request, "hide")
    failures_left = to_fail.operations if to_fail else 0
    buckets, failed = hub_of(request).buckets, []
    for operation in operations:
        try:
            if to_fail and failures_left and to_fail.hits_operation(operation.path):
                failures_left -= 1
                raise Refused("Internal error (fault on demand)")
            if isinstance(operation, CopyFile):
                _check_copy_source(request, operation, identity)
            if to_hide and to_hide.hits_operation(operation.path):
                buckets.apply_later(bucket, operation, time.time() + to_hide.delay_s)
            else:
                buckets.apply(bucket, operation)
        except Refused as refusal:
            failed.append({"path": operation.path, "error": str(refusal)})
    return failed


def _check_copy_source(request: Request, operation: CopyFile, identity: Identity) -> None:
    if operation.source_repo_type != "bucket":
        raise Refused(f"the emulated Hub holds buckets only: cannot copy from a {operation.source_repo_type}")
    try:
        source = visible_bucket(request, operation.source_repo_id, identity)
    except HubError as error:
        raise Refused(f"source bucket {operation.source_repo_id}: {error.message}") from error
    if not hub_of(request).buckets.holds(source, operation.xet_hash):
        raise Refused(f"no file in {source.id} has the content {operation.xet_hash}")


def resolve(request: Request) -> Response:
    """Where a file is: its metadata in headers, and for a GET a redirect to a signed URL for its bytes.

    The Hub redirects a HEAD as well, to another host, where its client stops and reads the headers it has. There is no
    other host here, so a HEAD is answered at once.
    """
    bucket = readable(request)
    file = hub_of(request).buckets.file(bucket, request.path_params["path"])
    token_route = f"{base_url(request)}/api/buckets/{bucket.id}/xet-read-token"
    headers = {
        "X-Xet-Hash": file.xet_hash,
        "X-Xet-Refresh-Route": token_route,
        "X-Linked-Size": str(file.size),
        "X-Linked-ETag": f'"{file.xet_hash}"',
        "ETag": f'"{file.xet_hash}"',
        "Last-Modified": formatdate(file.uploaded_at, usegmt=True),
        "Link": f'<{token_route}>; rel="xet-auth"',
    }
    if request.method == "HEAD":
        return Response(headers=headers | {"Accept-Ranges": "bytes", "Content-Length": str(file.size)})
    return RedirectResponse(signed_url(request, f"/cas-bridge/{file.xet_hash}"), 302, headers)


def read_token(request: Request) -> Response:
    return _cas_token(request, readable(request), "read")


def write_token(request: Request) -> Response:
    return _cas_token(request, writable(request), "write")


def _cas_token(request: Request, bucket: Bucket, role: Any) -> Response:
    hub, url = hub_of(request), cas_url(request)
    token, expires = hub.tokens.mint_cas_token(role, bucket.id, hub.cas_token_lifetime_s)
    headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(expires)}
    return JSONResponse({"casUrl": url, "accessToken": token, "exp": expires}, headers=headers)


async def events(request: Request) -> Response:
    bucket = readable(request)
    resume = read_resume_point(request.query_params.get("cursor"), request.query_params.get("since"))
    stream = hub_of(request).feed.stream(bucket.row, resume)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def other_repository(request: Request) -> Response:
    """Models, datasets and spaces: to this Hub, they don't exist."""
    raise HubError(404, "Repository not found (the emulated Hub holds buckets only)", "RepoNotFound")


def routes() -> list[Route]:
    others = [Route(f"/api/{kind}/{{rest:path}}", other_repository) for kind in ("models", "datasets", "spaces")]
    return [
        *others,
        Route("/api/whoami-v2", whoami),
        Route("/api/repos/move", move_repository, methods=["POST"]),
        Route("/api/buckets/{namespace}", list_buckets),
        Route(BUCKET, create_bucket, methods=["POST"]),
        Route(BUCKET, bucket_info),
        Route(BUCKET, delete_bucket, methods=["DELETE"]),
        Route(f"{BUCKET}/settings", change_settings, methods=["PUT"]),
        Route(f"{BUCKET}/tree", tree),
        Route(f"{BUCKET}/tree/{{prefix:path}}", tree),
        Route(f"{BUCKET}/paths-info", paths_info, methods=["POST"]),
        Route(f"{BUCKET}/batch", batch, methods=["POST"]),
        Route(f"{BUCKET}/events", events),
        Route(f"{BUCKET}/xet-read-token", read_token),
        Route(f"{BUCKET}/xet-write-token", write_token),
        Route("/buckets/{namespace}/{name}/resolve/{path:path}", resolve),
    ]
