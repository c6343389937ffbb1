"""/v1/batches: create, list, retrieve and cancel, as OpenAI has them; the work is done in the background."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from server.api.openai.files import folder_of, owner_of
from server.api.route import BODY_REFUSALS, JSON, Operation, route
from server.api.service import Service
from server.batches import api_types
from server.batches.api_types import BATCH, CreateBatch, ListQuery, page
from server.batches.files import INPUT, new_id
from server.batches.runner import BatchRunner
from server.batches.store import StoredBatch
from server.http.answers import json_response
from server.http.body import read_query, read_request
from server.http.errors import BatchesOff, InvalidRequest

BATCH_ID = {"batch_id": "The id of a batch"}


def runner_of(service: Service) -> BatchRunner:
    """Raises BatchesOff."""
    if service.batches is None:
        raise BatchesOff
    return service.batches


@route(
    "POST",
    "/v1/batches",
    Operation(
        "createBatch", "Batches", "Answer a file of requests in the background", {JSON: api_types.BatchBody}, CreateBatch,
        (*BODY_REFUSALS, 429),
    ),
)  # fmt: skip
async def create(service: Service, http: Request) -> ASGIApp:
    folder, runner, owner = folder_of(service), runner_of(service), owner_of(http)
    given = await read_request(http, BATCH, service.config)
    file = folder.files.find(given.input_file_id, owner)
    if file.purpose != INPUT:
        raise InvalidRequest(f"{file.id} is for {file.purpose}, not for batches", param="input_file_id")
    batch = StoredBatch(
        id=new_id("batch_"), owner=owner.key, input_file_id=file.id, endpoint=given.endpoint,
        window=given.completion_window, window_s=given.window_s,
        output_ttl_s=None if given.output_expires_after is None else given.output_expires_after.seconds,
        metadata=given.metadata,
    )  # fmt: skip
    return json_response((await runner.submit(batch)).body)


@route(
    "GET",
    "/v1/batches",
    Operation(
        "listBatches",
        "Batches",
        "The newest first",
        {JSON: api_types.BatchList},
        None,
        (400, 404),
        query=ListQuery,
    ),
)
async def list_all(service: Service, http: Request) -> ASGIApp:
    folder, query = folder_of(service), read_query(http, ListQuery, service.config)
    found = folder.batches.owned(owner_of(http))
    return json_response(page(api_types.BatchList, found, after=query.after, limit=query.limit))


@route(
    "GET",
    "/v1/batches/{batch_id}",
    Operation(
        "retrieveBatch",
        "Batches",
        "Where a batch stands",
        {JSON: api_types.BatchBody},
        None,
        (404,),
        parameters=BATCH_ID,
    ),
)
async def retrieve(service: Service, http: Request) -> ASGIApp:
    return json_response(folder_of(service).batches.find(http.path_params["batch_id"], owner_of(http)).body)


@route(
    "POST",
    "/v1/batches/{batch_id}/cancel",
    Operation(
        "cancelBatch", "Batches", "End a batch; what is answered stays", {JSON: api_types.BatchBody}, None, (400, 404),
        parameters=BATCH_ID,
    ),
)  # fmt: skip
async def cancel(service: Service, http: Request) -> ASGIApp:
    batch = folder_of(service).batches.find(http.path_params["batch_id"], owner_of(http))
    return json_response((await runner_of(service).cancel(batch.id)).body)
