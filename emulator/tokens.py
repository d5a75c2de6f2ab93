"""Who may do what: user tokens with a read or write role, kept under the Hub's root, and short-lived CAS tokens.

A user acts in their own namespace and in those of their organizations. A read token reads what its user may see; only a
write token changes anything. Every secret is made at the first start and kept in `tokens.json`, readable by its owner.
"""

import base64
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from bucket_grpo.emulator.hub_errors import HubError, invalid_token

Role = Literal["read", "write"]
TOKENS_FILE = "tokens.json"


class User(BaseModel):
    """A user of the Hub: one token per role, and the organizations whose namespaces they share."""

    name: str
    orgs: list[str] = []
    tokens: dict[Role, str]


class TokenFile(BaseModel):
    secret: str
    admin: str
    users: list[User] = []


@dataclass(frozen=True)
class Identity:
    """The user and role behind a request's token."""

    user: User
    role: Role

    def owns(self, namespace: str) -> bool:
        return namespace == self.user.name or namespace in self.user.orgs

    def require_write(self, namespace: str) -> None:
        """Raise 403 unless this token may change things in `namespace`."""
        if not self.owns(namespace):
            raise HubError(403, f"You don't have the rights to write in the namespace {namespace!r}", "Forbidden")
        if self.role != "write":
            raise HubError(403, "This token has the role 'read': a token with the role 'write' is needed", "Forbidden")


class TokenBook:
    """The users and secrets of one Hub; creates the file and any missing user."""

    def __init__(self, root: Path, users: Sequence[str] = ("me",), orgs: Sequence[str] = ()) -> None:
        path = root / TOKENS_FILE
        if path.exists():
            self._file = TokenFile.model_validate_json(path.read_bytes())
        else:
            self._file = TokenFile(secret=secrets.token_hex(32), admin=f"admin_{secrets.token_hex(16)}")
        for name in users:
            if self.user(name) is None:
                minted: dict[Role, str] = {role: f"hf_{role}_{secrets.token_hex(16)}" for role in ("read", "write")}
                self._file.users.append(User(name=name, orgs=list(orgs), tokens=minted))
        _write_private(path, self._file.model_dump_json(indent=2))

    @property
    def admin(self) -> str:
        return self._file.admin

    def user(self, name: str) -> User | None:
        return next((user for user in self._file.users if user.name == name), None)

    def namespaces(self) -> set[str]:
        return {user.name for user in self._file.users} | {org for user in self._file.users for org in user.orgs}

    def identify(self, authorization: str | None) -> Identity | None:
        """The caller behind an `Authorization` header; None for none. Raises 401 for a token that is not ours."""
        if not authorization:
            return None
        presented = authorization.removeprefix("Bearer ").strip()
        for user in self._file.users:
            for role, token in user.tokens.items():
                if hmac.compare_digest(token, presented):
                    return Identity(user, role)
        raise invalid_token()

    def is_admin(self, authorization: str | None) -> bool:
        return hmac.compare_digest(f"Bearer {self.admin}", authorization or "")

    def mint_cas_token(self, role: Role, bucket_id: str, lifetime_s: float) -> tuple[str, int]:
        """A CAS token for one bucket and role, and when it expires (seconds since 1970)."""
        expires = int(time.time() + lifetime_s)
        claims = json.dumps({"role": role, "bucket": bucket_id, "exp": expires}).encode()
        payload = base64.urlsafe_b64encode(claims).decode().rstrip("=")
        return f"{payload}.{self.sign(payload)}", expires

    def check_cas_token(self, authorization: str | None, needed: Role) -> None:
        """Raise 401 for a missing, forged or expired CAS token, 403 for one whose role is too small."""
        payload, _, signature = (authorization or "").removeprefix("Bearer ").partition(".")
        if not payload or not hmac.compare_digest(signature, self.sign(payload)):
            raise HubError(401, "CAS token is missing or not valid")
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        if claims["exp"] <= time.time():
            raise HubError(401, "CAS token has expired")
        if needed == "write" and claims["role"] != "write":
            raise HubError(403, "CAS token has the scope 'read', 'write' is needed")

    def sign(self, text: str) -> str:
        """A signature that only this Hub can make: for CAS tokens and for URLs that need no token."""
        return hmac.new(self._file.secret.encode(), text.encode(), hashlib.sha256).hexdigest()[:32]


def _write_private(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(text)
    os.replace(temporary, path)
