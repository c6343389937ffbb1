"""GET /, and what the pages load: static files without a build step."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server.api.route import HTML, TEXT, Operation, route
from server.api.service import Service
from server.http import pages


@route("GET", "/", Operation("chatPage", "Pages", "The built-in chat page", {HTML: None}))
async def chat(service: Service, http: Request) -> Response:
    return await pages.page("index.html", http, service.offload)


@route(
    "GET",
    "/web/{version}/{name}",
    Operation(
        "pageAsset", "Pages", "Scripts and styles of the pages", {TEXT: None}, refusals=(404,),
        parameters={"version": "The hash of all of them", "name": "A file"},
    ),
)  # fmt: skip
async def asset(service: Service, http: Request) -> Response:
    version, name = http.path_params["version"], http.path_params["name"]
    return await pages.asset(version, name, http, service.offload)
