"""What the Hub answers when it refuses: a status, a JSON body and the headers that its clients read."""

from dataclasses import dataclass, field

from starlette.responses import JSONResponse


@dataclass
class HubError(Exception):
    """A refusal. `code` becomes `X-Error-Code`, which the client turns into a class of exception."""

    status: int
    message: str
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"

    def response(self) -> JSONResponse:
        # A header holds one line of ASCII; a path in the message may hold anything.
        line = " ".join(self.message.split()).encode("ascii", "backslashreplace").decode()
        headers = {"X-Error-Message": line, **self.headers}
        if self.code:
            headers["X-Error-Code"] = self.code
        return JSONResponse({"error": self.message, **self.details}, self.status, headers)


def bucket_not_found(authenticated: bool) -> HubError:
    """A bucket that is missing and one that the caller may not see look the same, as on the Hub."""
    if authenticated:
        return HubError(404, "Repository not found", "RepoNotFound")
    return HubError(401, "Invalid username or password.", "RepoNotFound")


def entry_not_found(path: str) -> HubError:
    return HubError(404, f"Entry not found: {path}", "EntryNotFound")


def invalid_token() -> HubError:
    return HubError(401, "Invalid credentials in Authorization header")
